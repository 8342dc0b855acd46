"""What a graph has no use for, and what it may not have."""

from __future__ import annotations

import torch
from torch import fx

from ortrain.capture.fx.draws import draws_of
from ortrain.capture.origin import captured_error

aten = torch.ops.aten

_CHECKS = {
    aten.sym_constrain_range_for_size.default,
    aten.sym_constrain_range.default,
    aten._assert_async.default,
    aten._assert_async.msg,
    aten._assert_scalar.default,
    aten._assert_tensor_metadata.default,
}


def remove_checks(module: fx.GraphModule) -> None:
    """Removes assertions, and what only they needed."""
    for node in reversed(list(module.graph.nodes)):
        if node.op == "call_function" and node.target in _CHECKS:
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code(_has_effect)


def _has_effect(node: fx.Node) -> bool:
    """Whether a node matters although nothing reads it. A random draw does not."""
    if node.op in ("placeholder", "output"):
        return True
    if node.target is aten.batch_norm.default:  # it updates running statistics
        return True
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def refuse_random(module: fx.GraphModule) -> None:
    """Refuses draws that have no stream: those of distributions that take several tries."""
    for node in module.graph.nodes:
        if draws_of(node) and "stream" not in node.kwargs:
            raise captured_error(
                node,
                f"{node.target} draws random numbers",
                because="a graph cannot draw them from torch's generator",
                help="draw them outside and pass them in, or leave this to eager",
            )


def refuse_complex(module: fx.GraphModule) -> None:
    """Refuses complex numbers: neither onnxruntime nor a gradient rule knows them."""
    for node in module.graph.nodes:
        if _is_complex(node):
            raise captured_error(
                node,
                f"{node.target if node.op == 'call_function' else node.name} is complex",
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
