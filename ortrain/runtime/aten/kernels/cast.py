"""From one dtype to another."""

from __future__ import annotations

import onnx_ir as ir

from ortrain.graph.shapes import FLOATING
from ortrain.runtime.aten.dtypes import DTYPES, UNSIGNED
from ortrain.runtime.aten.kernels.unsigned import valued
from ortrain.runtime.aten.lines import Raw
from ortrain.runtime.aten.operands import Host
from ortrain.runtime.aten.table import kernel


@kernel("Cast")
def cast(t, input, *, to, saturate=1, round_mode="up"):
    return converted(t, input, ir.DataType(to))


@kernel("CastLike")
def cast_like(t, input, target_type, *, saturate=1, round_mode="up"):
    return converted(t, input, target_type.dtype)


def converted(t, x, dtype):
    """What no integer of the dtype is becomes what numpy and onnxruntime make of it."""
    if isinstance(x, Host) and x.is_scalar and x.known is None:
        result = t.scalar_tensor(x.items[0], dtype=dtype, device=Raw("device"))
        result.dims, result.dtype = (), dtype
        return result
    x = t.tensor(x)
    if x.dtype is dtype:
        return x
    source = x
    if x.dtype in UNSIGNED and (dtype in FLOATING or dtype.bitwidth > x.dtype.bitwidth):
        source = valued(x)
    if dtype in UNSIGNED and x.dtype in FLOATING:
        result = source.to(Raw(f"torch.uint{dtype.bitwidth}")).view(dtype)
    else:
        result = source.to(dtype)
    if x.dtype is not None and DTYPES[x.dtype] is not DTYPES[dtype]:
        t.own(result)  # and not, as `to` may give, its operand
    result.dims, result.dtype = x.dims, dtype
    return result
