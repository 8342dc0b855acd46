"""Attention whose weights are larger than what they follow from: the backward computes them again.

Of a sequence of L elements the weights are L x L for each head, and the query and the key, which
the backward reads anyway, L x E each. Where L is several times E, nothing that lies between them
and the weighted values is kept: it is marked as a checkpointed region.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.attention import attention_of, is_product
from ortrain.program import OWN_REGION, REGION, region_of

# Elements of the weights for each of query and key above which they are computed again. With heads
# of 64 these are lengths above 384. It is one product more beside the six of forward and backward.
_RATIO = 3


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
        inside = attention_of(node)
        if inside and _is_long(inside[0], sizes):
            number += 1
            for each in inside:
                each.metadata_props[REGION] = f"{OWN_REGION}{number}"


def _is_long(node: ir.Node, sizes: Mapping[str, int]) -> bool:
    """Whether the weights are several times as large as the query and the key."""
    query, key = node.inputs[:2]
    assert query is not None
    assert key is not None
    q, k = shapes.dims(query), shapes.dims(key)
    if not q or not k or len(q) < 3 or len(q) != len(k):
        return False
    length = k[-1] if is_product(node) else k[-2]  # the product's key is transposed
    rows, width, columns = (shapes.evaluate(dim, sizes) for dim in (q[-2], q[-1], length))
    if rows is None or width is None or columns is None:
        return False
    return rows * columns > _RATIO * width * (rows + columns)
