"""Eager against the graph on real steps: the faster one stays.

Eager runs the first steps, the graph the next ones. So a short run never pays for a capture, and
the two never hold their memory at the same time. Where the result is close, each runs again.

Both contestants are timed the same way, by autograd hooks on the outputs and on what receives a
gradient, so that neither work outside the module nor the optimizer counts. Every timed step is a
real training step: nothing is computed only to be measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch

from ortrain.runtime.memory import release_free_memory
from ortrain.step.report import Contest, median

# A turn lasts until so many of its steps are timed, and either this time or this number is reached.
LEAST_STEPS, MOST_STEPS, ENOUGH_SECONDS = 3, 50, 0.2
# First steps of a turn that are not counted: memory pools grow and caches fill.
WARM_UP = 1
# Turns of each contestant at most, and the difference that needs no second one.
MOST_ROUNDS, CLEAR = 3, 0.1
# The graph has to be faster by more than what the medians scatter: a wrong verdict for it costs
# time in every step to come, a wrong one for eager only what little there was to win.
MARGIN = 0.98

clock: Callable[[], float] = time.perf_counter


def _ignored() -> None:
    """Nobody asks."""


class Sample:
    """The time of one step, normalized by its size, because batches differ in length.

    Args:
        seconds: where the time goes once it is complete.
        size: of the step.
        start: when the forward began, by `clock`.
        again: called where a backward makes gradients that can be differentiated again.
    """

    def __init__(
        self, seconds: list[float], size: int, start: float, again: Callable[[], None]
    ) -> None:
        self.seconds, self.size, self.start, self.again = seconds, max(size, 1), start, again
        self.spent = 0.0
        self.backward: tuple[float, float] | None = None
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
        self.leaves = leaves
        self.hooks = [t.register_hook(self._backward_starts) for t in differentiable]
        # Not one hook for all of them: it would hold every gradient until the last has come, and
        # autograd copies a gradient that something else holds.
        self.hooks += [t.register_hook(self._backward_goes_on) for t in leaves]

    def settle(self) -> bool:
        """Whether the step is over; then its time has been noted and its hooks are gone.

        To be asked when no backward runs.
        """
        if self.hooks and self.backward is not None and self.backward[1]:
            start, end = self.backward
            self.seconds.append((self.spent + end - start) / self.size)
            self.close()
        return not self.hooks

    def close(self) -> None:
        """Takes the hooks off outputs and leaves."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        for leaf in self.leaves:
            # An empty dictionary of hooks is still looked at: 0.5 us a parameter and backward.
            if not leaf._backward_hooks:
                leaf._backward_hooks = None

    def _backward_starts(self, gradient: torch.Tensor) -> None:
        if torch.is_grad_enabled():  # create_graph=True
            self.again()
        if self.backward is None:
            self.backward = (clock(), 0.0)

    def _backward_goes_on(self, gradient: torch.Tensor) -> None:
        if self.backward is not None:
            self.backward = (self.backward[0], clock())


class Race:
    """Gives the contestants turns and decides."""

    def __init__(self) -> None:
        self.contest = Contest()
        self.winner = ""
        self._turn, self._calls, self._rounds = "eager", 0, 0
        self._times: dict[str, list[float]] = {"graph": [], "eager": []}
        self._counted: dict[str, list[float]] = {"graph": [], "eager": []}
        self._sizes: list[int] = []
        self._samples: list[Sample] = []

    def next(self) -> str:
        """``"graph"`` or ``"eager"``: who runs the next step."""
        if self.winner:
            return self.winner
        self._calls += 1
        self._samples = [s for s in self._samples if not s.settle()]
        if self._turn_is_over():
            self._counted[self._turn] += self._times[self._turn][WARM_UP:]
            self._times[self._turn].clear()
            self._calls = 0
            if self._turn == "graph":
                self._rounds += 1
                if self._rounds == MOST_ROUNDS or self._is_clear():
                    return self._decide()
            else:
                release_free_memory()
            self._turn = "graph" if self._turn == "eager" else "eager"
        self._tell()
        return self._turn

    def _turn_is_over(self) -> bool:
        # Forwards that never come to their backward are not waited for.
        if self._calls > 4 * (MOST_STEPS + WARM_UP):
            return True
        counted = self._times[self._turn][WARM_UP:]
        if len(counted) < LEAST_STEPS:
            return False
        return len(counted) >= MOST_STEPS or sum(counted) * self._size() >= ENOUGH_SECONDS

    def _tell(self) -> None:
        """Notes in the contest how far it has come."""
        times = {kind: [*self._counted[kind], *self._times[kind][WARM_UP:]] for kind in self._times}
        size = self._size()
        for kind, noted in (("graph", self.contest.graph), ("eager", self.contest.eager)):
            noted[:] = [t * size for t in times[kind]]

        def calls(kind: str) -> int:
            # The graph's first turn is taken to be as long as eager's.
            seconds = median(times[kind] or times["eager"]) * size
            enough = math.ceil(ENOUGH_SECONDS / seconds) if seconds else 0
            return WARM_UP + min(max(enough, LEAST_STEPS), MOST_STEPS)

        left = max(calls(self._turn) - len(self._times[self._turn]), 1)
        self.contest.left = left + (calls("graph") if self._turn == "eager" else 0)

    def _is_clear(self) -> bool:
        graph, eager = (median(self._counted[k]) for k in ("graph", "eager"))
        return not graph or not eager or abs(graph - eager) > CLEAR * eager

    def sample(
        self, contestant: str, size: int, start: float, again: Callable[[], None] = _ignored
    ) -> Sample:
        """The time of one step.

        Args:
            contestant: who runs it.
            size: what its time is proportional to.
            start: when its forward began, by `clock`.
            again: called where a backward makes gradients that can be differentiated again.
        """
        self._sizes.append(size)
        self._samples.append(Sample(self._times[contestant], size, start, again))
        return self._samples[-1]

    def close(self) -> None:
        """Ends without a decision."""
        for sample in self._samples:
            sample.close()
        self._samples.clear()

    def _size(self) -> float:
        return median([float(s) for s in self._sizes])

    def _decide(self) -> str:
        graph, eager = self._counted["graph"], self._counted["eager"]
        size = self._size()
        self.contest.left = 0
        self.contest.graph = [t * size for t in graph]
        self.contest.eager = [t * size for t in eager]
        # Without times of both there is no contest, and the graph is what was asked for.
        known = bool(graph and eager)
        wins = not known or median(graph) <= MARGIN * median(eager)
        self.winner = self.contest.winner = "graph" if wins else "eager"
        self.close()
        return self.winner
