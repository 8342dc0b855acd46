"""Gradients of looking rows up."""

from __future__ import annotations

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.graph.scatter import add_rows, rows_of_zeros
from ortrain.ops.base import like_inputs, operator


@operator("EmbeddingGradient", types=like_inputs(1))
def embedding(
    op: Builder, dy: ir.Value, weight: ir.Value, indices: ir.Value, *, padding_idx: int = -1
) -> ir.Value:
    """d weight = zeros, with dy added at the indices; none at padding_idx

    Args:
        op: the builder.
        dy: [..., H].
        weight: [V, H], of which the shape is read.
        indices: [...], none of them negative.
        padding_idx: as in Embedding.
    """
    if padding_idx >= 0:
        assert dy.dtype is not None
        takes_part = op.cast(op.Not(op.Equal(indices, padding_idx)), dy.dtype)
        dy = dy * op.Unsqueeze(takes_part, [-1])
    return rows_of_zeros(op, weight, indices, dy)


@operator("GatherGradient", types=like_inputs(1))
def gather(
    op: Builder, dy: ir.Value, data: ir.Value, indices: ir.Value, *, axis: int = 0
) -> ir.Value:
    """d data = zeros, with dy added at the indices

    Args:
        op: the builder.
        dy: of the output.
        data: of which the shape is read.
        indices: of the places along the axis; those below zero count from the end.
        axis: not below zero.
    """
    if not axis:
        return rows_of_zeros(op, data, indices, dy)
    # Bring the gathered axes of dy to the front, scatter rows, and put the axis back.
    length, places, total = (shapes.rank(value) for value in (data, indices, dy))
    assert length is not None
    assert places is not None
    assert total is not None
    moved = [*range(axis, axis + places), *range(axis), *range(axis + places, total)]
    dy = op.Transpose(dy, perm=moved)
    lead = [axis, *(i for i in range(length) if i != axis)]
    shape = op.Gather(op.shape(data), lead)
    zeros = op.Expand(op.constant(0, data.dtype), shape)
    if zeros.shape is None:
        zeros.shape = ir.Shape([None] * length)
    summed = add_rows(op, zeros, indices, dy)
    back = [lead.index(i) for i in range(length)]
    result: ir.Value = op.Transpose(summed, perm=back)
    return result
