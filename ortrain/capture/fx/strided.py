"""Windows of memory, ``as_strided``, as rows that an index chooses.

Longformer and LED cut a sequence into chunks that overlap so.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ortrain.capture.fx.splice import Emitter, arguments_of
from ortrain.capture.fx.windows import WINDOWS, Rows, rows_of
from ortrain.capture.origin import IN_PYTORCH, captured_error
from ortrain.pytorch.conditions import hold

aten = torch.ops.aten


def strided_as_rows(module: fx.GraphModule) -> None:
    """Replaces ``as_strided`` by rows of the tensor, chosen by an index.

    Raises:
        CaptureError: its windows are no rows of it.
    """
    graph = module.graph
    for node in [each for each in graph.nodes if each.target in WINDOWS]:
        rows = rows_of(node)
        if not hold(rows.conditions, [n.meta.get("val") for n in (node, *node.all_input_nodes)]):
            raise captured_error(
                node,
                "windows of memory are no rows of their tensor",
                because="a graph has a tensor's numbers, and no memory behind or between them",
                help=IN_PYTORCH,
            )
        with graph.inserting_before(node):
            result = _chosen(Emitter(graph, node), rows, **arguments_of(node))
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def _chosen(
    emit: Emitter,
    found: Rows,
    input: fx.Node,
    size: Sequence[Any],
    stride: Sequence[Any],
    storage_offset: Any,
) -> fx.Node:
    start, length = found.start, 1
    for each in size[start:]:
        length = _computed(emit, operator.mul, length, each)
    rows = emit(aten.permute.default, input, [*found.order])
    rows = emit(aten.reshape.default, rows, [-1, length])
    index: Any = _computed(emit, operator.floordiv, storage_offset or 0, length)
    for axis in range(start):
        step = _computed(emit, operator.floordiv, stride[axis], length)
        places = emit(
            aten.arange.default, size[axis], dtype=torch.int64, device=input.meta["val"].device
        )
        places = emit(aten.mul.Tensor, places, step)
        shape = [-1 if i == axis else 1 for i in range(start)]
        index = emit(aten.add.Tensor, emit(aten.view.default, places, shape), index)
    return emit(aten.view.default, emit(aten.embedding.default, rows, index), [*size])


def _computed(emit: Emitter, function: Any, one: Any, other: Any) -> Any:
    """A number, or the node that computes it."""
    if isinstance(one, fx.Node) or isinstance(other, fx.Node):
        return emit(function, one, other)
    return function(one, other)
