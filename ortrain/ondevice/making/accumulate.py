"""Accumulation of gradients over several runs of a training graph."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from ortrain.graph.build import Builder
from ortrain.ondevice.contract import accumulation_out


def accumulate(
    op: Builder,
    gradients: Mapping[str, ir.Value],
    buffers: Mapping[str, ir.Value],
    lazy_reset_grad: ir.Value,
) -> dict[str, ir.Value]:
    """This run's gradients, added to those so far unless these are to be forgotten.

    One ``If`` for all of them. Forgotten buffers are not read, so that whatever lies in them, NaN
    included, has no effect; multiplying them by 0 would keep NaN, and ``Where`` takes twice to four
    times as long. Each result may take its buffer's memory.

    Args:
        op: emits into the training graph.
        gradients: by parameter, in order.
        buffers: by parameter, of the gradients' dtypes and shapes.
        lazy_reset_grad: bool [1]; whether to forget.

    Returns:
        By parameter, under the names that the contract has for them.
    """
    if not gradients:
        return {}
    forget, add = op.subgraph("forget"), op.subgraph("add")
    alone = [forget.Identity(gradient) for gradient in gradients.values()]
    sums = [add.Add(buffers[name], gradient) for name, gradient in gradients.items()]
    results = op.node(
        "If",
        [lazy_reset_grad],
        outputs=len(gradients),
        then_branch=forget.returning(*alone),
        else_branch=add.returning(*sums),
    )
    results = results if isinstance(results, tuple) else (results,)
    accumulated = dict(zip(gradients, results, strict=True))
    for name, value in accumulated.items():
        value.type, value.shape = gradients[name].type, gradients[name].shape
        value.name = accumulation_out(name)
    return accumulated
