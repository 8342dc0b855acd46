"""What stands in the way of leaving tokens out: what reads all of them, and the work behind it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from ortrain.graph.cost import Multiplications
from ortrain.graph.walk import reads
from ortrain.passes.tokens import tokenwise
from ortrain.passes.tokens.demand import Demands, Shown, demands, loss_of, through
from ortrain.program import Program, Role, origin_of, role_of

Kind = Literal["output", "operator", "mask", "no mask"]


@dataclass(frozen=True)
class Obstacle:
    """What has the work in front of it done for all tokens.

    Attributes:
        kind: an ``output`` that shows them; an ``operator`` that reads all of its input; the
            ``mask`` of an attention that shuts none out for certain; ``no mask`` where it has none.
        name: of the output, or of the operator.
        where: the user's module and source line; empty for an output, or where capture knew none.
        others: how many more there are of the same source line, as in layers that are alike.
        behind: the multiplications of what is computed for all tokens because of it.
    """

    kind: Kind
    name: str
    where: str
    others: int
    behind: Multiplications


_Key = tuple[Kind, str, str]
"""Kind, name, and source line: of layers that are alike each has the same obstacle."""


def leaves_out(program: Program, shown: Shown) -> bool:
    """Whether any product with a matrix is needed for less than all tokens.

    Args:
        program: forward, of which shapes are known.
        shown: what is read of its outputs, as in :func:`demands`.
    """
    return any(map(_is_product, demands(program, shown).plans))


def obstacles(program: Program, shown: Shown = "all") -> list[Obstacle]:
    """What has products with matrices computed for all tokens, each with the work behind it.

    Work that two of them need whole counts for both.

    Args:
        program: forward, of which shapes are known; left as it is.
        shown: what is read of its outputs, as in :func:`demands`.
    """
    found = demands(program, shown)
    blamed: dict[ir.Value, frozenset[_Key]] = defaultdict(frozenset)
    places: dict[_Key, list[str]] = defaultdict(list)
    work: dict[_Key, list[ir.Node]] = defaultdict(list)
    for value in _shown_whole(program, found, shown):
        key: _Key = ("output", value.name or "", "")
        blamed[value] |= {key}
        places[key].append("")
    for node in reversed(program.graph):
        whole = _read_whole(node, found)
        if not whole:
            continue
        dense = [v for v in node.outputs if v in found.frames and found.of.get(v) == {}]
        behind = frozenset[_Key]().union(*(blamed[v] for v in dense))
        passes = bool(dense) and tokenwise.plan(node, found.frames, dense) is not None
        key = _key(node)
        for value in whole:
            causes = behind if passes or _only_asks(node, value, behind) else frozenset({key})
            if key in causes and origin_of(node) not in places[key]:
                places[key].append(origin_of(node))
            blamed[value] |= causes
        if passes:
            for each in behind:
                work[each].append(node)
    return [
        Obstacle(key[0], key[1], places[key][-1], len(places[key]) - 1, Multiplications(nodes))
        for key, nodes in work.items()
        if any(map(_is_product, nodes))
    ]


def _is_product(node: ir.Node) -> bool:
    return node.op_type in ("MatMul", "Gemm")


def _shown_whole(program: Program, found: Demands, shown: Shown) -> Iterator[ir.Value]:
    """Outputs of which somebody sees all tokens."""
    if shown == "loss" and loss_of(program) is not None:
        return
    for value in program.graph.outputs:
        frame = found.frames.get(value)
        if role_of(value) not in (Role.USER_OUTPUT, Role.LOSS) or frame is None:
            continue
        if shown != "tokens" or frame.grid not in found.seen:
            yield value


def _read_whole(node: ir.Node, found: Demands) -> list[ir.Value]:
    """What a node reads at all tokens, of values that are computed of weights."""
    alone = found.beside({v: found.of[v] for v in node.outputs if v in found.of})
    through(node, alone)
    return [
        v
        for v in dict.fromkeys(reads(node))
        if v in found.frames and v in found.masks.learned and alone.of.get(v) == {}
    ]


def _only_asks(node: ir.Node, value: ir.Value, through: frozenset[_Key]) -> bool:
    """Whether an attention needs all of a value because all of its result is needed."""
    is_query = node.op_type == "Attention" and value is node.inputs[0]
    return is_query and value not in node.inputs[1:] and bool(through)


def _key(node: ir.Node) -> _Key:
    line = origin_of(node).rpartition("(")[2]
    if (node.domain, node.op_type) != ("ortrain", "Attention"):
        return "operator", node.op_type, line
    mask = node.inputs[3] if len(node.inputs) > 3 else None
    return "no mask" if mask is None else "mask", "attention", line
