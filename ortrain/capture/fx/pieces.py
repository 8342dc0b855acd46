"""The pieces of a dimension that is open, and those that are written into: slices."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ortrain.capture.fx.memory import memory
from ortrain.capture.fx.splice import arguments_of, from_same_place
from ortrain.pytorch.operators import OpOverload, is_mutable

aten = torch.ops.aten

Size = int | fx.Node
Cut = tuple[Any, tuple[Any, ...]]

_CHUNKS = {aten.chunk.default, aten.unsafe_chunk.default}
_SPLITS = {aten.split.Tensor, aten.split.default, aten.unsafe_split.Tensor}
_EVEN = {aten.tensor_split.sections}
# Whose pieces have lengths of their own, with the axis of those that are not told one.
_UNEVEN = {
    aten.split_with_sizes.default: None, aten.split.sizes: None, aten.tensor_split.indices: None,
    aten.unsafe_split_with_sizes.default: None,
    aten.hsplit.int: 1, aten.hsplit.array: 1, aten.vsplit.int: 0, aten.vsplit.array: 0,
    aten.dsplit.int: 2, aten.dsplit.array: 2,
}  # fmt: skip


def written_pieces_as_views(module: fx.GraphModule) -> None:
    """Takes pieces one by one where any tensor of their memory is written into.

    Each is a view then, of a tensor that its node names.
    """
    graph = module.graph
    calls = [n for n in graph.nodes if isinstance(n.target, OpOverload)]
    written = {
        memory(given) for node in calls if is_mutable(node.target) for given in node.all_input_nodes
    }
    for node in calls:
        if not node.args or not isinstance(node.meta.get("val"), list | tuple):
            continue
        source = node.args[0]
        if not isinstance(source, fx.Node) or memory(source) not in written - {None}:
            continue
        count = len(node.meta["val"])
        if node.target is aten.unbind.int:
            dim = arguments_of(node)["dim"]
            _replace(graph, node, [(aten.select.int, (source, dim, i)) for i in range(count)])
        elif node.target in _CHUNKS | _SPLITS | _EVEN:
            _replace_by_slices(graph, node)
        elif node.target in _UNEVEN:
            dim = arguments_of(node).get("dim", _UNEVEN[node.target])
            dim = min(dim, source.meta["val"].ndim - 1)  # hsplit cuts a vector along its own axis
            sizes = [piece.shape[dim] for piece in node.meta["val"]]
            if all(isinstance(size, int) for size in sizes):
                _replace(graph, node, _slices(source, dim, [0, *itertools.accumulate(sizes)]))
    graph.eliminate_dead_code()


def open_pieces_as_slices(module: fx.GraphModule) -> None:
    """Cuts a dimension of open size by slices: ONNX's Split needs to know the sizes. ::

        a, b = chunk(x, 2)  →  half = (size(x, 0) + 1) // 2; a = x[:half]; b = x[half:]

    How many pieces there are is the trace's: the conditions on sizes hold it.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _CHUNKS | _SPLITS | _EVEN:
            continue
        source, wanted, dim = _cut(node)
        known = source.meta["val"].shape[dim]
        if isinstance(known, int) and isinstance(wanted, int) and node.target not in _EVEN:
            continue
        _replace_by_slices(graph, node)
    graph.eliminate_dead_code()


def _cut(node: fx.Node) -> tuple[fx.Node, Size, int]:
    """What is cut, into how many pieces or of which length, and along which axis."""
    source: Any
    wanted: Any
    source, wanted, *rest = node.args
    dim: Any = node.kwargs.get("dim", rest[0] if rest else 0)
    return source, wanted, dim


def _replace_by_slices(graph: fx.Graph, node: fx.Node) -> None:
    source, wanted, dim = _cut(node)
    with graph.inserting_before(node):
        size, count = _size(graph, source, dim), len(node.meta["val"])
        bounds = _bounds(node.target, _arithmetic(graph), size, wanted, count)
    _replace(graph, node, _slices(source, dim, bounds))


def _slices(source: fx.Node, dim: int, bounds: Sequence[Size]) -> list[Cut]:
    return [(aten.slice.Tensor, (source, dim, *ends)) for ends in itertools.pairwise(bounds)]


def _replace(graph: fx.Graph, node: fx.Node, cuts: Sequence[Cut]) -> None:
    """Puts a call in the place of each piece that is read."""
    for user in list(node.users):
        assert user.target is operator.getitem
        index: Any = user.args[1]
        with graph.inserting_before(node):
            piece = graph.call_function(*cuts[index])
        piece.meta = {**user.meta, "val": node.meta["val"][index]}
        from_same_place(piece, node)
        user.replace_all_uses_with(piece)
        graph.erase_node(user)
    graph.erase_node(node)


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
