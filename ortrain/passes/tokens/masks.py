"""What masks shut out: the keys that a softmax sees, and where values are zero.

A softmax gives an exact zero to what a mask takes to -1e30 or lower, as long as something that it
sees is left over. What a score is made of (products, biases, norms) holds no such numbers: they
come from constants, from what the user gives, and from logarithms and quotients, and are followed
from there. Nothing here depends on parameters or random numbers, so a set is the same for every
value of them, and what is equal with the tokens left out has equal gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.walk import reads
from ortrain.passes.tokens.frames import Frame, Frames, Monomial
from ortrain.passes.tokens.kept import KEY, QUERY, ROW, SHUT, Condition, Keys, Set
from ortrain.passes.tokens.tokenwise import attribute, carried, name_of
from ortrain.program import Program, Role, role_of

# Where a value is read: frame → tokens outside of which it is not. No frame, no limit.
Limits = dict[Frame, Set]

# Axis of a value → axis of the scores that it is part of.
Places = tuple[int, ...]

# Of any numbers they make small ones.
_SMALL = frozenset(
    {"Softmax", "LayerNormalization", "RMSNormalization", "Tanh", "Sigmoid", "Erf", "Sin", "Cos",
     "HardSigmoid", "Softsign", "ortrain::Sigmoid", "Sign", "IsNaN", "IsInf"}
)  # fmt: skip

# They are looked through for the zeros of what they are given.
_KEEP_ZEROS = frozenset(
    {"Cast", "Identity", "Unsqueeze", "Squeeze", "Expand", "Transpose", "Reshape", "Neg", "Relu",
     "ortrain::Dropout", "ortrain::StopGradient"}
)  # fmt: skip

# A number above it is watched: two that are smaller have no product that shuts out.
_LARGE = 1e15

# How often a set of keys is made of that of the layer behind it, with other masks between.
_DEEPEST = 3


@dataclass(frozen=True)
class Axes:
    """What the axes of some scores are.

    Attributes:
        keys: the frame of the keys.
        query: the axis of the queries; None where they are no tokens.
    """

    keys: Frame
    query: int | None = None

    def place(self, axis: int) -> int:
        """What an axis is."""
        if axis == self.keys.axes[0]:
            return ROW
        if axis == self.keys.position:
            return KEY
        return QUERY if axis == self.query else axis


class Masks:
    """What is known of the masks of a program.

    Args:
        program: the program.
        frames: of its values.

    Attributes:
        learned: what depends on parameters or random numbers.
    """

    def __init__(self, program: Program, frames: Frames) -> None:
        self.frames = frames
        self.learned = _learned(program)
        self._large = _large(program, self.learned)
        self._supports: dict[tuple[object, ...], Keys | None] = {}

    # -- the keys that a softmax sees ----------------------------------------------------------

    def of_softmax(self, scores: ir.Value, axis: int, limits: Mapping[Frame, Set]) -> Keys | None:
        """The keys that a softmax lets be seen; None where none are known to be shut out.

        Args:
            scores: what it is given.
            axis: of the keys.
            limits: where its result is read.
        """
        keys = self.keys_of(scores, axis)
        if keys is None:
            return None
        length = len(shapes.dims(scores) or ())
        found = self.conditions(scores, tuple(range(length)))
        queries = [f for f in self.frames.every(scores) if f.axes[0] == keys.axes[0]]
        queries = [f for f in queries if not f.is_flat and f.position != axis]
        queries.sort(key=lambda f: f not in limits)
        return self.opened(found, keys, queries[0] if queries else None, limits)

    def keys_of(self, scores: ir.Value, axis: int) -> Frame | None:
        """The frame that has its positions on an axis."""
        found = [f for f in self.frames.every(scores) if not f.is_flat and f.position == axis]
        return found[0] if len(found) == 1 else None

    def of_attention(
        self, mask: ir.Value, keys: Frame, query: Frame | None, limits: Mapping[Frame, Set]
    ) -> Keys | None:
        """The keys that the mask of ``ortrain::Attention`` lets be seen.

        Args:
            mask: bool or floating.
            keys: the frame of the keys in the scores.
            query: that of the queries.
            limits: where the queries are read, of the scores.
        """
        length = keys.position + 1
        dims = shapes.dims(mask)
        if dims is None or len(dims) > length:
            return None
        places = tuple(range(length - len(dims), length))
        if mask.dtype in shapes.FLOATING:
            found = self.conditions(mask, places)
        elif mask in self.learned:
            found = None
        else:
            found = self._split(mask, places, negated=False, finite=False)
        return self.opened(found, keys, query, limits)

    def opened(
        self,
        found: Sequence[tuple[Condition, Places]] | None,
        keys: Frame,
        query: Frame | None,
        limits: Mapping[Frame, Set],
    ) -> Keys | None:
        """The keys that conditions let some query see, of those queries that are read.

        Args:
            found: each with its axes among those of the scores; None where not all are known.
            keys: the frame of the keys in the scores.
            query: that of the queries.
            limits: where the scores are read.
        """
        if not found or keys.is_flat or keys.heads != 1:
            return None
        axes = Axes(keys, None if query is None else query.position)
        conditions = tuple(sorted({_canonical(*each, axes) for each in found}, key=_order))
        rows, length = Monomial.of(keys.grid.rows), keys.grid.length
        telling = tuple(each for each in conditions if _tells(each, rows, length))
        if not telling:
            return None
        if not Keys(conditions).loses:
            return Keys(telling)
        placed = {place for each in conditions for place in each.places}
        if QUERY not in placed or query is None:
            return Keys(conditions)
        result = Keys(conditions, grid=query.grid)
        wanted = limits.get(query)
        if wanted is None:
            return result
        for each in wanted:
            # Queries among such keys see no others: that is how they are made.
            if isinstance(each, Keys) and query.grid == keys.grid and _closes(each, wanted, result):
                return each
        limited = replace(result, queries=wanted)
        return limited if limited.depth <= _DEEPEST else result

    def conditions(self, value: ir.Value, places: Places) -> list[tuple[Condition, Places]] | None:
        """What lets numbers that are added to scores, or scores, be more than -1e30.

        Args:
            value: floating.
            places: its axes among those of the scores.

        Returns:
            Conditions all of which hold where the value may be more; none where it is everywhere.
            None where that is not known.
        """
        if value not in self._large:
            return []
        if value.dtype in (None, ir.DataType.FLOAT16):
            return None  # its lowest number shuts nothing out for certain
        node = value.producer()
        name = "" if node is None else name_of(node)
        if node is not None and name == "Add":
            return self._all_of([(v, _aligned(v, value, places)) for v in node.inputs])
        if node is not None and name == "Where":
            found = self._chosen(node, value, places)
            if found is not None:
                return found
        if node is not None and name in ("Cast", "Identity", "Unsqueeze", "Squeeze", "Expand",
                                         "Transpose"):  # fmt: skip
            inner = node.inputs[0]
            moved = _moved(node, value, places)
            if inner is not None and inner.dtype in shapes.FLOATING and moved is not None:
                return self.conditions(inner, moved)
        if value in self.learned:
            return None
        return [(Condition(value, ()), places)]

    def _all_of(
        self, parts: Sequence[tuple[ir.Value | None, Places | None]]
    ) -> list[tuple[Condition, Places]] | None:
        result: list[tuple[Condition, Places]] = []
        for value, places in parts:
            if value is None or places is None:
                return None
            found = self.conditions(value, places)
            if found is None:
                return None
            result += found
        return result

    def _chosen(
        self, node: ir.Node, value: ir.Value, places: Places
    ) -> list[tuple[Condition, Places]] | None:
        """Of a number that shuts out, where a condition has it."""
        condition, *ways = node.inputs
        numbers = [_shut(way) for way in ways]
        if condition is None or condition in self.learned or numbers.count(None) != 1:
            return None
        kept = 0 if numbers[0] is None else 1
        number = numbers[1 - kept]
        moved = _aligned(condition, value, places)
        rest = self._all_of([(ways[kept], _aligned(ways[kept], value, places))])
        if rest is None or moved is None:
            return None
        finite = number != -math.inf
        return [*self._split(condition, moved, negated=kept == 1, finite=finite), *rest]

    def _split(
        self, value: ir.Value, places: Places, *, negated: bool, finite: bool
    ) -> list[tuple[Condition, Places]]:
        """A condition as several of which all hold, each as near to the inputs as it goes."""
        node = value.producer()
        name = "" if node is None else name_of(node)
        dual = {"And": "Or", "Or": "And"}.get(name, name) if negated else name
        if node is not None and name == "Not":
            return self._inner(node.inputs[:1], value, places, not negated, finite)
        # Shorter whole numbers that are not zero may have a product that is.
        wide = value.dtype in (ir.DataType.INT64, ir.DataType.INT32) and not negated
        if node is not None and (dual == "And" or (name == "Mul" and wide)):
            return self._inner(node.inputs, value, places, negated, finite)
        if node is not None and name in ("Cast", "Identity", "Unsqueeze", "Squeeze", "Expand",
                                         "Transpose"):  # fmt: skip
            inner, moved = node.inputs[0], _moved(node, value, places)
            known = inner is not None and inner.dtype not in (None, *shapes.FLOATING)
            wraps = name == "Cast" and not _holds(inner, value)
            if inner is not None and moved is not None and known and not wraps:
                return self._split(inner, moved, negated=negated, finite=finite)
        return [(Condition(value, (), negated, finite), places)]

    def _inner(
        self,
        values: Sequence[ir.Value | None],
        whole: ir.Value,
        places: Places,
        negated: bool,
        finite: bool,
    ) -> list[tuple[Condition, Places]]:
        result: list[tuple[Condition, Places]] = []
        for value in values:
            moved = None if value is None else _aligned(value, whole, places)
            if value is None or moved is None or value.dtype in (None, *shapes.FLOATING):
                return [(Condition(whole, (), negated, finite), places)]
            result += self._split(value, moved, negated=negated, finite=finite)
        return result

    def bears(self, value: ir.Value) -> bool:
        """Whether a value may hold numbers that shut out."""
        return value in self._large

    # -- zeros ---------------------------------------------------------------------------------

    def support(self, value: ir.Value, frame: Frame, limits: Mapping[Frame, Set]) -> Keys | None:
        """Tokens outside of which a value is zero, whatever the parameters are.

        Args:
            value: any.
            frame: of the value.
            limits: where it is read, along other frames.

        Returns:
            They; None where none are known.
        """
        key = (value, frame, frozenset(limits.items()))
        if key not in self._supports:
            self._supports[key] = self._support(value, frame, limits)
        return self._supports[key]

    def _support(self, value: ir.Value, frame: Frame, limits: Mapping[Frame, Set]) -> Keys | None:
        node = value.producer()
        name = "" if node is None else name_of(node)
        if node is None or name not in _ZEROS | _KEEP_ZEROS:
            return self._given(value, frame)
        inner = node.inputs[0]
        if name == "Softmax" and inner is not None:
            length = len(shapes.dims(value) or ())
            axis = attribute(node, "axis", -1) % length
            return self.of_softmax(inner, axis, limits) if axis == frame.position else None
        if name == "Where":
            condition, *ways = node.inputs
            zeros = [_is_zero(way) for way in ways]
            if zeros.count(True) == 1 and condition is not None:
                return self.where(node, value, frame, negated=zeros[0])
            return None
        places = range(2) if name == "Mul" else range(1)
        if name == "Div" and not _is_number(node.inputs[1]):
            return None
        for i in places:
            operand, own = node.inputs[i], carried(node, i, value, frame)
            if operand is None or own is None:
                continue
            others = {carried(node, i, value, f): kept for f, kept in limits.items()}
            within = {f: kept for f, kept in others.items() if f is not None}
            found = self.support(operand, own, within)
            if found is not None:
                return found
        return self._given(value, frame)

    def _given(self, value: ir.Value, frame: Frame) -> Keys | None:
        """Of a mask of whole numbers, or of true and false."""
        if value in self.learned or value.dtype in (None, *shapes.FLOATING) or frame.is_flat:
            return None
        places = tuple(range(len(shapes.dims(value) or ())))
        return self.opened(self._split(value, places, negated=False, finite=False), frame, None, {})

    def where(self, node: ir.Node, output: ir.Value, frame: Frame, *, negated: bool) -> Keys | None:
        """Tokens at which a condition chooses its first value, or its second.

        Args:
            node: ``Where``.
            output: of it.
            frame: of the output.
            negated: whether the second is meant.
        """
        condition = node.inputs[0]
        if condition is None or condition in self.learned or frame.is_flat:
            return None
        places = _aligned(condition, output, tuple(range(len(shapes.dims(output) or ()))))
        if places is None:
            return None
        found = self._split(condition, places, negated=negated, finite=False)
        return self.opened(found, frame, None, {})


_ZEROS = frozenset({"Softmax", "Where", "Mul", "Div"})


def _learned(program: Program) -> set[ir.Value]:
    """What depends on parameters or random numbers: nothing decides by it what is left out."""
    given = {v for v in program.graph.inputs if role_of(v) in (Role.PARAMETER, Role.SEED)}
    for node in program.graph:
        if any(v in given for v in reads(node)):
            given.update(node.outputs)
    return given


_HUGE, _GIVEN = 1, 2  # from constants and the like, or from what the user gives or computes


_PRODUCTS = frozenset({"MatMul", "Gemm", "Einsum", "Conv"})


def _large(program: Program, learned: set[ir.Value]) -> set[ir.Value]:
    """Values that may hold numbers beyond 1e30, as masks do."""
    found: dict[ir.Value, int] = {}
    for value in program.graph.inputs:
        if value.dtype in shapes.FLOATING and role_of(value) is not Role.PARAMETER:
            found[value] = _GIVEN
    for node in program.graph:
        name = name_of(node)
        if name in _SMALL:
            continue
        inputs = [v for v in reads(node) if v.dtype in shapes.FLOATING]
        large = 0
        for value in inputs:
            known = shapes.constant(value)
            if known is not None:
                large |= 0 if _is_small(known) else _HUGE
            large |= found.get(value, 0)
        if name == "ortrain::Attention":
            large = max((found.get(v, 0) for v in node.inputs[2:3] if v is not None), default=0)
        elif name in _PRODUCTS and any(v in learned for v in node.inputs):
            large &= ~_GIVEN
        elif _makes_large(node, name, learned):
            large |= _HUGE
        if large:
            found.update({v: large for v in node.outputs if v.dtype in (None, *shapes.FLOATING)})
    for value in program.graph.initializers.values():
        known = shapes.constant(value)
        if known is not None and value.dtype in shapes.FLOATING and not _is_small(known):
            found[value] = _HUGE
    return {*found}


def _makes_large(node: ir.Node, name: str, learned: set[ir.Value]) -> bool:
    """Whether a node makes of a mask's small numbers such as shut out, or its code is unknown.

    Scores and norms of what is learned are no masks, whatever they are divided by.
    """
    if name == "Constant":
        known = shapes.constant(node.outputs[0])
        floating = node.outputs[0].dtype in shapes.FLOATING
        return floating and known is not None and not _is_small(known)
    if name in ("Log", "ortrain::Log1p"):
        return True
    if any(a.type is ir.AttributeType.GRAPH for a in node.attributes.values()):
        return True
    if name in ("Tan", "Cosh", "Sinh"):
        return True
    if name == "Pow":
        power = shapes.constant(node.inputs[1])
        rising = power is not None and bool((power >= 0).all() and (power <= 4).all())
        return not rising and node.inputs[0] not in learned
    divisor = {"Div": 1, "Reciprocal": 0, "Exp": 0}.get(name)
    by = None if divisor is None else node.inputs[divisor]
    if by is None or by in learned:
        return False
    # What all scores are divided by tells no keys apart.
    return not (name == "Div" and shapes.size(by) == 1) and not _is_number(by) and not _is_size(by)


def _is_number(value: ir.Value | None) -> bool:
    """Whether a value is known, and nowhere so near to zero that a quotient gets large."""
    known = shapes.constant(value)
    return known is not None and bool((np.abs(known.astype(np.float64)) > 1 / _LARGE).all())


def _is_size(value: ir.Value | None) -> bool:
    """Whether a value is made of sizes alone, and so is 1 or more."""
    known = shapes.constant(value)
    if known is not None:
        return bool((known >= 1).all())
    node = None if value is None else value.producer()
    if node is None or name_of(node) not in _SIZES:
        return False
    made = node.inputs if name_of(node) in ("Concat", "Mul") else node.inputs[:1]
    return name_of(node) in ("Shape", "Size") or all(_is_size(each) for each in made)


_SIZES = frozenset(
    {"Shape", "Size", "Cast", "ReduceProd", "Squeeze", "Unsqueeze", "Gather", "Slice", "Reshape",
     "Concat", "Mul", "Sqrt", "Expand"}
)  # fmt: skip


def _is_small(numbers: np.ndarray) -> bool:
    """Whether no product of two such numbers shuts out."""
    return bool((np.abs(numbers.astype(np.float64)) < _LARGE).all())


def _is_zero(value: ir.Value | None) -> bool:
    known = shapes.constant(value)
    return known is not None and known.size == 1 and not known.any()


def _shut(value: ir.Value | None) -> float | None:
    """The number that shuts out all that it stands for; None where a value is none."""
    known = shapes.constant(value)
    if known is None or known.size != 1 or not float(known.reshape(-1)[0]) <= SHUT:
        return None
    return float(known.reshape(-1)[0])


def _holds(inner: ir.Value | None, value: ir.Value) -> bool:
    """Whether a cast keeps whole numbers from becoming zero."""
    if inner is None or inner.dtype is None or value.dtype is None:
        return False
    return value.dtype is ir.DataType.BOOL or inner.dtype is ir.DataType.BOOL


def _aligned(value: ir.Value | None, whole: ir.Value, places: Places) -> Places | None:
    """The axes of what is broadcast to a value."""
    rank = None if value is None else shapes.rank(value)
    if rank is None or rank > len(places):
        return None
    return places[len(places) - rank :] if rank else ()


def _moved(node: ir.Node, value: ir.Value, places: Places) -> Places | None:
    """The axes of what a node puts elsewhere; axes of size 1 that it adds have none."""
    inner, length = node.inputs[0], len(places)
    rank = None if inner is None else shapes.rank(inner)
    if rank is None:
        return None
    if node.op_type in ("Cast", "Identity", "Expand"):
        return _aligned(inner, value, places)
    if node.op_type == "Transpose":
        perm = node.attributes.get("perm")
        order = list(range(rank))[::-1] if perm is None else list(perm.as_ints())
        return tuple(places[order.index(a)] for a in range(rank))
    given = shapes.constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if given is None:
        return None
    if node.op_type == "Unsqueeze":
        new = {int(a) % length for a in given.reshape(-1)}
        return tuple(place for a, place in enumerate(places) if a not in new)
    gone, rest = {int(a) % rank for a in given.reshape(-1)}, iter(places)
    # An axis of size 1 is none of the scores'.
    return tuple(-1 if a in gone else next(rest) for a in range(rank))


def _canonical(condition: Condition, places: Places, axes: Axes) -> Condition:
    """A condition with what its axes are, by which those of all layers are the same."""
    dims = shapes.dims(condition.value) or ()
    named = (None if d == 1 else axes.place(a) for d, a in zip(dims, places, strict=True))
    return replace(condition, places=tuple(named))


def _closes(keys: Keys, wanted: Set, unlimited: Keys) -> bool:
    """Whether keys were made of queries among which are all but themselves, by the same masks."""
    same = keys.conditions == unlimited.conditions and keys.queries is not None
    return same and keys.queries is not None and wanted - {keys} <= keys.queries


def _order(condition: Condition) -> tuple[str, ...]:
    return condition.names


def _tells(condition: Condition, rows: Monomial | None, length: str) -> bool:
    """Whether a condition tells of the keys of each row."""
    places = condition.places
    if ROW not in places or KEY not in places:
        return False
    dims = shapes.dims(condition.value) or ()
    size = Monomial.of(dims[places.index(ROW)])
    return size == rows and dims[places.index(KEY)] == length
