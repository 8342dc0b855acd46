"""Casts where they cost least, and none that another one takes back.

::

    before                                      after
    w = Transpose(weight)                       h = Cast<to=BFLOAT16>(weight)
    a = Cast<to=BFLOAT16>(w)                    a = Transpose(h)
    b = Cast<to=BFLOAT16>(weight)               (gone, readers take h)
    f = Cast<to=FLOAT>(x)         # bfloat16
    g = Reshape(f, shape)
    y = Cast<to=BFLOAT16>(g)                    y = Reshape(x, shape)

Casts to a narrower dtype go towards the source, those to a wider one towards the readers, through
operators that only move elements: fewer bytes are moved, and casts meet. Of two in a row the first
goes where it has lost nothing: to float32 and back is nothing at all, from float32 to bfloat16 and
back is a rounding, which stays.

No number changes. Nodes take the phase of the one that they replace.
"""

from __future__ import annotations

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.graph.rewire import take_place
from ortrain.graph.rounding import is_narrowing, is_widening
from ortrain.passes.clean import clean
from ortrain.program import Program

# They only move the elements of their first input; the last two to more places, and to fewer.
_VIEWS = frozenset({"Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
_WIDE_BEHIND, _NARROW_BEFORE = _VIEWS | {"Slice"}, _VIEWS | {"Expand"}


def place_casts(program: Program) -> bool:
    """Places the casts of a program, in place; whether anything changed."""
    changed = False
    while _sweep(program):
        clean(program)
        changed = True
    return changed


def _sweep(program: Program) -> bool:
    changed = False
    for node in list(program.graph):
        if node.graph is program.graph and node.outputs and not node.domain:
            if node.op_type == "Cast":
                changed |= _after_cast(program, node) or _narrow_earlier(program, node)
            elif node.op_type in _WIDE_BEHIND:
                changed |= _widen_later(program, node)
    return changed


def _after_cast(program: Program, node: ir.Node) -> bool:
    """``Cast(Cast(x))`` → ``Cast(x)``, or x, where the inner one loses nothing."""
    inner = node.inputs[0].producer() if node.inputs[0] is not None else None
    to = node.outputs[0].dtype
    if not is_widening(inner) or to not in shapes.FLOATING:
        return False
    assert inner is not None
    source = inner.inputs[0]
    assert source is not None
    with Builder.before(node, opset=program.opset) as op:
        result = op.Identity(source) if source.dtype == to else op.Cast(source, to=int(to))
    _replace(program, node, result)
    return True


def _narrow_earlier(program: Program, node: ir.Node) -> bool:
    """``Cast(Move(x))`` → ``Move(Cast(x))`` for a cast to a narrower dtype."""
    move = node.inputs[0].producer() if node.inputs[0] is not None else None
    moves = move is not None and move.op_type in _NARROW_BEFORE and not move.domain
    if move is None or not moves or not is_narrowing(node) or not _read_once(move):
        return False
    source = move.inputs[0]
    assert source is not None
    assert node.outputs[0].dtype is not None
    with Builder.before(node, opset=program.opset) as op:
        cast = op.cast(source, node.outputs[0].dtype)
        result = _moved(op, move, cast)
    _replace(program, node, result)
    return True


def _widen_later(program: Program, node: ir.Node) -> bool:
    """``Move(Cast(x))`` → ``Cast(Move(x))`` for a cast to a wider dtype."""
    cast = node.inputs[0].producer() if node.inputs[0] is not None else None
    if cast is None or not is_widening(cast) or not _read_once(cast):
        return False
    source = cast.inputs[0]
    assert source is not None
    assert cast.outputs[0].dtype is not None
    with Builder.before(node, opset=program.opset) as op:
        result = op.cast(_moved(op, node, source), cast.outputs[0].dtype)
    _replace(program, node, result)
    return True


def _read_once(node: ir.Node) -> bool:
    value = node.outputs[0]
    return len(value.uses()) == 1 and not value.is_graph_output()


def _moved(op: Builder, move: ir.Node, source: ir.Value) -> ir.Value:
    """The move of another value."""
    attributes = {a.name: a.value for a in move.attributes.values()}
    result: ir.Value = op.node(move.op_type, (source, *move.inputs[1:]), **attributes)
    result.shape = move.outputs[0].shape
    return result


def _replace(program: Program, node: ir.Node, result: ir.Value) -> None:
    take_place(result, node.outputs[0])
    program.graph.remove(node, safe=True)
