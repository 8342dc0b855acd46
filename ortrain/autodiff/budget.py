"""A step within a budget of memory: which results the backward computes again instead.

What a step holds at each node is known (:mod:`ortrain.autodiff.held`). Where that is more than the
budget, results are dropped one after another, those first that give back the most bytes for the
time that it takes to compute them again, over the whole graph.

To choose by bytes and time under a budget is the idea of PyTorch's ``activation_memory_budget``
(Horace He, 2024); how it is chosen here is our own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ortrain.autodiff.held import SAME_MEMORY, Sizes, bytes_of, peak
from ortrain.autodiff.partition import Kept, is_constant, partition, with_constants
from ortrain.config import Budget
from ortrain.errors import BudgetError
from ortrain.graph import shapes
from ortrain.graph.cost import factors
from ortrain.graph.walk import reads
from ortrain.program import Program, region_of
from ortrain.units import megabytes

# Multiplications and bytes a second of two cores, roughly: their ratio is what matters.
_MULTIPLICATIONS, _BYTES, _LAUNCH = 100e9, 10e9, 5e-6
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
    allowed = 0 if budget == "least" else budget
    if isinstance(allowed, float):
        allowed *= whole
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
        f"a step cannot keep to memory_budget={budget}, {_amount(allowed)}",
        because=f"with all computed again that can be it holds {_amount(least.peak)}, and "
        f"without a budget {_amount(whole)}" + (f", at sizes {at}" if at else ""),
        help=f"memory_budget={least.peak} (bytes) is the least that is possible; or take a smaller "
        "batch",
    )
    error.least = least.peak
    raise error


def _amount(count: float) -> str:
    """What a step takes, in bytes where megabytes would all be 0.0."""
    return megabytes(count) if count >= 1 << 20 else f"{count:,.0f} bytes"


@dataclass(frozen=True)
class _Try:
    peak: int
    seconds: float
    programs: list[Program]


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
                # The exact sum: others hang on where nodes lie in memory, and so would the choice.
                cost = math.fsum(map(self._seconds, closure))
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
                self.seconds += math.fsum(map(self._seconds, closure))
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


def seconds_of(node: ir.Node, sizes: Sizes) -> float:
    """What a node takes, roughly."""
    made = [v for v in node.outputs if v.shape is not None]
    moved = sum(bytes_of(v, sizes) for v in (*reads(node), *made))
    if not any(factors(node, v) for v in node.outputs):
        return _LAUNCH + (0 if node.op_type in SAME_MEMORY else moved / _BYTES)
    count = 0.0
    for v in made:
        terms = math.prod(shapes.evaluate(dim, sizes) or 1 for dim in factors(node, v))
        count += terms * bytes_of(v, sizes) / (v.dtype.itemsize if v.dtype else 4)
    return _LAUNCH + moved / _BYTES + count / _MULTIPLICATIONS
