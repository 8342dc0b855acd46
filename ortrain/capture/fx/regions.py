"""Regions of the exported graph: ``no_grad`` and ``autocast``."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ortrain.capture.fx.splice import new_node, splice, substitute
from ortrain.capture.origin import captured_error

aten = torch.ops.aten
higher_order = torch.ops.higher_order


def inline_regions(module: fx.GraphModule) -> None:
    """Puts the bodies of ``no_grad`` and ``autocast`` regions in place of them.

    What a ``no_grad`` region returns is detached: upstream's decomposition forgets the barrier.
    """
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        args: Any
        if node.target is higher_order.wrap_with_set_grad_enabled:
            enabled, body, *args = node.args
            barrier = not enabled
        elif node.target is higher_order.wrap_with_autocast:
            device, dtype, enabled, _, body, *args = node.args
            if enabled:
                raise captured_error(
                    node,
                    f"an autocast region ({device}, {dtype}) cannot be captured",
                    because="the exported graph does not record its casts",
                    help="leave the region out; the precision is chosen for the whole graph",
                )
            barrier = False
        else:
            continue
        _inline(module, node, body, args, barrier)
    module.graph.eliminate_dead_code()
    module.delete_all_unused_submodules()


def _inline(
    module: fx.GraphModule, node: fx.Node, body: fx.Node, args: list[Any], barrier: bool
) -> None:
    inner = getattr(module, str(body.target))
    inline_regions(inner)
    with module.graph.inserting_before(node):
        results, _ = splice(module, inner, args, prefix=str(body.target))
        if barrier and isinstance(results, list | tuple):
            results = [_detached(module.graph, result) for result in results]
        elif barrier:
            results = _detached(module.graph, results)
    substitute(node, results)


def _detached(graph: fx.Graph, value: Any) -> Any:
    known = value.meta.get("val") if isinstance(value, fx.Node) else None
    if not isinstance(known, torch.Tensor) or not known.is_floating_point():
        return value
    return new_node(graph, aten.detach.default, (value,), value)
