"""The sizes of what an operator makes, from the sizes and the contents of what it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ortrain.deploy.optimization.fusions.contents import Content, numbers
from ortrain.deploy.optimization.fusions.matching import axes_of, integer, operand
from ortrain.deploy.optimization.fusions.sizes import Size, total
from ortrain.graph import shapes

Sizes = list[Size | None] | None
_ONE = Size.of(1)
_FAR = 1 << 31

# Of onnxruntime's own domain, whose schemas onnx has not: those that keep the first input's shape.
_SAME = frozenset(
    {"BiasGelu", "FastGelu", "Gelu", "QuickGelu", "RotaryEmbedding", "SkipLayerNormalization",
     "SkipSimplifiedLayerNormalization"}
)  # fmt: skip


@dataclass(frozen=True)
class Sources:
    """What is known of the inputs of a node.

    Attributes:
        sizes: of each.
        contents: what each holds where it is a vector of sizes.
        smaller: names the smaller one of two sizes.
        least: name of such a smaller size → the other one, where the first is a number above 1.
    """

    sizes: Sequence[Sizes]
    contents: Sequence[Content | None]
    smaller: Callable[[Size, Size], Size]
    least: Mapping[str, Size]

    def content(self, place: int) -> Content | None:
        """What an input holds."""
        return self.contents[place] if place < len(self.contents) else None

    def numbers(self, place: int) -> list[int] | None:
        """The same, where all of it is numbers."""
        return numbers(self.content(place))


def sizes_after(node: ir.Node, given: Sources) -> list[Sizes]:
    """The sizes of each output of a node, None where they do not follow."""
    nothing: list[Sizes] = [None] * len(node.outputs)
    if not node.outputs or not given.sizes:
        return nothing
    if node.domain:
        same = node.domain == "com.microsoft" and node.op_type in _SAME
        return [given.sizes[0], *nothing[1:]] if same else nothing
    if node.op_type == "Split":
        return _split(node, given)
    if node.op_type in shapes.SAME_SHAPE or node.op_type == "SimplifiedLayerNormalization":
        return [given.sizes[0], *nothing[1:]]
    if node.op_type in shapes.ELEMENTWISE:
        return [broadcast(*given.sizes, least=given.least)]
    if node.op_type.startswith("Reduce"):
        return [_reduce(node, given)]
    rule = _RULES.get(node.op_type)
    return nothing if rule is None else [rule(node, given), *nothing[1:]]


def broadcast(*parts: Sizes, least: Mapping[str, Size] | None = None) -> Sizes:
    """The sizes of values that are broadcast together.

    Args:
        parts: the sizes of each.
        least: as :class:`Sources` has it. A length and the smaller one of it and 512 are equal
            where they are broadcast together, or nothing comes of it.
    """
    if not parts or any(part is None for part in parts):
        return None
    present = [part for part in parts if part is not None]
    length, one = max(map(len, present)), list[Size | None]([_ONE])
    result: list[Size | None] = []
    for column in zip(*(one * (length - len(p)) + p for p in present), strict=True):
        wide = [size for size in column if size != _ONE]
        fixed = [size for size in wide if size is not None and size.number is not None]
        if not wide:
            result.append(_ONE)
        elif fixed:
            result.append(fixed[0])  # the others are as large, or 1
        elif None not in wide and least:
            known = [size for size in wide if size is not None]
            full = [size for size in known if size.name not in least]
            full = full or [least[size.name or ""] for size in known[:1]]
            same = all(size == full[0] or least.get(size.name or "") == full[0] for size in known)
            whole = full[0] if full[0] in known else known[0]
            result.append(whole if same else None)
        else:
            result.append(wide[0] if all(size == wide[0] for size in wide) else None)
    return result


def _reshape(node: ir.Node, given: Sources) -> Sizes:
    source, target = given.sizes[0], given.content(1)
    if target is None:
        wanted = given.sizes[1]
        count = wanted[0].number if wanted and wanted[0] is not None else None
        return None if count is None else [None] * count
    result: list[Size | None] = []
    for axis, size in enumerate(target.reshape(-1).tolist()):
        number = None if size is None else size.number
        if number == 0 and not integer(node, "allowzero", 0):
            result.append(source[axis] if source is not None and axis < len(source) else None)
        else:
            result.append(None if number == -1 else size)
    holes = [axis for axis, size in enumerate(result) if size is None]
    if len(holes) == 1 and source is not None and None not in source:
        left = [size for size in source if size is not None]
        rest = []
        for size in result:
            if size in left and size is not None:
                left.remove(size)
            elif size is not None:
                rest.append(size)
        result[holes[0]] = total(left).divided(total(rest))
    return result


def _expand(node: ir.Node, given: Sources) -> Sizes:
    target = given.content(1)
    return None if target is None else broadcast(given.sizes[0], target.reshape(-1).tolist())


def _filled(node: ir.Node, given: Sources) -> Sizes:
    target = given.content(0)
    return None if target is None else target.reshape(-1).tolist()


def _range(node: ir.Node, given: Sources) -> Sizes:
    start, limit, step = (given.content(i) for i in (0, 1, 2))
    if start is None or limit is None or given.numbers(2) != [1] or step is None:
        return [None]
    first, last = start.reshape(-1)[0], limit.reshape(-1)[0]
    if first is None or last is None or not (last - first).certain:
        return [None]
    return [last - first]


def _transpose(node: ir.Node, given: Sources) -> Sizes:
    source, perm = given.sizes[0], node.attributes.get("perm")
    if source is None:
        return None
    return [source[i] for i in perm.as_ints()] if perm is not None else source[::-1]


def _unsqueeze(node: ir.Node, given: Sources) -> Sizes:
    source, axes = given.sizes[0], axes_of(node)
    if source is None or axes is None:
        return None
    length = len(source) + len(axes)
    inserted, rest = {axis % length for axis in axes}, iter(source)
    return [_ONE if i in inserted else next(rest) for i in range(length)]


def _squeeze(node: ir.Node, given: Sources) -> Sizes:
    source = given.sizes[0]
    axes = axes_of(node) if len(node.inputs) > 1 or "axes" in node.attributes else None
    if source is None or axes is None:
        return None
    gone = {axis % len(source) for axis in axes}
    return [size for i, size in enumerate(source) if i not in gone]


def _reduce(node: ir.Node, given: Sources) -> Sizes:
    source, named = given.sizes[0], len(node.inputs) > 1 or "axes" in node.attributes
    axes = axes_of(node) if named else None
    if source is None or (named and operand(node, 1) is not None and axes is None):
        return None
    if not axes:
        if integer(node, "noop_with_empty_axes", 0):
            return source
        axes = [*range(len(source))]
    gone = {axis % len(source) for axis in axes} if source else set()
    if integer(node, "keepdims", 1):
        return [_ONE if i in gone else size for i, size in enumerate(source)]
    return [size for i, size in enumerate(source) if i not in gone]


def _matmul(node: ir.Node, given: Sources) -> Sizes:
    a, b = given.sizes[:2]
    if a is None or b is None or len(a) < 2 or len(b) < 2:
        return None
    rows = broadcast(a[:-2], b[:-2])
    return None if rows is None else [*rows, a[-2], b[-1]]


def _gemm(node: ir.Node, given: Sources) -> Sizes:
    a, b = given.sizes[:2]
    if a is None or b is None or len(a) != 2 or len(b) != 2:
        return None
    rows, columns = a[integer(node, "transA", 0)], b[1 - integer(node, "transB", 0)]
    return [rows, columns]


def _gather(node: ir.Node, given: Sources) -> Sizes:
    source, index = given.sizes[:2]
    if source is None or index is None or not source:
        return None
    axis = integer(node, "axis", 0) % len(source)
    return [*source[:axis], *index, *source[axis + 1 :]]


def _concat(node: ir.Node, given: Sources) -> Sizes:
    present = [part for part in given.sizes if part is not None]
    if len({len(part) for part in present}) != 1 or not present[0]:
        return None
    axis, result = integer(node, "axis", 0) % len(present[0]), list[Size | None]()
    for i, column in enumerate(zip(*present, strict=True)):
        if i != axis:
            known = [size for size in column if size is not None]
            fixed = [size for size in known if size.number is not None]
            result.append((fixed or known or [None])[0])
        elif None in column or len(present) < len(given.sizes):
            result.append(None)
        else:
            whole = Size(())
            for size in column:
                whole = whole + size if size is not None else whole
            result.append(whole)
    return result


def _slice(node: ir.Node, given: Sources) -> Sizes:
    source, start, end = given.sizes[0], given.content(1), given.content(2)
    if source is None:
        return None
    axes = given.numbers(3) if operand(node, 3) is not None else None
    steps = given.numbers(4) if operand(node, 4) is not None else None
    if operand(node, 3) is not None and axes is None:
        return [None] * len(source)
    if axes is None:
        if start is None and end is None:
            return [None] * len(source)
        axes = [*range((start if start is not None else end).size)]  # type: ignore[union-attr]
    result = list(source)
    for i, axis in enumerate(axes):
        size = source[axis]
        first, last = (None if part is None else part.reshape(-1)[i] for part in (start, end))
        step = 1 if operand(node, 4) is None else None if steps is None else steps[i]
        result[axis] = _kept(size, first, last, step, given.smaller)
    return result


def _kept(
    size: Size | None,
    first: Size | None,
    last: Size | None,
    step: int | None,
    smaller: Callable[[Size, Size], Size],
) -> Size | None:
    """How many of an axis a slice keeps."""
    if size is None or first is None or last is None or step is None:
        return None
    numbers_ = (size.number, first.number, last.number)
    if None not in numbers_ and step:
        count, low, high = (n for n in numbers_ if n is not None)
        # As a slice of Python's, but for a reverse one down to the first.
        return Size.of(len(range(count)[low:high:step])) if step > 0 else None
    if step != 1:
        return None
    low_, high_ = _from_start(size, first), _from_start(size, last)
    if high_ is None and low_ == Size(()) and last.certain and size.certain:
        return smaller(size, last)
    if low_ is None or high_ is None:
        return None
    return high_ - low_ if (high_ - low_).certain else None


def _from_start(size: Size, place: Size) -> Size | None:
    """A place of an axis, from 0 to its size, where that follows."""
    number = place.number
    if number is not None and number >= _FAR:
        return size
    if number is not None and number < 0:
        place = size + place
        return place if place.certain else None
    if not place.certain:
        return None
    if (size - place).certain:
        return place
    return size if (place - size).certain else None


def _split(node: ir.Node, given: Sources) -> list[Sizes]:
    source, count = given.sizes[0], len(node.outputs)
    if source is None or not source:
        return [None] * count
    axis = integer(node, "axis", 0) % len(source)
    content, size = given.content(1), source[axis]
    parts: list[Size | None] = [None] * count
    if content is not None and content.size == count:
        parts = content.reshape(-1).tolist()
    elif operand(node, 1) is None and size is not None and size.number is not None:
        each = -(-size.number // count)
        parts = [Size.of(max(min(each, size.number - i * each), 0)) for i in range(count)]
    return [[*source[:axis], part, *source[axis + 1 :]] for part in parts]


def _tile(node: ir.Node, given: Sources) -> Sizes:
    source, times = given.sizes[0], given.content(1)
    if source is None or times is None or times.size != len(source):
        return None
    pairs = zip(source, times.reshape(-1).tolist(), strict=True)
    return [None if size is None or count is None else size * count for size, count in pairs]


def _flatten(node: ir.Node, given: Sources) -> Sizes:
    source = given.sizes[0]
    if source is None or None in source:
        return [None, None]
    axis = integer(node, "axis", 1)
    axis = axis + len(source) if axis < 0 else axis
    known = [size for size in source if size is not None]
    return [total(known[:axis]), total(known[axis:])]


def _shape(node: ir.Node, given: Sources) -> Sizes:
    source = given.sizes[0]
    if source is None:
        return [None]
    start, end = integer(node, "start", 0), integer(node, "end", len(source))
    return [Size.of(len(source[start:end]))]


_RULES: dict[str, Callable[[ir.Node, Sources], Sizes]] = {
    "Reshape": _reshape,
    "Expand": _expand,
    "ConstantOfShape": _filled,
    "Range": _range,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Gather": _gather,
    "GatherElements": lambda _, given: given.sizes[1],
    "Concat": _concat,
    "Slice": _slice,
    "Tile": _tile,
    "Flatten": _flatten,
    "Shape": _shape,
    "Size": lambda *_: [],
}
