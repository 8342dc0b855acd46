"""At which tokens a value is read: a walk from the outputs back.

What is read of a value is nothing, everything, or what lies within a set of tokens, along each of
its frames. A set is known by what decides about it when the program runs, for example the labels of
a loss. What is not read may be any finite number, and outputs are the same.

The rules are few. What an operator carries along a frame, it reads where its result is read. Of two
factors one is read no further than the other is not zero, and so are the two sides of a product of
matrices along the axis that it contracts. Of two values that a condition chooses from each is read
where it is chosen. What is added to a mask under a softmax is read at the keys that the mask shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.walk import reads
from ortrain.passes.tokens import tokenwise
from ortrain.passes.tokens.frames import Frame, Frames, Grid
from ortrain.passes.tokens.kept import Kept, Keys, Labels, Position, Set
from ortrain.passes.tokens.masks import Limits, Masks
from ortrain.passes.tokens.tokenwise import Plan, attribute, carried, name_of
from ortrain.program import Program, Role, origin_of, role_of

Shown = Literal["all", "tokens", "loss"]

# Of finite numbers they make finite ones, of finite slope: they may be given anything at tokens at
# which their result is not read.
_TAME = frozenset(
    {"Add", "Sub", "Mul", "Div", "Neg", "Where", "Identity", "Cast", "Tanh", "Sigmoid", "Erf",
     "Gelu", "Relu", "Abs", "Min", "Max", "Clip", "LeakyRelu", "Elu", "Selu", "Softplus", "Sin",
     "Cos", "ortrain::StopGradient", "ortrain::Silu", "ortrain::Sigmoid", "MatMul", "Gemm",
     "Einsum", "Transpose", "Unsqueeze", "Squeeze", "Expand", "Reshape", "Concat", "Split", "Slice",
     "Softmax", "ReduceSum", "ReduceMean", "ortrain::Dropout", "Gather", "GatherElements"}
)  # fmt: skip


@dataclass
class Demands:
    """What is read of a program's values.

    Attributes:
        frames: of the values.
        masks: of the program.
        of: value → where it is read; nowhere where it is not in it.
        plans: nodes that compute some tokens → how, and which.
        direct: nodes that read some tokens of their first input, and can be given those alone.
        in_the_way: nodes that need all tokens of a value that has some → where in the user's code.
        seen: grid → the keys that attention lets be seen.
    """

    frames: Frames
    masks: Masks
    of: dict[ir.Value, Limits] = field(default_factory=dict)
    plans: dict[ir.Node, tuple[Plan, Set]] = field(default_factory=dict)
    direct: dict[ir.Node, Kept] = field(default_factory=dict)
    in_the_way: dict[ir.Node, str] = field(default_factory=dict)
    seen: dict[Grid, set[Kept]] = field(default_factory=dict)
    _exponents: dict[ir.Value, tuple[Frame, Keys]] = field(default_factory=dict)

    def add(self, value: ir.Value | None, limits: Limits | None = None) -> None:
        """Notes that a value is read.

        Args:
            value: any.
            limits: where, all of it by default.
        """
        if value is None:
            return
        limits = limits or {}
        for kept in limits.values():
            for each in kept:
                for decides in each.values:
                    self.of[decides] = {}
        known = self.of.get(value)
        self.of[value] = limits if known is None else _either([known, limits])

    def beside(self, of: dict[ir.Value, Limits]) -> Demands:
        """What is known of the same program, with other values that are read.

        Args:
            of: value → where it is read.
        """
        return Demands(self.frames, self.masks, of, _exponents=dict(self._exponents))

    def shut(self, value: ir.Value, frame: Frame, keys: Keys) -> None:
        """Notes that a value is nothing but the exponents of a softmax that sees some keys."""
        self._exponents[value] = frame, keys

    def exponents(self, value: ir.Value) -> tuple[Frame, Keys] | None:
        """Of which keys a value is the exponents, along which frame."""
        return self._exponents.get(value)


def _either(parts: Iterable[Limits]) -> Limits:
    """What is read by one or another."""
    first, *others = parts
    result = dict(first)
    for other in others:
        result = {f: kept | other[f] for f, kept in result.items() if f in other}
    return result


def demands(program: Program, shown: Shown = "all") -> Demands:
    """What is read of each value of a forward program.

    Args:
        program: the program.
        shown: what is read of its outputs: ``all``, the ``tokens`` that attention lets be seen, or
            nothing but a ``loss`` (:func:`loss_of`).
    """
    seen = demands(program).seen if shown == "tokens" else {}
    frames = Frames(program)
    found = Demands(frames, Masks(program, frames))
    only = shown == "loss" and loss_of(program) is not None
    for value in program.graph.outputs:
        frame = frames.get(value)
        if role_of(value) not in (Role.USER_OUTPUT, Role.LOSS) or frame is None:
            found.add(value)
        elif not only:
            found.add(value, {frame: frozenset(seen[frame.grid])} if frame.grid in seen else {})
    for node in reversed(program.graph):
        through(node, found)
    return found


def loss_of(program: Program) -> ir.Value | None:
    """The output that is a loss: one that is marked so, or else a floating scalar in front."""
    users = program.outputs(Role.LOSS) or program.outputs(Role.USER_OUTPUT)
    return users[0] if users and is_loss(users[0]) else None


def is_loss(value: ir.Value) -> bool:
    """Whether a value is a floating scalar."""
    return value.dtype in shapes.FLOATING and shapes.dims(value) == ()


def through(node: ir.Node, found: Demands) -> None:
    """Notes where a node reads its inputs, by where its outputs are read.

    Args:
        node: the node.
        found: of the nodes behind it; what is found is added.
    """
    demanded = [v for v in node.outputs if v in found.of]
    if not demanded:
        return
    special = _SPECIAL.get(name_of(node))
    if special is not None and special(node, found):
        return
    if _packs(node, demanded, found):
        return
    name = name_of(node)
    parts = [_parts(node, i, demanded, found) for i in range(len(node.inputs))]
    if any(found.of[v] for v in demanded) and name not in _TAME:
        if any(v in found.frames for v in node.inputs if v is not None):
            found.in_the_way[node] = origin_of(node)
        parts = [{} for _ in parts]
    limiting = _LIMITING.get(name)
    if limiting is not None:
        limiting(node, demanded[0], parts, found)
    for value, limits in zip(node.inputs, parts, strict=True):
        found.add(value, limits if value is not None and _may_lack(value, found) else {})
    for value in reads(node)[sum(v is not None for v in node.inputs) :]:
        found.add(value)


def _may_lack(value: ir.Value, found: Demands) -> bool:
    """Whether a value may be anything where it is not read, though it is computed on.

    What is not learned is cheap, and whole it is as it was in every place. So are masks among what
    is learned: without one of two that cancel out, the other's numbers become infinite, and an
    infinity times nothing is NaN.
    """
    masks = found.masks
    if value not in masks.learned or not masks.bears(value):
        return value in masks.learned
    places = tuple(range(shapes.rank(value) or 0))
    return value not in found.frames and masks.conditions(value, places) is not None


def _packs(node: ir.Node, demanded: list[ir.Value], found: Demands) -> bool:
    """Of a node that works on each token alone, those at which its outputs are read."""
    plan = tokenwise.plan(node, found.frames, demanded)
    if plan is None:
        return False
    kept = _either([found.of[v] for v in demanded]).get(plan.frame)
    if kept is None:
        return False
    found.plans[node] = plan, kept
    for value, how in zip(node.inputs, plan.reads, strict=True):
        found.add(value, {how: kept} if isinstance(how, Frame) else {})
    return True


def _parts(node: ir.Node, index: int, demanded: list[ir.Value], found: Demands) -> Limits:
    """Where an input is read, by where the outputs are."""
    if name_of(node) == "Div" and index == 1:
        return {}  # nothing is divided by what was left out
    parts: list[Limits] = []
    for output in demanded:
        limits = found.of[output]
        own = {carried(node, index, output, frame): kept for frame, kept in limits.items()}
        parts.append({frame: kept for frame, kept in own.items() if frame is not None})
    return _either(parts)


def _limit(parts: list[Limits], index: int, frame: Frame | None, keys: Keys | None) -> bool:
    """Has an input be read at some tokens, where it would be read at all of them."""
    if frame is None or keys is None or frame in parts[index]:
        return False
    parts[index][frame] = frozenset({keys})
    return True


# -- what leaves tokens out --------------------------------------------------------------------


def _factors(node: ir.Node, output: ir.Value, parts: list[Limits], found: Demands) -> None:
    """A factor is read where the other one is not zero."""
    frames = [f for f in found.frames.every(output) if f not in found.of[output]]
    for i in (0, 1):
        value, limits, limited = node.inputs[i], dict(parts[i]), False
        for frame in frames:
            own, other = carried(node, i, output, frame), carried(node, 1 - i, output, frame)
            if value is not None and own is not None:
                keys = found.masks.support(value, own, limits)
                limited |= _limit(parts, 1 - i, other, keys)
        if limited:
            return  # of two that limit each other both would be anything at the same place


def _chosen(node: ir.Node, output: ir.Value, parts: list[Limits], found: Demands) -> None:
    """What a condition chooses is read where it does."""
    if _added(node, output, parts, found):
        return
    for frame in found.frames.every(output):
        if frame not in found.of[output]:
            for i in (1, 2):
                keys = found.masks.where(node, output, frame, negated=i == 2)
                _limit(parts, i, carried(node, i, output, frame), keys)


def _added(node: ir.Node, output: ir.Value, parts: list[Limits], found: Demands) -> bool:
    """Exponents of a softmax are read at the keys that it sees, but for the masks among them."""
    exponents = found.exponents(output)
    if exponents is None:
        return False
    frame, keys = exponents
    for i, value in enumerate(node.inputs):
        if value is None or value.dtype not in shapes.FLOATING:
            continue
        own = carried(node, i, output, frame)
        if own is not None and found.masks.bears(value):
            _exponentiated(value, own, keys, found)
        else:
            _limit(parts, i, own, keys)
    return True


def _exponentiated(value: ir.Value, frame: Frame, keys: Keys, found: Demands) -> None:
    """Notes what is read by nothing else than a softmax, through no more than sums and choices."""
    if len(value.uses()) == 1 and not value.is_graph_output():
        found.shut(value, frame, keys)


def _softmax(node: ir.Node, output: ir.Value, parts: list[Limits], found: Demands) -> None:
    """It mixes all keys, and sees those that its mask shows."""
    scores = node.inputs[0]
    if scores is None:
        return
    axis = attribute(node, "axis", -1) % len(shapes.dims(output) or ())
    frame = found.masks.keys_of(scores, axis)
    keys = found.masks.of_softmax(scores, axis, parts[0])
    if frame is not None and keys is not None:
        _exponentiated(scores, frame, keys, found)


def _product(node: ir.Node, output: ir.Value, parts: list[Limits], found: Demands) -> None:
    """Along an axis that it contracts, one side is read where the other is not zero."""
    known = tokenwise.labels(node)
    if known is None:
        return
    terms, out = known
    for i in (0, 1):
        value, other = node.inputs[i], node.inputs[1 - i]
        for frame in found.frames.every(value):
            if value is None or frame.is_flat or frame in parts[i]:
                continue
            row, position = (terms[i][a] for a in frame.axes)
            both = row in terms[1 - i] and position in terms[1 - i]
            if not both or row not in out or position in out:
                continue  # a row is none of the product's own
            axes = (terms[1 - i].index(row), terms[1 - i].index(position))
            facing = Frame(frame.grid, axes, frame.heads)
            if facing not in found.frames.every(other):
                continue
            keys = found.masks.support(value, frame, parts[i])
            if keys is not None and _limit(parts, 1 - i, facing, keys):
                if value in found.masks.learned:
                    _saw(frame.grid, keys, found)
                return


def _saw(grid: Grid, keys: Keys, found: Demands) -> None:
    """Notes keys that are seen, by queries that the mask leaves some key."""
    if keys.loses and keys.grid == grid:
        keys = replace(keys, queries=frozenset())
    found.seen.setdefault(grid, set()).add(keys)


def _attention(node: ir.Node, found: Demands) -> bool:
    """A query is read where its result is, keys and values where the mask lets them be seen."""
    query, key, value = node.inputs[:3]
    assert query is not None
    assert key is not None
    assert value is not None
    mask = node.inputs[3] if len(node.inputs) > 3 else None
    output = node.outputs[0]
    limits = found.of[output]
    before, after = shapes.dims(query) or (), shapes.dims(output) or ()
    within = {f: kept for f, kept in limits.items() if max(f.axes) < len(after) - 1}
    for v in reads(node):
        if v not in (query, key, value):
            found.add(v)
    found.add(query, within if before[:-1] == after[:-1] else {})
    keyed, valued = found.frames.get(key), found.frames.get(value)
    keys = None
    rank = shapes.rank(output) or 0
    if mask is not None and keyed is not None and not keyed.is_flat and keyed == valued:
        missing = rank - (shapes.rank(key) or 0)
        frame = replace(keyed, axes=(keyed.axes[0] + missing, rank - 1))
        queries = [f for f in found.frames.every(output) if f.axes == (frame.axes[0], rank - 2)]
        fits = keyed.position == (shapes.rank(key) or 0) - 2 and keyed.axes[0] < keyed.position
        if fits:
            keys = found.masks.of_attention(mask, frame, queries[0] if queries else None, limits)
    if keys is not None and keyed is not None:
        _saw(keyed.grid, keys, found)
    demand: Limits = {keyed: frozenset({keys})} if keys is not None and keyed is not None else {}
    found.add(key, demand)
    found.add(value, demand)
    return True


def _cross_entropy(node: ir.Node, found: Demands) -> bool:
    """Logits are read where there is a label."""
    logits, labels = node.inputs[:2]
    assert logits is not None
    assert labels is not None
    reduction = node.attributes.get("reduction")
    frame = found.frames.get(logits)
    rank = shapes.rank(logits)
    rows = frame is not None and rank == len(frame.axes) + 1 and frame.axes[0] == 0
    fits = rows and labels not in found.masks.learned and node.outputs[1] not in found.of
    if not fits or frame is None or (reduction is not None and reduction.as_string() == "none"):
        return False
    for other in reads(node):
        if other is not logits:
            found.add(other)
    kept = Labels(labels, attribute(node, "ignore_index", -100))
    found.add(logits, {frame: frozenset({kept})})
    found.direct[node] = kept
    return True


def _position(node: ir.Node, found: Demands) -> bool:
    """One position of each row."""
    data = node.inputs[0]
    place = shapes.constant(node.inputs[1])
    frame = found.frames.get(data) if data is not None else None
    axis = node.attributes.get("axis")
    if frame is None or frame.is_flat or place is None or place.size != 1 or axis is None:
        return False
    if axis.as_int() % len(shapes.dims(data) or ()) != frame.position:
        return False
    kept = Position(int(place.reshape(-1)[0]))
    found.add(data, {frame: frozenset({kept})})
    if frame.axes == (0, 1):
        found.direct[node] = kept
    return True


_SPECIAL: Mapping[str, Callable[[ir.Node, Demands], bool]] = {
    "ortrain::Attention": _attention,
    "ortrain::CrossEntropy": _cross_entropy,
    "Gather": _position,
}

_LIMITING: Mapping[str, Callable[[ir.Node, ir.Value, list[Limits], Demands], object]] = {
    "Add": _added,
    "Cast": _added,
    "Identity": _added,
    "Mul": _factors,
    "Where": _chosen,
    "Softmax": _softmax,
    "MatMul": _product,
    "Einsum": _product,
}
