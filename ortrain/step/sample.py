"""The time of one step: its forward and its backward, and nothing between or behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ortrain.pytorch.hooks import without_empty_table
from ortrain.step import marks
from ortrain.step.marks import Mark, is_reached, seconds


class Sample:
    """The time of one step, normalized by its size, because batches differ in length.

    Args:
        seconds: where the time goes once it is complete.
        size: of the step.
        start: when the forward began.
        again: called where a backward makes gradients that can be differentiated again.
    """

    def __init__(
        self, seconds: list[float], size: int, start: Mark, again: Callable[[], None]
    ) -> None:
        self.seconds, self.size, self.again = seconds, max(size, 1), again
        self.marks = [start]  # then the forward's end, and the backward's start and end
        self.expected, self.is_over = 4, False
        self.hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.leaves: Sequence[torch.Tensor] = ()

    def forward_ends(self) -> None:
        """Takes the time: what follows is done for the contest."""
        self.marks.append(marks.like(self.marks[0]))

    def forward_done(
        self, outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], trains: bool
    ) -> None:
        """Ends the forward, where it has not; the backward is awaited where the step trains.

        Args:
            outputs: of the module.
            leaves: parameters and inputs that the backward gives a gradient.
            trains: whether there will be a backward.
        """
        if len(self.marks) < 2:
            self.forward_ends()
        if not trains:
            self.expected = 2
            self.settle()
            return
        differentiable = [t for t in outputs if t.requires_grad]
        if not differentiable or not leaves:
            self.is_over = True
            return
        self.leaves = leaves
        self.hooks = [t.register_hook(self._backward_starts) for t in differentiable]
        # Not one hook for all of them: it would hold every gradient until the last has come, and
        # autograd copies a gradient that something else holds.
        self.hooks += [t.register_hook(self._backward_goes_on) for t in leaves]

    def settle(self, *, wait: bool = False) -> bool:
        """Whether the step is over; then its time has been noted and its hooks are gone.

        So is one whose forward has failed. To be asked when no backward runs.

        Args:
            wait: for a GPU that is still at work on it.
        """
        marks = self.marks
        if len(marks) == self.expected and not self.is_over:
            self.close()  # the next step's gradients are not this one's
            self.is_over = is_reached(marks[-1], wait=wait)
            if self.is_over:
                pairs = zip(marks[::2], marks[1::2], strict=True)
                self.seconds.append(sum(seconds(start, end) for start, end in pairs) / self.size)
        return self.is_over or len(marks) == 1

    def close(self) -> None:
        """Takes the hooks off outputs and leaves."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        for leaf in self.leaves:
            without_empty_table(leaf)

    def _backward_starts(self, gradient: torch.Tensor) -> None:
        if torch.is_grad_enabled():  # create_graph=True
            self.again()
        if len(self.marks) == 2:
            self.marks.append(marks.like(self.marks[0]))

    def _backward_goes_on(self, gradient: torch.Tensor) -> None:
        if len(self.marks) > 2:
            self.marks[3:] = [marks.like(self.marks[0])]
