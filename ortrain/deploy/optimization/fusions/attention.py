"""Attention becomes one operator.

::

    before: query, key, value [b, h, n, d]      after
    k = Transpose<[0,1,3,2]>(key)               t = Transpose<[0,2,1,3]>(query)
    s = MatMul(query, k) * scale + mask         q = Reshape(t, [0, 0, h*d]); … of key and value
    w = Softmax<axis=-1>(s)                     y = MultiHeadAttention<h, scale>(q, k, v, mask)
    y = MatMul(w, value)                        … and the opposite of the two

The transposes and reshapes around it meet those that split the heads, and both fall away
(:mod:`.layout`). In exact arithmetic the operator is the same for every query, key, value and mask:
it adds the mask as it is, minus infinity and NaN included (measured: a row of nothing but minus
infinity is NaN in both).

Not made where the weights are read elsewhere, a size of heads is unknown or differs, or a mask may
not broadcast; and where masked scores are replaced by a number to which a score might still count.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from ortrain.deploy.optimization.fusions import grouped
from ortrain.deploy.optimization.fusions.fusion import DTYPES, Fusion, Place, Refused
from ortrain.deploy.optimization.fusions.heads import (
    Attention,
    apart,
    merged,
    splits_heads,
    whole,
)
from ortrain.deploy.optimization.fusions.masks import bias_of, seen_by, spread
from ortrain.deploy.optimization.fusions.matching import (
    either_way,
    integer,
    is_a,
    number,
    only_reader,
    operand,
)
from ortrain.deploy.optimization.fusions.scores import (
    Chosen,
    check_fills,
    scores_of,
    softmax_of,
    stands_between,
)
from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.graph.shapes import Dim


def _apply(place: Place, node: ir.Node) -> bool:
    read = _operator if node.op_type == "Attention" else _spelled_out
    found = read(place, node)
    if found is None:
        return False
    _replace(place, node, found)
    return True


def _spelled_out(place: Place, node: ir.Node) -> Attention | None:
    """Two products with a softmax between them."""
    softmax = softmax_of(node.inputs[0])
    scores = None if softmax is None else scores_of(softmax[0].inputs[0])
    value = node.inputs[1]
    if softmax is None or value is None:
        return None
    if scores is None:
        if (between := stands_between(softmax[0].inputs[0])) is not None:
            raise Refused(f"{between} stands between the product with the keys and the softmax")
        return None
    rank = shapes.rank(scores.query)
    if rank not in (3, 4) or rank != shapes.rank(scores.key) or rank != shapes.rank(value):
        raise Refused("query, key and value have unknown ranks, or others than 3 and 4")
    weights = node.inputs[0]
    outside = [u for u in softmax[0].outputs[0].uses() if u.node.op_type not in ("Where", "IsNaN")]
    if weights is None or only_reader(weights) is not node or (softmax[1] and outside):
        raise Refused("its weights are read elsewhere")
    check_fills(scores)
    op = place.builder(node)
    key = scores.key
    if scores.key_order is not None:
        key = op.Transpose(key, perm=list(scores.key_order))
    dtype = scores.result.dtype
    if dtype not in DTYPES:
        raise Refused(f"no kernel computes it in {dtype}")
    bias = bias_of(place, op, scores.masks, scores.chosen, dtype)
    parts = (scores.query, key, value)
    times = _sharing(*parts)
    return Attention(*parts, times, scores.scale, bias, softmax[1], False, node.outputs[0])


def _sharing(query: ir.Value, key: ir.Value, value: ir.Value) -> int:
    """How many heads share the one of key and value, over which the products broadcast."""
    q, k, v = shapes.dims(query), shapes.dims(key), shapes.dims(value)
    if q is None or k is None or v is None or len(q) != 4 or not isinstance(q[1], int):
        return 1
    return q[1] if k[1] == v[1] == 1 else 1


def _operator(place: Place, node: ir.Node) -> Attention | None:
    """The operator of opset 23, where it is one of heads apart without a past."""
    query, key, value = node.inputs[:3]
    if query is None or key is None or value is None:
        return None
    if any(shapes.rank(part) != 4 for part in (query, key, value)):
        return None  # of three axes: it is as good as any
    if number(node, "softcap", 0.0) or len([v for v in node.inputs[4:] if v is not None]):
        raise Refused("it has a softcap, a past or lengths")
    if any(v.uses() or v.is_graph_output() for v in node.outputs[1:]):
        raise Refused("it gives more than its result")
    if query.dtype not in DTYPES:
        raise Refused(f"no kernel computes it in {query.dtype}")
    q, k = shapes.dims(query), shapes.dims(key)
    if q is None or k is None or not isinstance(q[3], int):
        raise Refused("its sizes are unknown")
    if not isinstance(q[1], int) or not isinstance(k[1], int) or q[1] % k[1]:
        raise Refused("its heads are unknown")
    causal, mask = bool(integer(node, "is_causal", 0)), operand(node, 3)
    if causal and (mask is not None or not shapes.same(q[2], k[2])):
        raise Refused("it is causal, and has a mask or keys of another number than queries")
    shown = shapes.dims(mask)
    if place.opset >= 24 and mask is not None and not (shown and shapes.same(shown[-1], k[2])):
        raise Refused("its mask may be for fewer keys than there are")
    op, bias = place.builder(node), None
    if mask is not None:
        if mask.dtype == ir.DataType.BOOL:
            bias = bias_of(place, op, (), [Chosen(mask, True, -float("inf"))], query.dtype)
        else:
            bias = bias_of(place, op, [(mask, 1.0)], (), query.dtype)
    scale = number(node, "scale", q[3] ** -0.5)
    times = q[1] // k[1]
    cleared = mask is not None
    return Attention(query, key, value, times, scale, bias, cleared, causal, node.outputs[0])


def _replace(place: Place, node: ir.Node, found: Attention) -> None:
    if not found.scale:
        raise Refused("its scale is 0, which kernels take for none")
    op = place.builder(node)
    if shapes.rank(found.query) == 3:
        result = _of_three_axes(place, op, found)
        place.replace(found.target, result, "MultiHeadAttention")
        return
    sizes = check(found)
    target, factor = found.target, None
    bias = found.bias
    if bias is not None and found.cleared:
        bias, factor = seen_by(place, op, bias)
    elif (follower := _clearing(found.target, sizes)) is not None:
        target, factor = follower
        op = place.builder(target.producer() or node)
    if bias is not None:
        bias = spread(place, op, bias, sizes, found.query, found.key)
    if factor is not None:
        shape = shapes.dims(factor)
        # Of three axes, the first is that of the heads.
        if shape is None or (len(shape) >= 3 and shape[-3] != 1):
            raise Refused("rows are cleared head by head")
        if len(shape) == 4:
            column = factor
            factor = place.once(("factor", column), lambda: op.Squeeze(column, [1]))
    heads, width = sizes[1], shapes.dims(found.value)
    assert isinstance(heads, int)
    assert width is not None
    name, flat = grouped.emit(place, op, found, bias) or ("", None)
    if flat is None:
        name, flat = "MultiHeadAttention", _multi_head(op, found, bias, heads)
    flat.shape = ir.Shape([sizes[0], sizes[2], heads * whole(width[3])])
    if factor is not None:
        flat = op.Mul(flat, factor)
        flat.shape = ir.Shape([sizes[0], sizes[2], heads * whole(width[3])])
    place.replace(target, apart(op, flat, heads), name)


def check(found: Attention) -> tuple[Dim, Dim, Dim, Dim]:
    """The sizes of the scores.

    Raises:
        Refused: query, key and value do not belong together head by head.
    """
    q, k, v = (shapes.dims(part) for part in (found.query, found.key, found.value))
    if q is None or k is None or v is None:
        raise Refused("its sizes are unknown")
    if not isinstance(q[1], int) or not all(isinstance(d, int) for d in (q[3], v[3])):
        raise Refused("the number of heads or their size is unknown")
    if q[3] != k[3] or (k[1], v[1]) != (q[1] // found.times,) * 2:
        raise Refused("query, key and value have other heads than each other")
    if not (shapes.same(q[0], k[0]) and shapes.same(q[0], v[0])):
        raise Refused("query, key and value may have other batches than each other")
    return q[0], q[1], q[2], k[2]


def _clearing(value: ir.Value, sizes: tuple[Dim, ...]) -> tuple[ir.Value, ir.Value] | None:
    """``value * factor`` with a factor of each row, where nothing else reads the value."""
    node = only_reader(value)
    producer = value.producer()
    if (
        node is None
        or not is_a(node, "Mul")
        or producer is None
        or node.graph is not producer.graph
    ):
        return None
    for mine, factor in either_way(node):
        known = shapes.dims(factor)
        if mine is value and known is not None and len(known) == 4:
            batch = known[0] == 1 or shapes.same(known[0], sizes[0])
            if batch and known[1] == 1 and known[3] == 1:
                return node.outputs[0], factor
    return None


def _multi_head(op: Builder, found: Attention, bias: ir.Value | None, heads: int) -> ir.Value:
    key, value = found.key, found.value
    if found.times > 1:
        raise Refused("heads of the query share keys, of which the kernel takes no such form")
    k, v = shapes.dims(key), shapes.dims(value)
    # A kernel takes key and value with heads apart too, as a cache has them: that saves copies.
    if splits_heads(key) or splits_heads(value) or k is None or v is None or k[3] != v[3]:
        key, value = merged(op, key), merged(op, value)
    attributes: dict[str, Any] = {"unidirectional": 1} if found.causal else {}
    result: ir.Value = op.node(
        "MultiHeadAttention",
        [merged(op, found.query), key, value, None, None, bias],
        domain="com.microsoft",
        num_heads=heads,
        scale=float(found.scale),
        **attributes,
    )
    return result


def _of_three_axes(place: Place, op: Builder, found: Attention) -> ir.Value:
    """Heads that are part of the batch: the operator with one head."""
    q, k, v = (shapes.dims(part) for part in (found.query, found.key, found.value))
    assert q is not None
    assert k is not None
    assert v is not None
    if not (shapes.same(q[0], k[0]) and shapes.same(q[0], v[0])) or q[2] is None:
        raise Refused("query, key and value may have other batches than each other")
    if q[2] != k[2] or found.cleared:
        raise Refused("query and key have other sizes than each other, or rows are cleared")
    bias = found.bias
    if bias is not None:
        if shapes.rank(bias) == 3:
            rows = bias
            bias = place.once(("heads", rows), lambda: op.Unsqueeze(rows, [1]))
        bias = spread(place, op, bias, (q[0], 1, q[1], k[1]), found.query, found.key)
    result: ir.Value = op.node(
        "MultiHeadAttention",
        [found.query, found.key, found.value, None, None, bias],
        domain="com.microsoft",
        num_heads=1,
        scale=float(found.scale),
    )
    result.shape = ir.Shape([q[0], q[1], v[2]])
    return result


FUSION = Fusion(
    "attention",
    frozenset({("", "MatMul"), ("", "Attention")}),
    _apply,
    lambda config: not config.disable_attention_fusion,
)
