"""How a running function holds the numbers of each of ONNX's dtypes."""

from __future__ import annotations

import onnx_ir as ir
import torch

DTYPES: dict[ir.DataType, torch.dtype] = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.DOUBLE: torch.float64,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
    ir.DataType.INT8: torch.int8,
    ir.DataType.INT16: torch.int16,
    ir.DataType.INT32: torch.int32,
    ir.DataType.INT64: torch.int64,
    ir.DataType.UINT8: torch.uint8,
    ir.DataType.BOOL: torch.bool,
    ir.DataType.COMPLEX64: torch.complex64,
    ir.DataType.COMPLEX128: torch.complex128,
    # The same bits: of these PyTorch has the dtype and hardly an operator.
    ir.DataType.UINT16: torch.int16,
    ir.DataType.UINT32: torch.int32,
    ir.DataType.UINT64: torch.int64,
}
"""The dtype that stands for each of ONNX's in a running function."""

UNSIGNED = frozenset({ir.DataType.UINT16, ir.DataType.UINT32, ir.DataType.UINT64})
"""Those that are held as signed numbers of the same bits."""


def holds(value: ir.Value | None) -> bool:
    """Whether a value's numbers can be held: no text, and none of fewer than 8 bits."""
    return value is None or value.dtype is None or value.dtype in DTYPES
