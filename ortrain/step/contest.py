"""Graph against eager on real steps: the faster one stays.

Both contestants are timed the same way, by autograd hooks on the outputs and on what receives a
gradient, so that neither work outside the module nor the optimizer counts. Every timed step is a
real training step: nothing is computed only to be measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from ortrain.step.report import Contest, median

# Enough for a verdict: pairs of steps, and either this many pairs or this much measured time.
LEAST_PAIRS, MOST_PAIRS, ENOUGH_SECONDS = 3, 100, 0.4
# Steps of each contestant that are not counted: memory pools grow and caches fill.
WARM_UP = 2
# The graph has to be faster by more than what the medians scatter: a wrong verdict for it costs
# time in every step to come, a wrong one for eager only what little there was to win.
MARGIN = 0.98

clock: Callable[[], float] = time.perf_counter


class Sample:
    """The time of one step, normalized by its size, because batches differ in length.

    Args:
        seconds: where the time goes once it is complete.
        size: of the step.
        start: when the forward began, by `clock`.
    """

    def __init__(self, seconds: list[float], size: int, start: float) -> None:
        self.seconds, self.size, self.start = seconds, max(size, 1), start
        self.spent = 0.0
        self.hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.leaves: Sequence[torch.Tensor] = ()

    def forward_done(
        self, outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], trains: bool
    ) -> None:
        """Ends the forward; the backward is awaited where the step trains.

        Args:
            outputs: of the module.
            leaves: parameters and inputs that the backward gives a gradient.
            trains: whether there will be a backward.
        """
        self.spent = clock() - self.start
        if not trains:
            self.seconds.append(self.spent / self.size)
            return
        differentiable = [t for t in outputs if t.requires_grad]
        if not differentiable or not leaves:
            return
        self.start, self.leaves = 0.0, leaves
        self.hooks = [t.register_hook(self._backward_started) for t in differentiable]
        last = torch.autograd.graph.register_multi_grad_hook(leaves, self._backward_done)
        self.hooks.append(last)

    def close(self) -> None:
        """Takes the hooks off outputs and leaves."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []

    def _backward_started(self, gradient: torch.Tensor) -> None:
        if not self.start:
            self.start = clock()

    def _backward_done(self, gradients: Sequence[torch.Tensor | None]) -> None:
        if self.start and self.hooks:
            self.seconds.append((self.spent + clock() - self.start) / self.size)
            self.close()


class Race:
    """Alternates the contestants and decides."""

    def __init__(self) -> None:
        self.contest = Contest()
        self.winner = ""
        self._turns = 0
        self._times: dict[str, list[float]] = {"graph": [], "eager": []}
        self._sizes: list[int] = []
        self._samples: list[Sample] = []

    def next(self) -> str:
        """``"graph"`` or ``"eager"``: who runs the next step."""
        if self.winner:
            return self.winner
        graph, eager = (self._times[k][WARM_UP:] for k in ("graph", "eager"))
        pairs = min(len(graph), len(eager))
        if pairs >= LEAST_PAIRS:
            spent = (sum(graph) + sum(eager)) * self._size()
            if pairs >= MOST_PAIRS or spent >= ENOUGH_SECONDS:
                return self._decide(graph, eager)
        self._turns += 1
        # The forwards of a step that never comes to its backward are not waited for.
        if self._turns > 6 * (MOST_PAIRS + WARM_UP):
            return self._decide(graph, eager)
        return "graph" if self._turns % 2 else "eager"

    def sample(self, contestant: str, size: int, start: float) -> Sample:
        """The time of one step.

        Args:
            contestant: who runs it.
            size: what its time is proportional to.
            start: when its forward began, by `clock`.
        """
        self._sizes.append(size)
        self._samples = [s for s in self._samples if s.hooks]
        self._samples.append(Sample(self._times[contestant], size, start))
        return self._samples[-1]

    def _size(self) -> float:
        return median([float(s) for s in self._sizes])

    def _decide(self, graph: list[float], eager: list[float]) -> str:
        size = self._size()
        self.contest.graph = [t * size for t in graph]
        self.contest.eager = [t * size for t in eager]
        # Without times of both there is no contest, and the graph is what was asked for.
        known = bool(graph and eager)
        wins = not known or median(graph) <= MARGIN * median(eager)
        self.winner = self.contest.winner = "graph" if wins else "eager"
        for sample in self._samples:
            sample.close()
            for leaf in sample.leaves:
                # An empty dictionary of hooks is still looked at: 0.5 us a parameter and backward.
                if not leaf._backward_hooks:
                    leaf._backward_hooks = None
        self._samples = []
        return self.winner
