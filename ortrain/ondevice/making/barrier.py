"""The order that a fused training step needs: nothing is updated before all of it has been read."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ortrain.graph.build import Builder


def behind(
    op: Builder, learning_rate: ir.Value, step: ir.Value, values: Sequence[ir.Value]
) -> ir.Value:
    """The learning rate, known only after ``values`` are.

    Where updated parameters take the memory of the old ones, every node that reads an old one has
    to run before any update. All updates need the learning rate, so it is made to wait ::

        learning_rate = step >= 0 ? learning_rate : sum(values)

    The second branch is never run, and costs no time but keeps its edges: no runtime can know that
    a step is not negative. It follows that NaN in the values has no effect.

    Args:
        op: emits into the training graph.
        learning_rate: float32 [1].
        step: int64 [1], from 0 on.
        values: all gradients, and all other outputs that parameters are read for, loss included.
    """
    if not values:
        return learning_rate
    known, never = op.subgraph("known"), op.subgraph("never")
    flat = [never.Reshape(never.cast(v, ir.DataType.FLOAT), [-1]) for v in values]
    total = never.ReduceSum(never.Concat(*flat, axis=0), keepdims=1)
    result: ir.Value = op.If(
        op.GreaterOrEqual(step, 0),
        then_branch=known.returning(known.Identity(learning_rate)),
        else_branch=never.returning(total),
    )
    result.type, result.shape = learning_rate.type, learning_rate.shape
    return result
