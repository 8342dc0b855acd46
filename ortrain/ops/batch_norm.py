"""``ortrain::BatchNorm``: batch normalization in training mode, with torch's running statistics."""

from __future__ import annotations

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.graph.rounding import NARROW, WIDE
from ortrain.ops.base import operator


def _types(node: ir.Node) -> None:
    source = node.inputs[0]
    assert source is not None
    known = shapes.dims(source)
    shapes.assign(node.outputs[0], source.dtype, source.shape)
    running = node.inputs[3] if len(node.inputs) > 3 else None
    for i, value in enumerate(node.outputs[1:], 1):
        dtype = WIDE if i < 3 and source.dtype in NARROW else source.dtype
        if i > 2 and running is not None:
            dtype = running.dtype
        shapes.assign(value, dtype, None if known is None else ir.Shape([known[1]]))


@operator(
    "BatchNorm",
    outputs=("output", "mean", "inverse_std", "new_running_mean", "new_running_var"),
    types=_types,
)
def batch_norm(
    op: Builder,
    input: ir.Value,
    weight: ir.Value | None = None,
    bias: ir.Value | None = None,
    running_mean: ir.Value | None = None,
    running_var: ir.Value | None = None,
    *,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[ir.Value, ...]:
    """Normalizes each channel by the batch's own statistics.

    Ioffe and Szegedy, "Batch normalization" (2015), with torch's conventions: the biased variance
    normalizes, the unbiased one enters the running variance.

    Args:
        op: the builder.
        input: [N, C, ...].
        weight: [C] or absent.
        bias: [C] or absent.
        running_mean: [C] or absent.
        running_var: [C] or absent.
        momentum: share of the batch in the new running statistics.
        eps: added to the variance.

    Returns:
        The output [N, C, ...]; the batch's mean [C] and 1/sqrt(variance + eps) [C], in float32 of
        narrow tensors; the new running mean and variance [C] (the batch's own where there are none
        to update).
    """
    length = shapes.rank(input)
    assert length is not None
    axes = [0, *range(2, length)]
    column = [-1] + [1] * (length - 2)
    mean = op.ReduceMean(input, axes, keepdims=1)
    centred = op.Sub(input, mean)
    variance = op.ReduceMean(op.Mul(centred, centred), axes, keepdims=1)
    inverse = op.Reciprocal(op.Sqrt(op.Add(variance, eps)))
    factor = inverse if weight is None else op.Mul(inverse, op.Reshape(weight, column))
    output = op.Mul(centred, factor)
    if bias is not None:
        output = op.Add(output, op.Reshape(bias, column))
    flat_mean, flat_variance = op.Reshape(mean, [-1]), op.Reshape(variance, [-1])
    new_mean, new_variance = flat_mean, flat_variance
    if running_mean is not None and running_var is not None:
        assert input.dtype is not None
        count = op.Div(op.cast(op.Size(input), input.dtype), op.cast(op.Size(mean), input.dtype))
        unbiased = op.Mul(flat_variance, op.Div(count, op.Sub(count, 1.0)))
        new_mean = op.Add(op.Mul(running_mean, 1.0 - momentum), op.Mul(flat_mean, momentum))
        new_variance = op.Add(op.Mul(running_var, 1.0 - momentum), op.Mul(unbiased, momentum))
    statistics = [flat_mean, op.Reshape(inverse, [-1])]
    if input.dtype in NARROW:
        statistics = [op.cast(value, WIDE) for value in statistics]
    return output, *statistics, new_mean, new_variance
