"""Calls that stay PyTorch's: one node each."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch

from ortrain.capture.onnx.translations.base import Translator, translation
from ortrain.capture.trace.keeping import keeper


@translation(torch.ops.ortrain.kept.default)
def kept(
    op: Translator, tensors: Sequence[ir.Value], sizes: Sequence[int | ir.Value], number: int
) -> tuple[ir.Value, ...]:
    known = keeper()
    assert known is not None
    call, results = known.calls[number], known.results[number]
    numbers = [op.constant(size) if isinstance(size, int) else size for size in sizes]
    made = op.ours(
        "Kept",
        *tensors,
        *numbers,
        outputs=len(results),
        key=call.key,
        sizes=len(sizes),
        connected=[i for i, reached in enumerate(call.connected) if reached],
        ways=call.ways,
        axes=call.axes,
    )
    return (made,) if len(results) == 1 else tuple(made)
