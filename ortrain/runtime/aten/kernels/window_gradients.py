"""Gradients of convolutions and pools, and the pool that says where its maxima lie."""

from __future__ import annotations

from ortrain.graph.rounding import WIDE
from ortrain.ops.gradients.conv import spatial
from ortrain.runtime.aten.kernels.gradients import HALF
from ortrain.runtime.aten.kernels.norm_gradients import asked
from ortrain.runtime.aten.kernels.pad import padded
from ortrain.runtime.aten.kernels.pool import fits
from ortrain.runtime.aten.kernels.shape import of_channels, sized, viewed
from ortrain.runtime.aten.table import kernel


def _moves_over_few_axes(node):
    return 1 <= len(node.attributes["strides"].as_ints()) <= 3


def _pairs(pads):
    half = len(pads) // 2
    return [*zip(pads[:half], pads[half:], strict=True)]


@kernel("ortrain::ConvGradient", when=_moves_over_few_axes)
def conv(
    t, dy, x, w, *, pads, strides, dilations, kernel_shape=None, group=1, needs=(1, 1, 1), node
):
    """PyTorch pads as much at both ends; what else there is is put around the image."""
    mask, rest = asked(node, needs), [(0, 0)] * len(strides)
    both = [low for low, _ in _pairs(pads)]
    if any(low != high for low, high in _pairs(pads)):
        both, rest = [0] * len(strides), _pairs(pads)
    image = padded(t, x, [(0, 0), (0, 0), *rest])
    steps = ([w.size(0)], strides, both, dilations, False, [0] * len(strides), group)
    found = [None, None, None]
    in_float32 = _without_kernel(t, node, x, w, strides, group, mask)
    for wide in (False, True):
        asked_for = [m and f is wide for m, f in zip(mask, in_float32, strict=True)]
        if any(asked_for):
            operands = [v.to(WIDE) for v in (dy, image, w)] if wide else (dy, image, w)
            owner = "convolutions" if node.inputs[1] in t.images else "aten"
            name = f"{owner}.convolution_backward"
            results = t.call(name, *operands, *steps, asked_for, outputs=3)
            for place, (flag, made) in enumerate(zip(asked_for, results, strict=True)):
                if flag:
                    found[place] = made.to(x.dtype) if wide else made
    dx, dw, db = found
    if mask[0]:
        dx = viewed(t, dx, [":", ":", *(_inside(pair) for pair in rest)])
    return [r if flag else None for r, flag in zip((dx, dw, db), mask, strict=True)]


def _without_kernel(t, node, x, w, strides, group, mask):
    """Which gradients of a depthwise convolution of 16 bits are faster by way of float32.

    oneDNN has no kernels of 16 bits, on the CPU and of channels that lie last, for dx of windows
    that move by more than one place, and for dw of windows of more than three: of 8 x 144 x 59 x 59
    with windows of 5 x 5 that move by 2 they take 8.7 and 8.3 ms, the others with their casts 1.7
    and 3.0 (a Zen 5).
    """
    depthwise = group > 1 and w.dims[0] == group and w.dims[1] == 1
    if not depthwise or x.dtype not in HALF or node.inputs[1] not in t.images:
        return [False] * 3
    slow = max(strides) > 1, any(not isinstance(n, int) or n > 3 for n in w.dims[2:])
    wide = [m and s for m, s in zip(mask, slow, strict=False)]
    # A bias alone would be a call of its own.
    return [*wide, any(wide) and wide == mask[:2]]


def _inside(pair):
    low, high = pair
    return f"{low or ''}:{-high or ''}"


@kernel("ortrain::ConvTransposeGradient", when=_moves_over_few_axes)
def conv_transpose(
    t, dy, x, w, *, pads, strides, dilations, kernel_shape=None, output_padding=None, group=1,
    needs=(1, 1, 1), node,
):  # fmt: skip
    """PyTorch cuts off as much at both ends; what else was cut off has a gradient of zero."""
    mask, rest = asked(node, needs), [(0, 0)] * len(strides)
    both = [low for low, _ in _pairs(pads)]
    if any(low != high for low, high in _pairs(pads)):
        both, rest = [0] * len(strides), _pairs(pads)
    extra = output_padding or [0] * len(strides)
    found = t.aten.convolution_backward(
        padded(t, dy, [(0, 0), (0, 0), *rest]), x, w, [w.size(1) * group], strides, both,
        dilations, True, extra, group, mask, outputs=3,
    )  # fmt: skip
    return [r if flag else None for r, flag in zip(found, mask, strict=True)]


# -- pools ---------------------------------------------------------------------------------------


def _attribute(node, name, default):
    found = node.attributes.get(name)
    return default if found is None else list(found.as_ints())


def _is_plain(node, x, y):
    """Whether PyTorch pools so: pads as wide at both ends, and windows counted as ONNX does."""
    kernel_shape = node.attributes["kernel_shape"].as_ints()
    rank = len(kernel_shape)
    pads = _pairs(_attribute(node, "pads", [0] * (2 * rank)))
    steps = [_attribute(node, name, [1] * rank) for name in ("strides", "dilations")]
    spans = [(k - 1) * d + 1 for k, d in zip(kernel_shape, steps[1], strict=True)]
    half = all(low == high <= k // 2 for (low, high), k in zip(pads, kernel_shape, strict=True))
    if not half or not 1 <= rank <= 3:
        return False
    ceil_mode = node.attributes.get("ceil_mode")
    if ceil_mode is None or not ceil_mode.as_int():
        return True
    sizes, counts = spatial(x), spatial(y)
    if sizes is None or counts is None:
        return False
    rows = zip(sizes, counts, pads, spans, steps[0], strict=True)
    return all(_windows(n, low, span, step) == c for n, c, (low, _), span, step in rows)


def _windows(size, pad, span, step):
    """How many PyTorch counts in ceil mode: none begins behind the image and its first pad."""
    count = -(-(size + 2 * pad - span) // step) + 1
    return count - 1 if (count - 1) * step >= size + pad else count


def _pools_plainly(node):
    return _is_plain(node, node.inputs[0], node.outputs[0])


def _pooled_plainly(node):
    return _is_plain(node, node.inputs[1], node.inputs[0])


def _averaged_plainly(node):
    kernel_shape, sizes = node.attributes["kernel_shape"].as_ints(), spatial(node.inputs[1])
    fitting = fits(sizes or [None] * len(kernel_shape), kernel_shape)
    return fitting and _pooled_plainly(node) and set(_attribute(node, "dilations", [1])) == {1}


def _window(kernel_shape, strides, pads, dilations):
    """As PyTorch takes it for two or three axes; of one axis the first has a window of 1."""
    rank = len(kernel_shape)
    low = list(pads or [0] * (2 * rank))[:rank]
    rows = [[*kernel_shape], [*(strides or [1] * rank)], low, [*(dilations or [1] * rank)]]
    return [[int(row is not low), *row] if rank == 1 else row for row in rows]


def _plane(x, rank):
    return sized(x.unsqueeze(2), [*x.dims[:2], 1, *x.dims[2:]]) if rank == 1 else x


def _line(x, rank):
    return x.squeeze(2) if rank == 1 else x


@kernel("ortrain::MaxPool", when=_pools_plainly)
def max_pool(t, x, *, kernel_shape, ceil_mode=0, dilations=None, pads=None, strides=None):
    rank = len(kernel_shape)
    window = _window(kernel_shape, strides, pads, dilations)
    found = of_channels(
        t, f"nn.max_pool{max(rank, 2)}d_with_indices", _plane(x, rank), *window, bool(ceil_mode),
        outputs=2,
    )  # fmt: skip
    return [_line(each, rank) for each in found]


@kernel("ortrain::MaxPoolGradient", when=_pooled_plainly)
def max_pool_gradient(
    t, dy, x, places, *, kernel_shape, ceil_mode=0, dilations=None, pads=None, strides=None
):
    rank = len(kernel_shape)
    dy, x, places = (_plane(each, rank) for each in (dy, x, places))
    window = _window(kernel_shape, strides, pads, dilations)
    dx = of_channels(
        t, f"aten.max_pool{max(rank, 2)}d_with_indices_backward", dy, x, *window, bool(ceil_mode),
        places,
    )  # fmt: skip
    return _line(dx, rank)


@kernel("ortrain::AveragePoolGradient", when=_averaged_plainly)
def average_pool(
    t, dy, x, *, kernel_shape, pads, strides, dilations, ceil_mode=0, count_include_pad=0
):
    rank = len(kernel_shape)
    window = _window(kernel_shape, strides, pads, None)[:3]
    dx = of_channels(
        t, f"aten.avg_pool{max(rank, 2)}d_backward", _plane(dy, rank), _plane(x, rank), *window,
        bool(ceil_mode), bool(count_include_pad), None,
    )  # fmt: skip
    return _line(dx, rank)
