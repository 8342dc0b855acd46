"""Spelled-out layer and RMS norms become one operator.

::

    layer norm                                  RMS norm
    d = x - ReduceMean<[-1]>(x)                 s = ReduceMean<[-1]>(x * x)
    v = ReduceMean<[-1]>(d * d)                 y = x / Sqrt(s + epsilon) * g
    y = d / Sqrt(v + epsilon) * g + b           → y = SimplifiedLayerNormalization<epsilon>(x, g)
    → y = LayerNormalization<epsilon>(x, g, b)

with the square as a power or a product, the root as a reciprocal, and factors in either order. Not
made over other axes than the last, or with an epsilon that is no constant; a scale that is no
vector of that axis stays behind the operator.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortrain.deploy.optimization.fusions.fusion import DTYPES, Fusion, Place, Refused
from ortrain.deploy.optimization.fusions.matching import (
    axes_of,
    either_way,
    integer,
    is_last_axis,
    last,
    made_by,
    plus_scalar,
    scalar,
    vector,
)

# onnx has LayerNormalization from this opset on.
_SINCE = 17


def _apply(place: Place, node: ir.Node) -> bool:
    if node.op_type == "Add":
        return _with_offset(place, node)
    return _without_offset(place, node)


def _with_offset(place: Place, node: ir.Node) -> bool:
    """``normalized * g + b``"""
    for product, offset in either_way(node):
        scaled = made_by(product, "Mul")
        for inner, scale in either_way(scaled) if scaled is not None else ():
            found = layer_norm(inner)
            if found is not None and vector(scale, last(found[0])):
                if not vector(offset, last(found[0])):
                    raise Refused("the offset is no vector of the last axis")
                return _layer(place, node, found, scale, offset)
    return False


def _without_offset(place: Place, node: ir.Node) -> bool:
    """``normalized * g``, where no offset follows that would make more of it."""
    for inner, scale in either_way(node) if node.op_type == "Mul" else ():
        if (rms := rms_norm(inner)) is not None and vector(scale, last(rms[0])):
            return _rms(place, node, rms, scale)
        found = layer_norm(inner)
        if found is not None and vector(scale, last(found[0])):
            adds = [u.node for u in node.outputs[0].uses() if u.node.op_type == "Add"]
            if any(vector(v, last(found[0])) for add in adds for v in add.inputs):
                return False
            return _layer(place, node, found, scale, None)
    return _without_scale(place, node)


def _without_scale(place: Place, node: ir.Node) -> bool:
    """What is normalized alone, as where all scales were 1: the scale is a constant of ones."""
    result = node.outputs[0]
    layer = layer_norm(result)
    found = layer or rms_norm(result)
    if found is None or (width := last(found[0])) is None:
        return False
    scaled = [u.node for u in result.uses() if u.node.op_type == "Mul"]
    if any(vector(v, width) for each in scaled for v in each.inputs) or found[0].dtype is None:
        return False  # the scale follows
    ones = place.builder(node).constant(np.ones(width), found[0].dtype)
    if layer is not None:
        return _layer(place, node, found, ones, None)
    return _rms(place, node, found, ones)


def _layer(
    place: Place,
    node: ir.Node,
    found: tuple[ir.Value, float],
    scale: ir.Value,
    offset: ir.Value | None,
) -> bool:
    x, epsilon = found
    _check(x, scale, offset)
    if place.opset < _SINCE:
        raise Refused(f"opset {place.opset} has no LayerNormalization")
    op = place.builder(node)
    result = op.LayerNormalization(x, scale, offset, axis=-1, epsilon=epsilon, stash_type=1)
    place.replace(node.outputs[0], result, "LayerNormalization")
    return True


def _rms(place: Place, node: ir.Node, found: tuple[ir.Value, float], scale: ir.Value) -> bool:
    x, epsilon = found
    _check(x, scale, None)
    op = place.builder(node)
    result = op.SimplifiedLayerNormalization(x, scale, axis=-1, epsilon=epsilon, stash_type=1)
    result.shape = x.shape
    place.replace(node.outputs[0], result, "SimplifiedLayerNormalization")
    return True


def _check(x: ir.Value, scale: ir.Value, offset: ir.Value | None) -> None:
    for part in (x, scale, offset):
        if part is not None and (part.dtype != x.dtype or part.dtype not in DTYPES):
            raise Refused(f"no kernel computes it in {part.dtype}, or of several dtypes")


def layer_norm(value: ir.Value | None) -> tuple[ir.Value, float] | None:
    """``x`` and epsilon of ``(x - mean) / sqrt(variance + epsilon)``."""
    found = _over_root(value)
    if found is None:
        return None
    centred, (mean_square, epsilon) = found
    if _mean_of_square(mean_square) is not centred:
        return None
    difference = made_by(centred, "Sub")
    if difference is None or difference.inputs[0] is None:
        return None
    x = difference.inputs[0]
    return (x, epsilon) if _mean_of(difference.inputs[1]) is x else None


def rms_norm(value: ir.Value | None) -> tuple[ir.Value, float] | None:
    """``x`` and epsilon of ``x / sqrt(mean(x²) + epsilon)``."""
    found = _over_root(value)
    if found is None:
        return None
    x, (mean_square, epsilon) = found
    if _mean_of_square(mean_square) is not x or layer_norm(value) is not None:
        return None
    return x, epsilon


def _over_root(value: ir.Value | None) -> tuple[ir.Value, tuple[ir.Value, float]] | None:
    """``a`` and ``(v, epsilon)`` of ``a / sqrt(v + epsilon)``."""
    node = made_by(value, "Div", "Mul")
    if node is None:
        return None
    if node.op_type == "Div":
        root = _root(node.inputs[1])
        return None if root is None or node.inputs[0] is None else (node.inputs[0], root)
    for a, factor in either_way(node):
        inverse = made_by(factor, "Reciprocal", "Div", "Pow")
        if inverse is None:
            continue
        if inverse.op_type == "Reciprocal":
            root = _root(inverse.inputs[0])
        elif inverse.op_type == "Div":
            root = _root(inverse.inputs[1]) if scalar(inverse.inputs[0]) == 1.0 else None
        else:
            half = scalar(inverse.inputs[1]) == -0.5
            root = plus_scalar(inverse.inputs[0]) if half else None
        if root is not None:
            return a, root
    return None


def _root(value: ir.Value | None) -> tuple[ir.Value, float] | None:
    """``v`` and epsilon of ``sqrt(v + epsilon)``."""
    node = made_by(value, "Sqrt", "Pow")
    if node is None or (node.op_type == "Pow" and scalar(node.inputs[1]) != 0.5):
        return None
    return plus_scalar(node.inputs[0])


def _mean_of(value: ir.Value | None) -> ir.Value | None:
    """``x`` of its mean over the last axis, which stays as 1."""
    node = made_by(value, "ReduceMean")
    if node is None or node.inputs[0] is None or not integer(node, "keepdims", 1):
        return None
    axes = axes_of(node) if len(node.inputs) > 1 or "axes" in node.attributes else None
    if axes is None or len(axes) != 1 or not is_last_axis(axes[0], node.inputs[0]):
        return None
    return node.inputs[0]


def _mean_of_square(value: ir.Value | None) -> ir.Value | None:
    """``x`` of the mean of its square over the last axis."""
    square = _mean_of(value)
    node = made_by(square, "Pow", "Mul")
    if node is None:
        return None
    if node.op_type == "Pow":
        return node.inputs[0] if scalar(node.inputs[1]) == 2.0 else None
    return node.inputs[0] if node.inputs[0] is node.inputs[1] else None


FUSION = Fusion(
    "norm",
    frozenset({("", "Add"), ("", "Mul"), ("", "Div")}),
    _apply,
    lambda config: not config.disable_layer_norm_fusion,
)
