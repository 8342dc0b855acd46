"""Registry of ortrain's operators, and their expansion into standard ONNX."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from ortrain.errors import GraphError
from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.graph.rewire import take_place
from ortrain.graph.rounding import rounding_once

DOMAIN = "ortrain"

Body = Callable[..., Any]


@dataclass(frozen=True)
class Operator:
    """One operator of the ``ortrain`` domain.

    Attributes:
        name: the ONNX ``op_type``.
        body: ``body(op, *inputs, **attributes)`` emits standard ONNX and returns the outputs.
        types: sets dtype and shape of a node's outputs from its inputs.
        outputs: names of the outputs.
    """

    name: str
    body: Body
    types: Callable[[ir.Node], None]
    outputs: tuple[str, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs, in order; those with a default of None are optional."""
        positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = inspect.signature(self.body).parameters.values()
        return tuple(p.name for p in parameters if p.kind is positional)[1:]


OPERATORS: dict[str, Operator] = {}


def operator(
    name: str, *, outputs: tuple[str, ...] = ("output",), types: Callable[[ir.Node], None]
) -> Callable[[Body], Body]:
    """Registers the decorated body as operator ``ortrain::name``."""

    def register(body: Body) -> Body:
        if name in OPERATORS:
            raise GraphError(f"operator {DOMAIN}::{name} is registered twice")
        OPERATORS[name] = Operator(name, body, types, outputs)
        shapes.OPERATORS[DOMAIN, name] = types
        return body

    return register


def like_first(node: ir.Node) -> None:
    """Typing: the first output is like the first input."""
    source, target = node.inputs[0], node.outputs[0]
    assert source is not None
    shapes.assign(target, source.dtype, source.shape)


def like_inputs(*places: int) -> Callable[[ir.Node], None]:
    """Typing: each output is like the input at its place, where there is one."""

    def types(node: ir.Node) -> None:
        for target, place in zip(node.outputs, places, strict=False):
            source = node.inputs[place] if place < len(node.inputs) else None
            if source is not None:
                shapes.assign(target, source.dtype, source.shape)

    return types


def attributes_of(node: ir.Node) -> dict[str, Any]:
    """A node's attributes as Python values."""
    return {name: _plain(attribute) for name, attribute in node.attributes.items()}


def _plain(attribute: ir.Attr) -> Any:
    value = attribute.value
    if attribute.type is ir.AttributeType.TENSOR:
        return attribute.as_tensor().numpy()
    return list(value) if isinstance(value, tuple) else value


def expand(graph: ir.Graph, *, opset: int, only: Callable[[ir.Node], bool] | None = None) -> int:
    """Replaces ortrain's operators in a graph (sub-graphs included) by their bodies.

    Args:
        graph: changed in place.
        opset: of the standard domain.
        only: restricts the expansion to some nodes.

    Returns:
        How many nodes were replaced.
    """
    pools: dict[int, dict[tuple[Any, ...], ir.Value]] = {}
    replaced = 0
    while True:  # a body may hold operators of ours in turn
        found = [n for n in graph.all_nodes() if n.domain == DOMAIN and (only is None or only(n))]
        if not found:
            return replaced
        for node in found:
            expand_node(node, opset=opset, constants=pools.setdefault(id(node.graph), {}))
        replaced += len(found)


def expand_node(
    node: ir.Node, *, opset: int, constants: dict[tuple[Any, ...], ir.Value] | None = None
) -> Collection[ir.Node]:
    """Replaces one node by its operator's body; returns the new nodes."""
    known = OPERATORS.get(node.op_type)
    if known is None:
        raise GraphError(f"there is no operator {DOMAIN}::{node.op_type}")
    builder = Builder.before(node, opset=opset, constants=constants)
    with builder as op:
        results = rounding_once(op, known.body, node.inputs, attributes_of(node))
    if isinstance(results, ir.Value):
        results = (results,)
    taken: set[ir.Value] = set()
    for old, new in zip(node.outputs, results, strict=False):
        if new is None:  # the body has it not, where nobody asks for it
            assert not old.uses(), f"{DOMAIN}::{node.op_type} was not asked for {old.name}"
            continue
        # The body passed an input through, or returns one value as two outputs.
        if new.producer() is None or new in taken:
            with builder as op:
                new = op.Identity(new)
        take_place(new, old)
        taken.add(new)
    assert builder.graph is not None
    builder.graph.remove(node, safe=True)
    return builder.nodes
