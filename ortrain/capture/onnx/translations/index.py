"""Reading and writing by index."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ortrain.capture.onnx.translations.base import (
    INT64_MAX,
    Scalar,
    Size,
    Translator,
    aten,
    refuse,
    translation,
)
from ortrain.graph import shapes
from ortrain.graph.indices import from_the_start


@translation(aten.gather.default)
def gather(
    op: Translator, self: ir.Value, dim: int, index: ir.Value, *, sparse_grad: bool = False
) -> ir.Value:
    rows = _rows(self, dim, index)
    if rows is not None:
        return op.Gather(self, from_the_start(op, op.Reshape(rows, [-1])), axis=dim)
    return op.GatherElements(self, from_the_start(op, index), axis=dim)


def _rows(self: ir.Value, dim: int, index: ir.Value) -> ir.Value | None:
    """What an index is expanded from that has whole rows of a tensor, as of a graph's edges.

    Args:
        self: what is read or written.
        dim: the axis.
        index: of the rank of ``self``.

    Returns:
        The index with axes of size one beside ``dim``; None where it is another for each element.
    """
    node, dims, whole = index.producer(), shapes.dims(index), shapes.dims(self)
    if node is None or node.op_type != "Expand" or dims is None or whole is None:
        return None
    narrow = shapes.dims(node.inputs[0])
    if narrow is None or len(narrow) != len(dims) or len(dims) < 2:
        return None
    beside = [axis for axis in range(len(dims)) if axis != dim % len(dims)]
    if any(narrow[axis] != 1 or dims[axis] is None or dims[axis] != whole[axis] for axis in beside):
        return None
    return node.inputs[0]


@translation(aten.index_select.default)
def index_select(op: Translator, self: ir.Value, dim: int, index: ir.Value) -> ir.Value:
    return op.Gather(self, from_the_start(op, index), axis=dim)


@translation(aten.index.Tensor)
def index(op: Translator, self: ir.Value, indices: Sequence[ir.Value | None]) -> ir.Value:
    given = {dim: value for dim, value in enumerate(indices) if value is not None}
    if any(value.dtype == ir.DataType.BOOL for value in given.values()):
        if list(given) == [0]:
            return op.GatherND(self, op.Transpose(op.NonZero(given[0]), perm=[1, 0]))
        # A mask is as many indices as it has axes, of what is true in it.
        spread = [each for value in indices for each in _indices(op, value)]
        given = {dim: value for dim, value in enumerate(spread) if value is not None}
    length = shapes.rank(self)
    assert length is not None
    dims = list(given)
    if len(dims) == 1:
        return op.Gather(self, given[dims[0]], axis=dims[0])
    whole = _whole_ranges(op, self, given)
    if whole is not None:
        return whole
    rest = [d for d in range(length) if d not in given]
    if dims != list(range(len(dims))):
        self = op.Transpose(self, perm=dims + rest)
    picked = op.GatherND(self, _positions(op, list(given.values())))
    width = max(shapes.rank(v) or 0 for v in given.values())
    first = dims[0]
    if first == 0 or dims != list(range(first, first + len(dims))):
        return picked  # torch puts the indexed axes in front where they are not neighbours
    lead = list(range(width, width + first))
    order = [*lead, *range(width), *range(width + first, width + len(rest))]
    return op.Transpose(picked, perm=order)


def _indices(op: Translator, value: ir.Value | None) -> list[ir.Value | None]:
    """What an index is beside others: a mask its places along each of its axes."""
    if value is None or value.dtype != ir.DataType.BOOL:
        return [value]
    rank = shapes.rank(value)
    if not rank:
        raise refuse("indexing with a mask without dimensions beside other indices")
    places = op.NonZero(value)
    return [op.Reshape(op.Slice(places, [i], [i + 1], [0], [1]), [-1]) for i in range(rank)]


def _positions(op: Translator, indices: list[ir.Value]) -> ir.Value:
    """Index tensors, broadcast against each other, side by side on a last axis."""
    dims = [shapes.dims(v) for v in indices]
    wide = shapes.broadcast(*dims)
    if wide is None:  # of several axes of a mask, whose places nobody can count beforehand
        ranks = [shapes.rank(v) for v in indices]
        if None in ranks:
            raise refuse("indices of an unknown number of dimensions")
        wide = (None,) * max(rank or 0 for rank in ranks)
    known = [d == wide and None not in wide for d in dims]
    if not all(known):
        target = op.Concat(
            *(_size(op, indices, axis - len(wide)) for axis in range(len(wide))), axis=0
        )
        indices = [v if k else op.Expand(v, target) for v, k in zip(indices, known, strict=True)]
    return op.Concat(*(op.Unsqueeze(v, [-1]) for v in indices), axis=-1)


def _size(op: Translator, values: list[ir.Value], axis: int) -> ir.Value:
    """The broadcast size of one axis, counted from the end."""
    sizes = []
    for value in values:
        dims = shapes.dims(value)
        if dims is not None and len(dims) >= -axis and dims[axis] != 1:
            sizes.append((dims[axis], op.dim(value, axis)))
    if not sizes:
        return op.constant(np.array([1], np.int64))
    if any(isinstance(dim, int) for dim, _ in sizes):
        return next(size for dim, size in sizes if isinstance(dim, int))
    first = sizes[0]
    if all(shapes.same(first[0], dim) for dim, _ in sizes):
        return first[1]
    return op.Max(*(size for _, size in sizes))


def _whole_ranges(op: Translator, self: ir.Value, given: dict[int, ir.Value]) -> ir.Value | None:
    """``x[arange(n)[:, None], arange(m)]`` with all of x's rows and columns is x, axes inserted.

    Transformers builds its attention masks like that.
    """
    own = shapes.dims(self)
    if own is None or list(given) != list(range(len(own))):
        return None
    width = max(shapes.rank(v) or 0 for v in given.values())
    axes = []
    for dim, value in given.items():
        ranged, dims = _range_below(value), shapes.dims(value)
        if ranged is None or dims is None or not shapes.same(ranged, own[dim]):
            return None
        wide = [i - len(dims) + width for i, d in enumerate(dims) if d != 1]
        if len(wide) != 1:
            return None
        axes.append(wide[0])
    if axes != sorted(set(axes)):
        return None
    inserted = [axis for axis in range(width) if axis not in axes]
    return op.Unsqueeze(self, inserted) if inserted else self


def _range_below(value: ir.Value) -> shapes.Dim:
    """N where the value is ``arange(n)`` with axes inserted, else None."""
    node = value.producer()
    if node is None or node.domain or not node.inputs or node.inputs[0] is None:
        return None
    kind, rest = node.op_type, node.inputs[1:]
    if kind in ("Unsqueeze", "Identity") or (kind == "Add" and _is(rest[0], 0)):
        return _range_below(node.inputs[0])
    if kind == "Range" and _is(node.inputs[0], 0) and _is(rest[1], 1):
        dims = shapes.dims(value)
        return dims[0] if dims else None
    return None


def _is(value: ir.Value | None, number: int) -> bool:
    known = shapes.constant(value)
    return known is not None and bool((known == number).all())


# -- writing: what in-place assignments to a slice become ----------------------------------------


@translation(aten.slice_scatter.default)
def slice_scatter(
    op: Translator,
    self: ir.Value,
    src: ir.Value,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: int = 1,
) -> ir.Value:
    start = 0 if start is None else start
    end = INT64_MAX if end is None else end
    if step != 1:
        whole = op.Range(np.int64(0), op.Squeeze(op.dim(self, dim), [0]), np.int64(1))
        places = op.Slice(whole, op.index(start), op.index(end), [0], [step])
        return _put(op, self, src, dim, places)
    size = (shapes.dims(self) or ())[dim]
    parts = []
    if not (isinstance(start, int) and start == 0):
        parts.append(op.Slice(self, [0], op.index(start), [dim], [1]))
    parts.append(src)
    if not isinstance(end, int) or not (
        end == INT64_MAX or (isinstance(size, int) and end >= size)
    ):
        parts.append(op.Slice(self, op.index(end), [INT64_MAX], [dim], [1]))
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=dim)


@translation(aten.index_copy.default)
def index_copy(
    op: Translator, self: ir.Value, dim: int, index: ir.Value, source: ir.Value
) -> ir.Value:
    return _put(op, self, _of_rank(op, source, self, dim), dim, _along(op, index))


@translation(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(
    op: Translator, self: ir.Value, dim: int, index: ir.Value, value: Scalar
) -> ir.Value:
    """Of those that write along a dimension, the one which takes negative indices."""
    length = shapes.rank(self)
    assert length is not None
    met = op.beside(value, self)
    fill = met if isinstance(met, ir.Value) else op.constant(met, self.dtype)
    places = op.Reshape(op.cast(index, ir.DataType.INT64), [-1])
    sizes = [op.dim(places, 0) if d == dim % length else op.dim(self, d) for d in range(length)]
    return _put(op, self, op.Expand(fill, op.Concat(*sizes, axis=0)), dim, places)


@translation(aten.index_add.default)
def index_add(
    op: Translator,
    self: ir.Value,
    dim: int,
    index: ir.Value,
    source: ir.Value,
    *,
    alpha: Scalar = 1,
) -> ir.Value:
    if isinstance(alpha, ir.Value) or alpha != 1:
        source = op.Mul(source, op.beside(alpha, source))
    return _put(op, self, _of_rank(op, source, self, dim), dim, _along(op, index), "add")


def _along(op: Translator, index: ir.Value) -> ir.Value:
    """Places of one dimension, int64 [n]."""
    places = from_the_start(op, op.cast(index, ir.DataType.INT64))
    return places if shapes.rank(index) else op.Reshape(places, [1])


def _of_rank(op: Translator, source: ir.Value, self: ir.Value, dim: int) -> ir.Value:
    """A source for one index may lack the dimension."""
    return source if shapes.rank(source) == shapes.rank(self) else op.Unsqueeze(source, [dim])


def _put(
    op: Translator,
    self: ir.Value,
    src: ir.Value,
    dim: int,
    places: ir.Value,
    reduction: str = "none",
) -> ir.Value:
    """A tensor with others in its places along a dimension, or added there."""
    length = shapes.rank(self)
    assert length is not None
    first = [dim % length, *(d for d in range(length) if d != dim % length)]
    back = [first.index(d) for d in range(length)]
    ahead, of_src = op.Transpose(self, perm=first), op.Transpose(src, perm=first)
    places = op.Unsqueeze(places, [1])
    return op.Transpose(op.ScatterND(ahead, places, of_src, reduction=reduction), perm=back)


@translation(aten.select_scatter.default)
def select_scatter(
    op: Translator, self: ir.Value, src: ir.Value, dim: int, index: Size
) -> ir.Value:
    if isinstance(index, ir.Value):
        raise refuse("assignment at a symbolic index")
    end = INT64_MAX if index == -1 else index + 1
    return slice_scatter(op, self, op.Unsqueeze(src, [dim]), dim, index, end)


@translation(aten.diagonal_scatter.default)
def diagonal_scatter(
    op: Translator, self: ir.Value, src: ir.Value, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> ir.Value:
    length = shapes.rank(self)
    assert length is not None
    ends = [dim1 % length, dim2 % length]
    order = [*(d for d in range(length) if d not in ends), *ends]
    ahead = op.Transpose(self, perm=order)
    rows, columns = (
        op.Range(np.int64(0), op.Squeeze(op.dim(ahead, axis), [0]), np.int64(1))
        for axis in (-2, -1)
    )
    on = op.Equal(op.Unsqueeze(op.Add(rows, np.int64(offset)), [1]), op.Unsqueeze(columns, [0]))
    # Of each row its element of the diagonal, or any where it has none.
    last = op.Sub(op.dim(src, -1), np.int64(1))
    first = op.Max(op.Sub(rows, np.int64(max(-offset, 0))), np.int64(0))
    of_row = op.Unsqueeze(op.Gather(src, op.Min(first, last), axis=-1), [-1])
    return op.Transpose(op.Where(on, of_row, ahead), perm=[order.index(d) for d in range(length)])


@translation(aten.nonzero.default)
def nonzero(op: Translator, self: ir.Value) -> ir.Value:
    if shapes.rank(self) == 0:
        raise refuse("nonzero of a scalar", because="its result has no columns")
    return op.Transpose(op.NonZero(self), perm=[1, 0])


@translation(aten.masked_select.default)
def masked_select(op: Translator, self: ir.Value, mask: ir.Value) -> ir.Value:
    if shapes.rank(self) == shapes.rank(mask) == 0:
        self = op.Reshape(self, [1])
    mask = op.Expand(mask, op.shape(self))  # each to the shape of both
    return op.GatherND(op.Expand(self, op.shape(mask)), nonzero(op, mask))


@translation(aten.unique_consecutive.default)
def unique_consecutive(
    op: Translator,
    self: ir.Value,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    if dim is not None and shapes.rank(self) != 1:
        raise refuse("unique_consecutive along a dimension")
    if self.dtype in shapes.FLOATING:
        raise refuse("unique_consecutive of floating numbers", because="it has no gradient")
    flat = op.Reshape(self, [-1])
    before = op.Slice(flat, [0], [-1], [0], [1])
    after = op.Slice(flat, [1], [INT64_MAX], [0], [1])
    begins = op.Concat(op.constant([True]), op.Not(op.Equal(after, before)), axis=0)
    places = op.Reshape(op.NonZero(begins), [-1])
    ends = op.Concat(op.Slice(places, [1], [INT64_MAX], [0], [1]), op.shape(flat), axis=0)
    number = op.Sub(op.CumSum(op.cast(begins, ir.DataType.INT64), 0), 1)
    return op.Gather(flat, places), op.Reshape(number, op.shape(self)), op.Sub(ends, places)


@translation(aten.scatter.value)
def scatter_value(
    op: Translator, self: ir.Value, dim: int, index: ir.Value, value: Scalar
) -> ir.Value:
    assert self.dtype is not None
    if isinstance(value, ir.Value):  # a size
        fill = op.Cast(value, to=self.dtype) if value.dtype != self.dtype else value
    else:
        fill = op.constant(value, self.dtype)
    return _scatter(op, self, dim, index, op.Expand(fill, op.shape(index)))


@translation(aten.scatter.src)
def scatter(op: Translator, self: ir.Value, dim: int, index: ir.Value, src: ir.Value) -> ir.Value:
    return _scatter(op, self, dim, index, _leading(op, src, index))


@translation(aten.scatter_add.default)
def scatter_add(
    op: Translator, self: ir.Value, dim: int, index: ir.Value, src: ir.Value
) -> ir.Value:
    return _scatter(op, self, dim, index, _leading(op, src, index), "add")


def _scatter(
    op: Translator,
    self: ir.Value,
    dim: int,
    index: ir.Value,
    src: ir.Value,
    reduction: str = "none",
) -> ir.Value:
    rows = _rows(self, dim, index) if reduction == "add" else None
    if rows is not None and dim in (0, -(shapes.rank(self) or 0)):
        places = op.Reshape(from_the_start(op, rows), [-1, 1])
        return op.ScatterND(self, places, src, reduction=reduction)
    places = from_the_start(op, index)
    return op.ScatterElements(self, places, src, axis=dim, reduction=reduction)


def _leading(op: Translator, src: ir.Value, index: ir.Value) -> ir.Value:
    """The part of a source that torch reads: of the shape of the index."""
    if shapes.dims(index) == shapes.dims(src):
        return src
    length = shapes.rank(index)
    assert length is not None
    return op.Slice(src, [0] * length, op.shape(index), list(range(length)), [1] * length)


_SCATTERED = {"sum": "add", "mean": "add", "amax": "max", "amin": "min"}


@translation(aten.scatter_reduce.two)
def scatter_reduce(
    op: Translator,
    self: ir.Value,
    dim: int,
    index: ir.Value,
    src: ir.Value,
    reduce: str,
    *,
    include_self: bool = True,
) -> ir.Value:
    if reduce not in _SCATTERED:
        raise refuse(f"scatter_reduce of a {reduce}")
    alone = reduce in ("amax", "amin") and not include_self
    if self.dtype not in shapes.FLOATING and (reduce == "mean" or alone):
        raise refuse("scatter_reduce of whole numbers")
    assert self.dtype is not None
    src = _leading(op, src, index)
    if not include_self:
        neutral = {"amax": float("-inf"), "amin": float("inf")}.get(reduce, 0.0)
        nothing = op.Expand(op.constant(neutral, self.dtype), op.shape(index))
        self = _scatter(op, self, dim, index, nothing)
    total = _scatter(op, self, dim, index, src, _SCATTERED[reduce])
    if reduce != "mean":
        return total
    one = op.constant(1.0, self.dtype)
    start = op.Expand(one if include_self else op.constant(0.0, self.dtype), op.shape(self))
    start.shape = self.shape
    each = op.Expand(one, op.shape(index))
    count = _scatter(op, start, dim, index, each, "add")
    return op.Div(total, count if include_self else op.Max(count, 1.0))


@translation(aten.sort.default, aten.sort.stable)
def sort(
    op: Translator,
    self: ir.Value,
    dim: int = -1,
    descending: bool = False,
    *,
    stable: bool | None = None,
) -> tuple[ir.Value, ir.Value]:
    """Of equals ``TopK`` takes the first one first, in either direction: it is stable."""
    kind = self.dtype
    known = kind in shapes.FLOATING or kind in (ir.DataType.INT32, ir.DataType.INT64)
    ordered = self if known else op.cast(self, ir.DataType.INT32)
    values, places = op.TopK(
        ordered, op.dim(self, dim), outputs=2, axis=dim, largest=int(descending), sorted=1
    )
    return (values if known or kind is None else op.cast(values, kind)), places
