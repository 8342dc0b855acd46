"""Functions to the last digit, and at their ends: ``Sigmoid``, ``Log1p``, ``Expm1``, ``Xlogy``.

onnxruntime's ``Sigmoid`` is right to 6e-8 of 1, and 0 below -18: there PyTorch has 1.5e-8, and -18
for its logarithm. ONNX has no ``log1p`` and ``expm1``: log(1 + 1e-9) is 0 in float32.
"""

from __future__ import annotations

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.ops.base import like_first, operator


@operator("Sigmoid", types=like_first)
def sigmoid(op: Builder, x: ir.Value) -> ir.Value:
    """``1 / (1 + exp(-x))``, relative to itself as exact as the exponential."""
    result: ir.Value = op.Reciprocal(op.Add(op.Exp(op.Neg(x)), 1.0))
    return result


@operator("Log1p", types=like_first)
def log1p(op: Builder, x: ir.Value) -> ir.Value:
    """``log(1 + x)``: with u = 1 + x as it is rounded, ``log(u) x / (u - 1)``.

    Credit: W. Kahan, by way of Hewlett-Packard's calculators.
    """
    u = op.Add(x, 1.0)
    step = op.Sub(u, 1.0)
    none = op.Equal(step, 0.0)
    ratio = op.Div(x, op.Where(none, 1.0, step))
    result = op.Where(none, x, op.Mul(op.Log(u), ratio))
    return op.Where(op.IsInf(u, detect_negative=0), u, result)


@operator("Expm1", types=like_first)
def expm1(op: Builder, x: ir.Value) -> ir.Value:
    """``exp(x) - 1``: with u = exp(x) as it is rounded, ``(u - 1) x / log(u)``.

    Credit: W. Kahan, likewise.
    """
    u = op.Exp(x)
    step = op.Sub(u, 1.0)
    none = op.Equal(step, 0.0)
    near = op.Less(op.Abs(x), 1.0)
    logarithm = op.Log(op.Where(none, 2.0, u))
    small = op.Where(none, x, op.Mul(step, op.Div(x, logarithm)))
    return op.Where(near, small, step)


def _broadcast(node: ir.Node) -> None:
    x, y = node.inputs
    assert x is not None
    known = shapes.broadcast(shapes.dims(x), shapes.dims(y))
    shapes.assign(node.outputs[0], x.dtype, None if known is None else ir.Shape(known))


@operator("Xlogy", types=_broadcast)
def xlogy(op: Builder, x: ir.Value, other: ir.Value) -> ir.Value:
    """``x log(other)``: zero where x is, unless the other is no number."""
    zero = op.constant(0.0, x.dtype)
    known = op.Where(op.Equal(x, zero), zero, op.Mul(x, op.Log(other)))
    return op.Where(op.IsNaN(other), other, known)
