"""Attention whose weights are larger than what they follow from: the backward computes them again.

Of a sequence of L elements the weights are L x L for each head, and the query and the key, which
the backward reads anyway, L x E each. Where L is several times E, nothing that lies between them
and the weighted values is kept: it is marked as a checkpointed region.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.program import REGION, region_of

# Elements of the weights for each of query and key above which they are computed again. With heads
# of 64 these are lengths above 384. It is one product more beside the six of forward and backward.
_RATIO = 3
# What stands between the product of query and key and that with the values.
_ELEMENTWISE = {"Add", "Cast", "Div", "Dropout", "Mul", "Sub", "Where"}


def mark_long_attention(graph: ir.Graph, sizes: Mapping[str, int]) -> None:
    """Marks each attention over long sequences as a region that the backward computes again.

    Args:
        graph: of a forward program, before it is differentiated; its nodes are marked in place.
        sizes: example value of each symbolic dimension.
    """
    number = 0
    for node in list(graph):
        if region_of(node):
            continue
        inside = [*_attention(node)]
        if inside and _is_long(inside[0], sizes):
            number += 1
            for each in inside:
                each.metadata_props[REGION] = f"attention {number}"


def _attention(node: ir.Node) -> Iterator[ir.Node]:
    """The nodes of an attention, that with query and key first; none where it is none."""
    if (node.domain, node.op_type) == ("ortrain", "Attention"):
        yield node
    if node.domain or node.op_type != "Softmax":
        return
    above, below = _from_product(node.inputs[0]), _to_product(node.outputs[0])
    if above and below:
        yield from (*above, node, *below)


def _from_product(value: ir.Value | None) -> list[ir.Node]:
    """A product and what of its size makes the value of it; empty where none does."""
    node = None if value is None else value.producer()
    if value is None or node is None:
        return []
    if _is_product(node):
        return [node]
    if node.op_type not in _ELEMENTWISE:
        return []
    same = (v for v in node.inputs if v is not None and shapes.dims(v) == shapes.dims(value))
    return next(([*found, node] for v in same if (found := _from_product(v))), [])


def _to_product(value: ir.Value) -> list[ir.Node]:
    """What of its size is made of the value, and the product whose left side that is."""
    for use in value.uses():
        node = use.node
        if _is_product(node) and use.idx == 0:
            return [node]
        same = shapes.dims(node.outputs[0]) == shapes.dims(value)
        if node.op_type in _ELEMENTWISE and same and (found := _to_product(node.outputs[0])):
            return [node, *found]
    return []


def _is_product(node: ir.Node) -> bool:
    return node.op_type == "MatMul" and not node.domain


def _is_long(node: ir.Node, sizes: Mapping[str, int]) -> bool:
    """Whether the weights are several times as large as the query and the key."""
    query, key = node.inputs[:2]
    assert query is not None
    assert key is not None
    q, k = shapes.dims(query), shapes.dims(key)
    if not q or not k or len(q) < 3 or len(q) != len(k):
        return False
    length = k[-1] if _is_product(node) else k[-2]  # the product's key is transposed
    rows, width, columns = (shapes.evaluate(dim, sizes) for dim in (q[-2], q[-1], length))
    if rows is None or width is None or columns is None:
        return False
    return rows * columns > _RATIO * width * (rows + columns)
