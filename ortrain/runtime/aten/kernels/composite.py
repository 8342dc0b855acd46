"""ortrain's own operators that PyTorch has as they are."""

from __future__ import annotations

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.runtime.aten.table import kernel


def _is_aligned(node):
    """Whether rows of both sides are whole multiples of 16 bytes; float64 PyTorch refuses, too."""
    dtype, rows = node.inputs[0].dtype, shapes.dims(node.inputs[1])
    if dtype is None or dtype is ir.DataType.DOUBLE or rows is None:
        return False
    return all(isinstance(d, int) and d * dtype.itemsize % 16 == 0 for d in rows[1:])


@kernel("ortrain::GroupedMatMul", when=_is_aligned)
def grouped_matmul(t, input, weight, ends):
    """As the program that was captured has it; others multiply group by group."""
    if not input.is_contiguous:
        input = input.contiguous()
    return t.call("torch._grouped_mm", input, weight, offs=t.tensor(ends).to(ir.DataType.INT32))
