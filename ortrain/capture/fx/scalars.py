"""Scalars where an operator has a dimension: vectors of one element."""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import torch
from torch import fx

from ortrain.capture.fx.splice import from_same_place
from ortrain.pytorch.operators import OpOverload, schema_of
from ortrain.pytorch.tracing import fake_mode_of

aten = torch.ops.aten

_DIMENSIONS = {"dim", "dims", "dim0", "dim1"}
# Beside the tensor itself: those that have its dimensions. A value to fill with has none.
_ALONG = {"index", "src", "source", "indices"}


def scalars_as_vectors(module: fx.GraphModule) -> None:
    """Gives a scalar the axis that PyTorch pretends it has, wherever an operator is told one.

    ``torch.cumsum(x, 0)`` of a scalar is x: PyTorch takes it for a vector of one element, and gives
    the result the shape that it would have. ONNX has no axis 0 in a scalar. ::

        y = cumsum(x, 0)  →  y = reshape(cumsum(reshape(x, [1]), 0), [])
    """
    graph = module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        names = [argument.name for argument in schema_of(node.target).arguments]
        if node.target.namespace != "aten" or not names or not _DIMENSIONS.intersection(names):
            continue
        if not (node.args and _is_scalar(node.args[0])):
            continue
        if "dims" in names and not node.args[names.index("dims")]:  # permuted by no axes
            continue
        with graph.inserting_before(node):
            given = list(node.args)
            for i, (name, value) in enumerate(zip(names, given, strict=False)):
                if _is_scalar(value) and (i == 0 or name in _ALONG):
                    given[i] = _reshaped(graph, value, node, [1])
            vector = graph.call_function(node.target, tuple(given), dict(node.kwargs))
        vector.meta = {**node.meta, "val": _evaluated(vector)}
        with graph.inserting_before(node):
            _replace(graph, node, vector)


def _replace(graph: fx.Graph, node: fx.Node, vector: fx.Node) -> None:
    """Readers of a node read the same of the vector, in the shapes that they know."""
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        node.replace_all_uses_with(_reshaped(graph, vector, node, list(value.shape)))
    else:
        for user in list(node.users):
            assert user.target is operator.getitem
            index: Any = user.args[1]
            piece = graph.call_function(operator.getitem, (vector, index))
            piece.meta = {**user.meta, "val": vector.meta["val"][index]}
            shaped = _reshaped(graph, piece, user, list(user.meta["val"].shape))
            user.replace_all_uses_with(shaped)
            graph.erase_node(user)
    graph.erase_node(node)


def _reshaped(graph: fx.Graph, value: fx.Node, like: fx.Node, shape: list[Any]) -> fx.Node:
    if not shape and value.meta["val"].ndim == 0:
        return value
    if shape:
        result = graph.call_function(aten.reshape.default, (value, shape))
    else:  # also where the trace does not know that the vector has one element
        result = graph.call_function(aten.select.int, (value, 0, 0))
    result.meta["val"] = _evaluated(result)
    from_same_place(result, like)
    return result


def _evaluated(node: fx.Node) -> Any:
    """What a node would hold in the trace."""
    args: Any = fx.node.map_arg(node.args, lambda n: n.meta["val"])
    kwargs: Any = fx.node.map_arg(node.kwargs, lambda n: n.meta["val"])
    mode = fake_mode_of([n.meta["val"] for n in node.all_input_nodes])
    with mode if mode is not None else contextlib.nullcontext(), torch.no_grad():
        target: Any = node.target
        return target(*args, **kwargs)


def _is_scalar(value: Any) -> bool:
    known = value.meta.get("val") if isinstance(value, fx.Node) else None
    return isinstance(known, torch.Tensor) and known.ndim == 0
