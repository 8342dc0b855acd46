"""The same numbers in memory in other ways: what a tensor of a user or of a view may be like."""

from __future__ import annotations

from collections.abc import Callable

import torch

Layout = Callable[[torch.Tensor], torch.Tensor]


def turned(tensor: torch.Tensor) -> torch.Tensor:
    """The axes in memory from behind, and gaps between the elements."""
    wide = tensor.new_zeros([2 * n for n in tensor.shape[::-1]])
    places = wide[tuple(slice(None, None, 2) for _ in tensor.shape)]
    places.copy_(tensor.permute([*range(tensor.dim())][::-1]))
    return places.permute([*range(tensor.dim())][::-1])


def last_first(tensor: torch.Tensor) -> torch.Tensor:
    """The first axis innermost."""
    if tensor.dim() < 2:
        return tensor.clone()
    return tensor.movedim(0, -1).contiguous().movedim(-1, 0)


def last_swapped(tensor: torch.Tensor) -> torch.Tensor:
    """The last two axes transposed, as of ``x.transpose(-1, -2)``."""
    if tensor.dim() < 2:
        return tensor.clone()
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def heads(tensor: torch.Tensor) -> torch.Tensor:
    """The second and the third axis swapped, as a split into heads leaves them."""
    if tensor.dim() < 3:
        return tensor.clone()
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """The second axis innermost."""
    if tensor.dim() < 3:
        return tensor.clone()
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1)


def cut_out(tensor: torch.Tensor) -> torch.Tensor:
    """A part of something larger along each axis: rows lie apart, and begin anywhere."""
    wide = torch.full([n + 3 for n in tensor.shape], 7, dtype=tensor.dtype)
    part = wide[tuple(slice(1, 1 + n) for n in tensor.shape)]
    return part.copy_(tensor)


def with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """Every second element of a row."""
    if not tensor.dim():
        return tensor.clone()
    wide = torch.full([*tensor.shape[:-1], 2 * tensor.shape[-1]], 7, dtype=tensor.dtype)
    return wide[..., ::2].copy_(tensor)


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    """In one piece that begins at an odd place."""
    flat = torch.full([tensor.numel() + 1], 7, dtype=tensor.dtype)
    return flat[1:].view(tensor.shape).copy_(tensor)


LAYOUTS: dict[str, Layout] = {
    each.__name__: each
    for each in (
        turned, last_first, last_swapped, heads, channels_last, cut_out, with_gaps, unaligned,
    )
}  # fmt: skip
"""Of any numbers."""


def repeated(axis: int) -> Layout:
    """One slice along an axis, which stands for all of them: its stride is 0."""

    def lay(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or not tensor.numel():
            return tensor.clone()
        place = axis % tensor.dim()
        return tensor.narrow(place, 0, 1).clone().expand(tensor.shape)

    return lay
