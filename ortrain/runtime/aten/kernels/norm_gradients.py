"""Gradients of normalizations.

In float16 and bfloat16 PyTorch takes the statistics in float32: on a GPU together with weights of
the tensor's own dtype, on the CPU with weights of float32, else all in the tensor's own dtype. What
comes in another mixture is cast to float32, and what that gives back to what the program says.
"""

from __future__ import annotations

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.runtime.aten.kernels.gradients import HALF
from ortrain.runtime.aten.kernels.shape import in_rows
from ortrain.runtime.aten.operands import product
from ortrain.runtime.aten.table import kernel

WIDE = ir.DataType.FLOAT


def asked(node, needs):
    """Which outputs are read: PyTorch's ``output_mask``."""
    read = [value.is_graph_output() or len(value.uses()) > 0 for value in node.outputs]
    read += [False] * (len(needs) - len(read))  # those at the end may have been taken away
    return [bool(n) and r for n, r in zip(needs, read, strict=True)]


def _cast(value, dtype):
    """In a dtype, as it is where it has that."""
    if value is None or value.dtype is dtype:
        return value
    result = value.to(dtype)
    result.dtype = dtype
    return result


def _wide(x, *values):
    """Statistics as they are wanted."""
    return [_cast(v, WIDE) if x.dtype in HALF else v for v in values]


def _weights(t, x, *values):
    """Weights as they are wanted; None where there are none."""
    cast = x.dtype in HALF and t.device.type == "cpu"
    return [_cast(v, WIDE) if cast else v for v in values]


def _of_one_dtype(t, scale, *tensors):
    """Scale and tensors off the CPU, where of layers and groups PyTorch takes one dtype alone."""
    (dtype,) = {v.dtype for v in tensors}
    if t.device.type == "cpu" or scale is None or scale.dtype is dtype:
        return scale, *tensors
    common = WIDE if dtype in HALF else dtype
    return [_cast(v, common) for v in (scale, *tensors)]


def _in_one_order(t, x, *tensors):
    """Tensors of 16 bits that lie in one piece and in one order.

    On the CPU PyTorch rounds the sum of dy over the batch to 16 bits where one has other strides:
    dx of bfloat16 is 3 to 4 times as far from the truth.
    """
    if x.dtype not in HALF or t.device.type != "cpu":
        return x, *tensors
    given = (x, *tensors)
    if all(v.is_contiguous for v in given):
        return given
    ordered = t.call("late.in_one_order", *given, outputs=len(given))
    for tensor, before in zip(ordered, given, strict=True):  # which it may be
        tensor.dtype, tensor.dims, tensor.roots = before.dtype, before.dims, before.roots
    return ordered


def _gradients(t, x, results, mask, node):
    """In the dtypes that the program gives them, None for what is not asked for.

    Args:
        t: the writer.
        x: as PyTorch's kernel took it, whose dtype the gradient of x has.
        results: of the kernel.
        mask: which of them are asked for.
        node: whose they are.
    """
    of_weights = WIDE if x.dtype in HALF and t.device.type == "cpu" else x.dtype
    pairs = zip(results, node.outputs, strict=False)
    return [
        None if not flag else d if dtype is v.dtype else d.to(v.dtype)
        for (d, v), flag, dtype in zip(pairs, mask, (x.dtype, of_weights, of_weights), strict=False)
    ]


def _axis(node):
    axis = node.attributes.get("axis")
    return -1 if axis is None else axis.as_int()


def _has_whole_weights(node):
    """PyTorch's has no weights that are broadcast, and no gradient of the statistics."""
    _, x, scale, bias = (*node.inputs, None)[:4]
    known, axis = shapes.dims(x), _axis(node)
    if known is None or any(node.inputs[6:]):
        return False
    wanted = known[axis % len(known) :]
    return all(v is None or shapes.dims(v) == wanted for v in (scale, bias))


@kernel("ortrain::LayerNormalizationGradient", when=_has_whole_weights)
def layer_norm(
    t, dy, x, scale, bias=None, mean=None, inverse=None, d_mean=None, d_inverse=None, *, axis=-1,
    epsilon=1e-5, needs=(1, 1, 1), node,
):  # fmt: skip
    sizes, mask = x.shape[axis % x.rank :], asked(node, needs)
    scale, x, dy = _of_one_dtype(t, scale, x, dy)
    if mean is None:
        (whole,) = _wide(x, x)
        _, mean, inverse = t.native_layer_norm(whole, sizes, None, None, epsilon, outputs=3)
    mean, inverse = in_rows(mean), in_rows(inverse)
    (weight,) = _weights(t, x, scale)
    found = t.aten.native_layer_norm_backward(
        dy, x, sizes, *_wide(x, mean, inverse), weight, weight, mask, outputs=3
    )
    return _gradients(t, x, found, mask, node)


def _is_scaled_along_rows(node):
    x, scale = node.inputs[1:3]
    known, axis = shapes.dims(x), _axis(node)
    return known is not None and axis % len(known) == len(known) - 1 and shapes.rank(scale) == 1


@kernel("ortrain::RMSNormalizationGradient", when=_is_scaled_along_rows)
def rms_norm(t, dy, x, scale, *, axis=-1, epsilon=1e-5, needs=(1, 1), node):
    """PyTorch has it whole for GPUs alone. A product with scale sums without another pass.

    Of 16 bits in float32: what is rounded on its way to dx is multiplied where its terms cancel.
    """
    mask = asked(node, needs)
    scale, x, dy = _of_one_dtype(t, scale, x, dy)
    (wide,) = _wide(x, x)
    inverse = t.rsqrt(t.mean(t.square(wide), [-1], keepdim=True) + epsilon)
    if t.device.type == "cuda":
        found = t.aten._fused_rms_norm_backward(
            dy, x, [x.size(-1)], inverse, scale, mask, outputs=2
        )
        return _gradients(t, x, found, mask, node)
    if wide is not x:
        dy, scale = _wide(x, dy, scale)
    n = wide * inverse
    weighted = dy * n
    d_scale = weighted.sum([*range(x.rank - 1)]) if mask[1] else None
    dx = None
    if mask[0]:
        mean = t.matmul(weighted, scale).unsqueeze(-1) / x.size(-1)
        dx = t.addcmul(dy * scale, n, mean, value=-1) * inverse
    return _gradients(t, wide, (dx, d_scale), mask, node)


# -- groups of channels --------------------------------------------------------------------------


def _has_channels(node):
    return (shapes.rank(node.inputs[0]) or 0) > 1


def _counts(x):
    return x.size(0), x.size(1), product(x.shape[2:])


@kernel("ortrain::GroupNorm", when=_has_channels)
def group_norm(t, x, scale, bias, *, num_groups, epsilon=1e-5):
    dtype = x.dtype
    scale, x = _of_one_dtype(t, scale, x)
    bias = _cast(bias, scale.dtype)
    y, mean, inverse = t.native_group_norm(
        in_rows(x), *map(in_rows, _weights(t, x, scale, bias)), *_counts(x), num_groups, epsilon,
        outputs=3,
    )  # fmt: skip
    y = y if x.dtype is dtype else y.to(dtype)
    return y, *(v.to(WIDE) if x.dtype in HALF else v for v in (mean, inverse))


@kernel("ortrain::GroupNormGradient", when=_has_channels)
def group_norm_gradient(t, dy, x, scale, mean, inverse, *, num_groups, needs=(1, 1, 1), node):
    scale, x, dy = _of_one_dtype(t, scale, x, dy)
    mask, narrow = asked(node, needs), x.dtype in HALF and t.device.type == "cuda"
    statistics = [in_rows(v.to(x.dtype) if narrow else v) for v in (mean, inverse)]
    found = t.aten.native_group_norm_backward(
        in_rows(dy), in_rows(x), *statistics, *map(in_rows, _weights(t, x, scale)), *_counts(x),
        num_groups, mask, outputs=3,
    )  # fmt: skip
    return _gradients(t, x, found, mask, node)


# -- batches -------------------------------------------------------------------------------------


@kernel("ortrain::BatchNormGradient")
def batch_norm(t, dy, input, weight, mean, inverse_std, *, needs=(1, 1, 1), node):
    mask = asked(node, needs)
    input, dy = _in_one_order(t, input, dy)
    found = t.call(
        _of_torch(t, node.inputs[1]), dy, input, *_weights(t, input, weight), None, None,
        *_wide(input, mean, inverse_std), True, 0.0, mask, outputs=3,
    )  # fmt: skip
    return _gradients(t, input, found, mask, node)


def _of_torch(t, x):
    """The function that computes the gradients of a norm over a batch."""
    return "norms.batch_norm_backward" if x in t.images else "aten.native_batch_norm_backward"


def _has_constant_statistics(node):
    needs = node.attributes.get("needs")
    return needs is not None and not any(needs.as_ints()[3:])


@kernel("ortrain::BatchNormalizationGradient", when=_has_constant_statistics)
def frozen_batch_norm(t, dy, x, scale, mean, var, *, epsilon=1e-5, needs=(1, 1, 1, 1, 1), node):
    """In float32 of tensors of 16 bits.

    A mean that is rounded to bfloat16 moves what is far from zero by 0.4 % of itself, which may be
    several percent of the deviation.
    """
    mask = asked(node, needs)[:3]
    weight, mean, var = _wide(x, scale, mean, var)
    x, dy = _in_one_order(t, x, dy)
    of_batch = [None, None]
    if t.device.type == "cuda":  # where they are given, it takes them for the batch's own
        of_batch = [mean, t.rsqrt(var + epsilon)]
    found = t.call(
        _of_torch(t, node.inputs[1]), dy, x, weight, mean, var, *of_batch, False, epsilon, mask,
        outputs=3,
    )  # fmt: skip
    results = [r if flag else None for r, flag in zip(found, mask, strict=True)]
    if x.dtype not in HALF:
        return results
    pairs = zip(results, node.outputs, strict=False)
    return [None if r is None else r.to(v.dtype) for r, v in pairs]
