"""Which axes an operator carries from inputs to outputs, and what works on each token alone.

An axis is carried where an element of the output depends, of that input, on elements at its own
place of the axis and on no others. One rule for each operator says which; whether a node works on
each token alone, or reads an input only at tokens at which its result is read, follows from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.passes.tokens.frames import Frame, Frames, Monomial


class Read(Enum):
    """How a node that works on each token alone reads an input that has no token of its own."""

    SPREAD = "the same for all rows, or for all positions"
    WHOLE = "the same for all tokens"


Reads = list[Frame | Read]

# Axis of an input → axis of the output to which it is carried.
Carried = dict[int, int]
Rule = Callable[[ir.Node, int, int, int], Carried]  # node, input, its rank, rank of the output

_RULES: dict[str, Rule] = {}
_ELEMENTWISE: set[str] = set()


def name_of(node: ir.Node) -> str:
    """The operator with its domain."""
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def carried(node: ir.Node, index: int, output: ir.Value, frame: Frame) -> Frame | None:
    """Where an input of a node has those tokens that an output has in a frame.

    Args:
        node: the node.
        index: of the input.
        output: of the node.
        frame: of the output.

    Returns:
        A frame of the input: the output at a token depends, of this input, on that token alone.
        None where that is not so, or the input has no such tokens.
    """
    value = node.inputs[index]
    before, after = shapes.dims(value), shapes.dims(output)
    rule = _RULES.get(name_of(node))
    if not before or not after or (rule is None and name_of(node) != "Reshape"):
        return None
    if rule is None:
        return _reshaped(before, after, frame) if index == 0 else None
    axes = {o: i for i, o in rule(node, index, len(before), len(after)).items() if i >= 0}
    if any(a not in axes or before[axes[a]] != after[a] for a in frame.axes):
        return None
    return Frame(frame.grid, tuple(axes[a] for a in frame.axes), frame.heads)


def _reshaped(
    before: Sequence[shapes.Dim], after: Sequence[shapes.Dim], frame: Frame
) -> Frame | None:
    """The same tokens lie as far apart as before."""
    wanted = frame.strides(after)
    if wanted is None or Monomial.product(before) != Monomial.product(after):
        return None
    rows, length = Monomial.of(frame.grid.rows), frame.grid.length
    assert rows is not None
    found = [Frame(frame.grid, (a,)) for a in range(len(before))]
    for row, dim in enumerate(before):
        size = Monomial.of(dim)
        if size is None or size.symbols != rows.symbols or size.number % rows.number:
            continue
        heads = size.number // rows.number
        places = [a for a, other in enumerate(before) if other == length]
        found += [Frame(frame.grid, (row, a), heads) for a in places]
    both = rows.times(Monomial(1, (length,)))
    for each in found:
        if each.is_flat and (each.axes[0] != 0 or Monomial.of(before[0]) != both):
            continue
        if each.strides(before) == wanted:
            return each
    return None


@dataclass(frozen=True)
class Plan:
    """How a node works on each token alone.

    Attributes:
        frame: of its outputs.
        reads: for each input, the frame of the tokens that are read, or how it is read otherwise.
    """

    frame: Frame
    reads: Reads


def plan(node: ir.Node, frames: Frames, demanded: Sequence[ir.Value]) -> Plan | None:
    """How a node reads its inputs, None where it does not work on each token alone.

    Args:
        node: the node.
        frames: of the values.
        demanded: those outputs of the node that are read.
    """
    found = {frames.get(value) for value in demanded}
    frame = found.pop() if len(found) == 1 else None
    name = name_of(node)
    if frame is None or (name not in _RULES and name != "Reshape"):
        return None
    if not _is_plain(node, frame):
        return None
    reads: Reads = []
    for i, value in enumerate(node.inputs):
        own = None if value is None else carried(node, i, demanded[0], frame)
        if own is not None and value is not None:
            if frames.get(value) != own:
                return None
            reads.append(own)
        elif _is_free(value, frame) or (i == 1 and name in ("Reshape", "Expand")):
            reads.append(Read.WHOLE)
        elif name in _ELEMENTWISE and _is_spread(value, demanded[0], frame):
            reads.append(Read.SPREAD)
        else:
            return None
    return Plan(frame, reads)


def _is_plain(node: ir.Node, frame: Frame) -> bool:
    """Whether what a node says of sizes is known for each number of tokens."""
    output = node.outputs[0]
    dims = shapes.dims(output) or ()
    if name_of(node) == "Reshape":
        source = node.inputs[0]
        own = None if source is None else carried(node, 0, output, frame)
        before, after = None if own is None else _parts(source, own), _parts(output, frame)
        return before is not None and before == after
    if name_of(node) == "Expand":
        return all(isinstance(d, int) for a, d in enumerate(dims) if a not in frame.axes)
    if name_of(node) == "ortrain::Dropout":
        # Its mask goes by the number of the token, which it is told.
        leads = frame.axes == tuple(range(len(frame.axes)))
        behind = dims[len(frame.axes) : -1]
        fits = leads and len(dims) > len(frame.axes) and len(node.inputs) < 3
        return fits and all(isinstance(d, int) for d in behind)
    return True


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


def _is_free(value: ir.Value | None, frame: Frame) -> bool:
    """Whether a value has no axis of row or position: it is the same for all tokens."""
    if value is None:
        return True
    dims = shapes.dims(value)
    rows = Monomial.of(frame.grid.rows)
    assert rows is not None
    names = {*rows.symbols, frame.grid.length}
    sizes = [Monomial.of(dim) for dim in (dims if dims is not None else (None,))]
    return all(size is not None and not names.intersection(size.symbols) for size in sizes)


def _is_spread(value: ir.Value | None, output: ir.Value, frame: Frame) -> bool:
    """Whether a value is broadcast along the rows, or along the positions."""
    dims = shapes.dims(output)
    assert dims is not None, "it has a frame"
    here = None if value is None else aligned(value, len(dims), frame.axes)
    wanted = [dims[a] for a in frame.axes]
    return here is not None and len(wanted) == 2 and here in ([wanted[0], 1], [1, wanted[1]])


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


# -- one rule for each operator ----------------------------------------------------------------


def attribute(node: ir.Node, name: str, default: int) -> int:
    """An attribute that is a number."""
    given = node.attributes.get(name)
    return default if given is None else given.as_int()


def _but(axes: set[int], rank: int) -> Carried:
    """Each axis stays where it is, but for some, which are not carried."""
    return {a: a for a in range(rank) if a not in axes}


def _constant_axes(node: ir.Node, index: int, rank: int) -> set[int] | None:
    """The axes that an input of a node names; None where they are not known."""
    given = shapes.constant(node.inputs[index]) if len(node.inputs) > index else None
    return None if given is None else {int(a) % rank for a in given.reshape(-1)}


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
def _elementwise(node: ir.Node, index: int, rank: int, length: int) -> Carried:
    """As numpy broadcasts: axes are counted from the last."""
    return {a: a + length - rank for a in range(rank)}


_ELEMENTWISE.update(_RULES)


@_rule("Expand")
def _expand(node: ir.Node, index: int, rank: int, length: int) -> Carried:
    return _elementwise(node, index, rank, length) if index == 0 else {}


def labels(node: ir.Node) -> tuple[list[list[str]], list[str]] | None:
    """The axes of a product's two inputs, and of its output, by name: same name, same place.

    Args:
        node: ``MatMul`` or ``Einsum``; of another operator, or form, nothing is known.
    """
    ranks = [0 if value is None else shapes.rank(value) or 0 for value in node.inputs]
    if len(ranks) != 2:
        return None
    if name_of(node) == "Einsum":
        left, _, out = node.attributes["equation"].as_string().replace(" ", "").partition("->")
        terms = [list(term) for term in left.split(",")]
        plain = all(len({*term}) == len(term) and "." not in term for term in (*terms, [*out]))
        return (terms, list(out)) if out and plain and [*map(len, terms)] == ranks else None
    if name_of(node) != "MatMul" or min(ranks) < 2:
        return None
    batch = [str(a) for a in range(max(ranks) - 2)]
    lead = [batch[len(batch) - rank + 2 :] for rank in ranks]
    return [[*lead[0], "row", "sum"], [*lead[1], "sum", "column"]], [*batch, "row", "column"]


@_rule("MatMul", "Einsum")
def _product(node: ir.Node, index: int, rank: int, length: int) -> Carried:
    """Rows of the left, columns of the right, and what both have."""
    known = labels(node)
    if known is None:
        return {}
    terms, out = known
    return {a: out.index(name) for a, name in enumerate(terms[index]) if name in out}


@_rule("Gemm")
def _gemm(node: ir.Node, index: int, rank: int, length: int) -> Carried:
    return {0: 0} if index == 0 and not attribute(node, "transA", 0) else {}


@_rule("Softmax", "LogSoftmax")
def _softmax(node: ir.Node, index: int, rank: int, length: int) -> Carried:
    return _but({attribute(node, "axis", -1) % rank}, rank)


@_rule("LayerNormalization", "RMSNormalization")
def _norm(node: ir.Node, index: int, rank: int, length: int) -> Carried:
    """Over axes behind those of the token."""
    return {a: a for a in range(attribute(node, "axis", -1) % rank)} if index == 0 else {}


@_rule(
    "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2",
    "ReduceSumSquare", "ReduceLogSumExp",
)  # fmt: skip
def _reduce(node: ir.Node, index: int, rank: int, length: int) -> Carried:
    """Over other axes than those of the token."""
    axes = _constant_axes(node, 1, rank)
    if not axes or index:
        return {}
    if attribute(node, "keepdims", 1):
        return _but(axes, rank)
    return {a: a - sum(o < a for o in axes) for a in range(rank) if a not in axes}


@_rule("Concat", "GatherElements")
def _concat(node: ir.Node, index: int, rank: int, length: int) -> Carried:
    return _but({attribute(node, "axis", 0) % rank}, rank)


@_rule("Split")
def _split(node: ir.Node, index: int, rank: int, length: int) -> Carried:
    return _but({attribute(node, "axis", 0) % rank}, rank) if index == 0 else {}


@_rule("Slice")
def _slice(node: ir.Node, index: int, rank: int, length: int) -> Carried:
    axes = _constant_axes(node, 3, rank)
    return {} if axes is None or index else _but(axes, rank)


@_rule("ortrain::Embedding")
def _embedding(node: ir.Node, index: int, rank: int, length: int) -> Carried:
    return _but(set(), rank) if index == 1 else {}


@_rule("Gather")
def _gather(node: ir.Node, index: int, rank: int, length: int) -> Carried:
    """Rows of a table by each token's number, or places of another axis."""
    table, places = node.inputs
    axis, width = attribute(node, "axis", 0), shapes.rank(table) if table is not None else None
    if width is None or places is None or shapes.rank(places) is None:
        return {}
    axis, more = axis % width, (shapes.rank(places) or 0) - 1
    if index == 1:
        return {a: axis + a for a in range(rank)}
    return {a: a if a < axis else a + more for a in range(rank) if a != axis}


@_rule("Transpose")
def _transpose(node: ir.Node, index: int, rank: int, length: int) -> Carried:
    perm = node.attributes.get("perm")
    order = list(range(rank))[::-1] if perm is None else perm.as_ints()
    return {a: o for o, a in enumerate(order)}


@_rule("Unsqueeze")
def _unsqueeze(node: ir.Node, index: int, rank: int, length: int) -> Carried:
    new = _constant_axes(node, 1, length)
    if new is None or index:
        return {}
    return dict(enumerate(a for a in range(length) if a not in new))


@_rule("Squeeze")
def _squeeze(node: ir.Node, index: int, rank: int, length: int) -> Carried:
    gone = _constant_axes(node, 1, rank)
    if gone is None or index:
        return {}
    return {a: o for o, a in enumerate(a for a in range(rank) if a not in gone)}


@_rule("ortrain::Dropout")
def _dropout(node: ir.Node, index: int, rank: int, length: int) -> Carried:
    return _but(set(), rank) if index == 0 else {}


@_rule("ortrain::CrossEntropy")
def _cross_entropy(node: ir.Node, index: int, rank: int, length: int) -> Carried:
    """Of each token alone, where its losses are not added up."""
    reduction = node.attributes.get("reduction")
    if reduction is None or reduction.as_string() != "none":
        return {}
    return {0: 0} if index < 2 else {}
