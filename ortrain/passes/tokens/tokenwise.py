"""What works on each token alone, and how such an operator takes its inputs.

One rule for each operator: it is given a node and the frame of its outputs, and says for each input
how that is read, or None where a token's result depends on another token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.passes.tokens.frames import Frame, Frames


class Read(Enum):
    """How a node that works on each token alone reads an input."""

    TOKEN = "each token's own"
    SPREAD = "the same for all rows, or for all positions"
    WHOLE = "the same for all tokens"


Reads = list[Read]
Rule = Callable[[ir.Node, Frame, Frames], Reads | None]

_RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def reads(node: ir.Node, frames: Frames, demanded: Sequence[ir.Value]) -> Reads | None:
    """How a node reads its inputs, None where it does not work on each token alone.

    Args:
        node: the node.
        frames: of the values.
        demanded: those outputs of the node that are read.
    """
    found = {frames.get(value) for value in demanded}
    frame = found.pop() if len(found) == 1 else None
    name = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    rule = _RULES.get(name)
    if frame is None or rule is None or any(v is None for v in node.inputs[:1]):
        return None
    return rule(node, frame, frames)


def _attribute(node: ir.Node, name: str, default: int) -> int:
    given = node.attributes.get(name)
    return default if given is None else given.as_int()


def _own(value: ir.Value | None, frame: Frame, frames: Frames) -> bool:
    """Whether a value has its tokens on these axes."""
    return value is not None and frames.get(value) == frame


def _is_free(value: ir.Value | None, frame: Frame) -> bool:
    """Whether a value has no axis of row or position: it is the same for all tokens."""
    dims = shapes.dims(value)
    names = {frame.grid.rows, frame.grid.length, *frame.grid.flat}
    return value is None or (dims is not None and not names.intersection(map(str, dims)))


def _first(node: ir.Node, frame: Frame, frames: Frames, own: Frame | None = None) -> Reads | None:
    """The first input has the tokens, and all others are the same for all of them."""
    fits = _own(node.inputs[0], own or frame, frames)
    fits = fits and all(_is_free(value, frame) for value in node.inputs[1:])
    return [Read.TOKEN, *[Read.WHOLE] * (len(node.inputs) - 1)] if fits else None


@_rule(
    "Add", "Sub", "Mul", "Div", "Pow", "Where", "And", "Or", "Xor", "Not", "Equal", "Greater",
    "GreaterOrEqual", "Less", "LessOrEqual", "Min", "Max", "Sum", "Mean", "Mod", "BitwiseAnd",
    "BitwiseOr", "BitwiseXor", "BitwiseNot", "Abs", "Ceil", "Cos", "Erf", "Exp", "Floor",
    "Identity", "Log", "Neg", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Sqrt",
    "Tanh", "Cast", "HardSigmoid", "IsNaN", "IsInf", "Gelu", "Clip", "LeakyRelu", "Elu",
    "Selu", "Softplus", "Softsign", "HardSwish", "Mish", "PRelu", "Atan", "Asin", "Acos",
    "Tan", "Sinh", "Cosh", "ortrain::StopGradient", "ortrain::Silu", "ortrain::Sigmoid",
    "ortrain::Log1p",
)  # fmt: skip
def _elementwise(node: ir.Node, frame: Frame, frames: Frames) -> Reads | None:
    """As numpy broadcasts: axes are counted from the last."""
    dims = shapes.dims(node.outputs[0])
    assert dims is not None, "it has a frame"
    wanted, found = [dims[a] for a in frame.axes], Reads()
    for value in node.inputs:
        here = [1] if value is None else aligned(value, len(dims), frame.axes)
        if here is None or not {*here} <= {1, *wanted}:
            return None
        if all(d == 1 for d in here):
            found.append(Read.WHOLE)
        else:
            found.append(Read.TOKEN if here == wanted else Read.SPREAD)
    return found


def aligned(value: ir.Value, length: int, axes: Sequence[int]) -> list[shapes.Dim] | None:
    """The sizes of a value along the axes of what it is broadcast to.

    Args:
        value: any.
        length: how many axes the result has.
        axes: of the result.
    """
    dims = shapes.dims(value)
    if dims is None:
        return None
    missing = length - len(dims)
    return [dims[a - missing] if a >= missing else 1 for a in axes]


@_rule("MatMul")
def _matmul(node: ir.Node, frame: Frame, frames: Frames) -> Reads | None:
    """Of each token with one matrix."""
    if shapes.rank(node.inputs[1]) != 2:  # type: ignore[arg-type]
        return None
    return _first(node, frame, frames)


@_rule("Gemm")
def _gemm(node: ir.Node, frame: Frame, frames: Frames) -> Reads | None:
    if _attribute(node, "transA", 0):
        return None
    return _first(node, frame, frames)


@_rule("LayerNormalization", "RMSNormalization", "Softmax", "LogSoftmax")
def _along_last_axes(node: ir.Node, frame: Frame, frames: Frames) -> Reads | None:
    """Over axes behind those of the token."""
    length = shapes.rank(node.inputs[0])  # type: ignore[arg-type]
    if length is None or _attribute(node, "axis", -1) % length <= max(frame.axes):
        return None
    return _first(node, frame, frames)


@_rule(
    "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2",
    "ReduceSumSquare", "ReduceLogSumExp",
)  # fmt: skip
def _reduce(node: ir.Node, frame: Frame, frames: Frames) -> Reads | None:
    """Over other axes than those of the token."""
    axes = shapes.constant(node.inputs[1]) if len(node.inputs) > 1 else None
    source = node.inputs[0]
    own = frames.get(source) if source is not None else None
    length = shapes.rank(source) if source is not None else None
    if axes is None or own is None or own.grid != frame.grid or not length:
        return None
    if len(own.axes) != len(frame.axes) or {int(a) % length for a in axes} & {*own.axes}:
        return None
    return _first(node, frame, frames, own)


@_rule("Concat")
def _concat(node: ir.Node, frame: Frame, frames: Frames) -> Reads | None:
    length = shapes.rank(node.outputs[0])
    if length is None or _attribute(node, "axis", 0) % length in frame.axes:
        return None
    fits = all(_own(value, frame, frames) for value in node.inputs)
    return [Read.TOKEN] * len(node.inputs) if fits else None


@_rule("Split")
def _split(node: ir.Node, frame: Frame, frames: Frames) -> Reads | None:
    length = shapes.rank(node.outputs[0])
    if length is None or _attribute(node, "axis", 0) % length in frame.axes:
        return None
    return _first(node, frame, frames)


@_rule("Slice")
def _slice(node: ir.Node, frame: Frame, frames: Frames) -> Reads | None:
    """Of other axes."""
    axes = shapes.constant(node.inputs[3]) if len(node.inputs) > 3 else None
    length = shapes.rank(node.outputs[0])
    if axes is None or not length or {int(a) % length for a in axes} & {*frame.axes}:
        return None
    return _first(node, frame, frames)


@_rule("ortrain::Embedding")
def _embedding(node: ir.Node, frame: Frame, frames: Frames) -> Reads | None:
    return _looked_up(node, frame, frames)


@_rule("Gather")
def _gather(node: ir.Node, frame: Frame, frames: Frames) -> Reads | None:
    """Rows of a table by each token's number, or places of another axis."""
    table, places = node.inputs
    axis = _attribute(node, "axis", 0)
    if axis == 0 and _is_free(table, frame):
        return _looked_up(node, frame, frames)
    own = frames.get(table) if table is not None else None
    length = shapes.rank(table) if table is not None else None
    fits = own is not None and own.grid == frame.grid and len(own.axes) == len(frame.axes)
    if not fits or own is None or not length or axis % length in own.axes:
        return None
    return [Read.TOKEN, Read.WHOLE] if _is_free(places, frame) else None


def _looked_up(node: ir.Node, frame: Frame, frames: Frames) -> Reads | None:
    table, numbers = node.inputs
    fits = _is_free(table, frame) and _own(numbers, frame, frames)
    return [Read.WHOLE, Read.TOKEN] if fits else None


@_rule("GatherElements")
def _gather_elements(node: ir.Node, frame: Frame, frames: Frames) -> Reads | None:
    length = shapes.rank(node.outputs[0])
    if length is None or _attribute(node, "axis", 0) % length in frame.axes:
        return None
    fits = all(_own(value, frame, frames) for value in node.inputs)
    return [Read.TOKEN, Read.TOKEN] if fits else None


@_rule("Transpose")
def _transpose(node: ir.Node, frame: Frame, frames: Frames) -> Reads | None:
    perm = node.attributes.get("perm")
    if perm is None:
        return None
    order = perm.as_ints()
    return _first(node, frame, frames, Frame(frame.grid, tuple(order[a] for a in frame.axes)))


@_rule("Unsqueeze", "Squeeze")
def _unsqueeze(node: ir.Node, frame: Frame, frames: Frames) -> Reads | None:
    """The tokens' axes stay, by their sizes, which no other axis has."""
    source = node.inputs[0]
    own = frames.get(source) if source is not None else None
    if own is None or own.grid != frame.grid or len(own.axes) != len(frame.axes):
        return None
    if len(node.inputs) < 2 or shapes.constant(node.inputs[1]) is None:
        return None
    return _first(node, frame, frames, own)


@_rule("Expand")
def _expand(node: ir.Node, frame: Frame, frames: Frames) -> Reads | None:
    """To other axes than those of the token."""
    if not _own(node.inputs[0], frame, frames):
        return None
    dims = shapes.dims(node.outputs[0]) or ()
    rest = [d for a, d in enumerate(dims) if a not in frame.axes]
    return [Read.TOKEN, Read.WHOLE] if all(isinstance(d, int) for d in rest) else None


@_rule("Reshape")
def _reshape(node: ir.Node, frame: Frame, frames: Frames) -> Reads | None:
    """Of what is before, between and behind the axes of the token; the first two may become one.

    Each part has as many elements before and after, by sizes that are numbers.
    """
    source = node.inputs[0]
    own = frames.get(source) if source is not None else None
    if own is None or own.grid != frame.grid:
        return None
    before, after = _parts(source, own), _parts(node.outputs[0], frame)
    if before is None or after is None or before != after:
        return None
    return [Read.TOKEN, Read.WHOLE]


def _parts(value: ir.Value | None, frame: Frame) -> tuple[int, int, int] | None:
    """Elements before, between and behind the axes of the token; None where that is not known."""
    dims = shapes.dims(value)
    first, last = frame.axes[0], frame.axes[-1]
    if dims is None or first > last:
        return None
    parts = [dims[:first], dims[first + 1 : last], dims[last + 1 :]]
    if not all(isinstance(d, int) for part in parts for d in part):
        return None
    before, between, behind = (math.prod(part) for part in parts)  # type: ignore[arg-type]
    return before, between, behind


@_rule("ortrain::Dropout")
def _dropout(node: ir.Node, frame: Frame, frames: Frames) -> Reads | None:
    """Its mask goes by the number of the token, which it is told."""
    length = shapes.rank(node.outputs[0])
    behind = (shapes.dims(node.outputs[0]) or ())[len(frame.axes) : -1]
    leads = frame.axes == tuple(range(len(frame.axes)))
    if not length or not leads or length == len(frame.axes) or len(node.inputs) > 2:
        return None
    return _first(node, frame, frames) if all(isinstance(d, int) for d in behind) else None
