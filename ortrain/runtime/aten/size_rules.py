"""Rules of shape arithmetic: what an operator makes of rows of whole numbers.

A rule computes with arrays of ints and of expressions for ints (``operands.Size``), and gives None
or fails where tensors are to do it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ortrain.graph.indices import is_never_negative
from ortrain.runtime.aten.operands import Size

# A rule that would make more numbers than this makes none.
MOST = 64
# No size is as large, nor a sum of sizes; one of them with such a number may wrap around in int64.
LARGE = 1 << 31

Array = np.ndarray
Rule = Callable[..., Array | None]
RULES: dict[str, Rule] = {}


def is_open(item: Any) -> bool:
    """Whether a number is known only to the running function."""
    return isinstance(item, Size)


def each(function: Callable[..., Any], *arrays: Array) -> Array:
    """A function of one number of each array, broadcast."""
    return np.asarray(np.frompyfunc(function, len(arrays), 1)(*arrays), object)


def _numbers(array: Array | Sequence[int] | None) -> list[int] | None:
    """The numbers in an operand or attribute; None for an absent one.

    Raises:
        ValueError: one of them is not known.
    """
    if array is None:
        return None
    items = np.asarray(array, object).reshape(-1).tolist()
    if any(map(is_open, items)):
        raise ValueError
    return items


def _rule(*operators: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(operators, function))
        return function

    return register


# -- arithmetic ----------------------------------------------------------------------------------


def _within(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The same, failing where the numbers could wrap around in int64."""

    def compute(a: Any, b: Any) -> Any:
        if any(not is_open(x) and abs(x) >= LARGE for x in (a, b)) and (is_open(a) or is_open(b)):
            raise ValueError
        return function(a, b)

    return compute


def _maximum(a: Any, b: Any) -> Any:
    return a if a == b else Size(f"max({a}, {b})") if is_open(a) or is_open(b) else max(a, b)


def _minimum(a: Any, b: Any) -> Any:
    return a if a == b else Size(f"min({a}, {b})") if is_open(a) or is_open(b) else min(a, b)


_FOLDS: dict[str, Callable[[Any, Any], Any]] = {
    "Add": _within(operator.add),
    "Sub": _within(operator.sub),
    "Mul": _within(operator.mul),
    "Sum": _within(operator.add),
    "Max": _maximum,
    "Min": _minimum,
    "ReduceSum": _within(operator.add),
    "ReduceProd": _within(operator.mul),
    "ReduceMax": _maximum,
    "ReduceMin": _minimum,
}


@_rule("Add", "Sub", "Mul", "Sum", "Max", "Min")
def _fold(node: ir.Node, *arrays: Array) -> Array:
    return functools.reduce(functools.partial(each, _FOLDS[node.op_type]), arrays)


@_rule("ReduceSum", "ReduceProd", "ReduceMax", "ReduceMin")
def _reduce(
    node: ir.Node, x: Array, axes: Any = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Array | None:
    """Of all axes at once."""
    over = _numbers(axes)
    if not over and noop_with_empty_axes:
        return x
    if over and len({a % x.ndim for a in over}) < x.ndim:
        return None
    start = {"ReduceSum": [0], "ReduceProd": [1]}.get(node.op_type, [])
    total = functools.reduce(_FOLDS[node.op_type], start + x.reshape(-1).tolist())
    return np.full([1] * x.ndim if keepdims else [], total, object)


@_rule("Div")
def _div(node: ir.Node, a: Array, b: Array) -> Array:
    """ONNX rounds towards zero, Python downwards: the same where nothing is negative."""
    is_plain = all(is_never_negative(value) for value in node.inputs)

    def divide(x: Any, y: Any) -> Any:
        if not is_open(x) and not is_open(y):
            return div(x, y)
        return Size(f"({x} // {y})" if is_plain else f"host.div({x}, {y})")

    return each(divide, a, b)


@_rule("Mod")
def _mod(node: ir.Node, a: Array, b: Array, *, fmod: int = 0) -> Array:
    def remain(x: Any, y: Any) -> Any:
        if is_open(x) or is_open(y):
            return Size(f"host.rest({x}, {y})" if fmod else f"({x} % {y})")
        return rest(x, y) if fmod else x % y

    return each(remain, a, b)


@_rule("Neg")
def _neg(node: ir.Node, x: Array) -> Array:
    return each(operator.neg, x)


@_rule("Abs")
def _abs(node: ir.Node, x: Array) -> Array:
    return each(lambda a: Size(f"abs({a})") if is_open(a) else abs(a), x)


@_rule("Clip")
def _clip(node: ir.Node, x: Array, low: Array | None = None, high: Array | None = None) -> Array:
    x = x if low is None else each(_maximum, x, low)
    return x if high is None else each(_minimum, x, high)


def div(x: int, y: int) -> int:
    """Whole division that rounds towards zero, of a running function."""
    quotient = abs(x) // abs(y)
    return quotient if (x < 0) == (y < 0) else -quotient


def rest(x: int, y: int) -> int:
    """The rest of a division, with the sign of what is divided, of a running function."""
    return x - y * div(x, y)


# -- conditions ----------------------------------------------------------------------------------

_RELATIONS: dict[str, tuple[str, Callable[[Any, Any], bool], bool]] = {
    "Equal": ("==", operator.eq, True),
    "Less": ("<", operator.lt, False),
    "LessOrEqual": ("<=", operator.le, True),
    "Greater": (">", operator.gt, False),
    "GreaterOrEqual": (">=", operator.ge, True),
    "And": ("and", lambda a, b: a and b, True),
    "Or": ("or", lambda a, b: a or b, True),
    "Xor": ("!=", operator.ne, False),
}


@_rule(*_RELATIONS)
def _relation(node: ir.Node, a: Array, b: Array) -> Array:
    symbol, compute, of_same = _RELATIONS[node.op_type]

    def relate(x: Any, y: Any) -> Any:
        if not is_open(x) and not is_open(y):
            return compute(x, y)
        if x == y and symbol not in ("and", "or"):
            return of_same
        return Size(f"({x} {symbol} {y})")

    return each(relate, a, b)


@_rule("Not")
def _not(node: ir.Node, x: Array) -> Array:
    return each(lambda a: Size(f"(not {a})") if is_open(a) else not a, x)


@_rule("Where")
def _where(node: ir.Node, condition: Array, a: Array, b: Array) -> Array:
    def choose(c: Any, x: Any, y: Any) -> Any:
        if not is_open(c) or x == y:
            return x if is_open(c) or c else y
        return Size(f"({x} if {c} else {y})")

    return each(choose, condition, a, b)


# -- what moves ----------------------------------------------------------------------------------


@_rule("Identity")
def _identity(node: ir.Node, x: Array) -> Array:
    return x


@_rule("Concat")
def _concat(node: ir.Node, *rows: Array, axis: int) -> Array:
    return np.concatenate(rows, axis)


@_rule("Gather")
def _gather(node: ir.Node, x: Array, indices: Array, *, axis: int = 0) -> Array | None:
    if not any(map(is_open, indices.reshape(-1))):
        return np.asarray(np.take(x, indices.astype(np.int64), axis), object)
    if x.ndim != 1:
        return None
    row = f"({', '.join(map(str, x))}{',' * (len(x) == 1)})"
    return each(lambda i: Size(f"{row}[{i}]") if is_open(i) else x[i], indices)


@_rule("Slice")
def _slice(
    node: ir.Node, x: Array, starts: Any, ends: Any, axes: Any = None, steps: Any = None
) -> Array:
    begin, end, over, step = map(_numbers, (starts, ends, axes, steps))
    assert begin is not None
    assert end is not None
    over = list(range(len(begin))) if over is None else over
    step = [1] * len(begin) if step is None else step
    for axis, low, high, by in zip(over, begin, end, step, strict=True):
        places = [slice(None)] * x.ndim
        places[axis] = bounded(low, high, by, x.shape[axis])
        x = x[tuple(places)]
    return x


def bounded(start: int, end: int, step: int, size: int) -> slice:
    """The slice of an axis that ONNX means by numbers that may lie beyond it."""
    if step > 0:
        return slice(start, end, step)
    start, end = (n + size if n < 0 else n for n in (start, end))
    start, end = min(max(start, 0), size - 1), min(max(end, -1), size - 1)
    return slice(start, None if end < 0 else end, step) if size else slice(0, 0)


@_rule("Reshape")
def _reshape(node: ir.Node, x: Array, shape: Array, *, allowzero: int = 0) -> Array:
    sizes = _numbers(shape)
    assert sizes is not None
    return x.reshape([x.shape[i] if n == 0 and not allowzero else n for i, n in enumerate(sizes)])


@_rule("Flatten")
def _flatten(node: ir.Node, x: Array, *, axis: int = 1) -> Array:
    lead = x.shape[: axis + x.ndim if axis < 0 else axis]
    return x.reshape(math.prod(lead), -1) if x.size else x.reshape(math.prod(lead), 0)


@_rule("Unsqueeze")
def _unsqueeze(node: ir.Node, x: Array, axes: Any) -> Array:
    return np.expand_dims(x, tuple(_numbers(axes) or ()))


@_rule("Squeeze")
def _squeeze(node: ir.Node, x: Array, axes: Any = None) -> Array:
    over = _numbers(axes)
    return x.squeeze() if over is None else x.squeeze(tuple(over))


@_rule("Transpose")
def _transpose(node: ir.Node, x: Array, *, perm: list[int] | None = None) -> Array:
    return x.transpose(perm)


@_rule("Expand")
def _expand(node: ir.Node, x: Array, shape: Array) -> Array:
    return np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(_numbers(shape) or ())))


@_rule("Tile")
def _tile(node: ir.Node, x: Array, repeats: Array) -> Array:
    return np.tile(x, _numbers(repeats) or ())


@_rule("Range")
def _range(node: ir.Node, start: Array, limit: Array, delta: Array) -> Array:
    (first,), (last,), (step,) = map(_numbers, (start, limit, delta))  # type: ignore[misc]
    places = range(first, last, step)
    return np.array([*places] if len(places) <= MOST else [0] * (MOST + 1), object)


@_rule("ConstantOfShape")
def _constant_of_shape(node: ir.Node, shape: Array, *, value: Any = 0.0) -> Array | None:
    sizes = _numbers(shape) or []
    return np.full(sizes, np.asarray(value).item(), object) if math.prod(sizes) <= MOST else None


@_rule("NonZero")
def _nonzero(node: ir.Node, x: Array) -> Array:
    _numbers(x)
    return np.array(np.nonzero(x.astype(np.int64))).astype(object)


__all__ = ["LARGE", "MOST", "RULES", "Array", "bounded", "div", "each", "is_open", "rest"]
