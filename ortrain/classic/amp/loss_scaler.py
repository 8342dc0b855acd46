"""By how much a loss is multiplied, so that its gradients are not lost in 16 bits."""

from __future__ import annotations

from typing import Any

from ortrain.errors import InputError
from ortrain.kinds import expect_flag, expect_number, expect_whole


class LossScaler:
    """A scale of the loss that stays as it is, and the base of those that move it.

    Args:
        loss_scale: the scale, above 0.
    """

    def __init__(self, loss_scale: float) -> None:
        self.input_name: str | None = None
        self.loss_scale = loss_scale

    @property
    def loss_scale(self) -> float:
        """The scale of the next step."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, loss_scale: float) -> None:
        expect_number("loss_scale", loss_scale)
        if not 0 < loss_scale < float("inf"):
            raise InputError(f"loss_scale={loss_scale}: expected a finite number above 0")
        self._loss_scale = float(loss_scale)

    def reset(self) -> None:
        """Goes back to the first scale."""

    def update(self, train_step_info: Any) -> float:
        """Learns of a step.

        Args:
            train_step_info: with ``all_finite``, whether all gradients of the step were.

        Returns:
            The scale of the next step.
        """
        return self.loss_scale


class DynamicLossScaler(LossScaler):
    """Halves the scale where a gradient overflows, and doubles it after so many good steps.

    Args:
        automatic_update: whether the trainer calls `update`; False leaves that to the script.
        loss_scale: the first scale.
        up_scale_window: good steps in a row after which it is doubled.
        min_loss_scale: lower bound.
        max_loss_scale: upper bound.
    """

    def __init__(
        self,
        automatic_update: bool = True,
        loss_scale: float = float(1 << 16),
        up_scale_window: int = 2000,
        min_loss_scale: float = 1.0,
        max_loss_scale: float = float(1 << 24),
    ) -> None:
        super().__init__(loss_scale)
        expect_flag("automatic_update", automatic_update)
        expect_whole("up_scale_window", up_scale_window)
        if up_scale_window < 1:
            raise InputError(f"up_scale_window={up_scale_window}: expected 1 or more")
        if not 0 < min_loss_scale <= max_loss_scale:
            raise InputError(
                f"min_loss_scale={min_loss_scale}, max_loss_scale={max_loss_scale}: expected "
                "0 < min_loss_scale <= max_loss_scale"
            )
        self.automatic_update = bool(automatic_update)
        self.up_scale_window = int(up_scale_window)
        self.min_loss_scale = float(min_loss_scale)
        self.max_loss_scale = float(max_loss_scale)
        self._initial_loss_scale = float(loss_scale)
        self._stable_steps_count = 0

    def reset(self) -> None:
        """Goes back to the first scale."""
        self.loss_scale = self._initial_loss_scale
        self._stable_steps_count = 0

    def update(self, train_step_info: Any) -> float:
        """Learns of a step.

        Args:
            train_step_info: with ``all_finite``, whether all gradients of the step were.

        Returns:
            The scale of the next step.
        """
        if not train_step_info.all_finite:
            self.loss_scale = max(self.min_loss_scale, self.loss_scale / 2)
            self._stable_steps_count = 0
            return self.loss_scale
        self._stable_steps_count += 1
        if self._stable_steps_count >= self.up_scale_window:
            self.loss_scale = min(self.max_loss_scale, self.loss_scale * 2)
            self._stable_steps_count = 0
        return self.loss_scale


__all__ = ["DynamicLossScaler", "LossScaler"]
