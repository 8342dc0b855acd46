"""What a running function calls where its source cannot say how: it depends on what comes late.

A program whose shapes are inputs does not tell how many axes its tensors have. These functions are
the general forms of kernels, for such programs; the others never meet them.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ortrain.runtime.aten.size_rules import bounded

Tensor = torch.Tensor


def reshape(x: Tensor, shape: Tensor, allowzero: bool) -> Tensor:
    """``Reshape``: 0 stands for the size that there was, unless it is allowed as a size."""
    sizes = shape.tolist()
    if not allowzero:
        sizes = [x.shape[i] if size == 0 else size for i, size in enumerate(sizes)]
    return x.reshape(sizes)


def expand(x: Tensor, shape: Tensor) -> Tensor:
    """``Expand``: to the shape that both broadcast to."""
    return x.expand(torch.broadcast_shapes(x.shape, tuple(shape.tolist())))


def unsqueeze(x: Tensor, axes: Tensor) -> Tensor:
    """``Unsqueeze``: axes of the result."""
    places = axes.tolist()
    rank = x.dim() + len(places)
    for axis in sorted(a % rank for a in places):
        x = x.unsqueeze(axis)
    return x


def squeeze(x: Tensor, axes: Tensor) -> Tensor:
    """``Squeeze``: of some axes."""
    return x.squeeze(axes.tolist())


def backwards(start: int, end: int, step: int, size: int) -> builtins.slice:
    """The places of a slice whose step is negative, in the order in which they lie."""
    picked = range(size)[bounded(start, end, step, size)]
    if not picked:
        return builtins.slice(0, 0)
    return builtins.slice(picked[-1], picked[0] + 1, -step)


def slice(
    x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None, steps: Tensor | None
) -> Tensor:
    """``Slice`` by bounds of an unknown number."""
    begin, end = starts.tolist(), ends.tolist()
    over: Sequence[int] = range(len(begin)) if axes is None else axes.tolist()
    by = [1] * len(begin) if steps is None else steps.tolist()
    places, turned = [builtins.slice(None)] * x.dim(), []
    for axis, low, high, step in zip(over, begin, end, by, strict=True):
        if step < 0:
            turned.append(axis)
            places[axis] = backwards(low, high, step, x.shape[axis])
        else:
            places[axis] = builtins.slice(low, high, step)
    view = x[tuple(places)]
    return view.flip(turned) if turned else view


def places_around(size: int, low: int, high: int, mode: str, device: torch.device) -> Tensor:
    """Where each element of a padded axis comes from, where it repeats what is inside."""
    begin, end = max(-low, 0), size + min(high, 0)
    inside = end - begin
    places = torch.arange(-max(low, 0), inside + max(high, 0), device=device)
    if mode == "edge":
        places = places.clamp(0, inside - 1)
    elif mode == "wrap":
        places = places.remainder(inside)
    else:
        last = inside - 1
        places = last - (places.remainder(max(2 * last, 1)) - last).abs()
    return places + begin


def repeated(kernel: Callable[..., Tensor], x: Tensor, pads: Sequence[int]) -> Tensor:
    """A kernel that puts copies around a tensor; it refuses one of no elements.

    Args:
        kernel: of PyTorch.
        x: the tensor.
        pads: before and after each axis, the last axis first.
    """
    sizes = list(x.shape)
    for i, more in enumerate(map(sum, zip(pads[::2], pads[1::2], strict=True))):
        if more and not sizes[-1 - i]:
            return kernel(x, pads)  # there is nothing to copy, as it says
        sizes[-1 - i] += more
    return kernel(x, pads) if x.numel() else x.new_empty(sizes)


def of_channels(kernel: Callable[..., Any], *given: Any) -> Any:
    """What a kernel makes of images; no channels lie in a batch of none, which it takes.

    Args:
        kernel: of PyTorch.
        given: its operands, of which tensors are images [N, C, *].
    """
    batch, channels = next(a.shape[:2] for a in given if isinstance(a, Tensor))
    if channels:
        return kernel(*given)
    found = kernel(*(a.reshape(0, 1, *a.shape[2:]) if isinstance(a, Tensor) else a for a in given))
    if isinstance(found, Tensor):
        return found.reshape(batch, 0, *found.shape[2:])
    return tuple(y.reshape(batch, 0, *y.shape[2:]) for y in found)


def pad(x: Tensor, pads: Tensor, fill: Tensor | float, axes: Tensor, mode: str) -> Tensor:
    """``Pad`` of an unknown number of axes."""
    flat, picked = pads.tolist(), axes.tolist()
    around = [(0, 0)] * x.dim()
    for axis, low, high in zip(picked, flat, flat[len(picked) :], strict=False):
        around[axis] = (low, high)
    if mode == "constant":
        number = fill.item() if isinstance(fill, Tensor) else fill
        return torch.constant_pad_nd(x, [n for pair in reversed(around) for n in pair], number)
    for axis, (low, high) in enumerate(around):
        x = x.index_select(axis, places_around(x.shape[axis], low, high, mode, x.device))
    return x


def shape(x: Tensor, start: int, end: int | None) -> Tensor:
    """``Shape`` of a tensor of unknown rank."""
    return torch.tensor(x.shape[start:end], dtype=torch.int64, device=x.device)


def count(x: Tensor) -> Tensor:
    """``Size`` of a tensor of unknown rank."""
    return torch.tensor(x.numel(), dtype=torch.int64, device=x.device)


def full(shape: Tensor, number: float, dtype: torch.dtype) -> Tensor:
    """``ConstantOfShape`` of unknown rank."""
    return torch.full(shape.tolist(), number, dtype=dtype, device=shape.device)


def arange(
    start: Tensor | float, limit: Tensor | float, delta: Tensor | float, dtype: torch.dtype,
    device: torch.device,
) -> Tensor:  # fmt: skip
    """``Range`` between numbers that are computed."""
    first, last, step = (n.item() if isinstance(n, Tensor) else n for n in (start, limit, delta))
    if (last - first) * step < 0:
        last = first
    return torch.arange(first, last, step, dtype=dtype, device=device)


def reduce(
    function: Callable[..., Tensor], x: Tensor, axes: Tensor, keep: bool, noop: bool,
    **options: torch.dtype,
) -> Tensor:  # fmt: skip
    """``Reduce…`` over axes of an unknown number; of none over all, unless it is to do nothing."""
    over = axes.tolist()
    if not over and noop:
        return x
    return function(x, over or [*range(x.dim())], keep, **options)


def prod(x: Tensor, axes: Sequence[int], keep: bool, dtype: torch.dtype | None = None) -> Tensor:
    """A product over several axes, in memory of its own."""
    if not axes:
        return x.prod(dtype=dtype)  # a number
    for axis in sorted((a % x.dim() for a in axes), reverse=True):
        x = x.prod(axis, keep, dtype=dtype)
    return x


def amax(x: Tensor, axes: Sequence[int], keep: bool) -> Tensor:
    """``ReduceMax``: of nothing, the least number of the dtype."""
    return torch.amax(x, [*axes], keep) if x.numel() else _of_nothing(x, axes, keep, -1)


def amin(x: Tensor, axes: Sequence[int], keep: bool) -> Tensor:
    """``ReduceMin``: of nothing, the greatest number of the dtype."""
    return torch.amin(x, [*axes], keep) if x.numel() else _of_nothing(x, axes, keep, 1)


def _of_nothing(x: Tensor, axes: Sequence[int], keep: bool, sign: int) -> Tensor:
    number: float
    if x.dtype is torch.bool:
        number = sign > 0
    elif x.dtype.is_floating_point:
        number = sign * math.inf
    else:
        limits = torch.iinfo(x.dtype)
        number = limits.max if sign > 0 else limits.min
    over = {axis % x.dim() for axis in axes}
    sizes = [1 if i in over else n for i, n in enumerate(x.shape) if keep or i not in over]
    return x.new_full(sizes, number)


def hardmax(x: Tensor, axis: int) -> Tensor:
    """``Hardmax`` of what may be nothing."""
    zeros = torch.zeros_like(x)
    return zeros.scatter_(axis, x.argmax(axis, True), 1.0) if x.numel() else zeros


def variance(x: Tensor, unbiased: Tensor) -> Tensor:
    """The variance of each channel, of which PyTorch has said what is n / (n - 1) of it."""
    count = x.numel() // max(x.shape[1], 1)
    if count > 1:
        return unbiased * ((count - 1) / count)
    return x.to(unbiased.dtype).var([0, *range(2, x.dim())], correction=0)


def in_one_order(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors of one shape that lie in one piece, all row by row or all with the channels last.

    Those that already do are given back as they are.
    """
    formats = [torch.contiguous_format]
    formats += {4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(tensors[0].dim(), [])
    for form in formats:
        if all(t.is_contiguous(memory_format=form) for t in tensors):
            return tensors
    return tuple(t.contiguous() for t in tensors)


def shifted(x: Tensor, axis: int, first: float) -> Tensor:
    """Each element one place further along an axis, which the last one leaves."""
    if not x.numel():
        return x.clone()
    around = [0, 0] * (x.dim() - 1 - axis % x.dim()) + [1, -1]
    return torch.constant_pad_nd(x, around, first)


def gather_nd(x: Tensor, indices: Tensor, batch_dims: int) -> Tensor:
    """``GatherND`` of indices of unknown width."""
    ranges = []
    for axis in range(batch_dims):
        column = [1] * (indices.dim() - 1)
        column[axis] = -1
        ranges.append(torch.arange(x.shape[axis], device=x.device).view(column))
    # In brackets, a tensor without axes would give a view.
    return torch.ops.aten.index.Tensor(x, [*ranges, *indices.unbind(-1)])


def scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, reduction: str) -> Tensor:
    """``ScatterND`` at indices of unknown width."""
    places = indices.unbind(-1)
    if reduction == "none":
        return x.index_put(places, updates)
    count = len(places)
    numbers = torch.arange(math.prod(x.shape[:count]), device=x.device)
    row = torch.ops.aten.index.Tensor(numbers.view(x.shape[:count]), [*places]).reshape(-1)
    rows = x.reshape(math.prod(x.shape[:count]), *x.shape[count:])
    rest = updates.reshape(row.numel(), *x.shape[count:])
    if reduction == "add":
        return rows.index_add(0, row, rest).view(x.shape)
    kind = {"mul": "prod", "max": "amax", "min": "amin"}[reduction]
    column = row.view(-1, *[1] * (rest.dim() - 1)).expand_as(rest)
    return rows.scatter_reduce(0, column, rest, kind).view(x.shape)


def unique(x: Tensor, axis: int | None, is_sorted: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``Unique``: the values, where each comes first, which one each element is, and counts."""
    values, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True, dim=axis)
    inverse = inverse.reshape(-1)
    places = torch.arange(len(inverse), device=x.device)
    first = places.new_full(counts.shape, len(inverse)).scatter_reduce(0, inverse, places, "amin")
    if is_sorted:
        return values, first, inverse, counts
    order = first.argsort()
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    return values.index_select(axis or 0, order), first[order], rank[inverse], counts[order]


def overhang(size: int, low: int, high: int, span: int, stride: int) -> int:
    """The pads at the end of an axis that is pooled in ceil mode: its last window may hang over.

    It begins within the axis, or in what is before it.
    """
    count = -(-(size + low + high - span) // stride) + 1
    if (count - 1) * stride >= size + low:
        count -= 1
    return (count - 1) * stride + span - size - low


def plane(
    sizes: Sequence[int], around: Sequence[Sequence[int]], columns_first: bool, device: torch.device
) -> Tensor:
    """The number in its own plane of each place of a padded plane, which is flat; -1 around."""
    numbers = torch.arange(math.prod(sizes), device=device)
    if columns_first:
        numbers = numbers.view([*sizes][::-1]).permute([*range(len(sizes))][::-1])
    else:
        numbers = numbers.view([*sizes])
    flat = [n for pair in reversed(around) for n in pair]
    return torch.constant_pad_nd(numbers, flat, -1).reshape(-1)


def shares(
    sizes: Sequence[int], kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int],
    pads: Sequence[Sequence[int]], around: Sequence[Sequence[int]], counts_pads: bool,
    device: torch.device,
) -> Tensor:  # fmt: skip
    """What a mean over whole windows is to be multiplied with, so that it divides by what counts.

    Args:
        sizes: of the image.
        kernel: sizes of the window.
        strides: of its steps.
        dilations: of its places.
        pads: that the operator names, at the beginning and the end of each axis.
        around: zeros that there are.
        counts_pads: whether the pads count; what hangs over in ceil mode never does.
        device: of the result.

    Returns:
        float64 [*windows].
    """
    result = torch.ones([], dtype=torch.float64, device=device)
    rows = zip(sizes, kernel, strides, dilations, pads, around, strict=True)
    for size, count, stride, dilation, (low, high), (begin, end) in rows:
        windows = (size + begin + end - (count - 1) * dilation - 1) // stride + 1
        starts = torch.arange(windows, device=device)[:, None] * stride - begin
        places = starts + torch.arange(count, device=device) * dilation
        first, last = (-low, size + high) if counts_pads else (0, size)
        counted = ((first <= places) & (places < last)).sum(1)
        result = result[..., None] * (count / counted.double())
    return result
