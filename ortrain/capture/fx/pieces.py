"""The pieces of a dimension that is open: slices."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ortrain.capture.fx.splice import from_same_place

aten = torch.ops.aten

Size = int | fx.Node

_CHUNKS = {aten.chunk.default, aten.unsafe_chunk.default}
_SPLITS = {aten.split.Tensor, aten.split.default, aten.unsafe_split.Tensor}
_EVEN = {aten.tensor_split.sections}


def open_pieces_as_slices(module: fx.GraphModule) -> None:
    """Cuts a dimension of open size by slices: ONNX's Split needs to know the sizes. ::

        a, b = chunk(x, 2)  →  half = (size(x, 0) + 1) // 2; a = x[:half]; b = x[half:]

    How many pieces there are is the trace's: the conditions on sizes hold it.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _CHUNKS | _SPLITS | _EVEN:
            continue
        source, wanted, *rest = node.args
        dim = node.kwargs.get("dim", rest[0] if rest else 0)
        known = source.meta["val"].shape[dim]
        if isinstance(known, int) and isinstance(wanted, int) and node.target not in _EVEN:
            continue
        pieces = node.meta["val"]
        with graph.inserting_before(node):
            size = _size(graph, source, dim)
            bounds = _bounds(node.target, _arithmetic(graph), size, wanted, len(pieces))
            for user in list(node.users):
                assert user.target is operator.getitem
                index: Any = user.args[1]
                start, end = bounds[index], bounds[index + 1]
                piece = graph.call_function(aten.slice.Tensor, (source, dim, start, end))
                piece.meta = {**user.meta, "val": pieces[index]}
                from_same_place(piece, node)
                user.replace_all_uses_with(piece)
                graph.erase_node(user)
        graph.erase_node(node)
    graph.eliminate_dead_code()


Arithmetic = Callable[[Callable[[Any, Any], Any], Size, Size], Size]


def _bounds(target: Any, compute: Arithmetic, size: Size, wanted: Size, pieces: int) -> list[Size]:
    """Where each piece begins, and where the last one ends."""
    if target in _EVEN:  # the first size % n pieces are one longer
        least = compute(operator.floordiv, size, pieces)
        more = compute(operator.mod, size, pieces)
        starts = [compute(operator.mul, least, i) for i in range(pieces)]
        return [
            *(compute(operator.add, s, _least(compute, more, i)) for i, s in enumerate(starts)),
            size,
        ]
    length = wanted
    if target in _CHUNKS:
        wide = compute(operator.add, size, compute(operator.sub, wanted, 1))
        length = compute(operator.floordiv, wide, wanted)
    return [*(compute(operator.mul, length, i) for i in range(pieces)), size]


def _least(compute: Arithmetic, more: Size, i: int) -> Size:
    """The smaller of two sizes, of integers: ``more`` below n, and ``i`` at most n."""
    if isinstance(more, int):
        return min(more, i)
    return compute(torch.sym_min, more, i)


def _arithmetic(graph: fx.Graph) -> Arithmetic:
    """Arithmetic of sizes as nodes, of numbers at once."""

    def compute(function: Callable[[Any, Any], Any], a: Size, b: Size) -> Size:
        if isinstance(a, int) and isinstance(b, int):
            return int(function(a, b))
        node = graph.call_function(function, (a, b))
        values = [v.meta["val"] if isinstance(v, fx.Node) else v for v in (a, b)]
        node.meta["val"] = function(*values)
        return node

    return compute


def _size(graph: fx.Graph, source: fx.Node, dim: int) -> Size:
    known = source.meta["val"].shape[dim]
    if isinstance(known, int):
        return known
    node = graph.call_function(aten.sym_size.int, (source, dim))
    node.meta["val"] = known
    return node
