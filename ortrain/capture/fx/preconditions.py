"""What operators demand of the values that they are given, as assertions of their own."""

from __future__ import annotations

import math

import torch
from torch import fx

from ortrain.capture.fx.splice import Emitter

aten = torch.ops.aten

# Below this a score's spacing is above 1e-3: of the normalizer of a row of attention, kept as one
# number with the row's largest score, nothing is left for the gradient of PyTorch's fused kernel.
LOWEST_BIAS = -2e4


def assert_preconditions(module: fx.GraphModule) -> None:
    """Asserts, before an operator, what a graph of it depends on.

    PyTorch raises an error inside of an operator, or its gradient loses what a graph's keeps.
    """
    for node in list(module.graph.nodes):
        with module.graph.inserting_before(node):
            if node.target is aten.binary_cross_entropy.default:
                _probabilities(module.graph, node)
            elif (
                node.target is aten.scaled_dot_product_attention.default and torch.is_grad_enabled()
            ):
                _open_rows(module.graph, node)


def _probabilities(graph: fx.Graph, node: fx.Node) -> None:
    """Asserts that probabilities and targets are between 0 and 1."""
    for given in node.args[:2]:
        emit = Emitter(graph, node)
        low, high = emit(aten.ge.Scalar, given, 0), emit(aten.le.Scalar, given, 1)
        inside = emit(aten.logical_and.default, low, high)
        graph.call_function(aten._assert_async.msg, (inside, "a probability"))


def _open_rows(graph: fx.Graph, node: fx.Node) -> None:
    """Asserts that a floating mask leaves something of each row, or shuts it by minus infinity."""
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    if not isinstance(mask, fx.Node) or dropout:  # with dropout PyTorch keeps the weights
        return
    value = mask.meta["val"]
    if not value.is_floating_point() or not value.ndim:
        return
    emit = Emitter(graph, node)
    largest = emit(aten.amax.default, mask, [-1])
    is_open = emit(aten.gt.Scalar, largest, LOWEST_BIAS)
    is_shut = emit(aten.eq.Scalar, largest, -math.inf)
    known = emit(aten.logical_or.default, is_open, is_shut)
    graph.call_function(aten._assert_async.msg, (known, "a row of a mask"))
