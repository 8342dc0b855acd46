"""``LinearLRScheduler``: a linear warm-up, then a linear decay to zero."""

from __future__ import annotations

import math

from ortrain.kinds import expect, expect_number, expect_whole
from ortrain.ondevice.running.pickling import NotPickled
from ortrain.ondevice.running.update import Update


class LinearLRScheduler(NotPickled):
    """Sets the learning rate: in the warm-up from 0 to ``initial_lr``, then down to 0 at the end.

    The first value is set here, and each `step` sets the next. Where the optimizer has done updates
    already, as after a checkpoint was loaded with its optimizer state, the schedule goes on from
    there.

    ::

        scheduler = LinearLRScheduler(optimizer, 2, 10, initial_lr=1.0)
        # the updates' learning rates: 0, 0.5, 1, 0.875, 0.75, …, 0.125, then 0

    Args:
        optimizer: an `Optimizer` or a `TrainStep`.
        warmup_step_count: updates before the learning rate is ``initial_lr``.
        total_step_count: updates after which it is 0.
        initial_lr: the highest learning rate.

    Raises:
        TypeError: an argument is of another type.
        ValueError: the warm-up is longer than the whole, or a number is negative or not finite.
    """

    def __init__(
        self,
        optimizer: Update,
        warmup_step_count: int,
        total_step_count: int,
        initial_lr: float,
    ) -> None:
        expect("optimizer", optimizer, Update, "an Optimizer or a TrainStep of ortrain.ondevice")
        expect_whole("warmup_step_count", warmup_step_count)
        expect_whole("total_step_count", total_step_count)
        expect_number("initial_lr", initial_lr)
        if not 0 <= warmup_step_count <= total_step_count:
            raise ValueError(
                f"a warm-up of {warmup_step_count} steps does not fit into {total_step_count} "
                "steps; give 0 <= warmup_step_count <= total_step_count"
            )
        if not 0 <= initial_lr < math.inf:
            raise ValueError(f"initial_lr is a finite number from 0 up, not {initial_lr!r}")
        self._optimizer = optimizer
        self._warmup, self._total = warmup_step_count, total_step_count
        self._initial = initial_lr
        self._step = optimizer.state.step
        optimizer.set_learning_rate(self._rate())

    def step(self) -> None:
        """Sets the learning rate of the next update; call it after each ``optimizer.step()``."""
        self._step += 1
        self._optimizer.set_learning_rate(self._rate())

    def _rate(self) -> float:
        if self._step < self._warmup:
            return self._initial * self._step / self._warmup
        if self._step >= self._total:
            return 0.0
        return self._initial * (self._total - self._step) / (self._total - self._warmup)
