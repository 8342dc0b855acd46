"""Regions of a graph: ``no_grad`` and ``autocast``."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ortrain.capture.fx.memory import layout, memory
from ortrain.capture.fx.splice import WITHOUT_GRADIENT, new_node
from ortrain.pytorch.autocast import Autocast
from ortrain.pytorch.operators import OpOverload, schema_of
from ortrain.pytorch.switches import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRADIENTS

aten = torch.ops.aten

AUTOCAST = "ortrain.autocast"
"""Of a node's ``meta``: the autocast that it runs under; not there without."""


def _changed(autocast: Autocast, device: str, dtype: Any, on: bool) -> Autocast:
    """Autocast in a region for one device; without a dtype it has the one that is set."""
    others = tuple(each for each in autocast if each[0] != device)
    return (*others, (device, dtype or torch.get_autocast_dtype(device))) if on else others


def mark_regions(module: fx.GraphModule, autocast: Autocast = ()) -> None:
    """Marks the operators of regions that are calls in the graph, and takes these calls away.

    Dynamo writes ``no_grad`` and ``autocast`` so: a call switches, and another one switches back.

    Args:
        module: its graph is changed in place.
        autocast: around the call.
    """
    graph = module.graph
    entered: dict[fx.Node, Autocast] = {}
    grad = torch.is_grad_enabled()
    made: list[fx.Node] = []
    regions: list[list[fx.Node]] = []
    for node in list(graph.nodes):
        if node.target is SET_GRADIENTS:
            grad = bool(node.args[0])
            made = []
            if not grad:
                regions.append(made)
        elif node.target is ENTER_AUTOCAST:
            entered[node] = autocast
            device, dtype, on, _ = node.args
            autocast = _changed(autocast, str(device), dtype, bool(on))
        elif node.target is EXIT_AUTOCAST:
            autocast = entered[node.all_input_nodes[0]]
        elif node.op == "call_function":
            if autocast:
                node.meta[AUTOCAST] = autocast
            if not grad:
                node.meta[WITHOUT_GRADIENT] = True
                made.append(node)
    for node in reversed(list(graph.nodes)):
        if node.target in (SET_GRADIENTS, ENTER_AUTOCAST, EXIT_AUTOCAST):
            graph.erase_node(node)
    for made in regions:
        _detach_what_leaves(graph, made)


def _detach_what_leaves(graph: fx.Graph, made: list[fx.Node]) -> None:
    """Puts a barrier behind each operator of a ``no_grad`` region that is read outside."""
    inside = set(made)
    for node in made:
        readers = [user for user in node.users if user not in inside]
        if not readers:
            continue
        same = _itself(node, inside)
        if same not in inside:
            result = same
        else:
            with graph.inserting_after(node):
                result = _detached(graph, same)
        for reader in readers:
            reader.replace_input_with(node, result)


def without_gradient(node: fx.Node) -> bool:
    """Whether a node comes from a ``no_grad`` region."""
    return WITHOUT_GRADIENT in node.meta


# Where there is nothing to do, these return the tensor itself, with its gradient, in any region.
_ITSELF = {
    "aten::to", "aten::contiguous", "aten::type_as", "aten::dropout", "aten::positive",
    "aten::resolve_conj", "aten::resolve_neg", "aten::feature_dropout", "aten::alpha_dropout",
}  # fmt: skip


def _itself(node: fx.Node, region: set[fx.Node]) -> fx.Node:
    """The node that returned the very tensor which this one returns; the first outside a region."""
    while (
        node in region
        and isinstance(node.target, OpOverload)
        and schema_of(node.target).name in _ITSELF
        and isinstance(source := node.args[0], fx.Node)
        and memory(source) == memory(node)
        and layout(source) == layout(node)
        and source.meta["val"].dtype == node.meta["val"].dtype
    ):
        node = source
    return node


def _detached(graph: fx.Graph, value: Any) -> Any:
    known = value.meta.get("val") if isinstance(value, fx.Node) else None
    if not isinstance(known, torch.Tensor) or not known.is_floating_point():
        return value
    return new_node(graph, aten.detach.default, (value,), value)
