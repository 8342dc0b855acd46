"""Sizes at run time: whole numbers that a function has as Python ints and computes with as such.

A program's shape arithmetic is made of tensors: ``Shape``, ``Gather``, ``Concat``, ``Mul`` of int64
vectors. Here it becomes arithmetic of Python ints, which costs nothing next to a call of PyTorch
and needs no wait for a GPU: :mod:`~ortrain.runtime.aten.size_rules` has what each operator makes of
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from ortrain.ops.base import attributes_of
from ortrain.runtime.aten.operands import Host, Operand, Size, Tensor, product
from ortrain.runtime.aten.size_rules import MOST, RULES, Array, div, each, is_open, rest

if TYPE_CHECKING:
    from ortrain.runtime.aten.writer import Writer

WHOLE = frozenset({ir.DataType.INT64, ir.DataType.INT32})
"""Dtypes of the hosts that every kernel may meet."""
ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div"})
"""Operators whose kernels may meet a scalar host of any dtype, as a number."""
CONDITIONAL = frozenset({"If", "Loop"})
"""Operators whose kernels may meet a host of a truth value."""

# Above so many unknown numbers, tensors are as good.
MOST_UNKNOWN = 16
# An expression that is longer gets a variable: read twice in each of ten steps, it would be
# computed a thousand times.
LONGEST = 60

_TRUTH = {"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Xor", "Not"}
_COMPUTES = {"Add", "Sub", "Mul", "Div", "Mod", "Neg", "Abs", "Sum", "ReduceSum", "ReduceProd"}


def evaluate(t: Writer, node: ir.Node, inputs: Sequence[Operand | None]) -> Host | None:
    """The result of a node of sizes, where it is one; None where tensors are to compute it."""
    if node.domain or not inputs:
        return None
    first = inputs[0]
    if node.op_type in ("Shape", "Size") and first is not None:
        return _shape(node, first)
    rule = RULES.get(node.op_type)
    if len(node.outputs) != 1 or (rule is None and node.op_type != "Cast"):
        return None
    operands = [_constant(i) for i in inputs]
    hosts = [i for i in operands if isinstance(i, Host)]
    if not hosts or len(hosts) < sum(i is not None for i in operands):
        return None
    if rule is None:
        result, dtype = _cast(hosts[0], ir.DataType(node.attributes["to"].as_int()))
        return None if result is None else _host(t, node, result, dtype)
    if any(host.dtype not in WHOLE | _BOOL for host in hosts):
        return None
    arrays = [_array(i) if isinstance(i, Host) else None for i in operands]
    try:
        result = rule(node, *arrays, **attributes_of(node))
    except (ValueError, IndexError, TypeError, ZeroDivisionError):
        return None  # whatever is wrong with it, PyTorch shall say so
    if result is None:
        return None
    return _host(t, node, np.asarray(result, object), _dtype(node, operands))


_BOOL = frozenset({ir.DataType.BOOL})


def _constant(operand: Operand | None) -> Operand | None:
    """A small constant of several axes, or of bools, as a host."""
    array = operand.array if isinstance(operand, Tensor) else None
    if array is None or operand is None or array.size > MOST or array.dtype.kind not in "ib":
        return operand
    if operand.dtype not in WHOLE | _BOOL:
        return operand
    items = array.reshape(-1).tolist()
    sizes = array.shape if array.ndim > 1 else None
    return Host(items, array.ndim == 0, operand.dtype, sizes=sizes)


def _shape(node: ir.Node, x: Operand) -> Host | None:
    if not isinstance(x, Host) and x.dims is None:
        return None
    if node.op_type == "Size":
        return Host([product(list(x.shape))], True)
    attributes = attributes_of(node)
    places = slice(attributes.get("start", 0), attributes.get("end"))
    if isinstance(x, Host):
        return Host(list(x.shape[places]), False)
    return Host([x.size(axis) for axis in range(x.rank)[places]], False)


def _cast(x: Host, dtype: ir.DataType) -> tuple[Array | None, ir.DataType]:
    """What does not fit into int32 wraps around as a tensor, and here is refused at run time."""
    array = _array(x)
    if dtype in _BOOL and x.dtype in WHOLE:
        return each(lambda a: Size(f"({a} != 0)") if is_open(a) else a != 0, array), dtype
    if dtype in WHOLE and x.dtype in _BOOL:
        return each(lambda a: Size(f"int({a})") if is_open(a) else int(a), array), dtype
    # A number of 16 bits would be rounded, and a number beside a tensor is not.
    if dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE) and x.dtype in WHOLE and x.is_scalar:
        return each(lambda a: Size(f"float({a})") if is_open(a) else float(a), array), dtype
    return (array if dtype in WHOLE | _BOOL and x.dtype in WHOLE | _BOOL else None), dtype


def _dtype(node: ir.Node, inputs: Sequence[Operand | None]) -> ir.DataType:
    if node.op_type in _TRUTH:
        return ir.DataType.BOOL
    if node.op_type == "NonZero":
        return ir.DataType.INT64
    if node.op_type == "ConstantOfShape":
        filled = node.attributes.get("value")
        return ir.DataType.FLOAT if filled is None else filled.as_tensor().dtype
    source = inputs[1 if node.op_type == "Where" else 0]
    return source.dtype if source is not None and source.dtype else ir.DataType.INT64


def _array(host: Host) -> Array:
    array = np.empty(len(host.items), object)
    array[:] = host.items
    return array.reshape(host.shape)


def _host(t: Writer, node: ir.Node, array: Array, dtype: ir.DataType) -> Host | None:
    items = array.reshape(-1).tolist()
    unknown = [item for item in items if is_open(item)]
    if len(items) > MOST or (unknown and len(items) > MOST_UNKNOWN):
        return None
    if dtype in WHOLE:
        limits = np.iinfo(dtype.numpy())
        if not all(is_open(item) or limits.min <= item <= limits.max for item in items):
            return None
        if unknown and dtype is ir.DataType.INT32 and node.op_type in _COMPUTES:
            return None  # it may wrap around
    elif dtype not in _BOOL and node.op_type != "Cast":
        return None
    short = {item: item if len(item.text) <= LONGEST else t.bound(item) for item in unknown}
    items = [short[item] if is_open(item) else item for item in items]
    return Host(items, array.ndim == 0, dtype, sizes=array.shape if array.ndim > 1 else None)


__all__ = ["ARITHMETIC", "CONDITIONAL", "WHOLE", "div", "evaluate", "rest"]
