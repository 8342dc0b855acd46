"""Every decision of a trace about sizes is a condition, an assumption or a refusal."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch._dynamo.variables.tensor import SymNodeVariable
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import (
    FloorDiv,
    IntTrueDiv,
    Max,
    Min,
    Mod,
    OpaqueUnaryFn_sqrt,
    ToFloat,
    TruncToInt,
)

from ortrain.capture.export import capture
from ortrain.capture.trace.decisions import Decided, Decision
from ortrain.capture.trace.outcomes import constraints_of
from ortrain.errors import CaptureError
from ortrain.guards.constraints import Constraints

log = logging.getLogger(__name__)


class Runs(nn.Module):
    """Runs a function of its inputs."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


def constraints(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Constraints:
    return capture(Runs(function), tuple(torch.randn(shape) for shape in shapes)).constraints


# -- conditions ----------------------------------------------------------------------------------


def _odd_rows(x: Tensor, y: Tensor) -> Tensor:
    return (x * 2 if x.shape[0] % 2 == 0 else x * 3) + y


def test_a_condition_on_a_size_that_equals_another_is_kept() -> None:
    found = constraints(_odd_rows, (4, 3), (4, 3))
    assert found.accepts([(6, 3), (6, 3)])
    assert not found.accepts([(5, 3), (5, 3)])
    assert not found.accepts([(6, 3), (4, 3)])


def _square(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y.T).diagonal()[: len(x.flatten()) // x.shape[1]] + torch.eye(x.shape[0])


def test_sizes_that_an_equality_ties_are_compared() -> None:
    found = constraints(_square, (4, 3), (4, 3))
    assert not found.accepts([(5, 3), (4, 3)])
    assert not found.accepts([(4, 3), (5, 3)])
    assert not found.accepts([(4, 3), (4, 2)])


BRANCHES: list[tuple[Callable[[Any, Any], Any], str]] = [
    (lambda n, m: n % 2 == 0, "even"),
    (lambda n, m: n == m, "equal"),
    (lambda n, m: n < m, "less"),
    (lambda n, m: n in (4, 8), "in a tuple"),
    (lambda n, m: n in {4, 8}, "in a set"),
    (lambda n, m: n // 2 > 1, "half"),
    (lambda n, m: -(-n // 2) == 2, "half rounded up"),
    (lambda n, m: int(n * 0.5) == 2, "cut off"),
    (lambda n, m: n / 2 > m / 3, "quotients"),
    (lambda n, m: float(n) == 4.0, "float"),
    (lambda n, m: max(n, m) == n, "larger"),
    (lambda n, m: min(n, 5) == 4, "smaller"),
    (lambda n, m: f"{n}" == "4", "text"),
    (lambda n, m: {4: True}.get(n), "key"),
    (lambda n, m: n and m > 3, "and"),
    (lambda n, m: n > 3 or m > 3, "or"),
    (lambda n, m: (n, m) == (4, 5), "pair"),
    (lambda n, m: (n - 1) * (m - 1) != 12, "product"),
    (lambda n, m: n**2 > 3 * m, "square"),
    (lambda n, m: n % 3 == 1 and -n % 4 < 2, "rest"),
    (lambda n, m: len(range(0, n, 2)) == 2, "range"),
    (lambda n, m: sum([n, m]) == 9, "sum"),
    (lambda n, m: sorted([n, m])[0] == 4, "sorted"),
    (lambda n, m: n >> 1 == 2, "shifted"),
    (lambda n, m: round(n / 3) == 1, "rounded"),
    (lambda n, m: n > 4 > m - 2, "chain"),
    (lambda n, m: [7, 8, 9, 1, 2, 5, 6, 7, 8, 9][n] == 2, "index"),
    (lambda n, m: n == 1, "one"),
    (lambda n, m: n * m > 1, "more than one"),
]


@pytest.mark.parametrize(("asks", "name"), BRANCHES, ids=[name for _, name in BRANCHES])
def test_accepted_and_traced_sizes_go_the_same_way(
    asks: Callable[[Any, Any], Any], name: str
) -> None:
    def branches(x: Tensor) -> Tensor:
        return x * 2 if asks(x.shape[0], x.shape[1]) else x * 3

    found = constraints(branches, (4, 5))
    own = bool(asks(4, 5))
    assert found.accepts([(4, 5)])
    assert found.assumes([(4, 5)])
    for n in range(1, 10):
        for m in range(1, 10):
            if found.accepts([(n, m)]) and found.assumes([(n, m)]):
                assert bool(asks(n, m)) == own, (n, m)


def test_a_range_that_code_declares_is_a_condition() -> None:
    def ranged(x: Tensor) -> Tensor:
        torch.sym_constrain_range(x.shape[0], min=3, max=9)
        torch._check(x.shape[1] > 2)
        return x * 2

    found = constraints(ranged, (4, 5))
    rows = [n for n in range(1, 12) if found.accepts([(n, 5)])]
    columns = [n for n in range(1, 12) if found.accepts([(4, n)])]
    assert (rows[0], rows[-1], columns[0]) == (3, 9, 3)


def test_no_size_of_zero_takes_the_place_of_another() -> None:
    found = constraints(lambda x: x * 2, (4, 5))
    assert found.accepts([(1, 1)])
    assert not found.accepts([(0, 5)])
    assert not found.accepts([(4, 0)])


def test_a_condition_that_cannot_be_evaluated_does_not_hold() -> None:
    found = constraints(lambda x: x * 2 if 8 // (x.shape[0] - 2) == 4 else x * 3, (4, 5))
    assert found.accepts([(4, 5)])
    assert not found.accepts([(2, 5)])
    assert found.why_not([(2, 5)])


def test_a_broken_condition_is_told_with_its_place() -> None:
    found = constraints(_odd_rows, (4, 3), (4, 3))
    told = found.why_not([(5, 3), (5, 3)])
    assert "shape[0] % 2) == 0 does not hold" in told
    assert __file__ in told


# -- assumptions ---------------------------------------------------------------------------------


def test_what_code_asks_about_one_is_known_for_those_shapes_only() -> None:
    def asks(x: Tensor) -> Tensor:
        return x * 3 if x.shape[0] == 1 and x.shape[1] > 7 else x * 2

    found = constraints(asks, (4, 5))
    assert found.assumes([(2, 9)])
    assert found.untraced([(1, 5)]) != found.untraced([(1, 9)])


def test_what_operators_assume_about_one_is_a_pattern() -> None:
    found = constraints(lambda x: x[1:].sum(0) + x.mean(), (4, 5))
    assert found.untraced([(1, 5)]) == found.untraced([(1, 9)]) != ()
    assert found.untraced([(4, 1)]) != found.untraced([(1, 5)])
    assert found.untraced([(2, 5)]) != (), "x[1:] has one row"
    assert found.untraced([(3, 5)]) == ()


def test_a_log_line_fixes_no_size() -> None:
    def logs(x: Tensor) -> Tensor:
        log.info("%s rows", x.shape[0])
        return x * 2

    assert constraints(logs, (4, 5)).static == {}


# -- refusals ------------------------------------------------------------------------------------


def _selected(x: Tensor) -> Tensor:
    chosen = x[x[:, 0] > 0]
    torch._check(chosen.shape[0] > 1)
    return chosen * 2


def _paired(x: Tensor) -> Tensor:
    return x[x[:, 0] > 0] + x[x[:, 0] <= 0]


@pytest.mark.parametrize("function", [_selected, _paired])
def test_a_relation_that_values_decide_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    value = torch.randn(4, 3)
    value[:, 0] = torch.tensor([1.0, 1.0, -1.0, -1.0])
    with pytest.raises(CaptureError, match="sizes of the inputs alone") as caught:
        capture(Runs(function), (value,))
    assert __file__ in caught.value.where


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2 if x.is_contiguous() else x * 3,
        lambda x: x * x.stride(0),
        lambda x: x * (1 + x.storage_offset()),
        lambda x: x.as_strided((2, 2), (1, 2)),
        lambda x: x.T.as_strided((2, 2), (1, 2)),
    ],
    ids=["is_contiguous", "stride", "storage_offset", "as_strided", "as_strided of a view"],
)
def test_code_that_reads_the_layout_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match="asks for"):
        capture(Runs(function), (torch.randn(4, 5),))


def test_an_empty_example_is_refused() -> None:
    with pytest.raises(CaptureError, match="is empty"):
        capture(Runs(lambda x: x * 2), (torch.randn(0, 5),))


# -- relations as Python -------------------------------------------------------------------------


def _expression(draw: random.Random, symbols: list[sympy.Symbol], depth: int) -> sympy.Expr:
    if depth == 0:
        return draw.choice([*symbols, *symbols, sympy.Integer(draw.randint(-3, 9))])
    a, b = (_expression(draw, symbols, depth - 1) for _ in range(2))
    k = sympy.Integer(draw.randint(2, 5))
    return draw.choice(
        [
            lambda: a + b,
            lambda: a - b,
            lambda: -a,
            lambda: a * b,
            lambda: FloorDiv(a, k),
            lambda: Mod(a + 100, k),
            lambda: Max(a, b),
            lambda: Min(a, b),
            lambda: TruncToInt(IntTrueDiv(a, k)),
            lambda: TruncToInt(ToFloat(a) * 0.3),
            lambda: TruncToInt(OpaqueUnaryFn_sqrt(ToFloat(a**2 + 1))),
        ]
    )()


@pytest.mark.parametrize("seed", range(40))
def test_a_relation_is_evaluated_as_sympy_does(seed: int) -> None:
    draw = random.Random(seed)
    environment = ShapeEnv()
    sizes = [environment.create_unbacked_symint() for _ in range(2)]
    symbols = [size.node.expr for size in sizes]
    compare = draw.choice([sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge])
    relation = compare(*(_expression(draw, symbols, draw.randint(1, 3)) for _ in range(2)))
    if relation in (sympy.true, sympy.false):
        return

    def truth(n: int, m: int) -> bool:
        values = zip(symbols, (sympy.Integer(n), sympy.Integer(m)), strict=True)
        return bool(relation.xreplace(dict(values)))

    pairs = [(n, m) for n in range(2, 12) for m in range(2, 12)]
    held = next((pair for pair in pairs if truth(*pair)), None)
    if held is None:
        return
    decided = Decided((Decision(relation, by_code=True),), dict(zip(symbols, held, strict=True)))
    found = constraints_of(["x"], [tuple(sizes)], decided)
    for pair in pairs:
        assert found.accepts([pair]) == truth(*pair), (relation, pair)


def test_names_that_are_used_beyond_the_documentation_exist() -> None:
    assert callable(SymNode.guard_bool)
    assert callable(SymNodeVariable.evaluate_expr)
    environment = ShapeEnv()
    for name in ("guards", "deferred_runtime_asserts", "var_to_range", "backed_var_to_val"):
        assert hasattr(environment, name)
    assert environment.replace(sympy.Symbol("s")) == sympy.Symbol("s")
