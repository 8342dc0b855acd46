"""A module of float64 is computed in float64: no number on the way is a float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ortrain import Options, ORTModule
from ortrain.config import Engine
from ortrain.errors import CaptureError
from ortrain.frontend.export import export
from tests.module.agreement import Called

OPTIONS = Options(engine="onnxruntime")
# Roundings of float64, as many as a short sum of products may have. A float32 on the way shows as
# 1e-8 at least.
SAME = 1e-13


def layer_norm_by_hand(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()


def gelu_by_hand(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))


def attention(x: Tensor, **options: object) -> Tensor:
    return F.scaled_dot_product_attention(x, x.flip(1), x * 2, **options)  # type: ignore[arg-type]


Function = Callable[[Tensor], Tensor]

# Of a tensor of shape [3, 4, 5].
AS_GRAPHS: dict[str, Function] = {
    "products and factors": lambda x: (x @ x.mT * 0.1) @ (0.3 * x),
    "a product divided": lambda x: (x * 0.7) @ x.mT / 5**0.5,
    "addmm": lambda x: torch.addmm(x[0], x[1, :, :4], x[2], beta=0.3, alpha=0.1),
    "addmm, whole factors": lambda x: torch.addmm(x[0], x[1, :, :4], x[2], beta=2, alpha=0.5),
    "baddbmm": lambda x: torch.baddbmm(x @ x.mT, x, x.mT, beta=0.3, alpha=0.1),
    "addmv": lambda x: torch.addmv(x[0, :, 0], x[1], x[2, 0], beta=0.3, alpha=0.1),
    "addr": lambda x: torch.addr(x[0], x[1, :, 0], x[2, 0], beta=0.3, alpha=0.1),
    "addcmul": lambda x: torch.addcmul(x, x, x.flip(0), value=0.1),
    "addcdiv": lambda x: torch.addcdiv(x, x, x.abs() + 1, value=0.1),
    "lerp": lambda x: torch.lerp(x, x.flip(0), 0.3),
    "attention": attention,
    "attention, scaled": lambda x: attention(x, scale=0.3),
    "attention, causal": lambda x: attention(x, is_causal=True),
    "layer norm": lambda x: F.layer_norm(x, (5,), eps=1e-3),
    "layer norm by hand": layer_norm_by_hand,
    "group norm": lambda x: F.group_norm(x, 2, eps=1e-3),
    "instance norm": lambda x: F.instance_norm(x, eps=1e-3),
    "batch norm": lambda x: F.batch_norm(x, x[0, :, 0].detach(), x[0, :, 1].detach() ** 2, eps=0.1),
    "rms norm": lambda x: F.rms_norm(x, (5,), eps=1e-3),
    "normalize": lambda x: F.normalize(x, dim=1, eps=0.3),
    "cosine similarity": lambda x: F.cosine_similarity(x, x.flip(0), eps=0.3),
    "gelu by hand": gelu_by_hand,
    "selu": F.selu,
    "hardswish": F.hardswish,
    "hardtanh": lambda x: F.hardtanh(x, -0.3, 0.7),
    "softplus": lambda x: F.softplus(x, 0.7, 1.3),
    "silu": F.silu,
    "threshold": lambda x: F.threshold(x, 0.1, 0.3),
    "degrees": lambda x: torch.deg2rad(x) + torch.rad2deg(x) * 1e-3,
    "logarithms": lambda x: torch.log2(x.abs() + 1) + torch.log10(x.abs() + 1),
    "powers": lambda x: (x.abs() + 1) ** 0.3 + torch.exp2(x),
    "sums of powers": lambda x: x.abs().pow(1.7).sum(1),
    "smoothed labels": lambda x: F.cross_entropy(
        x[0], torch.arange(4), label_smoothing=0.1, reduction="none"
    ),
    "huber": lambda x: F.huber_loss(x, x.detach() * 0.5, delta=0.3, reduction="none"),
    "smooth l1": lambda x: F.smooth_l1_loss(x, x.detach() * 0.5, beta=0.3, reduction="none"),
    "margins": lambda x: F.triplet_margin_loss(x[0], x[1], x[2], margin=0.7, reduction="none"),
    "a clamp": lambda x: x.clamp(-0.3, 0.7),
    "a table": lambda x: x * torch.linspace(0.1, 0.7, 5, dtype=torch.float64),
    "steps": lambda x: x + torch.arange(0.1, 0.6, 0.1, dtype=torch.float64),
}
# onnxruntime has no kernels for these, or PyTorch's own gradient has float32 in it.
OTHERS: dict[str, Function] = {
    "celu": lambda x: F.celu(x, 0.3),
    "hardsigmoid": F.hardsigmoid,
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "elu": lambda x: F.elu(x, 0.3),
    "leaky relu": lambda x: F.leaky_relu(x, 0.1),
    "mish": F.mish,
    "average pool": lambda x: F.avg_pool1d(x, 3, count_include_pad=False, padding=1),
    "bilinear": lambda x: F.interpolate(x[None], scale_factor=1.7, mode="bilinear"),
    "nearest": lambda x: F.interpolate(x, scale_factor=1.7),
    "quantile": lambda x: torch.quantile(x, 0.3, dim=1),
}


def step(module: nn.Module, values: Tensor) -> tuple[Tensor, Tensor]:
    x = values.clone().requires_grad_()
    output = module(x)
    output.backward(torch.linspace(0.5, 1.5, output.numel(), dtype=x.dtype).view_as(output))
    assert x.grad is not None
    return output.detach(), x.grad


@pytest.mark.filterwarnings("ignore:ORTModule runs Called in PyTorch")
@pytest.mark.parametrize("name", [*AS_GRAPHS, *OTHERS])
def test_nothing_is_rounded_to_float32(name: str) -> None:
    module = Called(AS_GRAPHS.get(name) or OTHERS[name])
    model = ORTModule(module, options=OPTIONS)
    for _ in range(2):
        values = torch.randn(3, 4, 5, dtype=torch.float64)
        for ours, eager in zip(step(model, values), step(module, values), strict=True):
            assert ours.dtype == torch.float64
            torch.testing.assert_close(ours, eager, rtol=SAME, atol=SAME)
    assert name in OTHERS or model.report.mode == "graph", model.report.reason


def test_a_translation_that_rounds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ortrain.capture.onnx.torchlib.has_tensor", lambda *_: False)
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    for function, number in (
        (lambda x: F.leaky_relu(x, 0.1), "alpha"),
        (F.hardswish, "numbers"),
    ):
        with pytest.raises(CaptureError, match=f"of float64 has no exact graph(?s:.*){number}"):
            export(Called(function), (x,))


@pytest.mark.parametrize(
    "function", [F.elu, F.selu, F.celu, lambda x: F.elu(x, 0.3), lambda x: F.celu(x, 2.0)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("engine", ["onnxruntime", "aten"])
@pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
def test_an_exponential_that_is_infinite_leaves_the_other_branch_its_gradient(
    engine: Engine, dtype: torch.dtype, function: Function
) -> None:
    model = ORTModule(Called(function), options=Options(engine=engine, certificate="off"))
    values = torch.tensor([-1e6, -800.0, -1.0, -0.0, 0.0, 1.0, 800.0, 1e6], dtype=dtype)
    found = []
    for run in (model, function):
        x = values.clone().requires_grad_()
        y = run(x)
        (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
        found.append((y.detach(), gradient))
    torch.testing.assert_close(*found)
    assert engine == "onnxruntime" or model.report.graph_calls == 1


def test_an_operator_whose_gradient_pytorch_rounds_is_refused() -> None:
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    with pytest.raises(CaptureError, match=r"hardsigmoid of float64(?s:.*)rounded"):
        export(Called(F.hardsigmoid), (x,))


@pytest.mark.parametrize("function", [torch.log2, torch.log10, torch.exp2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_whole_powers_are_whole(dtype: torch.dtype, function: Function) -> None:
    powers = torch.arange(-30, 31, dtype=dtype)
    base = {torch.log2: 2.0, torch.log10: 10.0}.get(function)
    values = powers if base is None else torch.full((), base, dtype=dtype) ** powers
    ends = torch.tensor([0.0, -1.0, float("inf"), float("nan")], dtype=dtype)
    for x in (values, ends):
        ours = ORTModule(Called(lambda x: function(x)), options=OPTIONS)(x)
        torch.testing.assert_close(ours, function(x), rtol=1e-6, atol=0, equal_nan=True)
        whole = function(x).frac() == 0
        assert torch.equal(ours[whole], function(x)[whole])
