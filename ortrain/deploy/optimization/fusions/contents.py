"""What vectors of sizes hold: the numbers that a graph computes of shapes, as far as they follow.

::

    s = Shape(x)            (x: [batch, seq, 64])       [batch, seq, 64]
    n = Gather(s, 1)                                    seq
    t = Concat(n * 2, [-1])                             [2*seq, -1]

A vector of a few elements or a single number is an array of objects: a
:class:`~ortrain.deploy.optimization.fusions.sizes.Size` where the element follows, else None. A
truth is 1 or 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from ortrain.deploy.optimization.fusions.matching import axes_of, integer, operand
from ortrain.deploy.optimization.fusions.sizes import Size, total
from ortrain.graph import shapes

Content = np.ndarray
# Elements of the longest vector that is followed.
LIMIT = 64
WHOLE = frozenset({ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL})
_ONE, _NONE = Size.of(1), Size.of(0)


def content_of(
    node: ir.Node,
    known: Sequence[Content | None],
    sizes: Sequence[Size | None] | None,
    quotient: Callable[[str, Size, Size], Size],
) -> Content | None:
    """What the first output of a node holds, None where nothing of it is known.

    Args:
        node: of the standard domain.
        known: what its inputs hold.
        sizes: of its first input.
        quotient: names the result of an operator on two sizes that is no sum of products.
    """
    if node.op_type == "Shape":
        if sizes is None:
            return None
        start, end = integer(node, "start", 0), integer(node, "end", len(sizes))
        return vector(sizes[slice(start, end)])
    if node.op_type == "Size":
        if sizes is None or any(size is None for size in sizes):
            return None
        return single(total(size for size in sizes if size is not None))
    rule = _RULES.get(node.op_type)
    if rule is not None:
        found = rule(node, known)
    elif node.op_type in _NAMED and len(known) == 2:
        found = _broadcast(lambda a, b: _named(node.op_type, a, b, quotient), *known[:2])
    else:
        return None
    return found if found is not None and found.size <= LIMIT and found.ndim <= 1 else None


def vector(elements: Sequence[Size | None]) -> Content:
    """A vector of these elements."""
    result = np.empty(len(elements), object)
    result[:] = list(elements)
    return result


def single(element: Size | None) -> Content:
    """A value of one element without an axis."""
    result = np.empty((), object)
    result[()] = element
    return result


def of_constant(array: np.ndarray) -> Content | None:
    """A constant as what it holds; None where it is none of sizes."""
    if array.dtype.kind not in "iub" or array.ndim > 1 or array.size > LIMIT:
        return None
    result = np.empty(array.shape, object)
    for place, number in np.ndenumerate(array):
        result[place] = Size.of(int(number))
    return result


def numbers(content: Content | None) -> list[int] | None:
    """The elements, where all of them are numbers."""
    if content is None:
        return None
    found = [None if size is None else size.number for size in content.reshape(-1)]
    return None if None in found else [number for number in found if number is not None]


def _indices(content: Content | None) -> np.ndarray | None:
    found = numbers(content)
    if content is None or found is None:
        return None
    return np.asarray(found, np.int64).reshape(content.shape)


def _gather(node: ir.Node, known: Sequence[Content | None]) -> Content | None:
    data, index = known[0], _indices(known[1])
    if data is None or index is None or data.ndim != 1 or integer(node, "axis", 0) not in (0, -1):
        return None
    if index.size and not -len(data) <= index.min() <= index.max() < len(data):
        return None
    picked = data[index]
    return single(picked) if not isinstance(picked, np.ndarray) else picked


def _slice(node: ir.Node, known: Sequence[Content | None]) -> Content | None:
    data, (start, end, axes, steps) = (
        known[0],
        (numbers(known[i]) if i < len(known) else None for i in (1, 2, 3, 4)),
    )
    if data is None or data.ndim != 1 or start is None or end is None or len(start) != 1:
        return None
    if (operand(node, 3) is not None and axes not in ([0], [-1])) or (
        operand(node, 4) is not None and steps is None
    ):
        return None
    step = 1 if steps is None else steps[0]
    if step < 0 or not step:
        return None
    return data[start[0] : end[0] : step]


def _concat(node: ir.Node, known: Sequence[Content | None]) -> Content | None:
    if integer(node, "axis", 0) not in (0, -1):
        return None
    parts: list[Content] = []
    for value, part in zip(node.inputs, known, strict=True):
        if part is None:
            length = shapes.static(value) if value is not None else None
            if length is None or len(length) != 1 or length[0] > LIMIT:
                return None
            part = vector([None] * length[0])
        parts.append(part.reshape(-1))
    return np.concatenate(parts)


def _unsqueeze(node: ir.Node, known: Sequence[Content | None]) -> Content | None:
    axes, data = axes_of(node), known[0]
    return data.reshape(1) if data is not None and axes in ([0], [-1]) and not data.ndim else None


def _squeeze(node: ir.Node, known: Sequence[Content | None]) -> Content | None:
    data = known[0]
    if data is None or data.shape != (1,):
        return None
    axes = axes_of(node) if len(node.inputs) > 1 or "axes" in node.attributes else [0]
    return data.reshape(()) if axes in ([0], [-1]) else None


def _reshape(node: ir.Node, known: Sequence[Content | None]) -> Content | None:
    data, target = known[0], numbers(known[1])
    if data is None or target is None or len(target) > 1:
        return None
    if not target:
        return data.reshape(()) if data.size == 1 else None
    return data.reshape(-1) if target[0] in (-1, data.size) else None


def _cast(node: ir.Node, known: Sequence[Content | None]) -> Content | None:
    kind, source = integer(node, "to", 0), node.inputs[0]
    if kind == int(ir.DataType.BOOL) or source is None or source.dtype not in WHOLE:
        return None
    data = known[0]
    if data is None or kind not in (int(ir.DataType.INT64), int(ir.DataType.INT32)):
        return None
    if kind == int(ir.DataType.INT32) and any(_is_far(size, 31) for size in data.reshape(-1)):
        return None  # cut off
    return data


def _where(node: ir.Node, known: Sequence[Content | None]) -> Content | None:
    def chosen(condition: Size | None, yes: Size | None, no: Size | None) -> Size | None:
        told = None if condition is None else condition.number
        if told is None:
            return yes if yes == no else None
        return yes if told else no

    return _broadcast(chosen, *known[:3])


def _constant_of_shape(node: ir.Node, known: Sequence[Content | None]) -> Content | None:
    target, filled = numbers(known[0]), node.attributes.get("value")
    if target is None or len(target) > 1 or filled is None or any(n > LIMIT for n in target):
        return None
    array = np.asarray(filled.as_tensor().numpy()).reshape(-1)
    if array.dtype.kind not in "iub" or len(array) != 1:
        return None
    return of_constant(np.full(target, array[0]))


def _expand(node: ir.Node, known: Sequence[Content | None]) -> Content | None:
    data, target = known[0], numbers(known[1])
    if data is None or target is None or len(target) != 1 or target[0] > LIMIT:
        return None
    return np.broadcast_to(data, np.broadcast_shapes(data.shape, (target[0],))).copy()


def _product(node: ir.Node, known: Sequence[Content | None]) -> Content | None:
    data = known[0]
    axes = axes_of(node) if len(node.inputs) > 1 or "axes" in node.attributes else [0]
    if data is None or data.ndim != 1 or axes not in ([0], [-1]) or None in data.tolist():
        return None
    found = total(data.tolist())
    return vector([found]) if integer(node, "keepdims", 1) else single(found)


def _each(
    of: Callable[[Size, Size], Size | None],
) -> Callable[[ir.Node, Sequence[Content | None]], Content | None]:
    def each(a: Size | None, b: Size | None) -> Size | None:
        found = None if a is None or b is None else of(a, b)
        return None if _is_far(found, 63) else found  # which goes round to the other end

    def rule(node: ir.Node, known: Sequence[Content | None]) -> Content | None:
        return _broadcast(each, *known[:2])

    return rule


def _is_far(size: Size | None, bits: int) -> bool:
    """Whether a number in a size is beyond what so many bits hold beside a sign."""
    return size is not None and any(
        not -(1 << bits) <= factor < 1 << bits for _, factor in size.terms
    )


def _equal(a: Size, b: Size) -> Size | None:
    if a == b:
        return _ONE
    return _NONE if a.differs(b) else None


def _named(
    op_type: str, a: Size | None, b: Size | None, quotient: Callable[[str, Size, Size], Size]
) -> Size | None:
    """Of a division, a remainder, or the smaller or larger of two sizes."""
    if a is None or b is None:
        return None
    if a.number is not None and b.number is not None:
        x, y = a.number, b.number
        if op_type in ("Min", "Max"):
            return Size.of(min(x, y) if op_type == "Min" else max(x, y))
        if x < 0 or y <= 0:
            return None  # as ONNX divides, and Python does not
        return Size.of(x // y if op_type == "Div" else x % y)
    if op_type in ("Min", "Max"):
        for small, large in ((a, b), (b, a)):
            if (large - small).certain:
                return small if op_type == "Min" else large
        return quotient(op_type, *sorted((a, b), key=str))
    if not a.certain or not b.certain or not b.terms:
        return None
    whole = a.divided(b)
    if whole is not None:
        return whole if op_type == "Div" else _NONE
    return quotient(op_type, a, b)


def _broadcast(of: Callable[..., Size | None], *operands: Content | None) -> Content | None:
    """An operator of each element; of a vector that is not known at all, of None."""
    lengths = [part.shape for part in operands if part is not None]
    if not lengths or any(part is None for part in operands):
        return None
    try:
        shape = np.broadcast_shapes(*lengths)
    except ValueError:  # the graph is wrong, which onnxruntime tells better
        return None
    whole = [np.broadcast_to(part, shape) for part in operands if part is not None]
    result = np.empty(shape, object)
    for place in np.ndindex(shape):
        result[place] = of(*(part[place] for part in whole))
    return result


_NAMED = frozenset({"Div", "Mod", "Min", "Max"})
_RULES: dict[str, Callable[[ir.Node, Sequence[Content | None]], Content | None]] = {
    "Identity": lambda _, known: known[0],
    "Gather": _gather,
    "Slice": _slice,
    "Concat": _concat,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Reshape": _reshape,
    "Cast": _cast,
    "Where": _where,
    "ConstantOfShape": _constant_of_shape,
    "Expand": _expand,
    "ReduceProd": _product,
    "Add": _each(lambda a, b: a + b),
    "Sub": _each(lambda a, b: a - b),
    "Mul": _each(lambda a, b: a * b),
    "Neg": lambda _, known: _broadcast(lambda a: None if a is None else Size.of(-1) * a, known[0]),
    "Equal": _each(_equal),
}
