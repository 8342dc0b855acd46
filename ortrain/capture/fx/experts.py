"""Transformers' product of grouped rows is recognised."""

from __future__ import annotations

from torch import fx

from ortrain.capture.onnx.translations.experts import grouped_matmul

# A custom operator, because its loop over the experts reads their numbers of tokens.
OPERATOR = "transformers.grouped_mm_fallback.default"


def reaches_experts(node: fx.Node) -> bool:
    """Whether a product of grouped rows depends on a node."""
    stack, seen = [node], {node}
    while stack:
        users = [user for user in stack.pop().users if user not in seen]
        if any(user.target is grouped_matmul for user in users):
            return True
        seen.update(users)
        stack += users
    return False


def recognise_experts(module: fx.GraphModule) -> None:
    """Puts :func:`grouped_matmul` in the place of transformers' operator."""
    for node in module.graph.nodes:
        if node.op == "call_function" and str(node.target) == OPERATOR:
            node.target = grouped_matmul
