"""Gradients of normalizations.

In float16 and bfloat16 PyTorch takes the statistics in float32: on a GPU together with weights of
the tensor's own dtype, on the CPU with weights of float32, else all in the tensor's own dtype.
"""

from __future__ import annotations

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.runtime.aten.kernels.gradients import HALF
from ortrain.runtime.aten.operands import product
from ortrain.runtime.aten.table import kernel

WIDE = ir.DataType.FLOAT


def asked(node, needs):
    """Which outputs are read: PyTorch's ``output_mask``."""
    read = [value.is_graph_output() or len(value.uses()) > 0 for value in node.outputs]
    read += [False] * (len(needs) - len(read))  # those at the end may have been taken away
    return [bool(n) and r for n, r in zip(needs, read, strict=True)]


def _wide(x, *values):
    """Statistics as they are wanted."""
    return [v.to(WIDE) if x.dtype in HALF and v.dtype is not WIDE else v for v in values]


def _weights(t, x, *values):
    """Weights as they are wanted; None where there are none."""
    cast = x.dtype in HALF and t.device.type == "cpu"
    return [v.to(WIDE) if cast and v is not None else v for v in values]


def _in_rows(x):
    """In one piece: of layers' and groups' statistics and weights PyTorch reads no strides."""
    return x if x is None or x.is_contiguous else x.contiguous()


def _gradients(t, x, results, mask, node):
    """In the dtypes that the program gives them, None for what is not asked for."""
    cast = x.dtype in HALF and t.device.type == "cpu"
    dx, *others = [r if flag else None for r, flag in zip(results, mask, strict=True)]
    pairs = zip(others, node.outputs[1:], strict=False)
    return [dx, *(d.to(v.dtype) if cast and d is not None else d for d, v in pairs)]


def _has_whole_weights(node):
    """PyTorch's has no weights that are broadcast, and no gradient of the statistics."""
    _, x, scale, bias = (*node.inputs, None)[:4]
    known, axis = shapes.dims(x), node.attributes["axis"].as_int()
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
    if mean is None:
        _, mean, inverse = t.native_layer_norm(x, sizes, None, None, epsilon, outputs=3)
    mean, inverse = _in_rows(mean), _in_rows(inverse)
    (weight,) = _weights(t, x, scale)
    found = t.aten.native_layer_norm_backward(
        dy, x, sizes, *_wide(x, mean, inverse), weight, weight, mask, outputs=3
    )
    return _gradients(t, x, found, mask, node)


def _is_scaled_along_rows(node):
    x, scale = node.inputs[1:3]
    known, axis = shapes.dims(x), node.attributes["axis"].as_int()
    return known is not None and axis % len(known) == len(known) - 1 and shapes.rank(scale) == 1


@kernel("ortrain::RMSNormalizationGradient", when=_is_scaled_along_rows)
def rms_norm(t, dy, x, scale, *, axis=-1, epsilon=1e-5, needs=(1, 1), node):
    """PyTorch has it whole for GPUs alone. A product with scale sums without another pass."""
    wide = x.to(WIDE) if x.dtype in HALF else x
    inverse = t.rsqrt(t.mean(t.square(wide), [-1], keepdim=True) + epsilon)
    mask = asked(node, needs)
    if t.device.type == "cuda":
        found = t.aten._fused_rms_norm_backward(
            dy, x, [x.size(-1)], inverse, scale, mask, outputs=2
        )
        return [r if flag else None for r, flag in zip(found, mask, strict=True)]
    inverse = inverse.to(x.dtype) if x.dtype in HALF else inverse
    n = x * inverse
    weighted = dy * n
    d_scale = weighted.sum([*range(x.rank - 1)]) if mask[1] else None
    if not mask[0]:
        return None, d_scale
    mean = t.matmul(weighted, scale).unsqueeze(-1) / x.size(-1)
    return t.addcmul(dy * scale, n, mean, value=-1) * inverse, d_scale


# -- groups of channels --------------------------------------------------------------------------


def _has_channels(node):
    return (shapes.rank(node.inputs[0]) or 0) > 1


def _counts(x):
    return x.size(0), x.size(1), product(x.shape[2:])


@kernel("ortrain::GroupNorm", when=_has_channels)
def group_norm(t, x, scale, bias, *, num_groups, epsilon=1e-5):
    y, mean, inverse = t.native_group_norm(
        _in_rows(x), *map(_in_rows, _weights(t, x, scale, bias)), *_counts(x), num_groups, epsilon,
        outputs=3,
    )  # fmt: skip
    return y, *_wide(x, mean, inverse)


@kernel("ortrain::GroupNormGradient", when=_has_channels)
def group_norm_gradient(t, dy, x, scale, mean, inverse, *, num_groups, needs=(1, 1, 1), node):
    mask, narrow = asked(node, needs), x.dtype in HALF and t.device.type == "cuda"
    statistics = [_in_rows(v.to(x.dtype) if narrow else v) for v in (mean, inverse)]
    found = t.aten.native_group_norm_backward(
        _in_rows(dy), _in_rows(x), *statistics, *map(_in_rows, _weights(t, x, scale)), *_counts(x),
        num_groups, mask, outputs=3,
    )  # fmt: skip
    return _gradients(t, x, found, mask, node)


# -- batches -------------------------------------------------------------------------------------


@kernel("ortrain::BatchNormGradient")
def batch_norm(t, dy, input, weight, mean, inverse_std, *, needs=(1, 1, 1), node):
    mask = asked(node, needs)
    found = t.aten.native_batch_norm_backward(
        dy, input, *_weights(t, input, weight), None, None, *_wide(input, mean, inverse_std), True,
        0.0, mask, outputs=3,
    )  # fmt: skip
    return _gradients(t, input, found, mask, node)


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
    of_batch = [None, None]
    if t.device.type == "cuda":  # where they are given, it takes them for the batch's own
        of_batch = [mean, t.rsqrt(var + epsilon)]
    found = t.aten.native_batch_norm_backward(
        dy, x, weight, mean, var, *of_batch, False, epsilon, mask, outputs=3
    )
    results = [r if flag else None for r, flag in zip(found, mask, strict=True)]
    if x.dtype not in HALF:
        return results
    pairs = zip(results, node.outputs, strict=False)
    return [None if r is None else r.to(v.dtype) for r, v in pairs]
