"""``torch.vmap`` in a graph of Dynamo's, as the operators on whole batches that it runs.

Dynamo hands over what is mapped as it is written, for one row, between calls that open and close
the map. Which operator a batch takes in the place of each is known to PyTorch's rules for batches
alone, so they run here, on the fakes of the graph, and what they call takes the map's place.
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import torch
from torch import Tensor, fx

from ortrain.capture.origin import IN_PYTORCH, captured_error
from ortrain.capture.refusal import first_line
from ortrain.errors import CaptureError
from ortrain.pytorch.operators import HigherOrderOperator, OpOverload, draws, is_mutable
from ortrain.pytorch.switches import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRADIENTS
from ortrain.pytorch.tracing import traced
from ortrain.pytorch.transforms import CLOSES_MAP, OPENS_MAP

_SWITCHES = {ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRADIENTS}


def without_maps(module: fx.GraphModule) -> fx.GraphModule:
    """A graph of Dynamo's in which maps are what they run on whole batches.

    Args:
        module: the graph; it is not changed.

    Raises:
        CaptureError: a map draws random numbers, writes in place, switches something, or calls what
            runs a graph itself.
    """
    if not any(node.target is OPENS_MAP for node in module.graph.nodes):
        return module
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    copied = fx.GraphModule(module, graph)
    for nodes, casts in _maps(copied.graph):
        with contextlib.ExitStack() as stack:
            for each in casts:
                stack.enter_context(torch.autocast(*each))
            _inline(copied, nodes)
    copied.recompile()
    return copied


def _maps(graph: fx.Graph) -> list[tuple[list[fx.Node], list[Any]]]:
    """Each map that lies in no other: its nodes, and the regions of autocast around it."""
    found: list[tuple[list[fx.Node], list[Any]]] = []
    casts: list[Any] = []
    depth = 0
    for node in graph.nodes:
        if node.target is ENTER_AUTOCAST:
            casts.append(node.args)
        elif node.target is EXIT_AUTOCAST:
            casts.pop()
        elif node.target is OPENS_MAP:
            if not depth:
                found.append(([], [*casts]))
            depth += 1
        if depth and node.op != "get_attr":  # which several maps may read
            found[-1][0].append(node)
        depth -= node.target is CLOSES_MAP
    return found


def _refused(node: fx.Node, because: str) -> CaptureError:
    what = "torch.vmap has no operators on whole batches"
    return captured_error(node, what, because=because, help=IN_PYTORCH)


def _inline(module: fx.GraphModule, nodes: list[fx.Node]) -> None:
    inside = set(nodes)
    for node in nodes:
        if isinstance(node.target, HigherOrderOperator) or node.target in _SWITCHES:
            raise _refused(node, f"{node.name} is called within")
    read = dict.fromkeys(given for node in nodes for given in node.all_input_nodes)
    given = [node for node in read if node not in inside and node.op != "get_attr"]
    fixed = {n: getattr(module, str(n.target)) for n in read if n.op == "get_attr"}
    returned = [n for n in nodes if any(user not in inside for user in n.users)]

    def call(*values: Any) -> Any:
        known: dict[fx.Node, Any] = {**fixed, **dict(zip(given, values, strict=True))}
        for node in nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: known[n])
            function: Any = node.target
            if node.op == "call_method":
                function, args = getattr(args[0], str(node.target)), args[1:]
            known[node] = function(*args, **kwargs)
        return tuple(known[node] for node in returned)

    values = [node.meta["example_value"] for node in given]
    detached = [value.detach() if isinstance(value, Tensor) else value for value in values]
    try:
        inner = traced(call, detached, below=True)
    except Exception as error:
        raise _refused(nodes[0], f"{type(error).__name__}: {first_line(error)}") from error
    for node in inner.graph.nodes:
        target = node.target
        if isinstance(target, OpOverload) and (is_mutable(target) or draws(target)):
            raise _refused(nodes[0], f"{target} is called within")
    with module.graph.inserting_before(nodes[0]):
        name = f"_mapped_{nodes[0].name}"
        module.add_submodule(name, inner)
        called = module.graph.call_module(name, tuple(given))
        called.meta = dict(nodes[-2].meta)  # the last one only closes the map
        called.meta["example_value"] = tuple(node.meta.get("example_value") for node in returned)
    for i, node in enumerate(returned):
        with module.graph.inserting_after(called):
            result = module.graph.call_function(operator.getitem, (called, i))
        result.meta = dict(node.meta)
        node.replace_all_uses_with(result, lambda user: user not in inside)
    for node in reversed(nodes):
        module.graph.erase_node(node)
