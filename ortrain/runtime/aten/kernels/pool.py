"""Pooling."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import torch

from ortrain.graph.shapes import FLOATING
from ortrain.runtime.aten import late
from ortrain.runtime.aten.kernels.conv import Window
from ortrain.runtime.aten.kernels.create import DEVICE
from ortrain.runtime.aten.kernels.pad import padded
from ortrain.runtime.aten.kernels.shape import counted, of_channels, shaped, sized
from ortrain.runtime.aten.operands import Size, product
from ortrain.runtime.aten.table import kernel


def window_of(t, node, x, kernel, strides, dilations, auto_pad, pads):
    """The window of a pool; it moves over one to three axes, as PyTorch's do."""
    if not 1 <= x.rank - 2 <= 3:
        raise t.refusal(node, f"PyTorch does not pool over {x.rank - 2} axes")
    return Window(t, x, kernel, strides, dilations, auto_pad, pads)


def _is_plain(window):
    """Whether PyTorch takes the pads: as many at both ends, and half a window at most."""
    rows = zip(window.pads, window.kernel, strict=True)
    return all(isinstance(p, int) and p == q and p <= size // 2 for (p, q), size in rows)


def _ends(window, x, ceil_mode):
    """The pads with which whole windows cover what is pooled: in ceil mode the last hangs over."""
    if not ceil_mode:
        return window.pads
    result = []
    rows = zip(x.shape[2:], window.pads, window.spans(), window.strides, strict=True)
    for size, (low, high), span, stride in rows:
        numbers = (size, low, high, span, stride)
        known = all(isinstance(n, int) for n in numbers)
        end = Size(f"late.overhang({', '.join(map(str, numbers))})")
        result.append((low, late.overhang(*numbers) if known else end))
    return result


# -- maxima --------------------------------------------------------------------------------------


@kernel("MaxPool")
def max_pool(
    t, x, *, kernel_shape, auto_pad="NOTSET", ceil_mode=0, dilations=None, pads=None,
    storage_order=0, strides=None, node,
):  # fmt: skip
    """PyTorch's indices count within the padded plane, ONNX's over the whole tensor."""
    window = window_of(t, node, x, kernel_shape, strides, dilations, auto_pad, pads)
    image, around, ceil = x, [(0, 0)] * window.rank, ceil_mode
    both = [low for low, _ in window.pads]
    alone = len(node.outputs) == 1 or not _is_read(node.outputs[1])
    if not _is_plain(window):
        around, both, ceil = _ends(window, x, ceil_mode), [0] * window.rank, 0
        least = _least(x.dtype)
        if not alone and x.dtype not in FLOATING:  # or a place around would be as large as one
            least, (image,) = least - 1, [sized(x.to(ir.DataType.INT32), x.dims)]
            image.dtype = ir.DataType.INT32
        image = padded(t, image, [(0, 0), (0, 0), *around], least)
    dims = [*x.dims[:2], *window.counts(x, _ends(window, x, ceil_mode))]
    steps = (window.kernel, window.strides, both, window.dilations, bool(ceil))
    if alone and (window.rank > 1 or x.dtype in FLOATING):
        return sized(of_channels(t, f"torch.max_pool{window.rank}d", image, *steps), dims)
    y, index = (sized(v, dims) for v in _with_indices(t, window.rank, image, steps))
    if image.dtype is not x.dtype:
        y = sized(y.to(x.dtype), dims)
    if len(node.outputs) == 1:
        return y
    sizes = x.shape[2:]
    if storage_order or any(pair != (0, 0) for pair in around):
        whole = ir.DataType.INT64
        table = _constant_or_late(t, whole, "plane", sizes, around, bool(storage_order))
        index = table.take(index)
    column = [x.size(0), x.size(1)] + [1] * window.rank
    planes = counted(t, product(column), product(sizes)).view(*column)
    return y, sized(index + planes, dims)


def _with_indices(t, rank, image, steps):
    where = "torch._C._nn" if rank > 1 else "torch"
    return of_channels(t, f"{where}.max_pool{rank}d_with_indices", image, *steps, outputs=2)


def _is_read(value):
    return bool(value.uses()) or value.is_graph_output()


def _least(dtype):
    return -math.inf if dtype in FLOATING else int(np.iinfo(dtype.numpy()).min)


def _constant_or_late(t, dtype, function, *arguments):
    """What a function of ``late`` makes of sizes: a constant where they are known."""
    if any(map(_is_open, arguments)):
        return t.call(f"late.{function}", *arguments, device=DEVICE).to(dtype)
    found = getattr(late, function)(*arguments, device=torch.device("cpu"))
    return t.constant_tensor(found.numpy().astype(dtype.numpy()), function, dtype)


def _is_open(argument):
    if isinstance(argument, list | tuple):
        return any(map(_is_open, argument))
    return isinstance(argument, Size)


@kernel("GlobalMaxPool")
def global_max_pool(t, x):
    return _pooled(x, x.amax([*range(2, x.rank)], True))


def _pooled(x, y):
    """What there is of a whole image."""
    return sized(y, [*x.dims[:2], *[1] * (x.rank - 2)])


@kernel("MaxUnpool")
def max_unpool(t, x, indices, output_shape=None, *, kernel_shape, pads=None, strides=None, node):
    """Indices count over the whole tensor, of the size that pooling had before."""
    window = window_of(t, node, x, kernel_shape, strides, None, "NOTSET", pads)
    rows = zip(x.shape[2:], window.strides, window.pads, window.kernel, strict=True)
    sizes = [(n - 1) * s - low - high + k for n, s, (low, high), k in rows]
    sizes = [x.size(0), x.size(1), *sizes]
    zeros = t.zeros([product(sizes)], dtype=x.dtype, device=DEVICE)
    whole = zeros.scatter(0, t.tensor(indices).reshape(-1), x.reshape(-1))
    y = shaped(whole, sizes)
    if output_shape is None:
        return y
    wanted = t.ints(output_shape, count=len(sizes))
    return padded(t, y, [(0, w - n) for w, n in zip(wanted, sizes, strict=True)])


# -- averages ------------------------------------------------------------------------------------


@kernel("AveragePool")
def average_pool(
    t, x, *, kernel_shape, auto_pad="NOTSET", ceil_mode=0, count_include_pad=0, dilations=None,
    pads=None, strides=None, node,
):  # fmt: skip
    window = window_of(t, node, x, kernel_shape, strides, dilations, auto_pad, pads)
    around = _ends(window, x, ceil_mode)
    dims = [*x.dims[:2], *window.counts(x, around)]
    if _is_plain(window) and set(window.dilations) == {1} and fits(x.dims[2:], kernel_shape):
        both = [low for low, _ in window.pads]
        means = _averages(t, x, window, both, bool(ceil_mode), bool(count_include_pad))
        return sized(means, dims)
    means = sized(_means(t, x, window, around), dims)
    if count_include_pad and not ceil_mode:
        return means
    shares = _constant_or_late(
        t, x.dtype, "shares", x.shape[2:], window.kernel, window.strides, window.dilations,
        window.pads, around, bool(count_include_pad),
    )  # fmt: skip
    return sized(means * shares, dims)


def fits(sizes, kernel):
    """Whether PyTorch averages over an image: over three axes, of no window that is larger.

    It does not count what is around it.
    """
    rows = zip(sizes, kernel, strict=True)
    return len(kernel) < 3 or all(isinstance(n, int) and n >= k for n, k in rows)


def _averages(t, x, window, both=0, ceil_mode=False, count_include_pad=True):
    function = "torch.avg_pool1d" if window.rank == 1 else f"torch._C._nn.avg_pool{window.rank}d"
    form = (window.kernel, window.strides, both, ceil_mode, count_include_pad)
    narrow = x.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    if window.rank == 3 and narrow and t.device.type == "cpu":  # for these it has no kernel
        wide = sized(x.to(ir.DataType.FLOAT), x.dims)
        return of_channels(t, function, wide, *form).to(x.dtype)
    return of_channels(t, function, x, *form)


def _means(t, x, window, around):
    """Over all places of each window, what is around the image counted as zeros."""
    image = padded(t, x, [(0, 0), (0, 0), *around])
    if set(window.dilations) == {1}:
        return _averages(t, image, window)
    for i, (span, stride) in enumerate(zip(window.spans(), window.strides, strict=True)):
        image = image.unfold(2 + i, span, stride)
    image = t.at(image, "...", *(f"::{d}" for d in window.dilations))
    return image.mean([*range(-window.rank, 0)])


@kernel("GlobalAveragePool")
def global_average_pool(t, x):
    return _pooled(x, x.mean([*range(2, x.rank)], True))


# -- powers --------------------------------------------------------------------------------------


@kernel("LpPool")
def lp_pool(
    t, x, *, kernel_shape, auto_pad="NOTSET", ceil_mode=0, dilations=None, p=2, pads=None,
    strides=None, node,
):  # fmt: skip
    """The p-th root of a sum of powers"""
    window = window_of(t, node, x, kernel_shape, strides, dilations, auto_pad, pads)
    around = _ends(window, x, ceil_mode)
    powers = sized(t.abs(x).pow(p), x.dims)
    powers.dtype = x.dtype
    means = _means(t, powers, window, around)
    norms = (means * math.prod(window.kernel)).pow(1 / p)
    return sized(norms, [*x.dims[:2], *window.counts(x, around)])


@kernel("GlobalLpPool")
def global_lp_pool(t, x, *, p=2):
    return _pooled(x, t.call("torch.linalg.vector_norm", x, p, [*range(2, x.rank)], True))
