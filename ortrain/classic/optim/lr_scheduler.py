"""Learning rates by the number of updates that have been made.

With the number of updates t, from 0 on, the total T and w = warmup T, every schedule is
``lr t / max(1, w)`` below w. So the first update of a schedule with a warm-up has a learning rate
of 0.
"""

from __future__ import annotations

import math
from typing import Any

from ortrain.errors import InputError
from ortrain.kinds import expect_number, expect_whole


class _LRScheduler:
    """The base of schedules, also of a script's own."""

    def __init__(self) -> None:
        self._last_lr: list[float] = []

    def _step(self, train_step_info: Any) -> list[float]:
        """The learning rate of a step, which is remembered."""
        self._last_lr = self.get_lr(train_step_info)
        return self._last_lr

    def get_lr(self, train_step_info: Any) -> list[float]:
        """The learning rate of a step, as a list of one number.

        Args:
            train_step_info: with ``optimization_step`` and ``optimizer_config.lr``.
        """
        raise NotImplementedError(f"{type(self).__name__}.get_lr")

    def get_last_lr(self) -> list[float]:
        """The learning rate of the last step; empty before the first one."""
        return self._last_lr


class _Warmup(_LRScheduler):
    """A warm-up, and what follows.

    Args:
        total_steps: updates of the whole run.
        warmup: share of them, from 0 to below 1.
    """

    def __init__(self, total_steps: int, warmup: float = 0.002) -> None:
        super().__init__()
        expect_whole("total_steps", total_steps)
        expect_number("warmup", warmup)
        if total_steps < 1:
            raise InputError(f"total_steps={total_steps}: expected 1 or more")
        if not 0 <= warmup < 1:
            raise InputError(
                f"warmup={warmup}: expected a share of total_steps, from 0 to below 1",
                help=f"write warmup={warmup / total_steps:g} for {warmup:g} steps"
                if 1 <= warmup < total_steps
                else "",
            )
        self.total_steps, self.warmup = int(total_steps), float(warmup)
        self._num_warmup_steps = self.warmup * self.total_steps

    def get_lr(self, train_step_info: Any) -> list[float]:
        """The learning rate of a step, as a list of one number.

        Args:
            train_step_info: with ``optimization_step`` and ``optimizer_config.lr``.
        """
        step, lr = train_step_info.optimization_step, train_step_info.optimizer_config.lr
        if step < self._num_warmup_steps:
            return [lr * (step / max(1.0, self._num_warmup_steps))]
        return [lr * self._share(step, lr)]

    def _progress(self, step: int) -> float:
        """How much of what follows the warm-up is done; above 1 where the run is over."""
        return (step - self._num_warmup_steps) / max(1.0, self.total_steps - self._num_warmup_steps)

    def _share(self, step: int, lr: float) -> float:
        raise NotImplementedError


class ConstantWarmupLRScheduler(_Warmup):
    """``lr`` after the warm-up.

    Args:
        total_steps: updates of the whole run.
        warmup: share of them, from 0 to below 1.
    """

    def _share(self, step: int, lr: float) -> float:
        return 1.0


class CosineWarmupLRScheduler(_Warmup):
    """``lr max(0, (1 + cos(2 pi cycles x)) / 2)`` at the progress x after the warm-up.

    Args:
        total_steps: updates of the whole run.
        cycles: waves; 0.5 goes down to 0 once.
        warmup: share of the steps, from 0 to below 1.
    """

    def __init__(self, total_steps: int, cycles: float = 0.5, warmup: float = 0.002) -> None:
        super().__init__(total_steps, warmup)
        expect_number("cycles", cycles)
        if not cycles > 0:
            raise InputError(f"cycles={cycles}: expected a number above 0")
        self.cycles = float(cycles)

    def _share(self, step: int, lr: float) -> float:
        return max(0.0, 0.5 * (1 + math.cos(2 * math.pi * self.cycles * self._progress(step))))


class LinearWarmupLRScheduler(_Warmup):
    """``lr (1 - x)`` at the progress x after the warm-up, and 0 after the run.

    Args:
        total_steps: updates of the whole run.
        warmup: share of them, from 0 to below 1.
    """

    def _share(self, step: int, lr: float) -> float:
        rest = max(1.0, self.total_steps - self._num_warmup_steps)
        return max(0.0, (self.total_steps - step) / rest)


class PolyWarmupLRScheduler(_Warmup):
    """``(lr - lr_end) (1 - x)^power + lr_end`` at the progress x after the warm-up.

    Args:
        total_steps: updates of the whole run.
        lr_end: learning rate at its end, and after it.
        power: of the polynomial.
        warmup: share of the steps, from 0 to below 1.

    Raises:
        InputError: at the first step, where ``lr_end`` is not below the learning rate.
    """

    def __init__(
        self, total_steps: int, lr_end: float = 1e-7, power: float = 1.0, warmup: float = 0.002
    ) -> None:
        super().__init__(total_steps, warmup)
        for name, value in (("lr_end", lr_end), ("power", power)):
            expect_number(name, value)
            if not value >= 0:
                raise InputError(f"{name}={value}: expected 0 or more")
        self.lr_end, self.power = float(lr_end), float(power)

    def get_lr(self, train_step_info: Any) -> list[float]:
        """The learning rate of a step, as a list of one number.

        Args:
            train_step_info: with ``optimization_step`` and ``optimizer_config.lr``.
        """
        lr = train_step_info.optimizer_config.lr
        if not lr > self.lr_end:
            raise InputError(
                f"lr_end={self.lr_end} of PolyWarmupLRScheduler is not below the learning rate {lr}"
            )
        return super().get_lr(train_step_info)

    def _share(self, step: int, lr: float) -> float:
        if step > self.total_steps:
            return self.lr_end / lr
        rest = (1 - self._progress(step)) ** self.power
        return ((lr - self.lr_end) * rest + self.lr_end) / lr


__all__ = [
    "ConstantWarmupLRScheduler",
    "CosineWarmupLRScheduler",
    "LinearWarmupLRScheduler",
    "PolyWarmupLRScheduler",
]
