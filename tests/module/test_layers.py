"""Layers and losses of ``torch.nn``: one training step of each, and its evaluation, as eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils import _pytree as pytree

from ortrain import Options, ORTModule
from ortrain.errors import OrtrainWarning
from tests.breadth import crossed
from tests.module.agreement import GRAPH, SAME


def in_both_modes(names: Iterable[str]) -> list[Any]:
    """Each name in training, and of those in evaluation a sample."""
    names = list(names)
    return crossed(["train"], names) + crossed(["eval"], names, one_in=4)


def floats(*shape: int, scale: float = 1.0) -> Callable[[], Tensor]:
    return lambda: (torch.randn(shape) * scale).requires_grad_()


def fixed(*shape: int, scale: float = 1.0) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape) * scale


def unit(*shape: int) -> Callable[[], Tensor]:
    """Between 0 and 1, and requires a gradient."""
    return lambda: (torch.rand(shape) * 0.9 + 0.05).requires_grad_()


def share(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.rand(shape)


def signs(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, 2, shape).float() * 2 - 1


def labels(high: int, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, high, shape)


def given(value: Any) -> Callable[[], Any]:
    return lambda: value


class Function(nn.Module):
    """A function of ``torch.nn.functional`` as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


LOSSES: dict[str, tuple[Callable[[], nn.Module], tuple[Callable[[], Any], ...]]] = {
    "L1": (lambda: nn.L1Loss(), (floats(4, 3), floats(4, 3))),
    "MSE": (lambda: nn.MSELoss(), (floats(4, 3), floats(4, 3))),
    "MSE-of-scalars": (lambda: nn.MSELoss(reduction="sum"), (floats(), floats())),
    "SmoothL1": (lambda: nn.SmoothL1Loss(beta=0.5), (floats(4, 3), fixed(4, 3))),
    "SmoothL1-of-scalars": (lambda: nn.SmoothL1Loss(reduction="sum"), (floats(), fixed())),
    "Huber": (lambda: nn.HuberLoss(delta=0.7), (floats(4, 3), fixed(4, 3))),
    "CrossEntropy": (lambda: nn.CrossEntropyLoss(), (floats(6, 5), labels(5, 6))),
    "CrossEntropy-weighted": (
        lambda: nn.CrossEntropyLoss(torch.rand(5), ignore_index=1, label_smoothing=0.1),
        (floats(6, 5, 2), labels(5, 6, 2)),
    ),
    "CrossEntropy-of-probabilities": (
        lambda: nn.CrossEntropyLoss(),
        (floats(6, 5), lambda: torch.rand(6, 5).softmax(1)),
    ),
    "NLL": (lambda: nn.NLLLoss(), (floats(6, 5), labels(5, 6))),
    "NLL-weighted": (
        lambda: nn.NLLLoss(torch.rand(5), ignore_index=2),
        (floats(6, 5, 2, 3), labels(5, 6, 2, 3)),
    ),
    "NLL-none": (lambda: nn.NLLLoss(reduction="none"), (floats(6, 5, 2), labels(5, 6, 2))),
    "NLL-of-one": (lambda: nn.NLLLoss(), (floats(5), labels(5))),
    "PoissonNLL": (
        lambda: nn.PoissonNLLLoss(full=True),
        (floats(4, 3), lambda: torch.rand(4, 3) * 5),
    ),
    "GaussianNLL": (lambda: nn.GaussianNLLLoss(full=True), (floats(4, 3), fixed(4, 3), unit(4, 3))),
    "KLDiv": (lambda: nn.KLDivLoss(reduction="batchmean"), (floats(4, 3), unit(4, 3))),
    "KLDiv-of-logs": (lambda: nn.KLDivLoss(log_target=True), (floats(4, 3), floats(4, 3))),
    "KLDiv-of-scalars": (lambda: nn.KLDivLoss(reduction="sum"), (floats(), unit())),
    "BCE": (lambda: nn.BCELoss(), (unit(4, 3), share(4, 3))),
    "BCE-weighted": (
        lambda: nn.BCELoss(torch.rand(3), reduction="none"),
        (unit(4, 3), share(4, 3)),
    ),
    "BCEWithLogits": (
        lambda: nn.BCEWithLogitsLoss(pos_weight=torch.rand(3)),
        (floats(4, 3), share(4, 3)),
    ),
    "MarginRanking": (
        lambda: nn.MarginRankingLoss(0.2),
        (floats(7), floats(7), signs(7)),
    ),
    "HingeEmbedding": (lambda: nn.HingeEmbeddingLoss(0.5), (floats(7), signs(7))),
    "HingeEmbedding-of-scalars": (
        lambda: nn.HingeEmbeddingLoss(reduction="sum"),
        (floats(), signs()),
    ),
    "MultiLabelMargin": (
        lambda: nn.MultiLabelMarginLoss(),
        (floats(3, 4), given(torch.tensor([[1, 0, -1, 2], [3, -1, 0, 1], [0, 1, 2, 3]]))),
    ),
    "SoftMargin": (lambda: nn.SoftMarginLoss(), (floats(4, 3), signs(4, 3))),
    "MultiLabelSoftMargin": (lambda: nn.MultiLabelSoftMarginLoss(), (floats(4, 3), share(4, 3))),
    "CosineEmbedding": (
        lambda: nn.CosineEmbeddingLoss(0.1),
        (floats(5, 4), floats(5, 4), signs(5)),
    ),
    "MultiMargin": (lambda: nn.MultiMarginLoss(), (floats(4, 3), labels(3, 4))),
    "MultiMargin-squared": (
        lambda: nn.MultiMarginLoss(p=2, margin=0.5, weight=torch.rand(3), reduction="none"),
        (floats(4, 3), labels(3, 4)),
    ),
    "TripletMargin": (lambda: nn.TripletMarginLoss(), (floats(5, 4), floats(5, 4), floats(5, 4))),
    "TripletMargin-swapped": (
        lambda: nn.TripletMarginLoss(2.0, p=1.5, swap=True, reduction="sum"),
        (floats(5, 4), floats(5, 4), floats(5, 4)),
    ),
    "TripletMarginWithDistance": (
        lambda: nn.TripletMarginWithDistanceLoss(margin=0.5),
        (floats(5, 4), floats(5, 4), floats(5, 4)),
    ),
}

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[Callable[[], Any], ...]]] = {
    "AdaptiveLogSoftmax": (  # of which a target in each part makes a graph
        lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 12, [4, 8], div_value=1.0),
        (floats(12, 8), lambda: torch.randperm(12)),
    ),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), (floats(5, 4),)),
    "BatchNorm2d-averaging": (lambda: nn.BatchNorm2d(4, momentum=None), (floats(5, 4, 3, 2),)),
    "BatchNorm1d-no-statistics": (
        lambda: nn.BatchNorm1d(4, track_running_stats=False),
        (floats(5, 4, 3),),
    ),
    "InstanceNorm1d": (
        lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
        (floats(5, 4, 6),),
    ),
    "InstanceNorm2d": (
        lambda: nn.InstanceNorm2d(4, track_running_stats=True),
        (floats(5, 4, 6, 2),),
    ),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(4), (floats(5, 4, 2, 3, 2),)),
    "RMSNorm": (lambda: nn.RMSNorm(6), (floats(3, 6),)),
    "RMSNorm-2d": (lambda: nn.RMSNorm([4, 6], eps=1e-3), (floats(3, 4, 6),)),
    "LayerNorm-no-bias": (lambda: nn.LayerNorm(6, bias=False), (floats(3, 6),)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (floats(3, 4, 5),)),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(3), (floats(3, 4, 5),)),
    "AdaptiveAvgPool1d": (lambda: nn.AdaptiveAvgPool1d(3), (floats(2, 4, 7),)),
    "AdaptiveAvgPool2d": (lambda: nn.AdaptiveAvgPool2d((3, None)), (floats(2, 4, 7, 5),)),
    "AdaptiveAvgPool2d-larger": (lambda: nn.AdaptiveAvgPool2d(7), (floats(2, 4, 5, 3),)),
    "AdaptiveAvgPool2d-no-batch": (lambda: nn.AdaptiveAvgPool2d(3), (floats(4, 7, 5),)),
    "AdaptiveAvgPool3d": (lambda: nn.AdaptiveAvgPool3d((2, 3, 2)), (floats(2, 2, 5, 4, 3),)),
    "AdaptiveMaxPool1d": (lambda: nn.AdaptiveMaxPool1d(3), (floats(2, 4, 7),)),
    "AdaptiveMaxPool2d": (
        lambda: nn.AdaptiveMaxPool2d((3, None), return_indices=True),
        (floats(2, 4, 7, 5),),
    ),
    "AdaptiveMaxPool3d": (
        lambda: nn.AdaptiveMaxPool3d((2, 3, 2), return_indices=True),
        (floats(2, 2, 5, 4, 3),),
    ),
    "AvgPool1d": (lambda: nn.AvgPool1d(3, 2, 1, ceil_mode=True), (floats(2, 4, 8),)),
    "AvgPool2d": (lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), (floats(2, 4, 7, 6),)),
    "AvgPool2d-vast": (
        lambda: nn.AvgPool2d(1280, ceil_mode=True),
        (floats(2, 1280, 2, 3),),
    ),
    "AvgPool2d-ceil": (
        lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
        (floats(2, 4, 8, 6),),
    ),
    "AvgPool2d-divisor": (
        lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True, divisor_override=5),
        (floats(2, 4, 8, 6),),
    ),
    "AvgPool3d-divisor": (lambda: nn.AvgPool3d(2, divisor_override=3), (floats(2, 3, 4, 4, 5),)),
    "MaxPool1d-ceil": (lambda: nn.MaxPool1d(3, 2, 1, ceil_mode=True), (floats(2, 4, 8),)),
    "MaxPool2d-no-batch": (lambda: nn.MaxPool2d(3, 2, 1), (floats(4, 8, 6),)),
    "MaxPool2d-indices": (
        lambda: nn.MaxPool2d(3, 2, 1, dilation=2, return_indices=True),
        (floats(2, 4, 9, 8),),
    ),
    "MaxPool3d-indices": (lambda: nn.MaxPool3d(2, return_indices=True), (floats(2, 2, 4, 5, 4),)),
    "MaxUnpool1d": (
        lambda: Function(lambda x: F.max_unpool1d(*F.max_pool1d(x, 2, return_indices=True), 2)),
        (floats(2, 4, 8),),
    ),
    "MaxUnpool2d": (
        lambda: Function(lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)),
        (floats(2, 4, 8, 6),),
    ),
    "MaxUnpool3d": (
        lambda: Function(lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2)),
        (floats(2, 4, 4, 2, 6),),
    ),
    "LPPool2d": (lambda: nn.LPPool2d(2, 3, 2), (unit(2, 4, 7, 6),)),
    "Softmax-of-a-scalar": (lambda: nn.Softmax(0), (floats(),)),
    "Softmax-implicit": (lambda: nn.Softmax(), (floats(3, 4),)),
    "LogSoftmax-implicit": (lambda: nn.LogSoftmax(), (floats(3, 4),)),
    "Embedding": (lambda: nn.Embedding(7, 4, padding_idx=2), (labels(7, 5, 3),)),
    **{
        f"EmbeddingBag-{mode}": (
            lambda mode=mode: nn.EmbeddingBag(7, 4, mode=mode),
            (labels(7, 5, 3),),
        )
        for mode in ("sum", "mean", "max")
    },
    **{
        f"EmbeddingBag-offsets-{mode}": (
            lambda mode=mode: nn.EmbeddingBag(7, 4, mode=mode, padding_idx=1),
            (labels(7, 9), given(torch.tensor([0, 2, 2, 6]))),
        )
        for mode in ("sum", "mean", "max")
    },
    "EmbeddingBag-weights": (
        lambda: nn.EmbeddingBag(7, 4, mode="sum"),
        (labels(7, 5, 3), given(None), floats(5, 3)),
    ),
    "EmbeddingBag-last-offset": (
        lambda: nn.EmbeddingBag(7, 4, mode="mean", include_last_offset=True),
        (labels(7, 9), given(torch.tensor([0, 2, 6, 9]))),
    ),
    "RNNCell": (lambda: nn.RNNCell(3, 5), (floats(2, 3), floats(2, 5))),
    "RNNCell-relu": (lambda: nn.RNNCell(3, 5, nonlinearity="relu"), (floats(2, 3),)),
    "GRUCell": (lambda: nn.GRUCell(3, 5), (floats(2, 3), floats(2, 5))),
    "GRUCell-no-batch": (lambda: nn.GRUCell(3, 5), (floats(3), floats(5))),
    "LSTMCell": (
        lambda: nn.LSTMCell(3, 5),
        (floats(2, 3), lambda: (torch.randn(2, 5), torch.randn(2, 5))),
    ),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), (floats(2, 8, 3, 4),)),
    "PixelUnshuffle": (lambda: nn.PixelUnshuffle(2), (floats(2, 3, 4, 6),)),
    "ChannelShuffle": (lambda: nn.ChannelShuffle(2), (floats(2, 6, 3, 4),)),
    "Fold": (lambda: nn.Fold((4, 5), 2), (floats(2, 12, 12),)),
    "Fold-strided": (lambda: nn.Fold((5, 5), 3, padding=1, stride=2), (floats(2, 9, 9),)),
    "Unfold": (lambda: nn.Unfold(2), (floats(2, 3, 4, 5),)),
    "Unfold-strided": (
        lambda: nn.Unfold(3, dilation=2, padding=2, stride=2),
        (floats(2, 3, 7, 6),),
    ),
    "Bilinear": (lambda: nn.Bilinear(3, 4, 5), (floats(6, 3), floats(6, 4))),
    "PairwiseDistance": (lambda: nn.PairwiseDistance(), (floats(6, 3), floats(6, 3))),
    "PairwiseDistance-3": (
        lambda: nn.PairwiseDistance(3, keepdim=True),
        (floats(6, 3), floats(6, 3)),
    ),
    "CosineSimilarity": (lambda: nn.CosineSimilarity(), (floats(6, 3), floats(6, 3))),
    "normalize": (lambda: Function(F.normalize), (floats(6, 3),)),
    "one_hot": (lambda: Function(lambda i: F.one_hot(i, 7).float() * 2.0), (labels(7, 4),)),
    **{
        f"Upsample-{mode}": (
            lambda mode=mode: nn.Upsample(scale_factor=2, mode=mode),
            (floats(2, 3, *sizes),),
        )
        for mode, sizes in (
            ("nearest", (4,)),
            ("linear", (4,)),
            ("bilinear", (4, 3)),
            ("bicubic", (4, 3)),
            ("trilinear", (2, 3, 2)),
        )
    },
    **{
        f"Upsample-{mode}-corners": (
            lambda mode=mode: nn.Upsample(scale_factor=2, mode=mode, align_corners=True),
            (floats(2, 3, *sizes),),
        )
        for mode, sizes in (("linear", (4,)), ("bilinear", (4, 3)), ("bicubic", (4, 3)))
    },
    "Upsample-to-a-size": (lambda: nn.Upsample((7, 5), mode="bilinear"), (floats(2, 3, 4, 3),)),
    "Upsample-down": (lambda: nn.Upsample((3, 2), mode="nearest"), (floats(2, 3, 7, 5),)),
    "interpolate-area": (
        lambda: Function(lambda x: F.interpolate(x, (3, 2), mode="area")),
        (floats(2, 3, 7, 5),),
    ),
    **{
        f"{kind.__name__}": (lambda kind=kind: kind((1, 2, 2, 1)), (floats(2, 3, 5, 4),))
        for kind in (nn.ReflectionPad2d, nn.ReplicationPad2d, nn.CircularPad2d, nn.ZeroPad2d)
    },
    "ConstantPad1d": (lambda: nn.ConstantPad1d((2, -1), 3.0), (floats(2, 3, 5),)),
    "ReplicationPad3d": (lambda: nn.ReplicationPad3d(1), (floats(2, 2, 3, 3, 2),)),
    "spectral_norm": (
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)),
        (floats(2, 4),),
    ),
    "weight_norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
        (floats(2, 4),),
    ),
    "PReLU": (lambda: nn.PReLU(3), (floats(2, 3, 4),)),
    "GLU": (lambda: nn.GLU(), (floats(2, 4),)),
    "Softmax2d": (lambda: nn.Softmax2d(), (floats(2, 3, 4, 2),)),
    "RReLU-fixed": (lambda: nn.RReLU(0.2, 0.2), (floats(2, 3),)),
    "Hardshrink": (lambda: nn.Hardshrink(), (floats(4, 3),)),
    "Flatten": (
        lambda: nn.Sequential(nn.Flatten(), nn.Tanh(), nn.Unflatten(1, (2, 6))),
        (floats(2, 3, 4),),
    ),
}


# What is refused, with a part of the reason.
REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[Callable[[], Any], ...], str]] = {
    "CTC": (
        lambda: nn.CTCLoss(),
        (
            lambda: torch.randn(12, 3, 5).log_softmax(-1).requires_grad_(),
            labels(4, 3, 4),
            given(torch.tensor([12, 10, 7])),
            given(torch.tensor([4, 2, 3])),
        ),
        "Dynamic shape operator",
    ),
    "MultiLabelMargin-of-one": (
        lambda: nn.MultiLabelMarginLoss(reduction="none"),
        (floats(4), given(torch.tensor([1, 0, -1, 2]))),
        "one row",
    ),
    "LSTM-projection": (lambda: nn.LSTM(3, 6, proj_size=4), (floats(5, 2, 3),), "proj_size"),
    "EmbeddingBag-sparse": (
        lambda: nn.EmbeddingBag(7, 4, sparse=True),
        (labels(7, 5, 3),),
        "sparse",
    ),
}


def gradients(args: Any, output: Any) -> list[Tensor | None]:
    """Of everything that requires one, under other numbers at each element of the outputs."""
    leaves = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    if leaves:
        weights = [torch.linspace(0.5, 1.5, t.numel()).view(t.shape) for t in leaves]
        torch.autograd.backward(leaves, weights)
    return [t.grad for t in pytree.tree_leaves(args) if isinstance(t, Tensor)]


def copied(args: Any) -> Any:
    return pytree.tree_map_only(
        Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), args
    )


def assert_same(name: str, ours: Any, theirs: Any) -> None:
    if not isinstance(theirs, Tensor):
        assert ours == theirs, name
        return
    assert isinstance(ours, Tensor), name
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), name
    if not theirs.is_floating_point():
        assert torch.equal(ours, theirs), name
        return
    assert torch.equal(ours.isnan(), theirs.isnan()), name
    finite = torch.where(theirs.isfinite(), theirs, 0.0).detach()
    largest = max(1e-3, float(finite.abs().max()) if theirs.numel() else 0.0)
    torch.testing.assert_close(
        ours.detach(), theirs.detach(), rtol=0, atol=SAME * largest, equal_nan=True, msg=name
    )


def assert_alike(
    module: nn.Module, args: tuple[Any, ...], steps: int = 2, *, is_graph: bool = True
) -> None:
    """So many steps of eager and of the graph alone, with buffers and gradients."""
    options = GRAPH if is_graph else Options(engine=GRAPH.engine)
    eager, model = module, ORTModule(copy.deepcopy(module), options=options)
    for step in range(steps):
        mine, theirs = copied(args), copied(args)
        eager.zero_grad()
        model.zero_grad()
        expected, output = eager(*theirs), model(*mine)
        assert (model.report.mode == "graph") is is_graph, model.report.reason
        wanted, spec = pytree.tree_flatten(expected)
        found, own = pytree.tree_flatten(output)
        assert own == spec
        for i, (ours, other) in enumerate(zip(found, wanted, strict=True)):
            assert_same(f"output {i} of step {step}", ours, other)
        pairs = zip(gradients(mine, output), gradients(theirs, expected), strict=True)
        for i, (ours, other) in enumerate(pairs):
            assert_same(f"gradient of argument {i}, step {step}", ours, other)
        for name, parameter in eager.named_parameters():
            ours = dict(model.module.named_parameters())[name].grad
            assert_same(f"gradient of {name}, step {step}", ours, parameter.grad)
        for name, buffer in eager.named_buffers():
            assert_same(f"{name}, step {step}", dict(model.module.named_buffers())[name], buffer)


ALL = {**LOSSES, **LAYERS}


# Where their code ends a graph of Dynamo's in the middle, all of it runs in PyTorch.
WITHOUT_GRAPH = {
    "GaussianNLL", "AdaptiveLogSoftmax", "BatchNorm2d-averaging", "encoder-both", "encoder-causal",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`")
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")
@pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
@pytest.mark.parametrize(("mode", "name"), in_both_modes(ALL))
def test_a_layer_and_its_gradients_are_eagers(mode: str, name: str) -> None:
    make, draws = ALL[name]
    args = tuple(draw() for draw in draws)
    assert_alike(make().train(mode == "train"), args, is_graph=name not in WITHOUT_GRAPH)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why_and_runs_in_pytorch(name: str) -> None:
    make, draws, reason = REFUSED[name]
    module, args = make(), tuple(draw() for draw in draws)
    model = ORTModule(copy.deepcopy(module), options=Options(engine="onnxruntime"))
    with pytest.warns(OrtrainWarning, match=reason):
        output = model(*args)
    expected = module(*args)
    for ours, theirs in zip(*map(pytree.tree_leaves, (output, expected)), strict=True):
        assert torch.equal(ours, theirs)


CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)
SOME = torch.zeros(5, 5, dtype=torch.bool)
SOME[0, 3:] = SOME[2, 1] = True
ROW = SOME.clone()
ROW[3] = True
PADDED = torch.zeros(2, 5, dtype=torch.bool)
PADDED[0, -2:] = True
EMPTY = PADDED.clone()
EMPTY[1] = True


class Called(nn.Module):
    """A module called with more arguments."""

    def __init__(self, module: nn.Module, **given: Any) -> None:
        super().__init__()
        self.module, self.given = module, given

    def forward(self, *args: Any) -> Any:
        return self.module(*args, **self.given)


def attention(**given: Any) -> Callable[[], nn.Module]:
    return lambda: Called(nn.MultiheadAttention(8, 2, batch_first=True), **given)


def encoder(nested: bool = True, **given: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        return Called(nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested), **given)

    return make


class Products(nn.Module):
    """Attention of a query, a key and a value."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.given = given

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, mask, **self.given)


THREE = (floats(2, 5, 8),) * 3
HEADS = (floats(2, 2, 5, 4),) * 3
ATTENTION: dict[str, tuple[Callable[[], nn.Module], tuple[Callable[[], Any], ...]]] = {
    "padded": (attention(key_padding_mask=PADDED), THREE),
    "no-weights": (attention(key_padding_mask=PADDED, need_weights=False), THREE),
    "all-padded": (attention(key_padding_mask=EMPTY, need_weights=False), THREE),
    "masked": (attention(attn_mask=SOME), THREE),
    "masked-row": (attention(attn_mask=ROW, need_weights=False), THREE),
    "masked-and-padded": (attention(attn_mask=SOME, key_padding_mask=PADDED), THREE),
    "causal": (attention(attn_mask=CAUSAL, is_causal=True, need_weights=False), THREE),
    "weights-of-heads": (attention(average_attn_weights=False), THREE),
    "encoder-padded": (encoder(src_key_padding_mask=PADDED), THREE[:1]),
    "encoder-causal": (encoder(mask=CAUSAL), THREE[:1]),
    "encoder-both": (encoder(mask=SOME, src_key_padding_mask=PADDED), THREE[:1]),
    "products-causal": (lambda: Products(is_causal=True), HEADS),
    "products-causal-long": (lambda: Products(is_causal=True), (floats(2, 2, 7, 4), *HEADS[:2])),
    "products-grouped": (
        lambda: Products(enable_gqa=True, scale=0.3),
        (floats(2, 4, 5, 4), *HEADS[:2]),
    ),
    "products-masked-row": (lambda: Products(), (*HEADS, given(~ROW))),
    "products-infinite": (
        lambda: Products(),
        (*HEADS, given(torch.zeros(5, 5).masked_fill(ROW, -torch.inf))),
    ),
    "products-of-one-key": (
        lambda: Products(),
        (HEADS[0], floats(1, 2, 5, 4), floats(1, 2, 5, 4)),
    ),
    "products-biased": (lambda: Products(), (*HEADS, floats(5, 5))),
}


@pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
@pytest.mark.parametrize(("mode", "name"), in_both_modes(ATTENTION))
def test_attention_and_its_masks_are_eagers(mode: str, name: str) -> None:
    make, draws = ATTENTION[name]
    args, is_graph = tuple(draw() for draw in draws), name not in WITHOUT_GRAPH
    assert_alike(make().train(mode == "train"), args, steps=1, is_graph=is_graph)


@pytest.mark.parametrize("nested", [False, True])
def test_an_encoder_in_inference_is_a_graph_of_its_layers(nested: bool) -> None:
    model = ORTModule(encoder(nested=nested)().eval(), options=GRAPH)
    with torch.no_grad():
        for rows in (5, 6, 5):
            x = torch.randn(2, rows, 8)
            assert_same("unpacked", model(x), model.module(x))
    assert (model.report.graph_calls, model.report.captures) == (3, 1)


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors", "ignore:.*gives zeros for padding"
)
def test_an_encoder_that_packs_its_input_gives_what_pytorch_gives() -> None:
    model = ORTModule(encoder()().eval(), options=Options(engine="onnxruntime"))
    model.module.given["src_key_padding_mask"] = PADDED.clone()
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        assert_same("packed", model(x), model.module(x))


LAZY = {
    "linear": lambda: nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2)),
    "convolution": lambda: nn.Sequential(nn.LazyBatchNorm1d(), nn.LazyConv1d(4, 3)),
}


@pytest.mark.parametrize("name", LAZY)
def test_the_first_call_of_a_lazy_module_runs_in_pytorch_and_the_next_as_a_graph(name: str) -> None:
    x = torch.randn(5, 3, 6)
    outcomes = []
    for wrap in (lambda m: m, lambda m: ORTModule(m, options=GRAPH)):
        torch.manual_seed(3)
        module = wrap(LAZY[name]())
        first = module(x).detach()
        module(x).sum().backward()
        outcomes.append((first, module(x).detach(), [p.grad for p in module.parameters()]))
    assert module.report.graph_calls == 2
    for ours, theirs in zip(*map(pytree.tree_leaves, reversed(outcomes)), strict=True):
        assert_same("lazy", ours, theirs)
