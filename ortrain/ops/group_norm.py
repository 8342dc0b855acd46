"""``ortrain::GroupNorm``: group normalization that returns the statistics that it took."""

from __future__ import annotations

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.ops.base import operator


def _types(node: ir.Node) -> None:
    x = node.inputs[0]
    assert x is not None
    known, groups = shapes.dims(x), node.attributes["num_groups"].as_int()
    wide = ir.DataType.DOUBLE if x.dtype is ir.DataType.DOUBLE else ir.DataType.FLOAT
    shapes.assign(node.outputs[0], x.dtype, x.shape)
    for value in node.outputs[1:]:
        shapes.assign(value, wide, None if known is None else ir.Shape([known[0], groups]))


@operator("GroupNorm", outputs=("output", "mean", "inverse_std"), types=_types)
def group_norm(
    op: Builder,
    x: ir.Value,
    scale: ir.Value,
    bias: ir.Value,
    *,
    num_groups: int,
    epsilon: float = 1e-5,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Normalizes groups of channels (Wu and He, "Group normalization", 2018).

    Args:
        op: the builder.
        x: [N, C, ...].
        scale: [C].
        bias: [C].
        num_groups: that the channels make.
        epsilon: added to the variance.

    Returns:
        The output, of x's shape; the mean and 1/sqrt(variance + epsilon) of each group
        [N, num_groups], in float32 unless x is of float64.
    """
    length = shapes.rank(x)
    assert length is not None
    assert x.dtype is not None
    wide = ir.DataType.DOUBLE if x.dtype is ir.DataType.DOUBLE else ir.DataType.FLOAT
    grouped = op.Reshape(op.cast(x, wide), [0, num_groups, -1])
    mean = op.ReduceMean(grouped, [2], keepdims=1)
    centred = op.Sub(grouped, mean)
    variance = op.ReduceMean(op.Mul(centred, centred), [2], keepdims=1)
    inverse = op.Reciprocal(op.Sqrt(op.Add(variance, epsilon)))
    column = [-1] + [1] * (length - 2)
    factor, shift = (op.Reshape(op.cast(v, wide), column) for v in (scale, bias))
    normal = op.Reshape(op.Mul(centred, inverse), op.shape(x))
    output = op.cast(op.Add(op.Mul(normal, factor), shift), x.dtype)
    return output, op.Squeeze(mean, [2]), op.Squeeze(inverse, [2])
