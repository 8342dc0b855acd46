"""Constant folding in numpy, for the operators that constants of a graph go through."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from ortrain.graph import shapes

LIMIT = 1 << 14  # elements; a folded Expand must not fill the file


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """ONNX's division: of integers towards zero."""
    if a.dtype.kind not in "iu":
        return a / b
    if not b.all():
        raise ZeroDivisionError
    quotient, rest = np.divmod(a, b)
    return quotient + ((rest != 0) & ((a < 0) != (b < 0))).astype(a.dtype)


# What constants of a graph go through. Loading the reference executor instead takes 0.4 s.
_NUMPY: dict[str, Callable[..., np.ndarray]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": _divide,
    "Neg": np.negative,
    "Abs": np.abs,
    "Sqrt": np.sqrt,
    "Reciprocal": lambda a: np.divide(1, a, dtype=a.dtype),
    "Pow": lambda a, b: np.power(a, b).astype(a.dtype),
    "Exp": np.exp,
    "Log": np.log,
    "Sin": np.sin,
    "Cos": np.cos,
    "Floor": np.floor,
    "Ceil": np.ceil,
    "Not": np.logical_not,
    "And": np.logical_and,
    "Or": np.logical_or,
    "Xor": np.logical_xor,
    "Equal": np.equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Where": np.where,
    "Min": lambda *a: functools.reduce(np.minimum, a),
    "Max": lambda *a: functools.reduce(np.maximum, a),
    "Cast": lambda a, *, to, **_: a.astype(ir.DataType(to).numpy()),
    "Concat": lambda *a, axis: np.concatenate(a, axis),
    "Expand": lambda a, shape: np.broadcast_to(
        a, np.broadcast_shapes(a.shape, tuple(shape.tolist()))
    ),
    "Gather": lambda a, i, *, axis=0: np.take(a, i, axis),
    "Transpose": lambda a, *, perm=None: np.transpose(a, perm),
    "Unsqueeze": lambda a, axes: np.expand_dims(a, tuple(axes.reshape(-1).tolist())),
    "Squeeze": lambda a, axes: np.squeeze(a, tuple(axes.reshape(-1).tolist())),
    "Reshape": lambda a, shape, *, allowzero=0: a.reshape(
        [a.shape[i] if d == 0 and not allowzero else d for i, d in enumerate(shape.tolist())]
    ),
    "Range": lambda a, b, c: np.arange(a, b, c, dtype=a.dtype),
    "Shape": lambda a, *, start=0, end=None: np.array(a.shape[start:end], np.int64),
    "Size": lambda a: np.array(a.size, np.int64),
    "ConstantOfShape": lambda shape, *, value: np.full(shape.tolist(), value.numpy()[0]),
}


def fold(node: ir.Node) -> np.ndarray | None:
    """A node's value where all its inputs are constants; None where that is not so or not cheap."""
    if node.domain or not node.inputs or None in node.inputs:
        return None
    for value in node.inputs:
        array = shapes.constant(value)
        if array is None or array.size > LIMIT:
            return None
    if math.prod(shapes.static(node.outputs[0]) or [1]) > LIMIT:
        return None
    result = _evaluate(node)
    return result if result is not None and result.size <= LIMIT else None


def _evaluate(node: ir.Node) -> np.ndarray | None:
    compute = _NUMPY.get(node.op_type)
    if compute is None or len(node.outputs) != 1:
        return None
    attributes = {a.name: a.value for a in node.attributes.values()}
    try:
        with np.errstate(all="ignore"):  # an infinity or a NaN is as good a constant
            array = np.asarray(compute(*map(shapes.constant, node.inputs), **attributes))
    except (ValueError, TypeError, IndexError, ZeroDivisionError):
        return None  # whatever is wrong with it, the runtime shall say so
    dtype = node.outputs[0].dtype
    return array if dtype is None or ir.DataType.from_numpy(array.dtype) == dtype else None
