"""Graph against eager on real steps: the faster one stays.

Both contestants are timed the same way, by autograd hooks on the outputs and on what receives a
gradient, so that neither work outside the module nor the optimizer counts. Every timed step is a
real training step: nothing is computed only to be measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from ortrain.step.report import Contest, median

# Enough for a verdict: pairs of steps, and either this many pairs or this much measured time.
LEAST_PAIRS, MOST_PAIRS, ENOUGH_SECONDS = 3, 20, 0.4
# Steps of each contestant that are not counted: memory pools grow and caches fill.
WARM_UP = 2


class Sample:
    """The time of one step, normalized by its size, because batches differ in length."""

    def __init__(self, seconds: list[float], size: int) -> None:
        self.seconds, self.size = seconds, max(size, 1)
        self.start = time.perf_counter()
        self.spent = 0.0

    def forward_done(
        self, outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], trains: bool
    ) -> None:
        """Ends the forward; the backward is awaited where the step trains."""
        self.spent = time.perf_counter() - self.start
        if not trains:
            self.seconds.append(self.spent / self.size)
            return
        differentiable = [t for t in outputs if t.requires_grad]
        if not differentiable or not leaves:
            return
        self.start = 0.0
        for tensor in differentiable:
            tensor.register_hook(self._backward_started)
        torch.autograd.graph.register_multi_grad_hook(leaves, self._backward_done, mode="all")

    def _backward_started(self, gradient: torch.Tensor) -> None:
        if not self.start:
            self.start = time.perf_counter()

    def _backward_done(self, gradients: Sequence[torch.Tensor | None]) -> None:
        if self.start and self.size:
            self.seconds.append((self.spent + time.perf_counter() - self.start) / self.size)
            self.size = 0


class Race:
    """Alternates the contestants and decides."""

    def __init__(self) -> None:
        self.contest = Contest()
        self.turns = 0
        self.winner = ""
        self._times: dict[str, list[float]] = {"graph": [], "eager": []}
        self._sizes: list[int] = []

    def next(self) -> str:
        """``"graph"`` or ``"eager"``: who runs the next step."""
        if self.winner:
            return self.winner
        graph, eager = (self._times[k][WARM_UP:] for k in ("graph", "eager"))
        pairs = min(len(graph), len(eager))
        if pairs >= LEAST_PAIRS:
            spent = (sum(graph) + sum(eager)) * median([float(s) for s in self._sizes])
            if pairs >= MOST_PAIRS or spent >= ENOUGH_SECONDS:
                return self._decide(graph, eager)
        self.turns += 1
        # The forwards of a step that never comes to its backward are not waited for.
        if self.turns > 6 * (MOST_PAIRS + WARM_UP):
            return self._decide(graph, eager) if pairs else "graph"
        return "graph" if self.turns % 2 else "eager"

    def sample(self, contestant: str, size: int) -> Sample:
        """Starts the clock of one step."""
        self._sizes.append(size)
        return Sample(self._times[contestant], size)

    def _decide(self, graph: list[float], eager: list[float]) -> str:
        size = median([float(s) for s in self._sizes])
        self.contest.graph = [t * size for t in graph]
        self.contest.eager = [t * size for t in eager]
        self.winner = "graph" if median(graph) <= median(eager) else "eager"
        self.contest.winner = self.winner
        return self.winner
