"""Losses as blocks: those of :mod:`ortrain.ondevice.losses`."""

from __future__ import annotations

from typing import Any

from ortrain.ondevice.making import losses
from ortrain.ondevice.making.block import Block
from ortrain.ondevice.onnxblock.bridge import emit

__all__ = ["BCEWithLogitsLoss", "CrossEntropyLoss", "L1Loss", "MSELoss"]


class _Elementwise(Block):
    _loss: losses.Loss

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """Appends the loss of a value.

        Args:
            loss_input_name: of the value.
            target_name: of the target, of the value's shape and dtype; an input is added where the
                model has no such value.

        Returns:
            The name of the loss.
        """
        loss = self._loss
        return emit(lambda op, x: loss(op, x, target_name), loss_input_name, type(self).__name__)


class MSELoss(_Elementwise):
    """The squared difference.

    Args:
        reduction: ``mean``, ``sum`` or ``none``.
    """

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self._loss = losses.MSELoss(reduction)


class L1Loss(_Elementwise):
    """The absolute difference.

    Args:
        reduction: ``mean``, ``sum`` or ``none``.
    """

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self._loss = losses.L1Loss(reduction)


class BCEWithLogitsLoss(_Elementwise):
    """Binary cross entropy of logits of any size.

    Args:
        weight: factor of each element, of a shape that broadcasts to the value's.
        reduction: ``mean``, ``sum`` or ``none``.
        pos_weight: factor of the positive targets, likewise.
    """

    def __init__(self, weight: Any = None, reduction: str = "mean", pos_weight: Any = None) -> None:
        super().__init__()
        self._loss = losses.BCEWithLogitsLoss(reduction, weight, pos_weight)


class CrossEntropyLoss(Block):
    """Cross entropy of class indices.

    Args:
        weight: factor of each class, [C].
        reduction: ``mean``, ``sum`` or ``none``.
        ignore_index: the label of what takes no part; None for torch's -100.
    """

    def __init__(
        self, weight: Any = None, reduction: str = "mean", ignore_index: int | None = -100
    ) -> None:
        super().__init__()
        self._loss = losses.CrossEntropyLoss(weight, reduction, ignore_index)

    def build(self, scores_input_name: str, labels_name: str = "labels") -> str:
        """Appends the loss of scores.

        Args:
            scores_input_name: [N, C] or [N, C, ...].
            labels_name: of the labels, int64 [N] or [N, ...]; an input is added where the model has
                no such value.

        Returns:
            The name of the loss.
        """
        loss = self._loss
        return emit(lambda op, x: loss(op, x, labels_name), scores_input_name, type(self).__name__)
