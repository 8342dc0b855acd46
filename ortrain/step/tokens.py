"""Which calls run without the tokens that nobody reads: those for which that saves enough."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from ortrain.graph.cost import Multiplications
from ortrain.passes.tokens import Packed
from ortrain.program import Program, Role
from ortrain.runtime.base import Executor
from ortrain.step.autograd import Step
from ortrain.step.build import build

# The share of a call's multiplications that has to be saved, and how many it has to have: moving
# tokens costs 1 % of a step of MiniLM, and counting them 0.3 ms.
ENOUGH, LEAST = 0.04, 1 << 29


class Tokens:
    """The packed program of a capture, and the calls that it is for.

    Args:
        packed: what leaves tokens out.
        whole: what computes all of them.
        cost: of ``whole``.
        executor: counts the tokens of a call.

    Attributes:
        program: the packed program.
        shown: what is read of its outputs.
        partial: positions of the outputs that are zero for tokens which were left out.
    """

    def __init__(
        self, packed: Packed, whole: Program, cost: Multiplications, executor: Executor
    ) -> None:
        self.program, self._packed, self._cost = packed.program, packed, cost
        self.shown, self.partial = packed.shown, packed.partial
        names = [value.name for value in whole.inputs(Role.USER_INPUT)]
        self._places = [names.index(v.name) for v in packed.counts.inputs(Role.USER_INPUT)]
        plan = build(packed.counts, (), None, executor)
        self._step = Step(plan, {}, lambda _: self._step)

    @staticmethod
    def serves(packed: Packed) -> bool:
        """Whether the tokens of a call can be counted before it runs."""
        return all(v in packed.counts.inputs(Role.USER_INPUT) for v in packed.counts.inputs())

    def counts(self, users: Sequence[torch.Tensor]) -> dict[str, int]:
        """How many tokens each set of a call has, by the symbol of their number.

        Args:
            users: the tensors that the program takes.
        """
        (found,) = self._step.infer([users[i] for i in self._places])
        return dict(zip(self._packed.symbols, found.tolist(), strict=True))

    def most(self, users: Sequence[torch.Tensor]) -> dict[str, int]:
        """What :meth:`counts` would be of a call of these sizes without padding, or more."""
        whole = max((math.prod(t.shape[:2]) for t in users if t.dim() > 1), default=1)
        return dict.fromkeys(self._packed.symbols, whole)

    def saved(self, users: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> float:
        """The share of a call's multiplications that are saved; 0 where that is not worth it.

        A set without tokens is none for a graph: its operators take no empty tensors.

        Args:
            users: the tensors that the program takes.
            sizes: value of each symbolic dimension.
        """
        whole = self._cost(sizes)
        if whole < LEAST:
            return 0.0
        counts = self.counts(users)
        if not all(counts.values()):
            return 0.0
        share = 1.0 - self._packed.cost({**sizes, **counts}) / whole
        return share if share >= ENOUGH else 0.0
