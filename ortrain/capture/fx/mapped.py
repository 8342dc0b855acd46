"""Calls of ``torch.vmap`` in the exported graph, as the operators on whole batches that they run.

An exported graph holds the functions of a map as they are written, for one row, between calls that
open and close the map::

    level = _vmap_increment_nesting(rows, "error")
    one = _add_batch_dim(x, 0, 1)
    y = matmul(one, weight)
    ys = _remove_batch_dim(y, 1, rows, 0)
    _vmap_decrement_nesting()

Which operator a batch takes in the place of each is known to PyTorch's rules for batches alone, so
they run once more, on the graph's tensors without contents, and what they call is the graph::

    ys = matmul(x, weight)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._C import _functorch
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch import predispatch
from torch.fx.experimental.proxy_tensor import make_fx

from ortrain.capture.fx.decompose import count_of_fixed_sizes
from ortrain.capture.fx.functional import functionalise_composed
from ortrain.capture.fx.regions import region_of
from ortrain.capture.fx.splice import from_same_place, splice
from ortrain.capture.onnx.translations.base import symbolic
from ortrain.capture.origin import located, operator_name, origin
from ortrain.capture.trace.refusal import named
from ortrain.pytorch.autocast import Autocast, autocast_as

_OPENS, _CLOSES = predispatch._vmap_increment_nesting, predispatch._vmap_decrement_nesting
_PREPARES = predispatch.lazy_load_decompositions
_OF_MAPS = {_OPENS, _CLOSES, _PREPARES, predispatch._add_batch_dim, predispatch._remove_batch_dim}


def inline_maps(module: fx.GraphModule, autocast: Autocast = ()) -> None:
    """Puts what maps run on whole batches in the place of what is mapped.

    Args:
        module: its graph is changed in place.
        autocast: around it. What the maps cast is cast in their graphs.

    Raises:
        CaptureError: a map draws random numbers, writes in place, or has a region inside.
    """
    for node in module.graph.nodes:
        if (region := region_of(node, autocast)) is not None:
            inline_maps(getattr(module, region.body), region.autocast)
    for number, nodes in enumerate(_maps(module.graph)):
        if not all(map(_is_known, nodes)):
            refused = named(operator_name(predispatch._add_batch_dim), origin(nodes[-1], full=True))
            assert refused is not None
            raise refused
        _inline(module, nodes, autocast, f"_mapped_{number}")


def _maps(graph: fx.Graph) -> list[list[fx.Node]]:
    """The nodes of each map that lies in no other, from where it opens to where it closes."""
    found: list[list[fx.Node]] = []
    depth = 0
    for node in graph.nodes:
        if node.target is _OPENS:
            if not depth:
                found.append([])
            depth += 1
        if depth and node.op != "get_attr":  # which several maps may read
            found[-1].append(node)
        depth -= node.target is _CLOSES
    return found


def _is_known(node: fx.Node) -> bool:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return (
            not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags
        )
    return (
        target in _OF_MAPS
        or target is torch.ops.higher_order.flat_apply
        or getattr(target, "__module__", "") == "_operator"
    )


def _inline(module: fx.GraphModule, nodes: list[fx.Node], autocast: Autocast, prefix: str) -> None:
    inside = set(nodes)
    read = dict.fromkeys(given for node in nodes for given in node.all_input_nodes)
    given = [node for node in read if node not in inside and node.op != "get_attr"]
    attributes = {n: getattr(module, str(n.target)) for n in read if n.op == "get_attr"}
    returned = [n for n in nodes if any(user not in inside for user in n.users)]
    values = [node.meta["val"] for node in given]

    def call(*replaced: Any) -> Any:
        known: dict[fx.Node, Any] = {**attributes, **dict(zip(given, replaced, strict=True))}
        for node in nodes:
            known[node] = _value(node, known)
        return tuple(known[node] for node in returned)

    mode = torch._guards.detect_fake_mode(values)
    assert mode is not None, "what is mapped comes from outside of the map"
    fixed = count_of_fixed_sizes(mode)
    depth = len(_functorch.get_interpreter_stack() or ())
    try:
        with mode, enable_python_dispatcher(), autocast_as(autocast):
            inner = make_fx(call, tracing_mode="real")(*values)
            functionalise_composed(inner.graph)
    finally:
        while len(_functorch.get_interpreter_stack() or ()) > depth:
            _CLOSES()
    if count_of_fixed_sizes(mode) != fixed:  # of which the conditions on the sizes know nothing
        raise located(nodes[0], symbolic("torch.vmap"))
    first = nodes[0]
    with module.graph.inserting_before(first):
        results, made = splice(module, inner, given, prefix)
    for copied in made:
        from_same_place(copied, nodes[-1])
    for node, result in zip(returned, results, strict=True):
        node.replace_all_uses_with(result, lambda user: user not in inside)
    for node in reversed(nodes):
        module.graph.erase_node(node)


def _value(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """What a call gives, of the values of those before it."""
    args: Any = fx.node.map_arg(node.args, lambda n: known[n])
    kwargs: Any = fx.node.map_arg(node.kwargs, lambda n: known[n])
    target: Any = node.target
    return target(*args, **kwargs)
