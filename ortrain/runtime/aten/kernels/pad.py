"""Operators that put something around a tensor, or take it away."""

from __future__ import annotations

import numpy as np

from ortrain.graph.shapes import FLOATING
from ortrain.runtime.aten.kernels.shape import has_some, known, number, sized
from ortrain.runtime.aten.lines import Raw
from ortrain.runtime.aten.operands import Size, Tensor
from ortrain.runtime.aten.table import kernel


@kernel("Pad")
def pad(t, data, pads, constant_value=None, axes=None, *, mode="constant", value=0.0):
    data, fill = t.tensor(data), value if constant_value is None else number(constant_value)
    picked = [*range(data.rank)] if axes is None else known(axes)
    if picked is None:
        return t.call("late.pad", data, pads, fill, axes, mode)
    flat = t.ints(pads, count=2 * len(picked))
    around = [(0, 0)] * data.rank
    for axis, *pair in zip(picked, flat, flat[len(picked) :], strict=False):
        around[axis] = tuple(pair)
    if all(pair == (0, 0) for pair in around):
        return data
    if mode != "constant":
        return _repeated(t, data, around, mode)
    if not isinstance(fill, Tensor):
        return padded(t, data, around, fill)
    # A number that only a tensor knows: asking for it would wait for a GPU.
    ones = sized(t.ones_like(data, dtype=Raw("torch.bool")), data.dims)
    whole, inside = padded(t, data, around), padded(t, ones, around, False)
    return sized(t.where(inside, whole, fill.reshape([])), whole.dims)


@kernel("CenterCropPad")
def center_crop_pad(t, input_data, shape, *, axes=None):
    """Half of what is missing or too much on either side, the odd one at the end."""
    data = t.tensor(input_data)
    axes = [*range(data.rank)] if axes is None else axes
    around = [(0, 0)] * data.rank
    for axis, wanted in zip(axes, t.ints(shape, count=len(axes)), strict=True):
        more = wanted - data.size(axis)
        low = int(more / 2) if isinstance(more, int) else t.bound(Size(f"host.div({more}, 2)"))
        around[axis] = (low, more - low)
    return padded(t, data, around)


def padded(t, data, around, fill=0):
    """Constants around a tensor: a pair (before, after) for each axis, cropped where negative."""
    dims = _sizes(data, around)
    while around and around[0] == (0, 0):
        around = around[1:]
    if not around:
        return data
    flat = [n for pair in reversed(around) for n in pair]
    whole = sized(t.constant_pad_nd(data, flat, fill), dims)
    whole.dtype = data.dtype
    return whole


def _sizes(data, around):
    rows = zip(data.dims, around, strict=True)
    return [
        d if pair == (0, 0) else sum(pair, d) if isinstance(d, int) else None for d, pair in rows
    ]


# -- copies of what is inside --------------------------------------------------------------------

_FUSED = {"reflect": "reflection", "edge": "replication"}
_LATE = "late.repeated"


def _repeated(t, data, around, mode):
    first = next(axis for axis, pair in enumerate(around) if pair != (0, 0))
    count = max(data.rank - first, data.rank - 2)  # a kernel takes one or two axes more
    fits = mode in _FUSED and data.dtype in FLOATING and count <= min(3, data.rank - 1)
    pairs = zip(data.dims, around, strict=True)
    if fits and all(_is_within(size, pair, mode) for size, pair in pairs):
        flat = [n for pair in reversed(around[-count:]) for n in pair]
        function = f"torch._C._nn.{_FUSED[mode]}_pad{count}d"
        some = has_some(data)
        whole = t.call(function, data, flat) if some else t.call(_LATE, Raw(function), data, flat)
        return sized(whole, _sizes(data, around))
    for axis, pair in enumerate(around):
        if pair != (0, 0):
            dims = _sizes(data, [pair if i == axis else (0, 0) for i in range(data.rank)])
            data = sized(data.index_select(axis, _places(t, data, axis, pair, mode)), dims)
    return data


def _is_within(size, pair, mode):
    """Whether PyTorch takes such pads: none is negative, and one that reflects is no longer."""
    if not all(isinstance(n, int) and n >= 0 for n in pair):
        return False
    return mode != "reflect" or not isinstance(size, int) or max(pair) < size


def _places(t, data, axis, pair, mode):
    """Where each element of the padded axis comes from."""
    size = data.dims[axis]
    if not all(isinstance(n, int) for n in (size, *pair)):
        return t.call("late.places_around", data.size(axis), *pair, mode, Raw("device"))
    low, high = pair
    inside = np.arange(size)[max(-low, 0) : size + min(high, 0)]
    return t.constant_tensor(np.pad(inside, (max(low, 0), max(high, 0)), mode=mode), "places")
