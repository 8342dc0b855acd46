"""Attention that is computed as far as the last token that is read, in any row of the batch.

Attention sees its batch whole, row by row, since it mixes the tokens of each. But of sentences that
are padded at the end to 128 positions, the longest of a batch has 50: the scores behind them are of
queries that nobody reads, or of keys that the mask shuts out with a weight of exactly zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.attention import attention_of, is_product
from ortrain.passes.tokens.demand import Demands
from ortrain.passes.tokens.frames import Frame, Grid
from ortrain.passes.tokens.kept import Condition, Keys, Set
from ortrain.passes.tokens.tokenwise import attribute


@dataclass(frozen=True)
class Short:
    """An attention that needs no more than the first positions of each row.

    Attributes:
        nodes: in order.
        sets: of each grid of which it does so → the tokens that are among those positions.
        conditions: some of which may shut keys out by minus infinity, and others by a number. A
            query whose first keys are all shut out by infinity, and another one by a number, would
            have a softmax of nothing else, and NaN as its gradient.
    """

    nodes: tuple[ir.Node, ...]
    sets: dict[Grid, Set]
    conditions: frozenset[Condition] = frozenset()


def shortened(graph: ir.Graph, found: Demands) -> Iterator[Short]:
    """The attentions of a program that need not be computed for whole rows.

    Args:
        graph: of the program.
        found: what is read of its values.
    """
    for node in graph:
        nodes = attention_of(node)
        if nodes and _is_closed(nodes, node):
            shut = _shut(node, found)
            if sets := _sets(nodes, shut, found):
                mixed = _mixed(shut)
                if any(each.adds for each in mixed) or not mixed:
                    yield Short(tuple(nodes), sets, mixed)


def _shut(node: ir.Node, found: Demands) -> Keys | None:
    """The keys that a softmax sees; none where it is not known to shut any out.

    It divides by the exponents of all that it is given. Of what is nothing but multiplied by zero
    behind it, or before it, nobody reads the values, and yet each counts.
    """
    exponents = found.exponents(node.inputs[0]) if node.inputs[0] is not None else None
    return None if exponents is None else exponents[1]


def _mixed(shut: Keys | None) -> frozenset[Condition]:
    """Conditions of keys of a softmax that shut them out by minus infinity and by numbers.

    The operator for attention, which gives a query that sees no key zeros, has none.
    """
    conditions = frozenset() if shut is None else frozenset(shut.conditions)
    infinite = any(each.adds or not each.finite for each in conditions)
    numbers = any(each.adds or each.finite for each in conditions)
    return conditions if infinite and numbers else frozenset()


def _is_closed(nodes: list[ir.Node], softmax: ir.Node) -> bool:
    """Whether nobody else reads what lies between the two products, and rows are of keys."""
    inner = [value for each in nodes[:-1] for value in each.outputs]
    if any(value.is_graph_output() for value in inner):
        return False
    if any(use.node not in nodes for value in inner for use in value.uses()):
        return False
    rank = shapes.rank(softmax.outputs[0]) or 0
    return softmax.op_type != "Softmax" or attribute(softmax, "axis", -1) % rank == rank - 1


def _sets(nodes: list[ir.Node], shut: Keys | None, found: Demands) -> dict[Grid, Set]:
    """Along each grid of an attention the tokens that have to be computed, where that is known."""
    first, last, fused = nodes[0], nodes[-1], len(nodes) == 1
    query, key = first.inputs[:2]
    value, output = last.inputs[2 if fused else 1], last.outputs[0]
    sides = [(key, -2 if fused else -1), (value, -2), (output, -2)]
    if _along(*sides[0]) != _along(*sides[1]) or not isinstance(_along(query, -1), int):
        return {}
    sets: dict[Grid, Set] = {}
    for length in dict.fromkeys(_along(*side) for side in sides):
        if not isinstance(length, str) or not all(_fits(node, length) for node in nodes):
            continue
        if length == _along(output, -2) and not _is_packed_by_all(output, found):
            continue
        limits = [_limit(*side, found) for side in sides if _along(*side) == length]
        keys: Set = frozenset()
        if length == _along(*sides[0]) and not fused:
            if shut is None:
                continue
            keys = frozenset({shut})
        grids = {frame.grid for each in limits for frame in each}
        if all(limits) and len(grids) == 1:
            (grid,) = grids
            kept = (kept for each in limits for kept in each.values())
            sets[grid] = keys.union(*kept, _packed_with(nodes, grid, found))
    return {grid: kept for grid, kept in sets.items() if kept}


def _packed_with(nodes: list[ir.Node], grid: Grid, found: Demands) -> Set:
    """The tokens of a grid with which operands of some nodes are packed, for whomever."""
    made_by = (v.producer() for node in nodes for v in node.inputs if v is not None)
    plans = (found.plans[node] for node in made_by if node in found.plans)
    return frozenset().union(*(kept for plan, kept in plans if plan.frame.grid == grid))


def _fits(node: ir.Node, length: str) -> bool:
    """Whether what a node reads along such an axis of the scores has its length there, or 1."""
    fused = node.op_type == "Attention"
    if is_product(node):
        return True
    scores = shapes.dims(node.outputs[0]) or ()
    if fused:
        key = shapes.dims(node.inputs[1]) or ()
        scores = (*scores[:-1], key[-2])
    for value in node.inputs[3:4] if fused else node.inputs:
        if value is None:
            continue
        dims = shapes.dims(value)
        if dims is None or len(dims) > len(scores):
            return False
        pairs = zip(dims[::-1], scores[::-1], strict=False)
        if any(own not in (1, length) for own, whole in pairs if whole == length):
            return False
    # Rows of scores have numbers in the order of the batch.
    drops = node.op_type == "Dropout" or fused
    middle = scores[1:-2]
    return not drops or scores[-2] != length or all(isinstance(d, int) for d in middle)


def _limit(value: ir.Value | None, axis: int, found: Demands) -> dict[Frame, Set]:
    """Where a value with its rows in front is read along an axis; nothing for everywhere."""
    frame = found.frames.get(value) if value is not None else None
    if value is None or frame is None or frame.axes != (0, axis % (shapes.rank(value) or 1)):
        return {}
    kept = found.of.get(value, {}).get(frame)
    return {} if kept is None else {frame: kept}


def _is_packed_by_all(value: ir.Value, found: Demands) -> bool:
    """Whether all who read a value are given some of its tokens."""
    for node, place in value.uses():
        plan = found.plans.get(node)
        packs = plan is not None and isinstance(plan[0].reads[place], Frame)
        if not packs and not (node in found.direct and place == 0):
            return False
    return not value.is_graph_output()


def _along(value: ir.Value | None, axis: int) -> shapes.Dim:
    dims = shapes.dims(value) or ()
    return dims[axis] if len(dims) > 1 else None
