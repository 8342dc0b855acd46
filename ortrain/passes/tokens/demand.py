"""At which tokens a value is read: a walk from the outputs back.

What is read of a value is everything, nothing, or a union of sets of tokens. A set is known by what
decides about it when the program runs, for example the labels of a loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.walk import reads
from ortrain.passes.tokens import tokenwise
from ortrain.passes.tokens.frames import Frame, Frames, Grid
from ortrain.passes.tokens.tokenwise import Read
from ortrain.program import Program, Role, origin_of, role_of


@dataclass(frozen=True)
class Kept:
    """A set of tokens.

    Attributes:
        kind: ``keys`` that an attention mask lets some query see; ``nonzero`` elements of a value;
            ``labels`` other than one that is ignored; one ``position`` of each row.
        value: the mask, value or labels; None for a position.
        number: the ignored label, or the position.
        lost: whether a query that a mask shuts out from every key sees all of them, as where a
            finite number stands for the mask.
        negated: whether a mask shuts out what it is true for.
    """

    kind: str
    value: ir.Value | None = None
    number: int = 0
    lost: bool = False
    negated: bool = False


Demand = frozenset[Kept] | None
"""The union of sets of tokens at which a value is read; None for all of them."""

# What an additive mask shuts out for certain: scores that a float32 can tell from it do not occur.
SHUT = -1e30

Shown = Literal["all", "tokens", "loss"]

ALL: Demand = None
NONE: Demand = frozenset()


def union(a: Demand, b: Demand) -> Demand:
    """What is read by one or the other."""
    return None if a is None or b is None else a | b


@dataclass
class Demands:
    """What is read of a program's values.

    Attributes:
        frames: of the values.
        of: value → where it is read; nowhere where it is not in it.
        reads: nodes that work on each token alone → how they read their inputs.
        in_the_way: nodes that need all tokens of a value that has some → where in the user's code.
        seen: grid → the keys that attention lets be seen.
    """

    frames: Frames
    of: dict[ir.Value, Demand] = field(default_factory=dict)
    reads: dict[ir.Node, tokenwise.Reads] = field(default_factory=dict)
    in_the_way: dict[ir.Node, str] = field(default_factory=dict)
    seen: dict[Grid, set[Kept]] = field(default_factory=dict)

    def add(self, value: ir.Value | None, demand: Demand) -> None:
        """Notes that a value is read."""
        if value is not None:
            self.of[value] = union(self.of.get(value, NONE), demand)

    def packs(self, node: ir.Node) -> Demand:
        """The tokens that a node computes; all where it does not leave any out."""
        found: Demand = NONE
        for value in node.outputs:
            found = union(found, self.of.get(value, NONE))
        return found if node in self.reads else ALL


def demands(program: Program, shown: Shown = "all") -> Demands:
    """What is read of each value of a forward program.

    Args:
        program: the program.
        shown: what is read of its outputs: ``all``, the ``tokens`` that attention lets be seen, or
            nothing but a ``loss``, which is a floating scalar in the first place.
    """
    seen = demands(program).seen if shown == "tokens" else {}
    found, users = Demands(Frames(program)), program.outputs(Role.USER_OUTPUT, Role.LOSS)
    first = users[0] if users else None
    only = shown == "loss" and first is not None and _is_loss(first)
    for value in program.graph.outputs:
        frame = found.frames.get(value)
        if role_of(value) not in (Role.USER_OUTPUT, Role.LOSS) or frame is None:
            found.add(value, ALL)
        elif not only:
            found.add(value, frozenset(seen[frame.grid]) if frame.grid in seen else ALL)
    learned = _learned(program)
    for node in reversed(program.graph):
        _through(node, found, learned)
    return found


def _is_loss(value: ir.Value) -> bool:
    return value.dtype in shapes.FLOATING and shapes.dims(value) == ()


def _learned(program: Program) -> set[ir.Value]:
    """What depends on parameters or random numbers: nothing decides by it what is left out."""
    given = {v for v in program.graph.inputs if role_of(v) in (Role.PARAMETER, Role.SEED)}
    for node in program.graph:
        if any(v in given for v in reads(node)):
            given.update(node.outputs)
    return given


def _through(node: ir.Node, found: Demands, learned: Collection[ir.Value]) -> None:
    demanded = [v for v in node.outputs if found.of.get(v, NONE) != NONE]
    if not demanded:
        return
    name = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    special = _SPECIAL.get(name)
    if special is not None and special(node, found, learned):
        return
    demand: Demand = NONE
    for value in demanded:
        demand = union(demand, found.of[value])
    taken = None if demand is ALL else tokenwise.reads(node, found.frames, demanded)
    if taken is None:
        framed = [v for v in node.inputs if v is not None and v in found.frames]
        if framed and demand is not ALL:
            found.in_the_way[node] = origin_of(node)
        for value in reads(node):
            found.add(value, ALL)
        return
    found.reads[node] = taken
    for operand, how in zip(node.inputs, taken, strict=True):
        found.add(operand, demand if how is Read.TOKEN else ALL)


# -- what leaves tokens out --------------------------------------------------------------------


def _attention(node: ir.Node, found: Demands, learned: Collection[ir.Value]) -> bool:
    """A query is read where its result is, keys and values where the mask lets them be seen."""
    query, key, value = node.inputs[:3]
    assert query is not None
    assert key is not None
    assert value is not None
    mask = node.inputs[3] if len(node.inputs) > 3 else None
    output = node.outputs[0]
    frames = found.frames
    kept = _seen(mask, key, learned, frames)
    own = frames.get(output)
    queries = found.of[output] if own is not None and frames.get(query) == own else ALL
    for v in reads(node):
        if v not in (query, key, value):
            found.add(v, ALL)
    found.add(query, queries)
    keyed = frames.get(key)
    demand = ALL
    if kept is not None and keyed is not None and keyed == frames.get(value):
        demand = frozenset({kept})
        found.seen.setdefault(keyed.grid, set()).add(kept)
    found.add(key, demand)
    found.add(value, demand)
    return True


def _seen(
    mask: ir.Value | None, key: ir.Value, learned: Collection[ir.Value], frames: Frames
) -> Kept | None:
    """The keys that a mask lets some query see; None where it tells nothing about them."""
    frame = frames.get(key)
    if mask is None or frame is None or frame.is_flat:
        return None
    mask, lost, negated = _condition(mask, frame, learned)
    if mask in learned or not _has_keys(mask, frame):
        return None
    source = mask if negated else _narrowed(mask, frame)
    dims = shapes.dims(source)
    # The lowest number of float16 shuts nothing out for certain.
    if not dims or dims[0] != frame.grid.rows or source.dtype in (None, ir.DataType.FLOAT16):
        return None
    if len(dims) == 2 and source.dtype not in shapes.FLOATING:
        return Kept("nonzero", source, lost=lost, negated=negated)
    return Kept("keys", source, lost=lost, negated=negated) if len(dims) >= 4 else None


def _has_keys(value: ir.Value, frame: Frame) -> bool:
    """Whether the last axis of a value is that of the keys."""
    dims = shapes.dims(value)
    return dims is not None and dims[-1:] == (frame.grid.length,)


def _condition(
    mask: ir.Value, frame: Frame, learned: Collection[ir.Value]
) -> tuple[ir.Value, bool, bool]:
    """The condition that a mask comes from, as far as it tells of keys, and how.

    What is learned, a bias for the distance of two tokens, is added to it, or stands where it is
    open.

    Returns:
        It, whether a query that it shuts out altogether sees all keys, and whether it is negated.
    """
    while (node := mask.producer()) is not None and not node.domain:
        if node.op_type == "Add" and mask.dtype in shapes.FLOATING:
            open_ = [v for v in node.inputs if v is None or not _is_bounded(v)]
            if len(open_) != 1 or open_[0] is None or not _has_keys(open_[0], frame):
                break
            mask = open_[0]
        elif node.op_type == "Where" and mask.dtype is not ir.DataType.FLOAT16:
            condition, *ways = node.inputs
            shut = [number for v in ways if (number := _shut(v)) is not None]
            others = [v for v in ways if _shut(v) is None]
            if len(shut) != 1 or condition is None or condition in learned:
                break
            if not all(v is not None and _is_bounded(v) for v in others):
                break
            return condition, shut[0] != -math.inf, _shut(ways[0]) is not None
        elif node.op_type in ("Unsqueeze", "Identity"):
            inner = node.inputs[0]
            if inner is None or not _has_keys(mask, frame) or not _has_keys(inner, frame):
                break
            mask = inner
        else:
            break
    return mask, False, False


# Of numbers that are none that shuts out they make none.
_BOUNDED = frozenset(
    {"Add", "Sub", "Mul", "Neg", "Abs", "Transpose", "Unsqueeze", "Squeeze", "Reshape", "Slice",
     "Expand", "Gather", "ortrain::Embedding", "Concat", "Identity", "Cast"}
)  # fmt: skip


def _is_bounded(value: ir.Value, depth: int = 12) -> bool:
    """Whether no number of a value shuts anything out: it is a bias of what is learned, or zero."""
    known = shapes.constant(value)
    if known is not None:
        return bool((np.abs(known.astype(np.float64)) < -SHUT).all())
    if value.dtype not in shapes.FLOATING or role_of(value) is Role.PARAMETER:
        return True
    node = value.producer()
    name = "" if node is None else f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    if node is None or name not in _BOUNDED or not depth:
        return False
    return all(v is None or _is_bounded(v, depth - 1) for v in node.inputs)


def _shut(value: ir.Value | None) -> float | None:
    """The number that shuts out all that it stands for; None where a value is none."""
    known = shapes.constant(value)
    if known is None or known.size != 1 or not float(known.reshape(-1)[0]) <= SHUT:
        return None
    return float(known.reshape(-1)[0])


def _narrowed(mask: ir.Value, frame: Frame) -> ir.Value:
    """A value that says the same of keys as a mask, or lets more be seen: nearer to the inputs.

    Its last axis is that of the keys, as the mask's is.
    """
    while (node := mask.producer()) is not None and not node.domain:
        known = [v for v in node.inputs if v is not None]
        if node.op_type == "And":  # of several only one knows of rows
            known = [v for v in known if (shapes.dims(v) or (1,))[0] == frame.grid.rows]
            if len(known) != 1:
                break
        elif node.op_type == "Cast":
            if mask.dtype is not ir.DataType.BOOL:
                break
        elif node.op_type not in ("Unsqueeze", "Identity"):
            break
        if not _has_keys(known[0], frame):
            break
        mask = known[0]
    return mask


def _cross_entropy(node: ir.Node, found: Demands, learned: Collection[ir.Value]) -> bool:
    """Logits are read where there is a label."""
    logits, labels = node.inputs[:2]
    assert logits is not None
    assert labels is not None
    reduction = node.attributes.get("reduction")
    frame = found.frames.get(logits)
    rank = shapes.rank(logits)
    rows = frame is not None and rank == len(frame.axes) + 1 and frame.axes[0] == 0
    fits = rows and labels not in learned and found.of.get(node.outputs[1], NONE) == NONE
    if not fits or (reduction is not None and reduction.as_string() == "none"):
        return False
    ignored = node.attributes.get("ignore_index")
    for other in reads(node):
        if other is not logits:
            found.add(other, ALL)
    kept = Kept("labels", labels, -100 if ignored is None else ignored.as_int())
    found.add(logits, frozenset({kept}))
    return True


def _position(node: ir.Node, found: Demands, learned: Collection[ir.Value]) -> bool:
    """One position of each row."""
    data = node.inputs[0]
    place = shapes.constant(node.inputs[1])
    frame = found.frames.get(data) if data is not None else None
    axis = node.attributes.get("axis")
    if frame is None or frame.is_flat or place is None or place.size != 1 or axis is None:
        return False
    if axis.as_int() % len(shapes.dims(data) or ()) != frame.axes[1]:
        return False
    found.add(data, frozenset({Kept("position", number=int(place.reshape(-1)[0]))}))
    return True


def _sum(node: ir.Node, found: Demands, learned: Collection[ir.Value]) -> bool:
    """Of a sum over positions what is not zero: a mean of the words, weighted by the mask."""
    data = node.inputs[0]
    axes = shapes.constant(node.inputs[1]) if len(node.inputs) > 1 else None
    frame = found.frames.get(data) if data is not None else None
    if data is None or frame is None or frame.is_flat or axes is None or axes.size != 1:
        return False
    if int(axes.reshape(-1)[0]) % len(shapes.dims(data) or ()) != frame.axes[1]:
        return False
    kept = _support(data, frame, learned)
    found.add(data, ALL if kept is None else frozenset({kept}))
    return True


def _support(value: ir.Value, frame: Frame, learned: Collection[ir.Value]) -> Kept | None:
    """Tokens outside of which a value is zero; None where none are known."""
    while True:
        dims = shapes.dims(value) or ()
        node = value.producer()
        if node is None or node.domain or value.dtype is None:
            break
        inner = node.inputs[0]
        if node.op_type == "Mul":
            found = (_support(v, frame, learned) for v in node.inputs if v is not None)
            return next((kept for kept in found if kept is not None), None)
        moves = node.op_type in ("Unsqueeze", "Expand", "Identity")
        # Of a floating number a cast may make zero, and of a zero never another number.
        if inner is None or not (moves or node.op_type == "Cast"):
            break
        value = inner
    lies = dims == (frame.grid.rows, frame.grid.length)
    exact = value.dtype not in shapes.FLOATING and value not in learned
    return Kept("nonzero", value) if lies and exact else None


_SPECIAL: dict[str, Callable[[ir.Node, Demands, Collection[ir.Value]], bool]] = {
    "ortrain::Attention": _attention,
    "ortrain::CrossEntropy": _cross_entropy,
    "Gather": _position,
    "ReduceMean": _sum,
    "ReduceSum": _sum,
}
