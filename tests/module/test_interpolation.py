"""Interpolation takes the places that PyTorch's kernels take, in as much memory as its tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ortrain import Options, ORTModule
from ortrain.errors import OrtrainWarning


class Interpolating(nn.Module):
    """By each of some ways, of a tensor whose size is open or fixed."""

    def __init__(self, ways: list[dict[str, Any]], fixed: bool, axes: int) -> None:
        super().__init__()
        self.ways, self.fixed, self.axes = ways, fixed, axes
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> list[Tensor]:
        x = x * self.weight.to(x.dtype)
        x = x.reshape(1, 1, *SIZES[: self.axes]) if self.fixed else x
        return [F.interpolate(x, **way) for way in self.ways]


SIZES = (89, 7, 3)
FACTORS = [1 / 30, 0.3, 0.7, 5 / 3, 2.0, 7.3, 41.0, 49.0]


def _ways(mode: str, axes: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    ways: list[dict[str, Any]] = []
    # Of float64 PyTorch's backward goes to other places than its forward by the last two.
    few = FACTORS[:6] if dtype is torch.float64 else FACTORS
    for factor in few if axes == 1 else FACTORS[2:5]:
        own = (factor, *[1.0, 2.0][: axes - 1])
        ways += [{"scale_factor": own, "recompute_scale_factor": r} for r in (None, True)]
    return [{"mode": mode, **w} for w in [*ways, {"size": (31, 5, 3)[:axes]}]]


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(
    ("mode", "axes", "dtype"),
    [
        ("nearest", 1, torch.float32),
        ("nearest", 1, torch.float64),
        ("nearest", 1, torch.bfloat16),
        ("nearest", 2, torch.float32),
        ("nearest", 3, torch.float32),
        ("nearest-exact", 1, torch.float32),
        ("nearest-exact", 2, torch.float32),
    ],
)
def test_the_nearest_places_are_those_of_pytorch(
    mode: str, axes: int, dtype: torch.dtype, fixed: bool, engine: str
) -> None:
    if dtype is torch.bfloat16 and engine == "onnxruntime":
        pytest.skip("reduced precision is not served by onnxruntime")
    ways = _ways(mode, axes, dtype)
    eager = Interpolating(ways, fixed, axes)
    options = Options(engine=engine, fallback="raise")  # type: ignore[arg-type]
    model = ORTModule(Interpolating(ways, fixed, axes), options=options)
    sizes = SIZES[:axes]
    x = torch.arange(torch.Size(sizes).numel()).remainder(251).to(dtype).view(1, 1, *sizes)
    gradients = []
    for module in (eager, model):
        given = x.clone().requires_grad_()
        outputs = module(given)
        weights = [torch.arange(y.numel()).view(y.shape).remainder(7) for y in outputs]
        torch.stack([(y * w).sum() for y, w in zip(outputs, weights, strict=True)]).sum().backward()
        gradients.append((outputs, given.grad))
    (wanted, its), (got, own) = gradients
    for way, a, b in zip(ways, got, wanted, strict=True):
        assert torch.equal(a, b), way
    torch.testing.assert_close(own, its, rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize("factor", [1 / 300, 2.0])
@pytest.mark.parametrize("fixed", [False, True])
def test_the_gradient_of_the_nearest_has_no_matrix(factor: float, fixed: bool, engine: str) -> None:
    """For 118,800 samples it had 14 billion numbers."""
    count = 118_800

    class Nearest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.weight
            return F.interpolate(x.reshape(1, 1, count) if fixed else x, scale_factor=factor)

    module, x = Nearest(), torch.randn(1, 1, count)
    options = Options(engine=engine, fallback="raise")  # type: ignore[arg-type]
    y = ORTModule(module, options=options)(x)
    y.square().mean().backward()
    wanted = F.interpolate(x, scale_factor=factor)
    assert torch.equal(y, wanted)
    assert module.weight.grad is not None
    torch.testing.assert_close(module.weight.grad[0], 2 * wanted.square().mean(), rtol=1e-4, atol=0)


LINEAR = {"linear": 1, "bilinear": 2, "trilinear": 3, "bicubic": 2}


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("mode", LINEAR)
def test_one_graph_serves_lines_of_all_lengths(mode: str, corners: bool, engine: str) -> None:
    """Also where a factor leaves an axis as long as it was: PyTorch leaves its elements then."""
    axes = LINEAR[mode]
    factors = (0.7, 2.2, 2.0, 3.3) if mode == "bicubic" else (0.7, 1.1, 2.0, 3.3)
    ways: list[dict[str, Any]] = [{"scale_factor": factor} for factor in factors]
    ways = [{"mode": mode, "align_corners": corners, **way} for way in [*ways, {"size": 5}]]
    eager = Interpolating(ways, False, axes)
    options = Options(engine=engine, fallback="raise")  # type: ignore[arg-type]
    model = ORTModule(Interpolating(ways, False, axes), options=options)
    for length in (8, 9, 13, 5, 30, 10, 20, 17):
        x = torch.randn(1, 2, length, *range(6, 5 + axes))
        gradients = []
        for module in (eager, model):
            given = x.clone().requires_grad_()
            outputs = module(given)
            sum((y.square() * (i + 1)).sum() for i, y in enumerate(outputs)).backward()
            gradients.append((outputs, given.grad))
        (wanted, its), (got, own) = gradients
        for way, a, b in zip(ways, got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=str(way))
        assert its is not None
        torch.testing.assert_close(own, its, rtol=0, atol=1e-5 * float(its.abs().max()))
    assert model.report.captures <= 2, model.report.reason


@pytest.mark.parametrize("factor", [1.1, (1.5, 1.0)])
def test_curves_that_may_stay_as_long_are_pytorchs(factor: Any) -> None:
    """Its gradient is a copy then, and its result is none."""
    way = {"mode": "bicubic", "scale_factor": factor}
    model = ORTModule(Interpolating([way], False, 2), options=Options(engine="aten"))
    given = torch.randn(1, 1, 5, 4).requires_grad_()
    with pytest.warns(OrtrainWarning, match="between 1 and 2"):
        (y,) = model(given)
    assert torch.equal(y, F.interpolate(given, **way))
    assert not model.report.graph_calls


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
def test_lines_of_long_signals_have_the_shares_of_pytorch_and_no_matrix(engine: str) -> None:
    """In float32 a place of 118,800 is good to a hundredth: roundings are those of its kernel."""

    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return F.interpolate(x * self.weight, scale_factor=0.7, mode="linear")

    x = torch.randn(1, 1, 118_800)
    gradients = []
    options = Options(engine=engine, fallback="raise")  # type: ignore[arg-type]
    for module in (Line(), ORTModule(Line(), options=options)):
        given = x.clone().requires_grad_()
        y = module(given)
        y.square().sum().backward()
        gradients.append((y, given.grad))
    for got, wanted in zip(gradients[1], gradients[0], strict=True):
        assert got is not None
        assert wanted is not None
        far = (got - wanted).abs() > 1e-5  # builds of PyTorch differ in fused multiplications
        assert far.sum() < 10
        torch.testing.assert_close(got, wanted, rtol=0, atol=0.05)
