"""At zeros, ties, bounds and infinities, outputs and gradients are PyTorch's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils import _pytree as pytree

from ortrain import Options, ORTModule
from tests.module.agreement import Called

OPTIONS = Options(engine="onnxruntime", fallback="raise", certificate="off")
INF, NAN = float("inf"), float("nan")
VALUES = torch.tensor([0.0, -0.0, 1, -1, 0.5, -0.5, 2, -2, 3, -3, 6, 20, -20, 100, -100, 1e4, -1e4,
                       1e-30, -1e-30, INF, -INF])  # fmt: skip
FINITE = VALUES[VALUES.isfinite()]
GRID = torch.tensor(list(itertools.product([0.0, -0.0, 1, -1, 0.5, 2, -2, 1e4, INF, -INF],
                                           repeat=2)))  # fmt: skip
PLAIN = GRID[GRID.isfinite().all(1)]
ROWS = torch.tensor([[0.0, 0, 0], [1, 1, 1], [3, 3, 1], [1, 3, 3], [-1, -1, -2], [0, -0.0, 0],
                     [2, 0, 3], [0, 0, 5]])  # fmt: skip
EMPTY_ROWS = torch.tensor([[0.0, 1, -INF], [-INF, -INF, -INF], [INF, 1, 2],
                           [torch.finfo().min] * 3])  # fmt: skip

Case = tuple[Callable[..., Any], Sequence[Tensor]]


def unary(values: Tensor, *functions: Callable[[Tensor], Any]) -> dict[str, Case]:
    return {
        f"{i} {function.__name__}": (function, [values]) for i, function in enumerate(functions)
    }


def binary(points: Tensor, *functions: Callable[[Tensor, Tensor], Any]) -> dict[str, Case]:
    columns = [points[:, 0].contiguous(), points[:, 1].contiguous()]
    return {f"{i} {function.__name__}": (function, columns) for i, function in enumerate(functions)}


FAMILIES: dict[str, dict[str, Case]] = {
    "bounds": unary(
        VALUES,
        F.relu6, F.hardtanh, lambda x: F.hardtanh(x, -3, 2), F.relu, F.leaky_relu, F.hardsigmoid,
        F.hardswish, F.hardshrink, F.softshrink, lambda x: x.clamp(-1, 1), lambda x: x.clamp_min(0),
        lambda x: x.clamp(max=0), lambda x: x.clamp(1, -1), lambda x: F.threshold(x, 0.5, -3),
        lambda x: x.clamp(torch.tensor(-1.0), torch.tensor(1.0)),
        lambda x: x.clamp(min=torch.tensor(2.0)), lambda x: x.clamp(max=torch.tensor(0.0)),
        lambda x: x.clamp(torch.tensor(1.0), torch.tensor(-1.0)),
    ),
    "curves": unary(
        VALUES,
        F.softplus, F.elu, F.selu, F.celu, F.logsigmoid, F.tanhshrink, F.softsign, torch.sigmoid,
        torch.tanh, torch.erf, torch.abs, torch.sign, torch.sqrt, torch.rsqrt, torch.log,
        torch.log1p, torch.exp, torch.reciprocal, torch.square, torch.floor, torch.round,
        torch.trunc, torch.frac, torch.atan, torch.isinf, torch.signbit,
    ),
    "powers": unary(
        torch.cat([FINITE[:1], FINITE[2:]]),  # the slope of a root at -0.0 is minus infinity
        *(lambda x, n=n: x**n for n in (0, 1, 2, 3, -1, 0.5, 1.5)),
        *(lambda x, b=b: b**x for b in (0.0, 1.0, 2.0, -2.0)),
    ),
    "poles behind masks": unary(
        VALUES,
        lambda x: F.relu(x).sqrt(), lambda x: x.clamp(min=0).sqrt(), lambda x: F.relu6(x).log(),
        lambda x: 1 / F.relu(x), lambda x: F.hardshrink(x).log(),
        lambda x: (F.relu(x) * 2).sum().sqrt(), lambda x: F.threshold(x, 0.5, 0).rsqrt(),
        lambda x: torch.where(x > 0, x.clamp(min=1e-6).log(), torch.zeros_like(x)),
    ),
    "pairs": binary(
        GRID,
        torch.maximum, torch.minimum, torch.add, torch.mul, torch.div,
        lambda x, y: x.clamp(min=y), lambda x, y: x.clamp(max=y),
        lambda x, y: x.clamp(y, y.flip(0)),
        lambda x, y: torch.where(x > 0, x.sqrt(), y), lambda x, y: (x * y).masked_fill(x > 0, 0),
    ),
    "finite pairs": binary(
        PLAIN,
        torch.atan2, torch.pow, torch.sub, torch.logaddexp, torch.logaddexp2,
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none"),
        lambda x, y: F.l1_loss(x, y, reduction="none"),
        lambda x, y: F.smooth_l1_loss(x, y, reduction="none"),
        lambda x, y: F.huber_loss(x, y, reduction="none"),
    ),
    "rows": unary(
        ROWS,
        lambda x: x.max(1), lambda x: x.min(1), lambda x: x.amax(1), lambda x: x.amin(1),
        lambda x: x.max(), lambda x: x.min(), lambda x: x.prod(1), lambda x: x.prod(),
        lambda x: x.std(1), lambda x: x.std(1, correction=0), lambda x: x.var(1),
        lambda x: x.norm(dim=1), lambda x: x.norm(3, dim=1), lambda x: x.norm(1, dim=1),
        lambda x: x.norm(INF, dim=1), lambda x: F.normalize(x), lambda x: x.cumsum(1),
        lambda x: (x * 0).norm(), lambda x: (x * 0).std(), lambda x: x[:, :1].std(1, correction=0),
        lambda x: torch.dist(x, x.detach()), lambda x: F.pairwise_distance(x, x.detach()),
        lambda x: F.layer_norm(x, (3,)), lambda x: torch.sinc(x),
    ),
    "softmax": unary(
        EMPTY_ROWS,
        lambda x: x.softmax(1), lambda x: x.log_softmax(1), lambda x: x.logsumexp(1),
        lambda x: x.masked_fill(x < 0, -INF).softmax(1),
        lambda x: x.masked_fill(x < 0, torch.finfo().min).softmax(1),
    ),
    "pools": unary(
        torch.tensor([0.0, 0, 1, 1, 0, 0, 1, 0, 2, 2, 1, 1, 2, 2, 1, 1]).reshape(1, 1, 4, 4),
        lambda x: F.max_pool2d(x, 2), lambda x: F.max_pool2d(x, 3, 1, 1),
        lambda x: F.max_pool1d(x[0], 2), lambda x: F.avg_pool2d(x, 2),
    ),
}  # fmt: skip


def cross_entropies() -> dict[str, Case]:
    """Labels of which all, some or none are ignored, logits of which some are minus infinity."""
    logits = torch.tensor([[1.0, 2, 3], [0, 0, 0], [-INF, 100, -100]])
    found: dict[str, Case] = {}
    for labels, smoothing, reduction in itertools.product(
        ([-100, -100, -100], [1, -100, -100], [1, 0, 1]), (0.0, 0.1), ("mean", "sum", "none")
    ):
        if smoothing and labels[2] != -100:
            continue  # minus infinity is among the classes of the mean

        def loss(x: Tensor, y: Any = labels, s: float = smoothing, r: str = reduction) -> Tensor:
            return F.cross_entropy(x, torch.tensor(y), label_smoothing=s, reduction=r)

        found[f"{labels} {smoothing} {reduction}"] = (loss, [logits])
    return found


FAMILIES["cross entropy"] = cross_entropies()


class Family(nn.Module):
    """Each function of its own arguments."""

    def __init__(self, cases: dict[str, Case]) -> None:
        super().__init__()
        self.functions = [function for function, _ in cases.values()]

    def forward(self, groups: list[list[Tensor]]) -> list[Any]:
        return [f(*group) for f, group in zip(self.functions, groups, strict=True)]


def results(model: nn.Module, cases: dict[str, Case]) -> list[list[Tensor | None]]:
    """Outputs of each function, then the gradients of its arguments."""
    groups = [[t.clone().requires_grad_() for t in tensors] for _, tensors in cases.values()]
    found: list[list[Tensor | None]] = []
    generator = torch.Generator().manual_seed(2)
    for output, group in zip(model(groups), groups, strict=True):
        outputs = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]
        drawn = [torch.randn(t.shape, generator=generator) for t in outputs]
        floats = [t.requires_grad for t in outputs]
        pairs = [(t, d) for t, d, f in zip(outputs, drawn, floats, strict=True) if f]
        gradients: list[Tensor | None] = [None] * len(group)
        if pairs:
            wanted, upstream = zip(*pairs, strict=True)
            gradients = list(
                torch.autograd.grad(wanted, group, upstream, retain_graph=True, allow_unused=True)
            )
        found.append([*(t.detach() for t in outputs), *gradients])
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_at_special_values_are_those_of_pytorch(family: str) -> None:
    cases = FAMILIES[family]
    want = results(Family(cases), cases)
    got = results(ORTModule(Family(cases), options=OPTIONS), cases)
    wrong = []
    for (name, (_, tensors)), ours, theirs in zip(cases.items(), got, want, strict=True):
        for i, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
            if mine is None or its is None:
                assert mine is its, f"{name}: the gradient of one is none"
                continue
            assert mine.dtype == its.dtype, name
            close = torch.isclose(mine.double(), its.double(), 1e-5, 1e-6, equal_nan=True)
            if not close.all():
                at = (~close).nonzero()[:4].tolist()
                wrong.append(f"{name}[{i}] at {at}: {mine[~close][:4]}, not {its[~close][:4]}")
                wrong[-1] += f" of {[t.shape for t in tensors]}"
    assert not wrong, "\n".join(wrong)


WHOLE = torch.tensor(
    [0, 1, -1, 2, -2, 3, 7, -7, 2**31 - 1, -(2**31), 2**53 + 1, -(2**53) - 1, 2**62]
)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "divide",
    [
        lambda a, b: a // b,
        lambda a, b: torch.div(a, b, rounding_mode="trunc"),
        torch.remainder,
        torch.fmod,
        lambda a, b: (a // 7, a % -3, torch.fmod(a, 5)),
    ],
)
def test_whole_numbers_are_divided_exactly(divide: Callable[..., Any], dtype: torch.dtype) -> None:
    values = WHOLE[WHOLE.abs() <= torch.iinfo(dtype).max].to(dtype)
    a, b = (t.flatten() for t in torch.meshgrid(values, values[1:], indexing="ij"))
    model = ORTModule(Called(divide), options=OPTIONS)
    mine, its = pytree.tree_leaves(model(a, b)), pytree.tree_leaves(divide(a, b))
    assert all(torch.equal(x, y) for x, y in zip(mine, its, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quotients_are_cut_where_pytorch_cuts_them(dtype: torch.dtype) -> None:
    a = torch.cat([torch.arange(50) * 0.1, torch.randn(400) * 10, torch.tensor([1e8, INF, -INF])])
    b = torch.cat([torch.full((200,), 0.1), torch.rand(253) + 0.01])
    model = ORTModule(Called(lambda a, b: (a // b, a // 0.1, a // -0.3, a // 0.0)), options=OPTIONS)
    a, b = a.to(dtype), b.to(dtype)
    for mine, its in zip(model(a, b), model.module(a, b), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_powers_of_whole_numbers_are_exact_and_wrap_around(dtype: torch.dtype) -> None:
    values = WHOLE[WHOLE.abs() <= torch.iinfo(dtype).max].to(dtype)
    model = ORTModule(Called(lambda a: [a**p for p in range(9)]), options=OPTIONS)
    for mine, its in zip(model(values), model.module(values), strict=True):
        assert torch.equal(mine, its)
    assert model.report.mode == "graph"
    for power in (lambda a, b: a**b, lambda a, b: (2**b, 7**b, (-3) ** b)):
        model = ORTModule(Called(power), options=OPTIONS)
        for most in (6, 12, 40, 70):  # beyond float64 the call is PyTorch's
            a, b = torch.randint(-most, most, (2, 200)).to(dtype)
            a, b = a[:, None].contiguous(), b.abs()
            for mine, its in zip(model(a, b), model.module(a, b), strict=True):
                assert torch.equal(mine, its)


def test_a_function_of_whole_numbers_has_a_fraction() -> None:
    names = (
        "exp2",
        "exp",
        "log",
        "tan",
        "sinh",
        "cosh",
        "atan",
        "asinh",
        "sqrt",
        "rsqrt",
        "sigmoid",
    )
    x = torch.arange(1, 9)
    for name in names:
        model = ORTModule(Called(getattr(torch, name)), options=OPTIONS)
        torch.testing.assert_close(model(x), model.module(x))
