"""Images of other sizes, and images at other places."""

from __future__ import annotations

import numpy as np
import torch

from ortrain.graph.shapes import FLOATING
from ortrain.runtime.aten import resampling
from ortrain.runtime.aten.kernels.shape import is_open, shaped, sized
from ortrain.runtime.aten.operands import Host, Size, Tensor, product
from ortrain.runtime.aten.table import kernel


@kernel("Resize")
def resize(
    t, x, roi=None, scales=None, sizes=None, *, antialias=0, axes=None,
    coordinate_transformation_mode="half_pixel", cubic_coeff_a=-0.75, exclude_outside=0,
    extrapolation_value=0.0, keep_aspect_ratio_policy="stretch", mode="nearest",
    nearest_mode="round_prefer_floor", node,
):  # fmt: skip
    """PyTorch's own kernel where it means the same, else plain arithmetic along each axis."""
    x = t.tensor(x)
    if x.dtype not in FLOATING and mode != "nearest":
        raise t.refusal(node, f"PyTorch's products are not of {x.dtype.name.lower()}")
    axes = [*range(x.rank)] if axes is None else [axis % x.rank for axis in axes]
    if sizes is not None:
        scales = None
    elif isinstance(scales, Tensor) and scales.array is not None:
        scales = scales.array.tolist()
    if coordinate_transformation_mode != "tf_crop_and_resize":
        roi = None
    form = {
        "mode": mode, "nearest_mode": nearest_mode, "coordinates": coordinate_transformation_mode,
        "a": cubic_coeff_a, "excludes_outside": bool(exclude_outside),
    }  # fmt: skip
    more = {
        "antialias": bool(antialias), "policy": keep_aspect_ratio_policy,
        "extrapolation": extrapolation_value,
    }  # fmt: skip
    known = sizes.known if isinstance(sizes, Host) else scales
    if x.array is not None and isinstance(known, list) and roi is None:  # a gradient's matrix
        wide = torch.from_numpy(x.array.astype(np.float64))
        after = None if sizes is None else known
        made = resampling.resize(wide, axes, after, scales, None, **form, **more).numpy()
        return t.constant_tensor(made.astype(x.array.dtype), "resized", x.dtype)
    is_stated = isinstance(scales, list) if sizes is None else not is_open(sizes)
    if is_stated and roi is None and not antialias and keep_aspect_ratio_policy == "stretch":
        changed = _changed(t, x, axes, scales, sizes)
        if coordinate_transformation_mode in resampling.BY_SIZES:
            changed = [(axis, n, m, None) for axis, n, m, _ in changed if n != m]
        if not changed:
            return x
        result = _by_pytorch(t, x, changed, **form)
        if result is not None:
            grown = {axis: size for axis, _, size, _ in changed}
            return sized(result, [grown.get(axis, d) for axis, d in enumerate(x.dims)])
    wanted = sizes.items if isinstance(sizes, Host) else sizes
    y = t.call("resampling.resize", x, axes, wanted, scales, roi, **form, **more)
    return sized(y, [None if axis in axes else d for axis, d in enumerate(x.dims)])


@kernel("Upsample")
def upsample(t, x, scales=None, *, mode="nearest", node):
    factors = list(scales) if isinstance(scales, list) else scales
    return resize(
        t, x, None, factors, None, mode=mode, coordinate_transformation_mode="asymmetric",
        nearest_mode="floor", node=node,
    )  # fmt: skip


def _changed(t, x, axes, scales, sizes):
    """(axis, size before, size after, scale or None) of each axis whose size changes."""
    result = []
    wanted = t.ints(sizes, count=len(axes)) if sizes is not None else [None] * len(axes)
    for i, axis in enumerate(axes):
        before, after, scale = x.size(axis), wanted[i], None
        if after is None:
            scale = scales[i]
            if isinstance(before, int):
                after = int(before * scale)
            else:
                after = before if scale == 1 else t.bound(Size(f"int({before} * {scale!r})"))
        if before != after or scale not in (None, 1):
            result.append((axis, before, after, scale))
    return result


def _by_pytorch(t, x, changed, *, mode, nearest_mode, coordinates, a, excludes_outside):
    """The call of PyTorch's kernel for it; None where there is none."""
    kernel, corners = None, coordinates == "align_corners"
    rows = [row[1:] for row in changed]
    if x.dtype not in FLOATING or len(changed) > (2 if mode == "cubic" else 3):
        return None
    if mode == "nearest":
        kernel = _nearest(rows, coordinates, nearest_mode)
    elif all(_has_centres(row, coordinates) for row in rows):
        if mode == "linear":
            kernel = ("linear1d", "bilinear2d", "trilinear3d")[len(rows) - 1]
        elif a == -0.75 and not excludes_outside:
            kernel = "bicubic2d"
    if kernel is None:
        return None
    image, afterwards = _laid_out(x, changed, 2 if mode == "cubic" else len(changed))
    sizes, scales = [after for _, after, _ in rows], [scale for *_, scale in rows]
    if mode == "cubic" and len(rows) == 1:
        sizes, scales = [1, *sizes], [None, *scales]
    if mode == "nearest":
        y = t.call(f"torch._C._nn.{kernel}", image, sizes, *scales)
    else:
        y = t.call(f"torch._C._nn.upsample_{kernel}", image, sizes, corners, *scales)
    return afterwards(y)


def _has_centres(row, coordinates):
    """Whether PyTorch's kernels compute the same coordinates."""
    _, after, _ = row
    if coordinates == "pytorch_half_pixel":
        return isinstance(after, int) and after > 1
    return coordinates in ("align_corners", "half_pixel")


def _nearest(rows, coordinates, nearest_mode):
    """The kernel that picks the same places."""
    count = f"{len(rows)}d"
    if any(isinstance(n, Size) for row in rows for n in row):
        return {
            ("asymmetric", "floor"): f"upsample_nearest{count}",
            ("half_pixel", "round_prefer_ceil"): f"_upsample_nearest_exact{count}",
        }.get((coordinates, nearest_mode))
    if coordinates == "tf_crop_and_resize":
        return None
    for name, centre in (("upsample_nearest", 0.0), ("_upsample_nearest_exact", 0.5)):
        if all(_picks(row, centre, coordinates, nearest_mode) for row in rows):
            return name + count
    return None


def _picks(row, centre, coordinates, nearest_mode):
    before, after, scale = row
    step = np.float32(before) / np.float32(after) if scale is None else np.float32(1 / scale)
    own = np.floor((np.arange(after, dtype=np.float32) + np.float32(centre)) * step)
    exact = resampling.nearest(before, after, scale, coordinates, nearest_mode, "cpu")
    return bool((np.minimum(own, before - 1) == exact.numpy()).all())


def _laid_out(x, changed, count):
    """The tensor as [N, C, *axes], and what takes the result back.

    PyTorch's kernels take a batch of none, and refuse no channels: where there may be none, all
    that does not change lies in the batch.
    """
    moved = [axis for axis, *_ in changed]
    order = [axis for axis in range(x.rank) if axis not in moved] + moved
    lead, sizes = [x.size(axis) for axis in order[: -len(moved)]], [row[1] for row in changed]
    image = x if order == sorted(order) else x.permute(*order)
    some = all(_is_some(x.dims[axis]) for axis in order[: -len(moved)])
    stays = len(lead) == 2 and count == len(moved) and _is_some(x.dims[order[1]])
    rest = [1, product(lead)] if some else [product(lead), 1]
    shape = [*rest, *[1] * (count - len(moved)), *sizes]
    if not stays:
        image = image.reshape(*shape)

    def afterwards(y):
        if not stays:
            y = shaped(y, [*lead, *(after for _, _, after, _ in changed)])
        if order == sorted(order):
            return y
        return y.permute(*(int(i) for i in np.argsort(order)))

    return image, afterwards


def _is_some(size):
    return isinstance(size, int) and size > 0


# -- sampling ------------------------------------------------------------------------------------

_MODES = {"bilinear": 0, "linear": 0, "nearest": 1, "bicubic": 2, "cubic": 2}
_PADDING = {"zeros": 0, "border": 1, "reflection": 2}


@kernel("GridSample")
def grid_sample(t, x, grid, *, align_corners=0, mode="linear", padding_mode="zeros", node):
    if x.rank not in (4, 5) or x.dtype not in FLOATING:
        raise t.refusal(node, "PyTorch samples floating images of two or three axes only")
    grid = grid if grid.dtype is x.dtype else grid.to(x.dtype)
    how = (_MODES[mode], _PADDING[padding_mode], bool(align_corners))
    if mode in ("cubic", "bicubic") and (x.rank == 5 or padding_mode == "border"):
        # PyTorch moves the neighbours of a place to the edge, and ONNX the place itself.
        raise t.refusal(node, "PyTorch samples cubically over two axes, and not at a border")
    return sized(t.grid_sampler(x, grid, *how), [*x.dims[:2], *grid.dims[1:-1]])


@kernel("AffineGrid")
def affine_grid(t, theta, size, *, align_corners=0):
    axes = theta.dims[1] if isinstance(theta.dims[1], int) else None
    sizes = t.ints(size, None if axes is None else axes + 2)
    grid = t.affine_grid_generator(theta, sizes, bool(align_corners))
    return sized(grid, [sizes[0], *sizes[2:], len(sizes) - 2])
