"""What a graph has no use for, and what it may not have."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from ortrain.capture.fx.draws import draws_of
from ortrain.capture.fx.splice import new_node
from ortrain.capture.origin import BESIDE, captured_error, operator_name
from ortrain.capture.translations import TRANSLATIONS
from ortrain.errors import listing

aten = torch.ops.aten

_CHECKS = {
    aten.sym_constrain_range_for_size.default,
    aten.sym_constrain_range.default,
    aten._assert_scalar.default,
    aten._assert_tensor_metadata.default,
}
_VALUES = {aten._assert_async.default, aten._assert_async.msg}


def remove_checks(module: fx.GraphModule) -> None:
    """Removes assertions on sizes and dtypes, and what only they needed."""
    for node in reversed(list(module.graph.nodes)):
        if node.op == "call_function" and node.target in _CHECKS:
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code(_has_effect)


def _has_effect(node: fx.Node) -> bool:
    """Whether a node matters although nothing reads it. A random draw does not."""
    if node.op in ("placeholder", "output"):
        return True
    if node.target in _VALUES or node.target is aten.batch_norm.default:  # updates statistics
        return True
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def violations(module: fx.GraphModule) -> fx.Node | None:
    """Takes assertions on values out of a graph; the node that counts where they do not hold."""
    graph, count = module.graph, None
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _VALUES:
            continue
        condition: Any = node.args[0]
        known = condition.meta["val"]
        with graph.inserting_before(node):
            violated = new_node(graph, aten.logical_not.default, (condition,), condition)
            violated.meta["val"] = known.new_empty(known.shape, dtype=torch.bool)
            each = new_node(graph, aten.sum.default, (violated,), violated)
            each.meta["val"] = known.new_empty((), dtype=torch.int64)
            count = each if count is None else new_node(graph, aten.add.Tensor, (count, each), each)
        graph.erase_node(node)
    return count


def refuse_second_device(exported: ExportedProgram) -> None:
    """Refuses a module that computes on one device and puts results on another.

    A graph runs on one, and the translation of ``tensor.to(device)`` is nothing.
    """
    nodes = exported.graph_module.graph.nodes
    kinds = {k for n in nodes if n.op == "placeholder" and (k := _device_type(n)) is not None}
    for node in nodes:
        kind = _device_type(node) if node.op == "call_function" else None
        if kind is not None and kinds and kind not in kinds:
            raise captured_error(
                node,
                f"the forward puts a tensor on {kind}, and its inputs are on {listing([*kinds])}",
                because="a graph runs on one device",
                help=f"move tensors between devices outside of the module; or {BESIDE}",
            )


def _device_type(node: fx.Node) -> str | None:
    value = node.meta.get("val")
    return value.device.type if isinstance(value, torch.Tensor) else None


def refuse_random(module: fx.GraphModule) -> None:
    """Refuses draws that we do not translate, and those that came with a decomposition."""
    for node in module.graph.nodes:
        if draws_of(node) and not ("stream" in node.kwargs and node.target in TRANSLATIONS):
            raise captured_error(
                node,
                f"{operator_name(node.target)} draws random numbers",
                because="a graph has uniform, normal and exponential numbers, whole ones in a "
                "range, and what follows from these",
                help="draw them outside and pass them in, or leave this to eager",
            )


def refuse_complex(module: fx.GraphModule) -> None:
    """Refuses complex numbers: neither onnxruntime nor a gradient rule knows them."""
    for node in module.graph.nodes:
        if _is_complex(node):
            called = node.op == "call_function"
            raise captured_error(
                node,
                f"{operator_name(node.target) if called else node.name} is complex",
                because="a graph computes with real numbers",
                help="compute with the real and the imaginary part, or leave this to eager",
            )


def _is_complex(node: fx.Node) -> bool:
    if isinstance(node.target, torch._ops.OpOverload):
        name = node.target._schema.name.removeprefix("aten::")
        if name.startswith("fft_") and not name.endswith(("shift", "freq")):
            return True  # within, where its result is not
    values = node.meta.get("val")
    return any(
        isinstance(value, torch.Tensor) and value.is_complex()
        for value in (values if isinstance(values, list | tuple) else (values,))
    )
