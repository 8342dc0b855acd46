"""Spelled-out GELUs become one operator, and a bias before one goes into it.

::

    0.5 x (1 + erf(x / √2))                         → Gelu(x)
    0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³)))      → FastGelu(x)
    x sigmoid(c x)                                  → QuickGelu<alpha=c>(x)
    Gelu(x + b)                                     → BiasGelu(x, b), for a GPU
    FastGelu(x + b)                                 → FastGelu(x, b), for a GPU

with factors in any order. Not made with other numbers than these (to 1e-6 of each), or where ``b``
is no vector of the last axis. A processor's ``BiasGelu`` is slower than the two operators
(onnxruntime 1.31, 512 rows of 1536: 533 µs against 407); there the addition becomes a ``Sum``,
which onnxruntime does not fuse when it loads the file.
"""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir

from ortrain.deploy.optimization.fusions.fusion import DTYPES, Fusion, Place, Refused
from ortrain.deploy.optimization.fusions.matching import (
    close,
    either_way,
    last,
    made_by,
    only_reader,
    operand,
    plus_scalar,
    same_shape,
    scalar,
    times_scalar,
    vector,
    weight,
)

# As exporters write it: 0.7978846 (float32), or 0.797885 of scripts that round it.
_ROOT = math.sqrt(2 / math.pi)
_CUBE = 0.044715


def _apply(place: Place, node: ir.Node) -> bool:
    if node.op_type == "Gelu":
        if node.attributes.get("approximate") is None:
            return False
        if node.attributes["approximate"].as_string() != "tanh" or node.inputs[0] is None:
            return False
        return _put(place, node, "FastGelu", node.inputs[0])
    factor, factors = _factors(node.outputs[0])
    for curve in factors:
        rest = list(factors)
        rest.remove(curve)
        if len(rest) != 1:
            continue
        x = rest[0]
        if close(factor, 0.5):
            if _erf(curve, x):
                return _put(place, node, "Gelu", x)
            if _tanh(curve, x):
                return _put(place, node, "FastGelu", x)
        if factor == 1.0 and (alpha := _sigmoid(curve, x)) is not None:
            return _put(place, node, "QuickGelu", x, alpha=alpha)
    return False


def _put(place: Place, node: ir.Node, name: str, x: ir.Value, **attributes: Any) -> bool:
    if x.dtype not in DTYPES:
        raise Refused(f"no kernel computes it in {x.dtype}")
    op = place.builder(node)
    result = op.node(name, [x], domain="com.microsoft", **attributes)
    result.shape = x.shape
    place.replace(node.outputs[0], result, name)
    return True


def _factors(value: ir.Value) -> tuple[float, list[ir.Value]]:
    """A product's constant factor, and its other factors; what others read stays whole."""
    node, constant, parts = value.producer(), 1.0, list[ir.Value]()
    if node is None or node.op_type not in ("Mul", "Div") or node.domain:
        return 1.0, [value]
    if (scaled := times_scalar(value)) is not None:
        inner, constant = scaled
        operands = [inner]
    elif node.op_type == "Mul":
        operands = [v for v in node.inputs if v is not None]
    else:
        return 1.0, [value]
    for each in operands:
        if made_by(each, "Mul", "Div") is not None and only_reader(each) is not None:
            more, others = _factors(each)
            constant *= more
            parts += others
        else:
            parts.append(each)
    return constant, parts


def _erf(curve: ir.Value, x: ir.Value) -> bool:
    """Whether a value is ``1 + erf(x / √2)``."""
    one = plus_scalar(curve)
    erf = made_by(one[0], "Erf") if one is not None and one[1] == 1.0 else None
    inner = None if erf is None else times_scalar(erf.inputs[0])
    return inner is not None and inner[0] is x and close(inner[1], math.sqrt(0.5))


def _tanh(curve: ir.Value, x: ir.Value) -> bool:
    """Whether a value is ``1 + tanh(√(2/π) (x + 0.044715 x³))``."""
    one = plus_scalar(curve)
    tanh = made_by(one[0], "Tanh") if one is not None and one[1] == 1.0 else None
    inner = None if tanh is None else times_scalar(tanh.inputs[0])
    if inner is None or not close(inner[1], _ROOT):
        return False
    add = made_by(inner[0], "Add")
    for linear, cubic in either_way(add) if add is not None else ():
        scaled = times_scalar(cubic)
        if linear is x and scaled is not None and close(scaled[1], _CUBE) and _cube(scaled[0], x):
            return True
    return False


def _cube(value: ir.Value, x: ir.Value) -> bool:
    node = made_by(value, "Pow", "Mul")
    if node is None:
        return False
    if node.op_type == "Pow":
        return node.inputs[0] is x and scalar(node.inputs[1]) == 3.0
    for a, b in either_way(node):
        square = made_by(b, "Mul", "Pow")
        if a is not x or square is None or square.inputs[0] is not x:
            continue
        if square.inputs[1] is x if square.op_type == "Mul" else scalar(square.inputs[1]) == 2.0:
            return True
    return False


def _sigmoid(curve: ir.Value, x: ir.Value) -> float | None:
    """``c`` of ``sigmoid(c x)``."""
    node = made_by(curve, "Sigmoid")
    if node is None:
        return None
    if node.inputs[0] is x:
        return 1.0
    inner = times_scalar(node.inputs[0])
    return inner[1] if inner is not None and inner[0] is x else None


def _apply_bias(place: Place, node: ir.Node) -> bool:
    form = node.attributes.get("approximate")
    if form is not None and form.as_string() != "none":
        return False
    total = node.inputs[0]
    add = made_by(total, "Add")
    if total is None or add is None or operand(node, 1) is not None:
        return False
    for x, bias in either_way(add):
        if weight(bias) is None or weight(x) is not None:
            continue
        if not place.config.optimize_for_gpu:
            return _summed(place, add, total)
        if only_reader(total) is None:
            raise Refused("the sum is read elsewhere")
        if not vector(bias, last(x)) or not same_shape(x, total):
            raise Refused("the bias is no vector of the last axis")
        if x.dtype not in DTYPES:
            raise Refused(f"no kernel computes it in {x.dtype}")
        name = "FastGelu" if node.op_type == "FastGelu" else "BiasGelu"
        result = place.builder(node).node(name, [x, bias], domain="com.microsoft")
        result.shape = x.shape
        place.replace(node.outputs[0], result, name)
        if node.domain:
            place.fused[node.op_type] -= 1
        return True
    return False


def _summed(place: Place, add: ir.Node, total: ir.Value) -> bool:
    if total.dtype != ir.DataType.FLOAT:
        return False
    result = place.builder(add).Sum(*add.inputs)
    result.shape = total.shape
    place.replace(total, result, "Sum")
    return True


def _apply_approximation(place: Place, node: ir.Node) -> bool:
    if node.outputs[0].dtype not in DTYPES:
        raise Refused(f"no kernel computes it in {node.outputs[0].dtype}")
    result = place.builder(node).node("FastGelu", node.inputs, domain="com.microsoft")
    result.shape = node.outputs[0].shape
    place.replace(node.outputs[0], result, "FastGelu")
    if node.domain:
        place.fused[node.op_type] -= 1
    return True


_EXACT = [("", "Gelu"), ("com.microsoft", "Gelu")]

FUSION = Fusion(
    "GELU",
    frozenset({("", "Mul"), ("", "Div"), ("", "Gelu")}),
    _apply,
    lambda config: not config.disable_gelu_fusion,
)
WITH_BIAS = Fusion(
    "GELU with bias",
    frozenset({*_EXACT, ("com.microsoft", "FastGelu")}),
    _apply_bias,
    lambda config: not config.disable_bias_gelu_fusion,
)
APPROXIMATION = Fusion(
    "GELU by tanh",
    frozenset({*_EXACT, ("com.microsoft", "BiasGelu")}),
    _apply_approximation,
    lambda config: config.enable_gelu_approximation,
)
