"""What operators demand of the values that they are given, as assertions of their own."""

from __future__ import annotations

import torch
from torch import fx

from ortrain.capture.fx.splice import Emitter

aten = torch.ops.aten


def assert_preconditions(module: fx.GraphModule) -> None:
    """Asserts, before an operator, what PyTorch would raise an error at inside of it."""
    for node in list(module.graph.nodes):
        if node.target is not aten.binary_cross_entropy.default:
            continue
        for given in node.args[:2]:  # probabilities, and targets between 0 and 1
            with module.graph.inserting_before(node):
                emit = Emitter(module.graph, node)
                low, high = emit(aten.ge.Scalar, given, 0), emit(aten.le.Scalar, given, 1)
                inside = emit(aten.logical_and.default, low, high)
                module.graph.call_function(aten._assert_async.msg, (inside, "a probability"))
