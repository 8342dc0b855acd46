"""A tensor that is read at every place, in order, is that tensor, with axes between its own.

So does transformers spell a padding mask where Dynamo looks at it::

    mask[arange(rows)[:, None, None, None], arange(length)[None, None, None, :]]
    → mask[:, None, None, :]

That the ranges are as long as the axes is asked of their sizes, and Dynamo guards it.
"""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch import Tensor, fx

from ortrain.capture.fx.splice import new_node

aten = torch.ops.aten


def grids_as_views(module: fx.GraphModule) -> None:
    """Replaces such readings in a graph of ATen operators, which is changed in place."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.target is not aten.index.Tensor:
            continue
        source, indices = cast(tuple[fx.Node, list[Any]], node.args)
        axes = _axes(source.meta["val"], indices)
        if axes is None:
            continue
        rank = node.meta["val"].dim()
        with graph.inserting_before(node):
            value, val = source, source.meta["val"]
            for axis in sorted({*range(rank)} - {*axes}):
                val = val.unsqueeze(axis)
                value = new_node(graph, aten.unsqueeze.default, (value, axis), node)
                value.meta["val"] = val
            copy = new_node(graph, aten.clone.default, (value,), node)
            copy.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(copy)
        graph.erase_node(node)


def _axes(source: Tensor, indices: list[Any]) -> list[int] | None:
    """The axes of the result that those of the source become; None where it is another reading."""
    if len(indices) != source.dim() or not all(isinstance(each, fx.Node) for each in indices):
        return None
    found = [_range(each) for each in indices]
    ranges = [each for each in found if each is not None]
    ranks = {rank for _, rank, _ in ranges}
    axes = [axis for axis, _, _ in ranges]
    if len(ranges) < len(indices) or len(ranks) > 1 or axes != sorted(set(axes)):
        return None
    pairs = zip(ranges, source.shape, strict=True)
    return axes if all(bool(end == size) for (_, _, end), size in pairs) else None


def _range(node: fx.Node) -> tuple[int, int, Any] | None:
    """The axis along which an index counts from 0, its rank, and to where; None for others."""
    source = node.args[0] if node.args else None
    if node.target is aten.arange.default:
        end = source.meta["val"] if isinstance(source, fx.Node) else source
        whole = node.meta["val"].dtype is torch.int64
        return (0, 1, end) if whole and isinstance(end, int | torch.SymInt) else None
    if not isinstance(source, fx.Node):
        return None
    known = _range(source)
    if known is None:
        return None
    axis, rank, end = known
    if node.target is aten.unsqueeze.default:
        place = cast(int, node.args[1]) % (rank + 1)
        return (axis + (place <= axis), rank + 1, end)
    if node.target is aten.add.Tensor and node.args[1:] == (0,) and not node.kwargs:
        return known
    if node.target is aten.slice.Tensor:
        _, start, stop, *step = (*node.args[1:], None, None)[:4]
        whole = start in (0, None) and stop in (sys.maxsize, None) and step in ([], [1], [None])
        return known if whole else None
    return None
