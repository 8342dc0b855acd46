"""Constants of a few elements that follow before a run, each in its own dtype.

::

    s = Sqrt(8.0)                           2.828427
    n = Gather(Shape(x), 2)                 64, where a file says that x is [b, s, 64]
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from ortrain.deploy.optimization.fusions.contents import LIMIT
from ortrain.deploy.optimization.fusions.matching import axes_of, integer, integers, operand
from ortrain.graph import shapes


def result_of(node: ir.Node) -> np.ndarray | None:
    """The value of a node that is known before a run."""
    if node.domain or len(node.outputs) != 1:
        return None
    rule = _RULES.get(node.op_type)
    if rule is None or not node.inputs:
        return None
    known = []
    for value in node.inputs:
        if value is None or (shapes.size(value) or 0) > LIMIT:
            return None
        array = shapes.constant(value)
        if array is None or array.size > LIMIT or array.dtype.kind not in "fiub":
            return None
        known.append(array)
    try:
        with np.errstate(all="ignore"):
            result = rule(node, *known)
    except (ValueError, IndexError):  # the graph is wrong, which onnxruntime tells better
        return None
    return None if result is None or result.size > LIMIT else np.asarray(result)


def sizes_of_file(node: ir.Node) -> np.ndarray | None:
    """A shape, or what is picked out of one, where these sizes are numbers in the file."""
    if node.domain:
        return None
    if node.op_type == "Shape":
        picked = _axes_of_shape(node)
    elif node.op_type in ("Gather", "Slice") and node.inputs[0] is not None:
        source = node.inputs[0].producer()
        if source is None or source.op_type != "Shape" or source.domain:
            return None
        picked = _axes_of_shape(source)
        if picked is not None:
            picked = _gathered(node, picked) if node.op_type == "Gather" else _sliced(node, picked)
    else:
        return None
    if picked is None or any(not isinstance(d, int) for d in np.asarray(picked, object).flat):
        return None
    return np.asarray(picked, dtype=np.int64)


def _axes_of_shape(node: ir.Node) -> np.ndarray | None:
    known = shapes.dims(node.inputs[0])
    if known is None:
        return None
    part = slice(integer(node, "start", 0), integer(node, "end", len(known)))
    result = np.empty(len(known[part]), object)
    result[:] = known[part]
    return result


def _gathered(node: ir.Node, sizes: np.ndarray) -> np.ndarray | None:
    index = shapes.constant(node.inputs[1])
    if index is None or (index.size and not -len(sizes) <= index.min() <= index.max() < len(sizes)):
        return None
    return np.asarray(sizes[index], object)


def _sliced(node: ir.Node, sizes: np.ndarray) -> np.ndarray | None:
    if len(node.inputs) < 3:
        return None
    start, end = integers(node.inputs[1]), integers(node.inputs[2])
    axes, steps = operand(node, 3), operand(node, 4)
    if start is None or end is None or len(start) != 1:
        return None
    if axes is not None and integers(axes) not in ([0], [-1]):
        return None
    step = [1] if steps is None else integers(steps)
    return None if step is None else sizes[start[0] : end[0] : step[0]]


def _cast(node: ir.Node, x: np.ndarray) -> np.ndarray | None:
    return x.astype(ir.DataType(integer(node, "to", 1)).numpy())


def _unsqueeze(node: ir.Node, x: np.ndarray, *_: np.ndarray) -> np.ndarray | None:
    axes = axes_of(node)
    return None if axes is None else np.expand_dims(x, tuple(axes))


def _squeeze(node: ir.Node, x: np.ndarray, *_: np.ndarray) -> np.ndarray | None:
    axes = axes_of(node) if len(node.inputs) > 1 or "axes" in node.attributes else None
    return np.squeeze(x, None if axes is None else tuple(axes))


def _concat(node: ir.Node, *parts: np.ndarray) -> np.ndarray | None:
    return np.concatenate(parts, integer(node, "axis", 0))


def _reshape(node: ir.Node, x: np.ndarray, target: np.ndarray) -> np.ndarray | None:
    sizes = target.tolist()
    if not integer(node, "allowzero", 0):
        if any(size == 0 and i >= x.ndim for i, size in enumerate(sizes)):
            return None
        sizes = [x.shape[i] if size == 0 else size for i, size in enumerate(sizes)]
    return x.reshape(sizes)


def _transpose(node: ir.Node, x: np.ndarray) -> np.ndarray | None:
    perm = node.attributes.get("perm")
    return np.transpose(x, None if perm is None else tuple(perm.as_ints()))


def _gather(node: ir.Node, x: np.ndarray, index: np.ndarray) -> np.ndarray | None:
    return np.take(x, index, integer(node, "axis", 0))


def _slice(
    node: ir.Node,
    x: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    axes: np.ndarray | None = None,
    steps: np.ndarray | None = None,
) -> np.ndarray | None:
    chosen = [slice(None)] * x.ndim
    axes = np.arange(len(starts)) if axes is None else axes
    for i, axis in enumerate(axes.tolist()):
        start, end, step = int(starts[i]), int(ends[i]), 1 if steps is None else int(steps[i])
        size = x.shape[axis]
        # Before the first element, where a reverse slice ends, is no place of Python's.
        low = None if step < 0 and end < -size else end
        chosen[axis] = slice(start, low, step)
    return x[tuple(chosen)]


def _constant_of_shape(node: ir.Node, shape: np.ndarray) -> np.ndarray | None:
    filled = node.attributes.get("value")
    if shape.size and np.prod(shape.astype(np.float64)) > LIMIT:
        return None
    value = np.zeros(1, np.float32) if filled is None else filled.as_tensor().numpy()
    return np.full(shape.tolist(), np.asarray(value).reshape(-1)[0])


def _remainder(node: ir.Node, a: np.ndarray, b: np.ndarray) -> np.ndarray | None:
    return None if integer(node, "fmod", 0) or a.dtype.kind == "f" or not b.all() else np.mod(a, b)


def _where(node: ir.Node, condition: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray | None:
    return np.asarray(np.where(condition, a, b))


def _divided(node: ir.Node, a: np.ndarray, b: np.ndarray) -> np.ndarray | None:
    if a.dtype.kind == "f":
        return np.asarray(a / b)
    if not b.all():
        return None
    quotient = np.abs(a) // np.abs(b)  # towards zero, as ONNX divides
    return np.asarray(quotient * np.sign(a) * np.sign(b), a.dtype)


_RULES: dict[str, Callable[..., np.ndarray | None]] = {
    "Cast": _cast,
    "CastLike": lambda _, x, like: x.astype(like.dtype),
    "Sqrt": lambda _, x: np.sqrt(x) if x.dtype.kind == "f" else None,
    "Reciprocal": lambda _, x: np.reciprocal(x) if x.dtype.kind == "f" else None,
    "Neg": lambda _, x: np.negative(x),
    "Mul": lambda _, a, b: a * b,
    "Add": lambda _, a, b: a + b,
    "Sub": lambda _, a, b: a - b,
    "Div": _divided,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Concat": _concat,
    # Of pads, windows and masks of pictures of a fixed size.
    "Reshape": _reshape,
    "Transpose": _transpose,
    "Gather": _gather,
    "Slice": _slice,
    "ConstantOfShape": _constant_of_shape,
    "Mod": _remainder,
    "Equal": lambda _, a, b: np.equal(a, b),
    "Not": lambda _, x: np.logical_not(x),
    "Where": _where,
}
