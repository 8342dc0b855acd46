"""Losses on the outputs of a graph: each adds its target to the graph's inputs.

::

    loss = CrossEntropyLoss(weight=[1.0, 3.0])
    value = loss(op, logits)        # the graph has an input "labels" now

Values and gradients are those of ``torch.nn``, for inputs of any size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ortrain.errors import GraphError
from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.graph.indices import from_the_start
from ortrain.program import Role, set_role

REDUCTIONS = ("mean", "sum", "none")


class Loss:
    """A loss that is emitted into a graph: ``loss(op, *outputs)`` returns its value."""

    def __call__(self, op: Builder, *outputs: Any) -> ir.Value:
        """The loss of the model's outputs; adds what else it needs to the graph's inputs."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Elementwise(Loss):
    """A loss of each element against a target of the same shape.

    Args:
        reduction: ``mean`` over all elements, ``sum``, or ``none``. What is trained on is a scalar.
    """

    reduction: str = "mean"

    def __post_init__(self) -> None:
        _check(self.reduction)

    def __call__(self, op: Builder, output: ir.Value, target_name: str = "target") -> ir.Value:
        """The loss of an output, [] or as the output.

        Args:
            op: the builder.
            output: floating, any shape.
            target_name: of the new input, of the output's shape and dtype.
        """
        target = _input(op, target_name, output.dtype, output.shape)
        return _reduce(op, self.each(op, output, target), self.reduction)

    def each(self, op: Builder, output: ir.Value, target: ir.Value) -> ir.Value:
        """The loss of each element."""
        raise NotImplementedError


class MSELoss(_Elementwise):
    """(output - target)², as ``torch.nn.MSELoss``."""

    def each(self, op: Builder, output: ir.Value, target: ir.Value) -> ir.Value:
        """The loss of each element."""
        difference = op.Sub(output, target)
        result: ir.Value = op.Mul(difference, difference)
        return result


class L1Loss(_Elementwise):
    """|output - target|, as ``torch.nn.L1Loss``."""

    def each(self, op: Builder, output: ir.Value, target: ir.Value) -> ir.Value:
        """The loss of each element."""
        result: ir.Value = op.Abs(op.Sub(output, target))
        return result


@dataclass(frozen=True)
class BCEWithLogitsLoss(_Elementwise):
    """Binary cross entropy of logits, as ``torch.nn.BCEWithLogitsLoss``.

    Args:
        reduction: ``mean``, ``sum`` or ``none``.
        weight: factor of each element, of a shape that broadcasts to the output's.
        pos_weight: factor of the positive targets, likewise.
    """

    weight: Any = None
    pos_weight: Any = None

    def each(self, op: Builder, output: ir.Value, target: ir.Value) -> ir.Value:
        """The loss of each element: (1 - t) x + (1 + (pos_weight - 1) t) softplus(-x)."""
        softplus = op.Softplus(op.Neg(output))
        if self.pos_weight is not None:
            extra = op.Mul(target, np.asarray(self.pos_weight, np.float32) - 1)
            softplus = op.Mul(softplus, op.Add(extra, 1.0))
        loss: ir.Value = op.Add(op.Mul(op.Sub(1.0, target), output), softplus)
        if self.weight is not None:
            loss = op.Mul(loss, np.asarray(self.weight, np.float32))
        return loss


@dataclass(frozen=True)
class CrossEntropyLoss(Loss):
    """Cross entropy of class indices, as ``torch.nn.CrossEntropyLoss``.

    Args:
        weight: factor of each class, [C].
        reduction: ``mean`` over the weights of what takes part, ``sum`` or ``none``.
        ignore_index: label of what takes no part; None for torch's -100. Any other label that is
            no class is an error of the step.
    """

    weight: Any = None
    reduction: str = "mean"
    ignore_index: int | None = -100

    def __post_init__(self) -> None:
        _check(self.reduction)

    def __call__(self, op: Builder, scores: ir.Value, labels_name: str = "labels") -> ir.Value:
        """The loss of scores, [] or as the labels.

        Args:
            op: the builder.
            scores: [N, C] or [N, C, ...], floating.
            labels_name: of the new input: int64 [N] or [N, ...], class indices.
        """
        known = shapes.dims(scores)
        if known is None or len(known) < 2:
            raise GraphError(
                f"CrossEntropyLoss needs scores [N, C] or [N, C, ...], and {scores.name!r} has "
                + ("an unknown shape" if known is None else f"{len(known)} axes"),
                help="choose another output with loss_input_names",
            )
        labels = _input(op, labels_name, ir.DataType.INT64, ir.Shape([known[0], *known[2:]]))
        weight = None if self.weight is None else np.asarray(self.weight, np.float32)
        ignored = -100 if self.ignore_index is None else self.ignore_index
        classes = from_the_start(op, labels)
        if ignored < 0:
            classes = op.Where(op.Equal(labels, ignored), ignored, classes)
        result: ir.Value = op.SoftmaxCrossEntropyLoss(
            scores, classes, weight, reduction=self.reduction, ignore_index=ignored
        )
        if self.reduction != "none":
            result.shape = ir.Shape([])
        return result


def _input(op: Builder, name: str, dtype: ir.DataType | None, shape: ir.Shape | None) -> ir.Value:
    """A new input of the graph, behind the user's others."""
    graph = op.graph
    assert graph is not None
    if any(value.name == name for value in graph.inputs):
        raise GraphError(
            f"the model has an input {name!r} already", help="give the target another name"
        )
    value = ir.Value(name=name, shape=shape, type=ir.TensorType(dtype or ir.DataType.FLOAT))
    graph.inputs.append(set_role(value, Role.USER_INPUT))
    return value


def _reduce(op: Builder, loss: ir.Value, reduction: str) -> ir.Value:
    if reduction == "none":
        return loss
    result: ir.Value = getattr(op, {"mean": "ReduceMean", "sum": "ReduceSum"}[reduction])(
        loss, keepdims=0
    )
    return result


def _check(reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r}: expected one of {', '.join(REDUCTIONS)}")
