"""Forms of operators that need more than one of ONNX, in training: values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from ortrain import Options, ORTModule
from ortrain.config import Engine
from tests.breadth import crossed
from tests.sweep.agreement import difference, in_another_precision, step

GRAPH = Options(engine="onnxruntime", fallback="raise", certificate="off")

Function = Callable[[torch.Tensor], object]


class Called(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> object:
        return self.function(x)


# Of a tensor of shape [rows, columns, 4], at two sizes.
FUNCTIONS: dict[str, Function] = {
    # views of any rank, sizes that are rounded up or cut
    "all axes from behind": lambda x: x.mT.permute(2, 1, 0).transpose(0, 1) * 2,
    "the last half, rounded up": lambda x: x[: -(-x.shape[0] // 2)] * 2,
    "chunks of rows": lambda x: x.chunk(3)[1] * 2,
    "pieces of two columns": lambda x: x.split(2, 1)[1] * 3,
    "even pieces of columns": lambda x: x.tensor_split(3, 1)[1] * 2,
    "roll by more than the size": lambda x: x.roll((11, -1), (0, 2)) * 2,
    "roll of all elements": lambda x: x.roll(3) * 2,
    "tile": lambda x: x.tile(2, 1) * 2,
    "windows along the columns": lambda x: F.unfold(x[:, None], (3, 1), padding=(1, 0)) * 2,
    "windows of every size": lambda x: F.unfold(x[:, None] * 2, (2, 3), (2, 1), (1, 2), (1, 2)),
    # scalars that have a dimension
    "a sum along a scalar": lambda x: x.sum().cumsum(0) + x.mean().softmax(-1),
    "extrema of a scalar": lambda x: x.sum().max(0).values + x.mean().amax(0),
    "a norm of a scalar": lambda x: torch.linalg.vector_norm(x.sum(), dim=0),
    # statistics
    "mean and deviation": lambda x: torch.std_mean(x, 1),
    "variance and mean of all": lambda x: torch.var_mean(x, unbiased=False),
    "any and all": lambda x: x * (x > 0).any(1, keepdim=True) + x * (x > -1).all((0, 1)),
    "quantile": lambda x: torch.quantile(x, 0.3, dim=0),
    "cosine similarity": lambda x: F.cosine_similarity(x, x.exp(), dim=1),
    "norm of order three": lambda x: torch.linalg.vector_norm(x, ord=3, dim=1),
    "norms of zeros": lambda x: sum(
        torch.linalg.vector_norm(x * 0, ord=p, dim=1).sum() for p in (1, 2, 3, float("inf"))
    ),
    # zero slopes are zeros, not None
    "rounding": lambda x: x.floor() + x.ceil() + x.round() + x.trunc() + x.sign(),
    "what was there before a fill": lambda x: torch.fill(x, 2.0) + (x * 2).zero_(),
    # tails
    "log of a sigmoid": lambda x: F.logsigmoid(x * 20),
    # sums of products
    "einsum with an ellipsis": lambda x: torch.einsum("...ij,...kj->...ik", x, x + 1),
    "einsum that broadcasts": lambda x: torch.einsum("...j,kj", x, x[:1, 0] * 2),
    "einsum with an ellipsis in one": lambda x: torch.einsum("...j,j->...", x, x[0, 0]),
    # scattering
    **{
        f"scatter {reduce}, {'with' if include else 'without'} what was there": (
            lambda x, reduce=reduce, include=include: (x[0] * 1.5).scatter_reduce(
                1, (x[1] * 100).long() % 4, x[2], reduce, include_self=include
            )
        )
        for reduce in ("sum", "mean", "amax", "amin")
        for include in (True, False)
    },
    "scatter a number": lambda x: (x[0] * 2).scatter(1, (x[1] * 100).long() % 4, 3.0),
    "nearest in a plane": lambda x: F.interpolate(x[None] * 2, scale_factor=2.0),
    "nearest in a space": lambda x: F.interpolate(x[None, None] * 2, scale_factor=2.0),
    **{
        f"{mode} to aligned corners, {axes} axes": (
            lambda x, mode=mode, axes=axes: F.interpolate(
                x[(None,) * (axes - 1)] * 2, scale_factor=1.7, mode=mode, align_corners=True
            )
        )
        for axes, mode in ((1, "linear"), (2, "bilinear"), (2, "bicubic"), (3, "trilinear"))
    },
    "extrema that tie": lambda x: (x[0] * 0).scatter_reduce(
        1, (x[1] * 100).long() % 2, x[2].clamp(max=0.0), "amax"
    ),
    "a constant in the forward": lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]),
}


def on_engines() -> list[Any]:
    """Each function on onnxruntime; on PyTorch's operators those of images alone here."""
    images = [name for name in FUNCTIONS if "corners" in name or "nearest" in name]
    return crossed(FUNCTIONS, ["onnxruntime"]) + crossed(FUNCTIONS, ["aten"], sample=images)


@pytest.mark.parametrize(("name", "engine"), on_engines())
def test_the_graph_computes_what_eager_does_at_two_sizes(name: str, engine: Engine) -> None:
    function = FUNCTIONS[name]
    model = ORTModule(Called(function), options=replace(GRAPH, engine=engine))
    for shape in ((5, 6, 4), (8, 5, 4)):
        args = (torch.randn(shape, requires_grad=True),)
        ours, eager = step(model, args, {}), step(Called(function), args, {})
        wide = step(Called(function), in_another_precision(args, torch.float32), {})
        assert difference(ours, eager, wide) == ""


def eager_because(function: Function, x: torch.Tensor) -> str:
    model = ORTModule(Called(function), options=Options(engine="onnxruntime", certificate="off"))
    with pytest.warns(UserWarning, match="in PyTorch"):
        step(model, (x,), {})
    return model.report.reason


COMPLEX: dict[str, Function] = {
    "made": lambda x: torch.complex(x, x).abs(),
    "viewed": lambda x: torch.view_as_real(torch.view_as_complex(x) * 2),
    "transformed": lambda x: torch.fft.rfft(x).abs(),
    "inside of an operator": lambda x: torch.fft.irfft(torch.fft.rfft(x)),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_numbers_stay_with_pytorch(name: str) -> None:
    x = torch.randn(3, 2, requires_grad=True)
    assert "complex" in eager_because(COMPLEX[name], x)


def test_an_untrusted_translation_of_the_exporter_is_not_used() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    for function in (lambda x: x.logcumsumexp(1), torch.special.log_ndtr):
        assert "no translation to ONNX" in eager_because(function, x)
