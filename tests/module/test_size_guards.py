"""Calls of other sizes never use a graph that was traced along another way."""

from __future__ import annotations

import copy
import fractions
import functools
import itertools
import math
import numbers
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from tests.module.agreement import SAME

FORCED = Options(engine="onnxruntime", fallback="torch")


def assert_same_steps(module: nn.Module, *calls: tuple[Tensor, ...]) -> ORTModule:
    """Raises unless a module and its graph agree in outputs, gradients and buffers at all calls."""
    model = ORTModule(copy.deepcopy(module), options=FORCED)
    for inputs in calls:
        outputs = []
        for each in (model, module):
            each.zero_grad()
            output = each(*inputs)
            output.pow(2).sum().backward()
            outputs.append(output)
        torch.testing.assert_close(*outputs, rtol=SAME, atol=SAME)
        for mine, its in zip(model.parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, its.grad, rtol=SAME, atol=SAME)
        for mine, its in zip(model.buffers(), module.buffers(), strict=True):
            torch.testing.assert_close(mine, its)
    return model


class Layered(nn.Module):
    """A linear layer in front of what depends on sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


class EvenRows(Layered):
    """Asks about the rows of one input, and adds another one."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden: Tensor = self.layer(x)
        return (hidden * 2 if x.shape[0] % 2 == 0 else hidden * 3) + y


def test_a_question_about_one_of_two_equal_sizes_is_asked_again() -> None:
    calls = [(torch.randn(n, 4), torch.randn(n, 4)) for n in (4, 5, 6, 1, 7)]
    model = assert_same_steps(EvenRows(), *calls)
    assert model.report.mode == "graph"


class NormsSeveral(Layered):
    """A batch of one row goes past the normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layer(x)
        if x.size(0) > 1:
            hidden = self.norm(hidden)
        return self.dropout(hidden)


@pytest.mark.parametrize("sizes", [(4, 1, 3, 1), (1, 4, 1)], ids=str)
def test_statistics_of_a_batch_that_one_row_goes_past(sizes: tuple[int, ...]) -> None:
    assert_same_steps(NormsSeveral(), *((torch.randn(n, 4),) for n in sizes))


def test_statistics_of_a_batch_stay_finite_where_dropout_draws() -> None:
    module = NormsSeveral()
    module.dropout.p = 0.5
    model = ORTModule(module, options=FORCED)
    for rows in (4, 1, 3, 1):
        model(torch.randn(rows, 4)).sum().backward()
    assert module.norm.num_batches_tracked == 2
    assert bool(module.norm.running_var.isfinite().all())


class Contrastive(Layered):
    """In-batch negatives: the loss is over a square of two inputs."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.layer(x) @ self.layer(y).T
        return nn.functional.cross_entropy(scores, torch.arange(x.shape[0]))


class Similarity(Layered):
    """All pairs of two inputs."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.layer(x) @ self.layer(y).T).softmax(1)


@pytest.mark.parametrize("module", [Contrastive, Similarity])
def test_sizes_that_were_equal_by_chance_may_differ(module: type[nn.Module]) -> None:
    pairs = [(4, 4), (6, 6), (4, 6), (3, 5), (1, 1), (2, 3), (4, 4)]
    assert_same_steps(module(), *((torch.randn(n, 4), torch.randn(m, 4)) for n, m in pairs))


class TwoQuestions(Layered):
    """What it asks second, it asks on the way of one row only."""

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layer(x)
        return hidden * 3 if x.shape[0] == 1 and x.shape[1] > 7 else hidden * 2


def test_a_question_on_the_way_of_one_row_is_asked_at_each_length() -> None:
    shapes = [(3, 5), (1, 5), (1, 9), (1, 6), (2, 9)]
    assert_same_steps(TwoQuestions(), *((torch.randn(n, m, 4),) for n, m in shapes))


class Padded(Layered):
    """Pads to a multiple, and looks a factor up by the size."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = {4: 2.0, 8: 3.0}
        self.table = [1.0, 2.0, 0.5, 3.0]

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layer(x)
        padded = nn.functional.pad(hidden, (0, 0, 0, -x.shape[0] % 4))
        halves = padded[: -(-x.shape[0] // 2)] * self.table[x.shape[0] % 4]
        return halves * self.factors.get(padded.shape[0], 1.0)


def test_padding_tables_and_rounding_up() -> None:
    assert_same_steps(Padded(), *((torch.randn(n, 4),) for n in (4, 5, 7, 8, 3)))


class Asks(Layered):
    """Asks what a size is, besides how large."""

    def __init__(self, question: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.question = question

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layer(x)
        return hidden * 3 if self.question(x) else hidden


def _matches(x: Tensor) -> bool:
    match x.shape[0]:
        case int() as rows if rows == 7:
            return True
        case _:
            return False


@functools.singledispatch
def _kind(value: object) -> str:
    return "another"


@_kind.register
def _(value: int) -> str:
    return "whole"


KINDS: dict[str, Callable[[Tensor], bool]] = {
    "isinstance": lambda x: isinstance(x.shape[0], int) and x.shape[0] == 7,
    "isinstance of a sum": lambda x: isinstance(x.shape[0] + 1, int | float) and x.shape[0] == 7,
    "a float": lambda x: isinstance(x.shape[0] / 2, float) and x.shape[0] == 7,
    "a number": lambda x: isinstance(x.numel(), numbers.Number) and x.numel() == 28,
    "a truth": lambda x: isinstance(x.shape[0] == 7, bool) and x.shape[0] == 7,
    "type": lambda x: type(x.shape[0]) is int and x.shape[0] == 7,
    "a subclass": lambda x: issubclass(type(x.shape[0]), int) and x.shape[0] == 7,
    "a table of types": lambda x: {int: 7, float: 8}.get(type(x.shape[0])) == x.shape[0],
    "match": _matches,
    "singledispatch": lambda x: _kind(x.shape[0]) == "whole" and x.shape[0] == 7,
    "an attribute": lambda x: hasattr(x.shape[0], "bit_length") and x.shape[0] == 7,
    "of a value": lambda x: isinstance(x.sum().item(), float) and x.shape[0] == 7,
}


@pytest.mark.parametrize("name", KINDS)
def test_to_the_code_a_size_is_a_number(name: str) -> None:
    model = assert_same_steps(Asks(KINDS[name]), *((torch.randn(n, 4),) for n in (4, 5, 7, 9, 7)))
    assert model.report.graph_calls >= 3
    assert type(torch.SymInt.__eq__).__name__ == "function"
    assert "__class__" not in vars(torch.SymInt)
    assert "type" not in globals()


AS_NUMBERS = {
    "divmod": lambda n: divmod(n, 3)[1] + divmod(17, n)[0],
    "invert": lambda n: ~n,
    "bits": lambda n: (n & (n - 1)) + (n | 1) + (n ^ 3) + (3 ^ n) + (n << 1) + (n >> 1),
    "bit_length": lambda n: n.bit_length() + n.bit_count(),
    "bytes": lambda n: n.to_bytes(2, "big")[1],
    "parts": lambda n: n.real + n.imag + n.numerator + n.denominator + n.conjugate(),
    "fraction": lambda n: float(fractions.Fraction(n, 3)),
    "format": lambda n: int(f"{n:d}") + len(f"{n:5d}") + float(f"{n / 3:.2f}") + int("%d" % n),  # noqa: UP031
    "str.format": lambda n: float("{:.1f}".format(n)),  # noqa: UP032
    "bases": lambda n: int(hex(n), 16) + int(oct(n), 8) + bin(n).count("1"),
    "rounded": lambda n: round(n / 3, 1) + math.floor(n / 2) + math.ceil(n / 3) + round(n),
    "powers": lambda n: n**2 + n**0.5 + 2**n,
    "roots": lambda n: math.sqrt(n) + math.isqrt(n) + math.log2(n) + math.gcd(n, 6),
    "lookups": lambda n: {4: 1, 5: 2}.get(n, 3) + (0, 1, 2, 3, 4, 5, 6, 7, 8)[n],
    "strings": lambda n: len("-" * n) + int(str(n)) + len("abcdefghij"[:n]),
    "kinds": lambda n: (2 if isinstance(n, int) else 3) + (2 if type(n) is int else 3),
}


@pytest.mark.parametrize(("name", "by_len"), [*zip(AS_NUMBERS, itertools.cycle([False, True]))])
def test_a_size_is_a_number_to_code(name: str, by_len: bool) -> None:
    class Scaled(Layered):
        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = self.layer(x)
            return hidden * AS_NUMBERS[name](len(x) if by_len else x.shape[0]) / 16

    model = assert_same_steps(Scaled(), *((torch.randn(n, 4),) for n in (4, 5, 7, 4, 8)))
    assert model.report.mode == "graph", model.report.reason
