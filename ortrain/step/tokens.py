"""Which calls run without the tokens that nobody reads: those for which that saves enough."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch

from ortrain.graph import shapes
from ortrain.graph.cost import Multiplications
from ortrain.passes.tokens import Grid, Kept, Packed, Position, Shown, leaves_out, obstacles
from ortrain.program import Program, Role
from ortrain.runtime.base import Executor
from ortrain.step.autograd import Step
from ortrain.step.build import build
from ortrain.step.report import Dense, Saving

# The share of a call's multiplications that has to be saved, and how many it has to have: moving
# tokens costs 1 % of a step of MiniLM, and counting them 0.3 ms.
ENOUGH, LEAST = 0.04, 1 << 29

# Kinds of sets in words; a position has its own.
LABELLED, REAL = "labelled", "real"
_WORDS = {"labels": LABELLED, "keys": REAL}


class TokenCounts:
    """How many tokens a call has in each set.

    Args:
        packed: whose sets they are.
        whole: the program before.
        executor: counts.
    """

    def __init__(self, packed: Packed, whole: Program, executor: Executor) -> None:
        users = whole.inputs(Role.USER_INPUT)
        names = [value.name for value in users]
        self._places = [names.index(v.name) for v in packed.counts.inputs(Role.USER_INPUT)]
        plan = build(packed.counts, (), None, executor)
        self._step = Step(plan, {}, lambda _: self._step)
        self._symbols = packed.symbols[: len(packed.sets)]
        self._names = (*packed.symbols, *map(_read, self._symbols))
        several = len({grid for _, grid in packed.sets}) > 1
        self._sets = [
            (_words(kept) + (f" of {_named(grid, whole)}" if several else ""), grid)
            for kept, grid in packed.sets
        ]

    @staticmethod
    def serves(packed: Packed) -> bool:
        """Whether the tokens of a call can be counted before it runs."""
        return all(v in packed.counts.inputs(Role.USER_INPUT) for v in packed.counts.inputs())

    def __call__(self, users: Sequence[torch.Tensor]) -> dict[str, int]:
        """By the symbol of their number; and how many of them are read.

        Args:
            users: the tensors that the program takes.
        """
        (found,) = self._step.infer([users[i] for i in self._places])
        return dict(zip(self._names, found.tolist(), strict=True))

    def densities(self, counts: Mapping[str, int], sizes: Mapping[str, int]) -> dict[str, float]:
        """The share that each set has of the places of its batch, by what it is in words.

        Args:
            counts: of a call.
            sizes: value of each symbolic dimension.
        """
        found: dict[str, float] = {}
        for symbol, (words, grid) in zip(self._symbols, self._sets, strict=True):
            share = counts[_read(symbol)] / (
                _number(grid.rows, sizes) * _number(grid.length, sizes)
            )
            found[words] = max(share, found.get(words, 0.0))
        return found


def _read(symbol: str) -> str:
    """The name of how many tokens of a set are read."""
    return f"{symbol} read"


class Tokens:
    """The packed program of a capture, and the calls that it is for.

    Args:
        packed: what leaves tokens out.
        whole: what computes all of them.
        cost: of ``whole``.
        executor: counts the tokens of a call.
        hidden: positions of the outputs of ``packed`` that are zeros for whatever reason else.

    Attributes:
        program: the packed program.
        partial: positions of the outputs that are zero for tokens which were left out.
        hidden: of those that are zeros, since nobody reads them.
    """

    def __init__(
        self,
        packed: Packed,
        whole: Program,
        cost: Multiplications,
        executor: Executor,
        hidden: Collection[int] = (),
    ) -> None:
        self.program, self._packed, self._cost = packed.program, packed, cost
        only_loss = packed.shown == "loss"
        self.partial = () if only_loss else packed.partial
        self.hidden = tuple(sorted({*hidden, *(packed.partial if only_loss else ())}))
        self._counts = TokenCounts(packed, whole, executor)

    def counts(self, users: Sequence[torch.Tensor]) -> dict[str, int]:
        """How many tokens each set of a call has, and as far as rows go, by their symbols.

        Args:
            users: the tensors that the program takes.
        """
        return self._counts(users)

    def most(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """What :meth:`counts` would be of a batch all of whose places are read.

        Args:
            sizes: value of each symbolic dimension.
        """
        packed = self._packed
        most = [_number(grid.rows, sizes) * _number(grid.length, sizes) for _, grid in packed.sets]
        most += [_number(grid.length, sizes) for grid in packed.short]
        return dict(zip(packed.symbols, most, strict=True))

    def saving(self, users: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> Saving | None:
        """What is saved of a call, nothing where that is not worth it; None of small calls.

        A set without tokens is none for a graph: its operators take no empty tensors.

        Args:
            users: the tensors that the program takes.
            sizes: value of each symbolic dimension.
        """
        whole = self._cost(sizes)
        if whole < LEAST:
            return None
        counts = self.counts(users)
        densities = self._counts.densities(counts, sizes)
        share = 0.0
        if all(counts.values()):
            share = 1.0 - self._packed.cost({**sizes, **counts}) / whole
        return Saving(share if share >= ENOUGH else 0.0, densities)


def dense(
    program: Program, shown: Shown, cost: Multiplications, sizes: Mapping[str, int]
) -> list[Dense]:
    """What of a capture is computed for all tokens, and why: the most work first.

    An output that shows tokens is none of it where nothing would be left out if it did not.

    Args:
        program: of the capture.
        shown: what is read of its outputs.
        cost: of the program.
        sizes: value of each symbolic dimension.
    """
    whole = max(cost(sizes), 1)
    found = obstacles(program, shown)
    helps: tuple[Shown, ...] = ()
    if any(each.kind == "output" for each in found):
        ways: tuple[Shown, ...] = ("loss", "tokens")
        helps = tuple(way for way in ways if way != shown and leaves_out(program, way))
    rows = [
        Dense(
            each.kind,
            each.name,
            each.where,
            each.others,
            each.behind(sizes) / whole,
            helps if each.kind == "output" else (),
        )
        for each in found
        if each.kind != "output" or helps
    ]
    return sorted(rows, key=lambda row: -row.share)


def _words(kept: frozenset[Kept]) -> str:
    """What the tokens of a set are."""
    words = {
        f"at position {each.number}" if isinstance(each, Position) else _WORDS[each.kind]
        for each in kept
    }
    return " or ".join(sorted(words))


def _number(size: str, sizes: Mapping[str, int]) -> int:
    """The value of a size, which may be a product of symbols."""
    return math.prod(int(s) if s.isdecimal() else sizes[s] for s in size.split("*"))


def _named(grid: Grid, program: Program) -> str:
    """The first input that has these rows and positions."""
    for value in program.inputs(Role.USER_INPUT):
        if (shapes.dims(value) or ())[:2] == (grid.rows, grid.length):
            return value.name or ""
    return f"{grid.rows} x {grid.length}"
