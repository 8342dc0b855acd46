"""Normalizations."""

from __future__ import annotations

import onnx_ir as ir

from ortrain.graph.rounding import NARROW, WIDE
from ortrain.runtime.aten.kernels.shape import in_rows, sized
from ortrain.runtime.aten.lines import Raw
from ortrain.runtime.aten.operands import Size, product
from ortrain.runtime.aten.table import kernel

_DEVICE = Raw("device")


@kernel("LayerNormalization")
def layer_norm(t, x, scale, bias=None, *, axis=-1, epsilon=1e-5, stash_type=1, node):
    """The statistics are float32, unless PyTorch's of 16 bits are all that nobody asks for."""
    dtype, dims, sizes = x.dtype, x.dims, x.shape[axis % x.rank :]
    scale, bias = (_of_sizes(v, sizes, dims[axis % x.rank :]) for v in (scale, bias))
    asked = any(value.uses() or value.is_graph_output() for value in node.outputs[1:])
    if t.device.type == "cpu":
        # There they have the parameters' dtype, which may be float32 beside tensors of 16 bits.
        if dtype in NARROW and asked:
            scale, bias = _wide(scale), _wide(bias)
    elif scale.dtype is not dtype:
        x = x.to(scale.dtype)
    y, *statistics = t.native_layer_norm(x, sizes, scale, bias, epsilon, outputs=3)
    if x.dtype is not dtype:
        y = y.to(dtype)
    if dtype is ir.DataType.DOUBLE and asked:
        statistics = [v.to(WIDE) for v in statistics]
    lead = dims[: axis % x.rank]
    rows = (*lead, *[1] * len(sizes))
    return sized(y, dims), *(sized(v, rows) for v in statistics)


def _of_sizes(parameter, sizes, dims):
    """A parameter in the shape of what is normalized, which PyTorch demands."""
    if parameter is None or parameter.dims == dims:
        return parameter
    result = parameter.expand(sizes)
    result.dtype = parameter.dtype
    return result


@kernel("RMSNormalization")
def rms_norm(t, x, scale, *, axis=-1, epsilon=1e-5, stash_type=1):
    """By the norm: 1.1 ms for (8, 128, 768) in float32, PyTorch's own on the CPU 1.9 ms."""
    dtype, axes = x.dtype, [*range(axis % x.rank, x.rank)]
    if t.device.type != "cpu" and scale.dtype is dtype:
        sizes = x.shape[axes[0] :]
        return t.rms_norm(x, sizes, _of_sizes(scale, sizes, x.dims[axes[0] :]), epsilon)
    if dtype in NARROW:
        x, scale = x.to(WIDE), scale.to(WIDE)
    rows = [1 if i in axes else d for i, d in enumerate(x.dims)]
    norm = sized(t.call("torch.linalg.vector_norm", x, 2, axes, True), rows)
    count = product([x.size(a) for a in axes])
    inverse = t.rsqrt(t.add(t.div(t.square(norm), count), epsilon))
    result = t.mul(t.mul(x, inverse), scale)
    return result.to(dtype) if dtype in NARROW else result


@kernel("InstanceNormalization")
def instance_norm(t, input, scale, bias, *, epsilon=1e-5):
    """Each channel is a group."""
    count = input.size(1)  # where there are none, a group of nothing
    groups = max(count, 1) if isinstance(count, int) else t.bound(Size(f"max({count}, 1)"))
    return sized(t.group_norm(in_rows(input), groups, scale, bias, epsilon), input.dims)


@kernel("GroupNormalization")
def group_norm(t, x, scale, bias, *, num_groups, epsilon=1e-5, stash_type=1):
    """Before opset 21 the parameters belong to groups, then to channels."""
    if t.opset < 21:
        repeats = Size(f"{x.size(1)} // {num_groups}")
        scale, bias = (v.repeat_interleave(repeats) for v in (scale, bias))
    return sized(t.group_norm(in_rows(x), num_groups, scale, bias, epsilon), x.dims)


@kernel("BatchNormalization")
def batch_norm(
    t, x, scale, bias, input_mean, input_var, *, epsilon=1e-5, momentum=0.9, training_mode=0,
    node,
):  # fmt: skip
    """In training the running variance takes up the batch's own, and not n / (n - 1) of it."""
    dtypes = {v.dtype for v in (scale, bias, input_mean, input_var)}
    if len(dtypes) > 1:  # the parameters may be of 16 bits beside statistics of float32
        common = WIDE if x.dtype in NARROW else x.dtype
        scale, bias, input_mean, input_var = (
            v.to(common) for v in (scale, bias, input_mean, input_var)
        )
    if not training_mode:
        y = t.batch_norm(x, scale, bias, input_mean, input_var, False, 0.0, epsilon, True)
        return sized(y, x.dims)
    y, _, _, mean, variance = _of_batch(t, x, scale, bias, epsilon, node)
    mean, variance = mean.to(input_mean.dtype), variance.to(input_mean.dtype)
    return y, t.lerp(mean, input_mean, momentum), t.lerp(variance, input_var, momentum)


@kernel("ortrain::BatchNorm")
def batch_norm_of_torch(
    t, input, weight=None, bias=None, running_mean=None, running_var=None, *, momentum=0.1,
    eps=1e-5, node,
):  # fmt: skip
    """The batch's own statistics are new where there are none to update.

    Those of numbers of 16 bits are taken in float32, as the parameters then are.
    """
    narrow = input.dtype in NARROW
    kept = input.dtype if running_mean is None else running_mean.dtype
    if narrow:
        weight, bias, running_mean, running_var = (
            _wide(v) for v in (weight, bias, running_mean, running_var)
        )
    if running_mean is not None and running_var is not None:
        y, mean, inverse, *running = t.call(
            _of_torch(t, node.inputs[0]), input, weight, bias, running_mean, running_var, True,
            momentum, eps, outputs=5,
        )  # fmt: skip
    elif narrow or node.inputs[0] in t.images or any(v.name for v in node.outputs[3:]):
        y, mean, inverse, *running = _of_batch(t, input, weight, bias, eps, node)
    else:
        y, mean, inverse = t.aten._native_batch_norm_legit__no_stats(
            input, weight, bias, True, momentum, eps, outputs=3
        )
        running = []
    if narrow and kept is not WIDE:
        running = [v.to(kept) for v in running]
    return y, mean, inverse, *running


def _of_torch(t, x):
    """The function that normalizes over a batch."""
    return "norms.batch_norm" if x in t.images else "aten._native_batch_norm_legit_functional"


def _of_batch(t, x, weight, bias, epsilon, node):
    """The normalized tensor, mean, 1 / std, mean again, and the batch's variance.

    `torch.var_mean` takes three times as long as all of this.
    """
    dtype = x.dtype
    if dtype in NARROW:
        dtype, weight, bias = WIDE, _wide(weight), _wide(bias)
    nothing = t.zeros([x.size(1)], dtype=dtype, device=_DEVICE)
    y, mean, inverse, _, unbiased = t.call(
        _of_torch(t, node.inputs[0]), x, weight, bias, nothing, nothing, True, 1.0, epsilon,
        outputs=5,
    )  # fmt: skip
    variance = sized(t.call("late.variance", x, unbiased), [x.dims[1]])
    return y, mean, inverse, mean, variance


def _wide(parameter):
    """PyTorch takes parameters of float32 beside tensors of 16 bits."""
    if parameter is None or parameter.dtype is WIDE:
        return parameter
    return parameter.to(WIDE)


@kernel("LpNormalization")
def lp_norm(t, input, *, axis=-1, p=2):
    """Zeros stay zeros. A norm may be beyond float16 where no quotient is."""
    wide = input.to(WIDE) if input.dtype in NARROW else input
    norm = t.call("torch.linalg.vector_norm", wide, p, [axis], True)
    result = t.div(wide, t.masked_fill(norm, t.eq(norm, 0.0), 1.0))
    return result if wide is input else result.to(input.dtype)


@kernel("MeanVarianceNormalization")
def mean_variance_norm(t, x, *, axes=(0, 2, 3)):
    centred = t.sub(x, t.mean(x, [*axes], True))
    variance = t.mean(t.square(centred), [*axes], True)
    return t.div(centred, t.add(t.sqrt(variance), 1e-9))


@kernel("LRN")
def local_response_norm(t, x, *, size, alpha=1e-4, beta=0.75, bias=1.0):
    """Over so many neighbouring channels, of an even number one more behind than before."""
    around = [0, 0] * (x.rank - 2) + [(size - 1) // 2, size // 2]
    windows = t.constant_pad_nd(t.square(x), around).unfold(1, size, 1)
    return t.div(x, t.pow(t.add(t.mul(t.sum(windows, [-1]), alpha / size), bias), beta))
