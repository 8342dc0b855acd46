"""How often operators in float16 or bfloat16 round a result on its way.

PyTorch's kernels take narrow tensors, compute in float32 inside, and round once. What spells such a
kernel in several operators has to do so too: each further rounding to bfloat16 costs as much
as the first one, 2e-3 of the value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder

NARROW = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
WIDE = ir.DataType.FLOAT
"""What PyTorch's kernels compute in where the tensors are narrow."""

_WIDER = {
    ir.DataType.FLOAT16: {ir.DataType.FLOAT, ir.DataType.DOUBLE},
    ir.DataType.BFLOAT16: {ir.DataType.FLOAT, ir.DataType.DOUBLE},
    ir.DataType.FLOAT: {ir.DataType.DOUBLE},
}
# Large, and as PyTorch has them: what they take and give is rounded, what they add up is not.
PRODUCTS = frozenset(
    {"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "LSTM", "GRU", "RNN", "Attention",
     "GroupedMatMul", "ConvGradient", "ConvTransposeGradient", "FlashAttention",
     "FlashAttentionGradient", "LinearCrossEntropy", "NarrowAttention", "NarrowAttentionGradient"}
)  # fmt: skip
_LOOPS = frozenset({"If", "Loop", "Scan"})
# The result is made of numbers of the operands: there is nothing to round.
_EXACT = frozenset(
    {"Abs", "ArgMax", "ArgMin", "Clip", "Compress", "Concat", "Constant", "ConstantOfShape",
     "DepthToSpace", "Embedding", "Expand", "Flatten", "Gather", "GatherElements", "GatherND",
     "Identity", "Max", "MaxPool", "MaxUnpool", "Min", "Neg", "OneHot", "Pack", "Pad", "ReduceMax",
     "ReduceMin", "Relu", "Reshape", "ReverseSequence", "Sign", "Slice", "SpaceToDepth", "Split",
     "Squeeze", "StopGradient", "Tile", "TopK", "Transpose", "Trilu", "Unpack", "Unsqueeze",
     "Where", "Ceil", "Floor", "Round"}
)  # fmt: skip
# The kernels take a number as it is, and round the result; to others it is one of their tensors'.
_WITH_NUMBERS = frozenset({"Add", "Sub", "Mul", "Div", "Pow"})


def rounds_once(builder: Builder) -> bool:
    """Whether nothing that the builder has emitted is rounded to a narrow dtype twice.

    Nor is a number beside a tensor. Products are left as they are, with what is around them, and so
    are loops.
    """
    times: dict[ir.Value, int] = {}
    if any(node.op_type in PRODUCTS or node.op_type in _LOOPS for node in builder.nodes):
        return True
    for node in builder.nodes:
        before = max((times.get(v, 0) for v in node.inputs if v is not None), default=0)
        count = before + _rounds(node)
        rounded = node.op_type in _WITH_NUMBERS and any(v in builder.rounded for v in node.inputs)
        if count > 1 or (count and rounded):
            return False
        times.update(dict.fromkeys(node.outputs, count))
    return True


def _rounds(node: ir.Node) -> bool:
    if node.op_type in _EXACT or all(v.dtype not in NARROW for v in node.outputs):
        return False
    if node.op_type == "Cast":
        source = node.inputs[0]
        return source is None or source.dtype not in {ir.DataType.BOOL, *NARROW}
    if node.op_type in ("Mul", "Div"):
        return not any(_is_power_of_two(v) for v in node.inputs)
    return True


def _is_power_of_two(value: ir.Value | None) -> bool:
    known = shapes.constant(value)
    if known is None or known.size != 1:
        return False
    fraction, _ = math.frexp(float(known.reshape(-1)[0]))
    return abs(fraction) == 0.5


def is_narrow(values: Iterable[object]) -> bool:
    """Whether there is a narrow tensor among some operands."""
    return any(isinstance(v, ir.Value) and v.dtype in NARROW for v in values)


def is_widening(node: ir.Node | None) -> bool:
    """Whether a node is a cast of floating-point numbers that keeps every one."""
    if node is None or node.op_type != "Cast" or node.domain or node.inputs[0] is None:
        return False
    source, to = node.inputs[0].dtype, node.outputs[0].dtype
    return to in _WIDER.get(source, ()) if source is not None else False


def is_narrowing(node: ir.Node | None) -> bool:
    """Whether a node is a cast of floating-point numbers to a dtype with fewer of them."""
    if node is None or node.op_type != "Cast" or node.domain or node.inputs[0] is None:
        return False
    source, to = node.inputs[0].dtype, node.outputs[0].dtype
    return source in _WIDER.get(to, ()) if to is not None else False


def rounding_once(
    op: Builder, emit: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """What ``emit(op, *args, **kwargs)`` returns, a value or a tuple of them; None where none is.

    Of narrow tensors in float32, and then rounded, where in their own dtype it would be rounded
    more than once.

    Args:
        op: the builder, with nothing else emitted.
        emit: emits nodes.
        args: values, numbers, rows of them.
        kwargs: likewise.
    """
    result = emit(op, *args, **kwargs)
    if not is_narrow(values_in((args, kwargs))) or rounds_once(op):
        return result
    op.discard()

    def wide(argument: Any) -> Any:
        if isinstance(argument, ir.Value):
            return op.cast(argument, WIDE) if argument.dtype in NARROW else argument
        return [wide(each) for each in argument] if isinstance(argument, list | tuple) else argument

    def rounded(value: ir.Value | None, model: ir.Value | None) -> ir.Value | None:
        if value is None or model is None or model.dtype is None:
            return value
        return op.cast(value, model.dtype) if model.dtype in NARROW else value

    again = emit(op, *map(wide, args), **{name: wide(v) for name, v in kwargs.items()})
    if isinstance(again, ir.Value):
        return rounded(again, result)
    return tuple(map(rounded, again, result))


def values_in(argument: Any) -> Iterator[ir.Value]:
    """The values among some arguments."""
    if isinstance(argument, ir.Value):
        yield argument
    elif isinstance(argument, list | tuple):
        for each in argument:
            yield from values_in(each)
    elif isinstance(argument, Mapping):
        yield from values_in([*argument.values()])
