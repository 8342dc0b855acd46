"""Gathering and scattering."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from ortrain.graph.indices import REFUSES, is_never_negative
from ortrain.runtime.aten.dtypes import UNSIGNED
from ortrain.runtime.aten.kernels.shape import counted, shaped, sized
from ortrain.runtime.aten.operands import Host, product
from ortrain.runtime.aten.table import kernel

# From so many elements a row on, rows are copied whole. PyTorch's general indexing goes element by
# element: of 8 x 512 rows of 64, 8 x 128 take it 240 µs, and rows as such 40.
ROW = 16


# -- reading -------------------------------------------------------------------------------------


@kernel("ortrain::Embedding")
def embedding(t, weight, indices, *, padding_idx=-1):
    """As PyTorch's own, it refuses a negative index."""
    indices = t.tensor(indices)
    return sized(t.embedding(weight, indices), indices.dims + weight.dims[1:])


@kernel("Gather")
def gather(t, data, indices, *, axis=0, node):
    """Places of an axis: a view where they lie one after another."""
    data = t.tensor(data)
    axis %= data.rank
    if isinstance(indices, Host) and len(indices.shape) <= 1:
        items, lead, rest = indices.items, data.dims[:axis], data.dims[axis + 1 :]
        if indices.is_scalar:
            return sized(data.select(axis, items[0]), lead + rest)
        if len(items) == 1 or (indices.known and _is_run(indices.known)):
            return sized(data.narrow(axis, items[0], len(items)), (*lead, len(items), *rest))
    return picked(t, data, t.tensor(indices), axis, node)


def _is_run(items):
    """Whether places follow one another, and are counted from the same end."""
    runs = items == [*range(items[0], items[0] + len(items))]
    return runs and (items[0] >= 0 or items[-1] < 0)


def picked(t, data, indices, axis, node):
    """Places of an axis by a tensor of them, which a node of the program is given."""
    lead, rest = data.dims[:axis], data.dims[axis + 1 :]
    dims = lead + indices.dims + rest
    if REFUSES not in node.metadata_props and math.prod(_known(rest)) < ROW:
        # Indexing knows by itself that negative ones count from the end.
        if data.rank == 1 and indices.dtype is ir.DataType.INT64:
            return sized(data.take(indices), dims)
        return sized(_indexed(t, data, [None] * axis + [indices]), dims)
    indices = from_start(t, indices, data, axis, node)
    if indices.rank == 1:
        return sized(data.index_select(axis, indices), dims)
    if axis == 0 and data.rank == 2:
        return sized(t.embedding(data, indices), dims)
    rows = data.index_select(axis, indices.reshape(-1))
    sizes = data.shape
    return shaped(rows, [*sizes[:axis], *indices.shape, *sizes[axis + 1 :]])


def _known(dims):
    return [d if isinstance(d, int) else ROW for d in dims]


def _indexed(t, data, places):
    """A copy of what is at some places, None for whole axes.

    In brackets, a tensor without axes is asked for its number, and what there is then is a view.
    """
    if any(place is not None and not place.rank for place in places):
        return t.aten.index__Tensor(data, places)
    return t.at(data, *(":" if place is None else place for place in places))


def from_start(t, indices, data, axis, node):
    """A node's indices of an axis without negative ones, which PyTorch's kernels refuse."""
    if REFUSES in node.metadata_props or is_never_negative(node.inputs[1]):
        return indices
    size = data.size(axis)
    if indices.array is not None and isinstance(size, int):
        array = np.where(indices.array < 0, indices.array + size, indices.array)
        return t.constant_tensor(array.astype(indices.array.dtype), "places", indices.dtype)
    forward = t.where(t.lt(indices, 0), t.add(indices, size), indices)
    forward.dtype = indices.dtype
    return forward


@kernel("ortrain::Pack")
def pack(t, data, places):
    """Rows of the batch as a whole."""
    data, places = t.tensor(data), t.tensor(places)
    taken = data.flatten(0, 1).index_select(0, places)
    return sized(taken.unsqueeze(0), (1, *places.dims, *data.dims[2:]))


@kernel("ortrain::Unpack")
def unpack(t, data, places, sizes):
    data, places = t.tensor(data), t.tensor(places)
    lead, rest = t.ints(sizes, 2), data.shape[2:]
    zeros = data.new_zeros([product(lead), *rest])
    return shaped(zeros.index_copy_(0, places, data.select(0, 0)), [*lead, *rest])


@kernel("GatherElements")
def gather_elements(t, data, indices, *, axis=0, node):
    data = t.tensor(data)
    indices = from_start(t, t.tensor(indices), data, axis, node)
    return sized(t.gather(data, axis, _long(indices)), indices.dims)


def _long(indices):
    """``gather`` and ``scatter`` take no other dtype."""
    return indices.to(ir.DataType.INT64) if indices.dtype is not ir.DataType.INT64 else indices


@kernel("GatherND")
def gather_nd(t, data, indices, *, batch_dims=0, node):
    data, indices = t.tensor(data), t.tensor(indices)
    width = indices.dims[-1]
    if not isinstance(width, int):
        return t.call("late.gather_nd", data, indices, batch_dims)
    if width == 1 and not batch_dims:
        return picked(t, data, _last(indices, 0), 0, node)
    ranges = []
    for axis in range(batch_dims):
        column = [1] * (indices.rank - 1)
        column[axis] = -1
        ranges.append(sized(counted(t, data.size(axis)).view(*column), column))
    taken = _indexed(t, data, [*ranges, *(_last(indices, i) for i in range(width))])
    return sized(taken, indices.dims[:-1] + data.dims[batch_dims + width :])


def _last(indices, place):
    column = sized(indices.select(-1, place), indices.dims[:-1])
    column.dtype = indices.dtype
    return column


@kernel("Compress")
def compress(t, input, condition, *, axis=None):
    input, places = t.tensor(input), t.tensor(condition).nonzero().view(-1)
    if axis is None:
        return sized(input.reshape(-1).index_select(0, places), [None])
    dims = [*input.dims]
    dims[axis] = None
    return sized(input.index_select(axis, places), dims)


@kernel("NonZero")
def nonzero(t, x):
    x = t.tensor(x)
    return sized(x.nonzero().t(), [x.rank, None])


@kernel("Unique")
def unique(t, x, *, axis=None, sorted=1, node):
    """The values; where each comes first, which one each element is, and how often it comes."""
    x = t.tensor(x)
    _check_order(t, x, node)
    return t.call("late.unique", x, axis, bool(sorted), outputs=4)[: len(node.outputs)]


def _check_order(t, x, node):
    if x.dtype in UNSIGNED:
        raise t.refusal(node, f"PyTorch cannot order {x.dtype.name.lower()}")


# -- writing -------------------------------------------------------------------------------------

_REDUCTIONS = {"mul": "prod", "max": "amax", "min": "amin"}


@kernel("Scatter", "ScatterElements")
def scatter_elements(t, data, indices, updates, *, axis=0, reduction="none", node):
    data, updates = t.tensor(data), t.tensor(updates)
    indices = _long(from_start(t, t.tensor(indices), data, axis, node))
    if reduction in ("none", "add"):
        function = t.scatter if reduction == "none" else t.scatter_add
        return sized(function(data, axis, indices, updates), data.dims)
    if reduction != "mul":
        _check_order(t, data, node)
    total = t.scatter_reduce(data, axis, indices, updates, _REDUCTIONS[reduction])
    return sized(total, data.dims)


@kernel("ScatterND")
def scatter_nd(t, data, indices, updates, *, reduction="none", node):
    """Reductions are of rows, in their order: with several threads ``index_put`` adds in any."""
    data, indices, updates = t.tensor(data), t.tensor(indices), t.tensor(updates)
    width = indices.dims[-1]
    if reduction in ("max", "min"):
        _check_order(t, data, node)
    if not isinstance(width, int):
        return t.call("late.scatter_nd", data, indices, updates, reduction)
    if reduction == "none":
        places = [_last(indices, i) for i in range(width)]
        return sized(t.index_put(data, places, updates), data.dims)
    row = inside = None
    for axis in range(width):
        place, size = from_start(t, _last(indices, axis), data, axis, node), data.size(axis)
        within = t.logical_and(t.ge(place, 0), t.lt(place, size)) if width > 1 else None
        inside = within if inside is None else t.logical_and(inside, within)
        row = place if row is None else row * size + place
    assert row is not None
    if inside is not None:  # the number of a row could be another's
        row = t.where(inside, row, -1)
    row, lead, rest = row.reshape(-1), data.shape[:width], data.shape[width:]
    rows = data if width == 1 else data.reshape(product(lead), *rest)
    updates = updates.reshape(product(indices.shape[:-1]), *rest)
    if reduction == "add":
        total = rows.index_add(0, row, updates)
    else:
        column = row.reshape(-1, *[1] * len(rest)).expand_as(updates)
        total = rows.scatter_reduce(0, column, updates, _REDUCTIONS[reduction])
    return sized(total if width == 1 else total.reshape(*lead, *rest), data.dims)
