"""Phrases of formulas that several optimizers use."""

from __future__ import annotations

import math

import onnx_ir as ir

from ortrain.graph.build import Builder


def towards(mean: ir.Value, x: ir.Value, weight: float) -> ir.Value:
    """The moving average: ``(1 - weight) mean + weight x``, in three passes, exact for either end.

    It rounds less than the two products do: the weights add up to 1 although neither is exact.
    """
    if weight < 0.5:
        return mean + (x - mean) * weight
    return x - (x - mean) * (1 - weight)


def one_minus_power(op: Builder, beta: float, count: ir.Value) -> ir.Value:
    """``1 - beta^count``, to 1e-7.

    With x = count ln(beta) / 2, it is ``-2 tanh(x) / (1 - tanh(x))``. In float32 beta itself is
    inexact: ``1 - Pow(0.999, count)`` is off by 1e-5.

    Args:
        op: emits.
        beta: in [0, 1).
        count: float32 [1].
    """
    if beta == 0.0:
        return op.constant([1.0], ir.DataType.FLOAT)
    th = op.Tanh(count * (math.log(beta) / 2))
    return -2.0 * th / (1.0 - th)
