"""How tensors lie in memory: in which order their axes do.

What PyTorch computes lies as its inputs do: a convolution of images in ``channels_last`` gives such
images, and ``x.t() * 2`` is transposed. Who views an output outside of the module relies on that.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
# A convolution of it gives contiguous images, and an addition may not.
OVERLAPPING = "an expanded batch of images whose axes are permuted"


def layout_of(tensor: Tensor) -> Hashable:
    """What a call's key holds of a tensor's place in memory.

    ``torch.strided`` where its axes lie in their order, with gaps or without; else their order. Of
    images an axis of one counts, too: grey ones in ``channels_last`` are told by its stride.
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor.layout
    if tensor.is_contiguous() and not may_be_channels_last(tensor):
        return torch.strided
    sizes, strides = tensor.shape, tensor.stride()
    moves = [axis for axis, stride in enumerate(strides) if stride or sizes[axis] == 1]
    axes = order_of(sizes, strides, moves)
    if axes == moves:
        return torch.strided
    if len(moves) < len(sizes):
        if len(sizes) in (4, 5):
            return OVERLAPPING
        axes = order_of(sizes, torch.empty_like(tensor, device="meta").stride())
    return tuple(axes)


def may_be_channels_last(tensor: Tensor) -> bool:
    """Whether they are images without gaps whose channels lie last, or may be by their sizes."""
    form = _CHANNELS_LAST.get(tensor.ndim)
    return form is not None and tensor.is_contiguous(memory_format=form)


def order_of(
    sizes: Sequence[int], strides: Sequence[int], axes: Iterable[int] | None = None
) -> list[int]:
    """Axes, all where none are named, from the outermost in memory to the innermost."""
    axes = range(len(sizes)) if axes is None else axes
    return sorted(axes, key=lambda axis: (-strides[axis], sizes[axis] == 1))


def inverse(axes: Sequence[int]) -> tuple[int, ...]:
    """The permutation that undoes another one."""
    return tuple(sorted(range(len(axes)), key=axes.__getitem__))


def laid(tensor: Tensor, axes: Sequence[int], back: Sequence[int] | None = None) -> Tensor:
    """The tensor without gaps, with its axes in an order, from the outermost to the innermost.

    Args:
        tensor: any.
        axes: the order.
        back: its inverse, where that is known.
    """
    turned = tensor.permute(*axes).contiguous()
    if 1 in turned.shape:  # along such an axis any stride is contiguous, and convolutions read it
        turned = turned.view(-1).view(turned.shape)
    return turned.permute(*(inverse(axes) if back is None else back))


def without_gaps(tensor: Tensor) -> Tensor:
    """The tensor, or a copy without gaps that has the same layout."""
    return tensor.contiguous() if layout_of(tensor) is torch.strided else tensor.clone()


def nestings(sizes: Sequence[int], strides: Sequence[int]) -> set[tuple[int, int]]:
    """Which axis lies directly around which other one; -1 is the element.

    A tensor has every view that another one has if it has all of its nestings.
    """
    moves = [axis for axis, size in enumerate(sizes) if size > 1]
    spans = [(axis, sizes[axis] * strides[axis]) for axis in moves]
    pairs = [(axis, other, span) for axis in moves for other, span in [*spans, (-1, 1)]]
    return {(axis, other) for axis, other, span in pairs if strides[axis] == span != 0}
