"""A step within a budget of memory: which results the backward computes again instead.

What a step holds at each node follows from shapes and lifetimes (:func:`curve`). Where that is more
than the budget, results are dropped one after another, those first that give back the most bytes
for the time that it takes to compute them again, over the whole graph.

The idea of a budget and of choosing by bytes and time is that of PyTorch's
``activation_memory_budget``; the planner of what holds memory is our own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ortrain.autodiff.partition import VIEWS, Kept, is_constant, partition, with_constants
from ortrain.config import Budget
from ortrain.errors import BudgetError
from ortrain.graph import shapes
from ortrain.graph.cost import factors
from ortrain.graph.walk import reads
from ortrain.program import Program, Role, region_of, role_of

# Multiplications and bytes a second, roughly, of two cores: only their ratio matters here.
_MULTIPLICATIONS, _BYTES = 100e9, 10e9
_LAUNCH = 5e-6
# What a node of these gives is its operand seen in another way.
_SAME_MEMORY = VIEWS | {"Transpose", "Slice", "Expand", "Split"}
# What can be written over its first operand.
_IN_PLACE = frozenset({"Add", "Sub", "Mul", "Div", "Neg", "Where", "Relu", "Tanh", "Exp", "Sqrt"})

Sizes = Mapping[str, int]


def bytes_of(value: ir.Value, sizes: Sizes) -> int:
    """Bytes of a value; a size that is not known counts as 1."""
    count = math.prod(shapes.evaluate(dim, sizes) or 1 for dim in shapes.dims(value) or ())
    return int(count * (value.dtype.itemsize if value.dtype is not None else 4))


def seconds_of(node: ir.Node, sizes: Sizes) -> float:
    """What a node takes, roughly."""
    made = [v for v in node.outputs if v.shape is not None]
    moved = sum(bytes_of(v, sizes) for v in (*reads(node), *made))
    terms = math.prod(shapes.evaluate(dim, sizes) or 1 for dim in factors(node))
    if not factors(node):
        return _LAUNCH + (0 if node.op_type in _SAME_MEMORY else moved / _BYTES)
    count = sum(bytes_of(v, sizes) / (v.dtype.itemsize if v.dtype else 4) for v in made)
    return _LAUNCH + moved / _BYTES + count * terms / _MULTIPLICATIONS


@dataclass(frozen=True)
class Moment:
    """What is held while a node runs.

    Attributes:
        node: that runs.
        piece: 0 for the forward, 1 and on for the pieces of the backward.
        held: bytes.
    """

    node: ir.Node
    piece: int
    held: int


def curve(programs: Sequence[Program], sizes: Sizes) -> list[Moment]:
    """What a step holds beyond its inputs, node by node.

    Args:
        programs: the forward and the pieces of the backward, as :func:`partition` gives them.
        sizes: value of each symbolic dimension.
    """
    moments: list[Moment] = []
    kept: dict[str | None, int] = {}  # what pieces hand to later ones
    results = 0  # outputs of the user's, and gradients
    last: dict[str | None, int] = {}
    for place, program in enumerate(programs):
        last.update((value.name, place) for value in program.graph.inputs)
    for place, program in enumerate(programs):
        graph = program.graph
        given = {v: kept[v.name] for v in graph.inputs if v.name in kept}
        final = {v: n for v, n in given.items() if last[v.name] == place}
        before = results + sum(kept.values())
        living = _Living(graph, sizes, final)
        for node in graph:
            most = living.run(node)
            moments.append(Moment(node, place, before + most))
        for value in final:
            kept.pop(value.name)
        shared: set[ir.Value] = set()
        for value in graph.outputs:
            root = living.root(value)
            if root in shared:
                continue
            shared.add(root)
            if role_of(value) is Role.SAVED:
                kept[value.name] = living.size(root)
            else:
                results += living.size(root)
    return moments


class _Living:
    """What lives of one program's values.

    Args:
        graph: of the program.
        sizes: of symbols.
        given: inputs that are freed once they were read, and their bytes.
    """

    def __init__(self, graph: ir.Graph, sizes: Sizes, given: Mapping[ir.Value, int]) -> None:
        self._sizes, self._given = sizes, given
        self._root: dict[ir.Value, ir.Value] = {}
        inputs = set(graph.inputs)
        for node in graph:
            if node.op_type in _SAME_MEMORY and not node.domain and node.inputs[0] is not None:
                for value in node.outputs:
                    self._root[value] = self.root(node.inputs[0])
        ends: dict[ir.Value, ir.Node] = {}
        for node in graph:
            for value in (*reads(node), *node.outputs):
                ends[self.root(value)] = node
        for value in graph.outputs:
            ends.pop(self.root(value), None)
        self._frees: dict[ir.Node, list[ir.Value]] = {}
        for value, end in ends.items():
            if value not in inputs or value in given:
                self._frees.setdefault(end, []).append(value)
        self._now = 0

    def root(self, value: ir.Value) -> ir.Value:
        """The value whose memory this one is."""
        return self._root.get(value, value)

    def size(self, value: ir.Value) -> int:
        """Bytes of a root; none of an input that stays, and of a constant."""
        producer = value.producer()
        if producer is None:
            return self._given.get(value, 0)
        return 0 if is_constant(producer) else bytes_of(value, self._sizes)

    def run(self, node: ir.Node) -> int:
        """Runs a node; gives what is held meanwhile beyond what there was, in bytes."""
        frees = self._frees.get(node, [])
        made = sum(self.size(v) for v in node.outputs if v not in self._root)
        over = 0
        if node.op_type in _IN_PLACE and not node.domain:
            over = made if any(self.size(v) == made for v in frees if v not in node.outputs) else 0
        most = self._now + made - over
        self._now += made - sum(map(self.size, frees))
        return max(most, self._now)


# -- what is dropped -----------------------------------------------------------------------------

# What is computed again together is held together: of the bytes that are kept without a budget,
# so much may hang together, from a fine mesh to a coarse one.
_MESHES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)


def within(
    program: Program,
    budget: Budget,
    sizes: Sizes,
    pieces: int,
    cheap: Callable[[ir.Node], bool],
) -> list[Program]:
    """Cuts a differentiated program so that a step holds no more than a budget.

    Args:
        program: what :func:`~ortrain.autodiff.engine.differentiate` returned; left as it is.
        budget: bytes; a float is a share of what the step would hold; ``"least"`` is as little as
            can be.
        sizes: value of each symbolic dimension.
        pieces: as of :func:`~ortrain.autodiff.partition.partition`.
        cheap: likewise.

    Raises:
        BudgetError: what is least possible is more.
    """
    plain = partition(program, pieces, cheap)
    whole = peak(plain, sizes)
    if budget == "least":
        allowed = 0.0
    else:
        allowed = budget * whole if isinstance(budget, float) else budget
    if whole <= allowed:
        return plain
    tried: list[_Try] = []
    for mesh in _MESHES:
        drops = _Drops(sizes, mesh)
        # Bytes that are to be given back, until the peak is low enough: what is dropped is held
        # for a moment when it is computed again.
        wanted, step = whole - allowed, 0.0
        while True:
            decide = functools.partial(drops.drop, wanted=wanted)
            programs = partition(program, pieces, cheap, decide)
            now = peak(programs, sizes)
            tried.append(_Try(now, drops.seconds, programs))
            if now <= allowed or drops.exhausted:
                break
            step = max(now - allowed, step * 1.5, 0.01 * whole)
            wanted += step
    fitting = [each for each in tried if each.peak <= allowed]
    if fitting:
        return min(fitting, key=lambda each: each.seconds).programs
    least = min(tried, key=lambda each: (each.peak, each.seconds))
    if budget == "least":
        return least.programs
    at = ", ".join(f"{name}={size}" for name, size in sizes.items())
    error = BudgetError(
        f"a step cannot keep to memory_budget={budget}, {megabytes(allowed)}",
        because=f"with all computed again that can be it holds {megabytes(least.peak)}, and without "
        f"a budget {megabytes(whole)}" + (f", at sizes {at}" if at else ""),
        help=f"memory_budget={least.peak} (bytes) is the least that is possible; or take a smaller "
        "batch",
    )
    error.least = least.peak
    raise error


@dataclass(frozen=True)
class _Try:
    peak: int
    seconds: float
    programs: list[Program]


def peak(programs: Sequence[Program], sizes: Sizes) -> int:
    """The most that a step holds beyond its inputs, in bytes."""
    return max((moment.held for moment in curve(programs, sizes)), default=0)


def megabytes(count: float) -> str:
    """A number of bytes for people."""
    return f"{count / 2**20:,.1f} MiB"


class _Islands:
    """Nodes that run again in one go, since what lies between them is not kept.

    Args:
        most: bytes of results that one may have.
        linked: bytes from which a result links the nodes that make and read it: what is small, such
            as a mask that all layers read, stays once it is there.
        size: bytes of a value.
    """

    def __init__(self, most: float, linked: float, size: Callable[[ir.Value], int]) -> None:
        self._most, self._linked, self._size = most, linked, size
        self._of: dict[ir.Node, set[ir.Node]] = {}

    def joined(
        self, closure: Collection[ir.Node], keep: Collection[ir.Value], again: Collection[ir.Node]
    ) -> set[ir.Node] | None:
        """The island that nodes belong to once they run again; None where it is too large."""
        result: set[ir.Node] = set()
        for node in closure:
            result |= self._of.get(node, {node})
            read = [v for v in reads(node) if v.producer() in again and self._links(v, keep)]
            for value in read:
                producer = value.producer()
                assert producer is not None
                result |= self._of.get(producer, {producer})
            for value in node.outputs:
                if self._links(value, ()):
                    for user in (use.node for use in value.uses()):
                        if user in again:
                            result |= self._of.get(user, {user})
        held = sum(self._size(v) for node in result for v in node.outputs)
        return result if held <= self._most else None

    def join(self, island: set[ir.Node]) -> None:
        """Makes one of all of these nodes."""
        for node in island:
            self._of[node] = island

    def _links(self, value: ir.Value, keep: Collection[ir.Value]) -> bool:
        return value not in keep and self._size(value) >= self._linked


class _Drops:
    """What is dropped of one program's kept values.

    Args:
        sizes: of the program's symbols.
        mesh: the share of the kept bytes that may be computed again in one go.

    Attributes:
        seconds: that computing again takes, roughly.
        exhausted: whether there is nothing more to drop.
    """

    def __init__(self, sizes: Sizes, mesh: float) -> None:
        self._sizes, self._mesh = sizes, mesh
        self._bytes: dict[ir.Value, int] = {}
        self._cost: dict[ir.Node, float] = {}
        self.seconds, self.exhausted = 0.0, False

    def drop(self, forward: Sequence[ir.Node], kept: Kept, wanted: float) -> Kept:
        """Keeps less, by ``wanted`` bytes, or as far as it goes."""
        keep, again = {*kept[0]}, {*kept[1]}
        self.seconds, self.exhausted = 0.0, False
        whole = sum(map(self._size, keep))
        islands = _Islands(self._mesh * whole, whole / 64, self._size)
        while wanted > 0:
            ranked = []
            for value in keep:
                closure = self._closure(value, keep, again)
                if closure is None or islands.joined(closure, keep, again) is None:
                    continue
                freed = sum(self._size(v) for v in _beside(value) if v in keep)
                cost = sum(map(self._seconds, closure))
                ranked.append((freed / cost, value.name or "", value))
            if not ranked:
                self.exhausted = True
                break
            ranked.sort(key=lambda each: each[:2], reverse=True)
            good = ranked[0][0]
            for worth, _, value in ranked:
                if worth < 0.7 * good or wanted <= 0:
                    break  # what was dropped changes what the rest is worth
                closure = self._closure(value, keep, again)
                if value not in keep or closure is None:
                    continue
                island = islands.joined(closure, keep, again)
                if island is None:
                    continue
                islands.join(island)
                again |= closure
                self.seconds += sum(map(self._seconds, closure))
                for other in _beside(value):
                    if other in keep:
                        keep.discard(other)
                        wanted -= self._size(other)
        return keep, with_constants(again)

    def _closure(
        self, value: ir.Value, keep: Collection[ir.Value], again: Collection[ir.Node]
    ) -> set[ir.Node] | None:
        """The nodes that are to run again for a value; None where that cannot be."""
        first = value.producer()
        if first is None or first in again or value.is_graph_output():
            return None
        found: set[ir.Node] = set()
        stack = [first]
        while stack:
            node = stack.pop()
            if node in found or node in again:
                continue
            if region_of(node) or any(v.is_graph_output() and v in keep for v in node.outputs):
                return None
            found.add(node)
            for read in reads(node):
                producer = read.producer()
                if producer is None or read in keep or producer in again or is_constant(producer):
                    continue
                stack.append(producer)
        return found

    def _size(self, value: ir.Value) -> int:
        if value not in self._bytes:
            self._bytes[value] = bytes_of(value, self._sizes)
        return self._bytes[value]

    def _seconds(self, node: ir.Node) -> float:
        if node not in self._cost:
            self._cost[node] = seconds_of(node, self._sizes)
        return self._cost[node]


def _beside(value: ir.Value) -> Sequence[ir.Value]:
    """All results of the node that makes a value."""
    producer = value.producer()
    return () if producer is None else producer.outputs
