"""Regions of the exported graph: ``no_grad`` and ``autocast``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ortrain.capture.fx.memory import layout, memory
from ortrain.capture.fx.splice import WITHOUT_GRADIENT, new_node, splice, substitute
from ortrain.capture.fx.statistics import may_update_statistics
from ortrain.pytorch.autocast import Autocast
from ortrain.pytorch.switches import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRADIENTS

aten = torch.ops.aten
higher_order = torch.ops.higher_order

AUTOCAST = "ortrain.autocast"
"""Of a node's ``meta``: the autocast that it runs under; not there without."""


def inline_regions(module: fx.GraphModule, autocast: Autocast = ()) -> None:
    """Puts the bodies of ``no_grad`` and ``autocast`` regions in place of them.

    What a ``no_grad`` region returns is detached: upstream's decomposition forgets the barrier. Its
    operators are marked (:func:`without_gradient`), for what they write in place. So are those that
    run under autocast, with that (:data:`AUTOCAST`).

    Args:
        module: its graph is changed in place.
        autocast: around the call.
    """
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        if (region := region_of(node, autocast)) is not None:
            _inline(module, node, region)
        elif autocast:
            node.meta[AUTOCAST] = autocast
    module.graph.eliminate_dead_code(lambda node: node.is_impure() or may_update_statistics(node))
    module.delete_all_unused_submodules()


@dataclass(frozen=True)
class Region:
    """A region of a graph.

    Attributes:
        body: names its graph.
        args: what the body is given.
        barrier: whether no gradient leaves it.
        autocast: that it runs under.
    """

    body: str
    args: list[Any]
    barrier: bool
    autocast: Autocast


def region_of(node: fx.Node, autocast: Autocast) -> Region | None:
    """The region that a node runs; None where it is another call.

    Args:
        node: a call.
        autocast: around it.
    """
    args: Any
    body: Any
    if node.target is higher_order.wrap_with_set_grad_enabled:
        enabled, body, *args = node.args
        return Region(str(body.target), args, not enabled, autocast)
    if node.target is higher_order.wrap_with_autocast:
        device, dtype, on, _, body, *args = node.args
        inside = _changed(autocast, str(device), dtype, bool(on))
        return Region(str(body.target), args, barrier=False, autocast=inside)
    return None


def _changed(autocast: Autocast, device: str, dtype: Any, on: bool) -> Autocast:
    """Autocast in a region for one device; without a dtype it has the one that is set."""
    others = tuple(each for each in autocast if each[0] != device)
    return (*others, (device, dtype or torch.get_autocast_dtype(device))) if on else others


def _inline(module: fx.GraphModule, node: fx.Node, region: Region) -> None:
    inner = getattr(module, region.body)
    inline_regions(inner, region.autocast)
    with module.graph.inserting_before(node):
        results, made = splice(module, inner, region.args, prefix=region.body)
        if region.barrier:
            for operation in made:
                operation.meta[WITHOUT_GRADIENT] = True
            inside = set(made)
            same = {operation: _itself(operation, inside) for operation in made}
            args = region.args
            if isinstance(results, list | tuple):
                results = [_detached(module.graph, same.get(r, r), args) for r in results]
            else:
                results = _detached(module.graph, same.get(results, results), args)
    substitute(node, results)


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
                result = _detached(graph, same, [])
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
        and isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.name in _ITSELF
        and isinstance(source := node.args[0], fx.Node)
        and memory(source) == memory(node)
        and layout(source) == layout(node)
        and source.meta["val"].dtype == node.meta["val"].dtype
    ):
        node = source
    return node


def _detached(graph: fx.Graph, value: Any, outside: list[Any]) -> Any:
    if any(value is each for each in outside):
        return value
    known = value.meta.get("val") if isinstance(value, fx.Node) else None
    if not isinstance(known, torch.Tensor) or not known.is_floating_point():
        return value
    return new_node(graph, aten.detach.default, (value,), value)
