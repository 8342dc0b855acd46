"""Gradients that the user's program has written out itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from ortrain.autodiff.registry import gradient, no_gradient
from ortrain.graph.build import Builder
from ortrain.graph.rewire import copied_attribute
from ortrain.graph.walk import dependencies, reads
from ortrain.ops.base import DOMAIN

no_gradient("ortrain::Upstream", reason="it stands for a gradient")


@gradient("ortrain::CustomGradient")
def custom_gradient(g, *values, number, results, inputs):
    """the gradients in the graph, of what arrives in the place of what stands for it"""
    given = g.node.inputs[results + inputs :]
    wanted = [v if g.needs(results + i) else None for i, v in enumerate(given)]
    arriving = {}
    for i, dy in enumerate(g.arriving):
        arriving[i] = g.op.zeros_like(g.node.outputs[i]) if dy is None else dy
    stand_ins = {
        node.outputs[0]: arriving[node.attributes["index"].as_int()]
        for node in g.node.graph
        if node.domain == DOMAIN
        and node.op_type == "Upstream"
        and node.attributes["number"].as_int() == number
    }
    found = _repeated(g.op, g.node.graph, [v for v in wanted if v is not None], stand_ins)
    gradients = [None if v is None else found.get(v, v) for v in wanted]
    without = inputs - len(gradients)  # the last ones may be absent
    return [*[None] * results, *gradients, *[None] * (without + len(given))]


def _repeated(
    op: Builder, graph: ir.Graph, wanted: list[ir.Value], instead: Mapping[ir.Value, ir.Value]
) -> dict[ir.Value, ir.Value]:
    """Computes values once more, with others in the place of some that they depend on.

    Args:
        op: emits the operators.
        graph: that computes the values.
        wanted: of it.
        instead: for each of those the other.

    Returns:
        For each value that is another by that, the other.
    """
    known = dict(instead)
    needed = dependencies(graph, wanted)
    for node in list(graph):
        if not any(v in needed for v in node.outputs) or any(v in known for v in node.outputs):
            continue
        if not any(v in known for v in reads(node)):
            continue
        attributes: Any = {n: copied_attribute(a, known) for n, a in node.attributes.items()}
        made = op.node(
            node.op_type,
            [None if v is None else known.get(v, v) for v in node.inputs],
            domain=node.domain,
            outputs=len(node.outputs),
            **attributes,
        )
        for old, new in zip(node.outputs, [made] if len(node.outputs) == 1 else made, strict=True):
            new.type, new.shape = old.type, old.shape
            known[old] = new
    return known
