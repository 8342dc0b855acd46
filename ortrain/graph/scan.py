"""Loops over the first axis of tensors, as ``Scan`` nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder

Values = Sequence[ir.Value]
Step = Callable[[Builder, Values, Values], tuple[Values, Values]]


def scan(
    op: Builder, step: Step, states: Values, slices: Values, *, backwards: bool = False
) -> tuple[list[ir.Value], list[ir.Value]]:
    """Emits a ``Scan`` over the first axis of some tensors.

    Args:
        op: emits the node.
        step: ``step(op, states, slices)`` emits one step into the builder that it is given and
            returns the next states and what to collect. It may read any value of the graph outside.
        states: before the first step.
        slices: [T, ...] each; a step sees [...] of them.
        backwards: from the last step to the first; what is collected keeps its place.

    Returns:
        The states after the last step, and the collected values [T, ...].
    """
    name = f"step_{len(op.nodes)}"
    entries = []
    for i, value in enumerate((*states, *slices)):
        known = shapes.dims(value)
        if i >= len(states) and known is not None:
            known = known[1:]
        entry = ir.Value(
            name=f"{op.prefix}/{name}/input_{i}", shape=None if known is None else ir.Shape(known)
        )
        entry.type = None if value.dtype is None else ir.TensorType(value.dtype)
        entries.append(entry)
    with op.subgraph(name, entries) as body:
        after, collected = step(body, entries[: len(states)], entries[len(states) :])
        outputs: list[ir.Value] = []
        for value in (*after, *collected):
            own = value.graph is body.graph and value not in outputs and value not in entries
            outputs.append(value if own else body.Identity(value))
        inner = body.returning(*outputs)
    direction = int(backwards)
    directions: dict[str, Any] = {}
    if collected:
        directions["scan_output_directions"] = [direction] * len(collected)
    results = op.node(
        "Scan",
        [*states, *slices],
        outputs=len(inner.outputs),
        body=inner,
        num_scan_inputs=len(slices),
        scan_input_directions=[direction] * len(slices),
        **directions,
    )
    results = (results,) if isinstance(results, ir.Value) else results
    length = (shapes.dims(slices[0]) or (None,))[0]
    for i, (result, value) in enumerate(zip(results, inner.outputs, strict=True)):
        known = shapes.dims(states[i]) if i < len(states) else shapes.dims(value)
        if i >= len(states) and known is not None:
            known = (length, *known)
        shapes.assign(result, value.dtype, None if known is None else ir.Shape(known))
    return list(results[: len(states)]), list(results[len(states) :])
