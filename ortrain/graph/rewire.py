"""Putting one value in another's place."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from ortrain.graph import shapes


def take_place(new: ir.Value, old: ir.Value) -> None:
    """``new`` takes over the readers of ``old``, its name, its role and its place as an output.

    Its dtype and shape stay, and are filled in where ``old`` knew more.

    Args:
        new: made by a node, and no output of the graph.
        old: without a name afterwards; its node can go.
    """
    learn(new, old)
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    new.metadata_props.update(old.metadata_props)
    name, old.name = old.name, None
    new.name = name


def detach(node: ir.Node) -> None:
    """Has a node that is in no graph read nothing, so that no value lists it among its readers."""
    for place in range(len(node.inputs)):
        node.replace_input_with(place, None)


def learn(new: ir.Value, old: ir.Value) -> None:
    """Gives ``new`` what ``old``, which holds the same, knows of dtype and shape beyond it."""
    new.type = new.type or old.type
    mine, known = shapes.dims(new), shapes.dims(old)
    if known is None or (mine is not None and len(mine) != len(known)):
        return
    if mine is None:
        new.shape = old.shape
    else:
        pairs = zip(mine, known, strict=True)
        new.shape = ir.Shape([y if x is None or isinstance(y, int) else x for x, y in pairs])


def copied_attribute(attribute: ir.Attr, values: Mapping[ir.Value, ir.Value]) -> ir.Attr:
    """An attribute for another graph; a sub-graph is copied, and reads the values' twins there."""
    if attribute.type is not ir.AttributeType.GRAPH:
        return attribute
    inner = attribute.as_graph().clone(allow_outer_scope_values=True)
    for node in inner.all_nodes():
        for i, value in enumerate(node.inputs):
            if value is not None and value in values:
                node.replace_input_with(i, values[value])
    return ir.AttrGraph(attribute.name, inner)
