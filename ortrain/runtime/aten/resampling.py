"""``Resize`` as plain arithmetic along each axis, for the forms that no kernel of PyTorch has.

Where each element of the result lies in the image follows from sizes alone. The nearest places are
picked by index, anything else is a product with a matrix of weights. Both are kept from one run to
the next.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

Tensor = torch.Tensor
Numbers = Sequence[float] | Tensor | None


BY_SIZES = frozenset({"align_corners", "tf_crop_and_resize"})
"""Coordinates that follow from the sizes before and after, of whatever scale these came."""


def resize(
    x: Tensor, axes: Sequence[int], sizes: Numbers, scales: Numbers, roi: Numbers, *, mode: str,
    nearest_mode: str, coordinates: str, a: float, excludes_outside: bool, antialias: bool,
    policy: str, extrapolation: float,
) -> Tensor:  # fmt: skip
    """A tensor of other sizes.

    Args:
        x: the tensor.
        axes: that change.
        sizes: of them afterwards; or else
        scales: of them.
        roi: where they begin, then where they end, as parts of them (tf_crop_and_resize only).
        mode: ``nearest``, ``linear`` or ``cubic``.
        nearest_mode: how a coordinate is rounded.
        coordinates: how a place in the result becomes one in the image.
        a: of cubic weights.
        excludes_outside: whether what is outside has no weight; it is like the edge otherwise.
        antialias: whether weights widen where the result is smaller.
        policy: how sizes keep the aspect ratio.
        extrapolation: what there is outside (tf_crop_and_resize only).
    """
    places, factors = _numbers(roi), _numbers(scales)
    if sizes is not None:
        wanted = [int(n) for n in _numbers(sizes) or ()]
        ratios = [n / x.shape[axis] for n, axis in zip(wanted, axes, strict=True)]
        factors = None
        if policy != "stretch":
            ratio = min(ratios) if policy == "not_larger" else max(ratios)
            factors = [ratio] * len(wanted)
            wanted = [int(ratio * x.shape[axis] + 0.5) for axis in axes]
    else:
        assert factors is not None
        pairs = zip(axes, factors, strict=True)
        wanted = [int(x.shape[axis] * factor) for axis, factor in pairs]
        if coordinates in BY_SIZES:
            factors = None
    for i, axis in enumerate(axes):
        size, count = x.shape[axis], wanted[i]
        factor = None if factors is None else factors[i]
        part = None if places is None else (places[i], places[len(axes) + i])
        if size == count and factor in (None, 1.0) and part in (None, (0.0, 1.0)):
            continue
        form = (size, count, factor, coordinates)
        if mode == "nearest" and part is None:
            x = x.index_select(axis, nearest(*form, nearest_mode, x.device))
            continue
        how = nearest_mode if mode == "nearest" else mode
        weights = matrix(*form, part, how, a, excludes_outside, antialias, x.dtype, x.device)
        x = torch.tensordot(x, weights, ([axis], [1])).movedim(-1, axis)
        if part is not None:
            outside = beyond(*form, part, x.device).view([-1] + [1] * (x.dim() - 1 - axis))
            x = torch.where(outside, extrapolation, x)
    return x


def _numbers(row: Numbers) -> list[float] | None:
    if row is None or (isinstance(row, Tensor) and not row.numel()):
        return None
    return row.tolist() if isinstance(row, Tensor) else list(row)


def _coordinates(
    size: int, count: int, scale: float | None, kind: str, part: tuple[float, float] | None
) -> Tensor:
    """Where in the axis each element of the result lies, float64 [count]."""
    places = torch.arange(count, dtype=torch.float64)
    width = count if scale is None else size * scale
    over, under = (size, count) if scale is None else (1.0, scale)  # by which places are scaled
    if kind == "asymmetric":
        return places * over / under
    if kind == "align_corners":
        return places * 0 if width == 1 else places * (size - 1) / (width - 1)
    if kind == "tf_crop_and_resize":
        begin, end = part or (0.0, 1.0)
        if width == 1:
            return places * 0 + (begin + end) * (size - 1) / 2
        return begin * (size - 1) + places * (end - begin) * (size - 1) / (width - 1)
    if kind == "tf_half_pixel_for_nn":
        return (places + 0.5) * over / under
    if kind == "pytorch_half_pixel" and count == 1:
        return places * 0
    if kind == "half_pixel_symmetric":
        return size / 2 * (1 - count / width) + (places + 0.5) * over / under - 0.5
    if kind in ("half_pixel", "pytorch_half_pixel"):
        return (places + 0.5) * over / under - 0.5
    raise ValueError(f"there is no coordinate_transformation_mode {kind!r}")


def _rounded(x: Tensor, how: str) -> Tensor:
    if how in ("floor", "ceil"):
        return x.floor() if how == "floor" else x.ceil()
    return (x - 0.5).ceil() if how == "round_prefer_floor" else (x + 0.5).floor()


@functools.lru_cache(maxsize=256)
def nearest(
    size: int, count: int, scale: float | None, coordinates: str, how: str, device: torch.device
) -> Tensor:
    """The place in the axis that each element of the result takes, int64 [count]."""
    x = _rounded(_coordinates(size, count, scale, coordinates, None), how)
    return x.long().clamp(0, max(size - 1, 0)).to(device)


def beyond(
    size: int, count: int, scale: float | None, coordinates: str, part: tuple[float, float],
    device: torch.device,
) -> Tensor:  # fmt: skip
    """Whether each element of the result lies outside of the axis."""
    x = _coordinates(size, count, scale, coordinates, part)
    return ((x < 0) | (x > size - 1)).to(device)


@functools.lru_cache(maxsize=256)
def matrix(
    size: int, count: int, scale: float | None, coordinates: str,
    part: tuple[float, float] | None, how: str, a: float, excludes_outside: bool, antialias: bool,
    dtype: torch.dtype, device: torch.device,
) -> Tensor:  # fmt: skip
    """The weights [count, size] with which the elements of an axis make those of the result."""
    x = _coordinates(size, count, scale, coordinates, part)
    shrink = min(scale if scale is not None else count / size, 1.0) if antialias else 1.0
    around = math.ceil(2 / shrink) + 1
    places = torch.arange(-around, size + around)
    if how in ("linear", "cubic"):
        distance = ((x[:, None] - places) * shrink).abs()
        weights = (1 - distance).clamp(min=0) if how == "linear" else _cubic(distance, a)
    else:
        weights = (_rounded(x, how)[:, None] == places).double()
    if excludes_outside:
        weights[:, (places < 0) | (places >= size)] = 0
    if excludes_outside or antialias:
        total = weights.sum(1, keepdim=True)
        weights = weights / torch.where(total == 0, 1, total)
    folded = torch.zeros(count, size, dtype=torch.float64)
    folded.index_add_(1, places.clamp(0, size - 1), weights)
    return folded.to(dtype).to(device)


def _cubic(distance: Tensor, a: float) -> Tensor:
    """The weight of a place by its distance: Keys, Cubic convolution interpolation (1981)."""
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return torch.where(distance <= 1, near, torch.where(distance < 2, far, 0.0))
