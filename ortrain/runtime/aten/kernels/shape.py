"""Operators that move elements, whole axes at a time."""

from __future__ import annotations

import numpy as np

from ortrain.runtime.aten.lines import Raw
from ortrain.runtime.aten.operands import Host, Size, Tensor, product
from ortrain.runtime.aten.size_rules import bounded
from ortrain.runtime.aten.table import kernel

# What a slice that ends "at the end" ends at, as ONNX's own tests and exporters write it.
END = 2**31 - 1
# So many numbers may be a constant of the function.
MOST = 1 << 14


# -- the same elements in another shape ----------------------------------------------------------


@kernel("Reshape")
def reshape(t, data, shape, *, allowzero=0):
    data = t.tensor(data)
    if is_open(shape) or data.dims is None:
        return t.call("late.reshape", data, shape, bool(allowzero))
    sizes = t.ints(shape)
    if not allowzero:
        sizes = [_kept(data, axis, size) for axis, size in enumerate(sizes)]
    return shaped(data, sizes)


def _kept(data, axis, size):
    """The size, of which 0 says that it stays."""
    if axis >= data.rank or (isinstance(size, int) and size):
        return size
    own = data.size(axis)
    return own if size in (0, own) else Size(f"({size} or {own})")


def shaped(data, sizes):
    """A reshape."""
    return sized(data.reshape(*sizes) if sizes else data.reshape([]), sizes)


def has_some(x):
    """Whether a tensor is known to have elements: of none, some of PyTorch's kernels refuse."""
    return x.dims is not None and all(isinstance(d, int) and d > 0 for d in x.dims)


def of_channels(t, function, *given, outputs=1):
    """A call of a kernel for images, which by itself would refuse those of no channels."""
    images = [a.dims for a in given if isinstance(a, Tensor) and a.dims is not None]
    if any(isinstance(dims[1], int) and dims[1] > 0 for dims in images):
        return t.call(function, *given, outputs=outputs)
    return t.call("late.of_channels", Raw(function), *given, outputs=outputs)


def sized(tensor, sizes):
    """A tensor of which it is noted what is known of its sizes."""
    tensor.dims = tuple(None if isinstance(s, Size) or s == -1 else s for s in sizes)
    return tensor


def in_rows(x):
    """In one piece: of the statistics and weights of norms PyTorch's kernels read no strides.

    Of images they do, and add up less exactly where the channels lie last.
    """
    return x if x is None or x.is_contiguous else x.contiguous()


def known(row):
    """The numbers of an operand or attribute, where they are known."""
    if isinstance(row, list):
        return row
    return row.known if isinstance(row, Host) else None


def is_open(operand):
    """Whether it is not known how many numbers a tensor has."""
    if isinstance(operand, (Host, list)) or operand is None:
        return False
    dims = operand.dims
    return dims is None or (dims != () and not isinstance(dims[0], int))


def counted(t, count, step=1):
    """0, 1, 2, … or their multiples, int64 [count]."""
    if isinstance(count, int) and isinstance(step, int) and count <= MOST:
        return t.constant_tensor(np.arange(count) * step, "numbers")
    return sized(t.arange(0, count * step, step, device=Raw("device")), [count])


def number(operand):
    """The one number in an operand, where it is known; else the operand."""
    if isinstance(operand, Host):
        return operand.items[0]
    return operand if operand.array is None else by_bits(operand.array).reshape(-1)[0].item()


def by_bits(array):
    """An array as tensors hold it: unsigned numbers of several bytes by their bits."""
    wide = array.dtype.kind == "u" and array.dtype.itemsize > 1
    return array.view(f"i{array.dtype.itemsize}") if wide else array


@kernel("Flatten")
def flatten(t, input, *, axis=1):
    input = t.tensor(input)
    axis = axis + input.rank if axis < 0 else axis
    rows, columns = product(input.shape[:axis]), product(input.shape[axis:])
    return shaped(input, [rows, columns])


@kernel("Unsqueeze")
def unsqueeze(t, data, axes):
    data = t.tensor(data)
    places = known(axes)
    if places is None or data.dims is None:
        return t.call("late.unsqueeze", data, axes)
    rank = data.rank + len(places)
    inserted = sorted(axis % rank for axis in places)
    own = iter(data.dims)
    dims = tuple(1 if i in inserted else next(own) for i in range(rank))
    sizes = [d if isinstance(d, int) else t.symbols.get(d, -1) for d in dims]
    if len(inserted) > 1 and sizes.count(-1) <= 1:
        return sized(data.view(*sizes), dims)
    for axis in inserted:
        data = data.unsqueeze(axis)
    return sized(data, dims) if inserted else data


@kernel("Squeeze")
def squeeze(t, data, axes=None):
    data = t.tensor(data)
    if axes is None:
        return data.squeeze()
    places = known(axes)
    if places is None or data.dims is None:
        return t.call("late.squeeze", data, axes)
    gone = [axis % data.rank for axis in places]
    if not gone:
        return data
    dims = [d for i, d in enumerate(data.dims) if i not in gone]
    return sized(data.squeeze(gone[0] if len(gone) == 1 else gone), dims)


@kernel("Transpose")
def transpose(t, data, *, perm=None):
    data = t.tensor(data)
    order = [*range(data.rank)][::-1] if perm is None else list(perm)
    moved = [axis for axis, source in enumerate(order) if axis != source]
    if not moved:
        return data
    turned = data.transpose(*moved) if len(moved) == 2 else data.permute(*order)
    return sized(turned, [data.dims[axis] for axis in order])


@kernel("Expand")
def expand(t, input, shape):
    """The sizes of both, broadcast: a 1 in the shape leaves the input's own size."""
    input = t.tensor(input)
    if is_open(shape) or input.dims is None:
        return t.call("late.expand", input, shape)
    sizes = t.ints(shape)
    lead = len(sizes) - input.rank
    sizes = [1] * -lead + sizes
    lead = max(lead, 0)
    wide = [*sizes[:lead], *(_wider(input, i, s) for i, s in enumerate(sizes[lead:]))]
    if all(size == -1 for size in wide):
        return input
    own = [None] * lead + [*input.dims]
    dims = [d if size == -1 else size for size, d in zip(wide, own, strict=True)]
    return sized(input.expand(*wide), dims)


def _wider(input, axis, size):
    """The size for ``expand``, to which -1 says that it stays."""
    own = input.dims[axis]
    if size == 1 or (isinstance(own, int) and own != 1):
        return -1
    if own == 1:
        return size
    own = input.size(axis)
    if own == size:
        return -1
    return Size(f"({own} if {size} == 1 else {size})") if isinstance(size, Size) else size


@kernel("Tile")
def tile(t, input, repeats):
    input = t.tensor(input)
    times = t.ints(repeats, count=input.rank)
    if all(n == 1 for n in times):
        return input
    pairs = [*zip(times, input.dims, strict=True)]
    dims = [d if n == 1 else n * d if isinstance(d, int) else None for n, d in pairs]
    if all(n == 1 or d == 1 for n, d in pairs):
        return sized(input.expand(*(-1 if n == 1 else n for n in times)), dims)
    return sized(input.repeat(*times), dims)


# -- together and apart --------------------------------------------------------------------------


@kernel("Concat")
def concat(t, *inputs, axis):
    parts = [t.tensor(part) for part in inputs]
    if len(parts) == 1:
        return parts[0]
    columns = [*zip(*(part.dims for part in parts), strict=True)]
    dims = [next((d for d in column if isinstance(d, int)), column[0]) for column in columns]
    lengths = columns[axis]
    dims[axis] = sum(lengths) if all(isinstance(n, int) for n in lengths) else None
    return sized(t.cat(parts, axis), dims)


@kernel("Split")
def split(t, input, split=None, *, axis=0, num_outputs=None, node):
    """Parts of equal size by default, of which the last may be smaller."""
    input, count = t.tensor(input), len(node.outputs)
    if split is not None:
        sizes = t.ints(split, count=count)
    elif isinstance(size := input.size(axis), int):
        each = -(-size // count)
        sizes = [each] * (count - 1) + [size - each * (count - 1)]
        if sizes[-1] < 0:
            raise t.refusal(node, f"{size} cannot be split into {count} parts of {each}")
    else:
        each = t.bound(Size(f"-(-{size} // {count})"))
        sizes = [each] * (count - 1) + [size - each * (count - 1)]
    if count == 1:
        return input
    parts = input.split_with_sizes(sizes, axis, outputs=count)
    axis %= input.rank
    lead, rest = input.dims[:axis], input.dims[axis + 1 :]
    return [sized(p, [*lead, size, *rest]) for p, size in zip(parts, sizes, strict=True)]


@kernel("Slice")
def slice(t, data, starts, ends, axes=None, steps=None):
    """Bounds mean what they mean in Python, but for those before the start of a step backwards."""
    data = t.tensor(data)
    rows = (starts, ends, axes, steps)
    count = next((_length(r) for r in rows if r is not None and not is_open(r)), None)
    over, step = (None if r is None else known(r) for r in (axes, steps))
    over = [*range(count)] if axes is None and count is not None else over
    step = [1] * len(over) if steps is None and over is not None else step
    if over is None or step is None:
        return t.call("late.slice", data, *rows)
    bounds = zip(over, t.ints(starts, count), t.ints(ends, count), step, strict=True)
    places, turned, dims = [":"] * data.rank, [], [*data.dims]
    for axis, start, end, stride in bounds:
        axis %= data.rank
        dims[axis] = _taken(data.dims[axis], start, end, stride)
        if stride < 0:
            turned.append(axis)
            places[axis] = _backwards(data, axis, start, end, stride)
        else:
            stop = "" if _is_beyond(end) else end
            step = f":{stride}" if stride != 1 else ""
            places[axis] = f"{'' if start == 0 else start}:{stop}{step}"
    view = viewed(t, data, places)
    view = view.flip(turned) if turned else view
    return view if view is data else sized(view, dims)


def _taken(size, start, end, step):
    """How many places a slice takes, where that is known."""
    if not all(isinstance(n, int) for n in (size, start, end)):
        return None
    return len(range(size)[bounded(start, end, step, size)])


def _length(row):
    return len(row) if isinstance(row, list) else row.shape[0]


def _backwards(data, axis, start, end, step):
    """The places that a step backwards visits, in the order in which they lie."""
    size = data.dims[axis]
    if all(isinstance(n, int) for n in (size, start, end)):
        picked = range(size)[bounded(start, end, step, size)]
        return f"{picked[-1]}:{picked[0] + 1}:{-step}" if picked else "0:0"
    if step == -1 and (start == -1 or _is_beyond(start)) and _is_beyond(end, -1):
        return ":"
    return f"late.backwards({start}, {end}, {step}, {data.size(axis)})"


def _is_beyond(bound, sign=1):
    return isinstance(bound, int) and bound * sign >= END


def viewed(t, data, places):
    """A view by source such as ``1:3`` for each axis; the tensor itself where that is all of it."""
    picked = [axis for axis, place in enumerate(places) if place != ":"]
    if not picked:
        return data
    if picked[0] > 1 and picked[-1] == len(places) - 1:
        return t.at(data, "...", *places[picked[0] :])
    return t.at(data, *places[: picked[-1] + 1])


@kernel("Trilu")
def trilu(t, input, k=None, *, upper=1):
    (diagonal,) = [0] if k is None else t.ints(k, count=1)
    input = t.tensor(input)
    return sized((t.triu if upper else t.tril)(input, diagonal), input.dims)


# -- blocks --------------------------------------------------------------------------------------


@kernel("DepthToSpace")
def depth_to_space(t, input, *, blocksize, mode="DCR"):
    n, channels, h, w = input.shape
    depth = _divided(channels, blocksize * blocksize)
    wide = [n, depth, h * blocksize, w * blocksize]
    if mode == "CRD":
        return sized(t.pixel_shuffle(input, blocksize), wide)
    blocks = input.reshape(n, blocksize, blocksize, depth, h, w)
    return shaped(blocks.permute(0, 3, 4, 1, 5, 2), wide)


@kernel("SpaceToDepth")
def space_to_depth(t, input, *, blocksize, mode="DCR"):
    n, c, h, w = input.shape
    h, w = (_divided(size, blocksize) for size in (h, w))
    deep = [n, c * blocksize * blocksize, h, w]
    if mode == "CRD":
        return sized(t.pixel_unshuffle(input, blocksize), deep)
    blocks = input.reshape(n, c, h, blocksize, w, blocksize)
    return shaped(blocks.permute(0, 3, 5, 1, 2, 4), deep)


def _divided(size, by):
    return size // by if isinstance(size, int) else Size(f"({size} // {by})")


@kernel("ReverseSequence")
def reverse_sequence(t, input, sequence_lens, *, batch_axis=1, time_axis=0):
    """The first elements of each sequence from behind, the rest as it was."""
    input, lengths = t.tensor(input), t.tensor(sequence_lens)
    times, batches = (counted(t, input.size(axis)) for axis in (time_axis, batch_axis))
    if time_axis == 0:
        times = times.unsqueeze(1)
    else:
        lengths, batches = lengths.unsqueeze(1), batches.unsqueeze(1)
    places = t.where(t.lt(times, lengths), t.sub(lengths, times) - 1, times)
    turned = t.at(input, *((places, batches) if time_axis == 0 else (batches, places)))
    return sized(turned, input.dims)
