"""A sum and the norm of it become one operator for a GPU, which gives the sum too.

::

    before                                      after, for a GPU
    t = a + bias + skip                         y, _, _, t = SkipLayerNormalization<epsilon>(
    y = LayerNormalization<epsilon>(t, g, b)        a, skip, g, b, bias)

and ``SkipSimplifiedLayerNormalization`` likewise of RMS norms. Not made where one of the two would
be broadcast over tokens, over other axes than the last, of other than three axes, or where the norm
gives its mean as well. The kernel takes mean and mean square in one pass: of 384 values of spread 1
around 100 it is 8e-5 off, ``LayerNormalization`` 4e-6, a spelled-out norm 2e-5; around 10, 1e-5,
8e-7 and 2e-6.

A processor's kernel is slow (onnxruntime 1.31, 32 rows of 384: 52 µs, where two additions and the
norm take 9; of RMS norms 9 against 6), and onnxruntime puts it in by itself when it loads a file.
There the additions become one ``Sum``, which it leaves alone::

    t = a + bias + skip                         t = Sum(a, bias, skip)
    y = LayerNormalization<epsilon>(t, g, b)    y = LayerNormalization<epsilon>(t, g, b)
"""

from __future__ import annotations

import onnx_ir as ir

from ortrain.deploy.optimization.fusions.fusion import DTYPES, Fusion, Place, Refused
from ortrain.deploy.optimization.fusions.matching import (
    either_way,
    integer,
    is_last_axis,
    last,
    made_by,
    number,
    only_reader,
    operand,
    same_shape,
    vector,
    weight,
)
from ortrain.graph import shapes

_LAYER = "LayerNormalization"


def _apply(place: Place, node: ir.Node) -> bool:
    total, scale = node.inputs[0], operand(node, 1)
    add = made_by(total, "Add")
    if total is None or add is None or scale is None or add.graph is not node.graph:
        return False
    a, skip = add.inputs[:2]
    if not place.config.optimize_for_gpu:
        return _summed(place, add, total)
    offset = operand(node, 2)
    width = last(total)
    if a is None or skip is None or weight(a) is not None or weight(skip) is not None:
        return False
    _check(node, total, a, skip, scale, offset)
    bias = None
    if not place.config.disable_bias_skip_layer_norm_fusion:
        a, skip, bias = _apart(a, skip, width)
    a, skip = _in_order(a, skip) or (a, skip)
    op = place.builder(add)
    layer = node.op_type == _LAYER
    parts = [a, skip, scale, offset, bias] if layer else [a, skip, scale, bias]
    name = "SkipLayerNormalization" if layer else "SkipSimplifiedLayerNormalization"
    epsilon = number(node, "epsilon", 1e-5)
    results = op.node(name, parts, domain="com.microsoft", outputs=4, epsilon=epsilon)
    for result in results:
        result.shape = None
        result.type = None
    for result, old in ((results[0], node.outputs[0]), (results[3], total)):
        shapes.assign(result, old.dtype, old.shape)
    for result in results[1:3]:
        result.name = ""
    place.replace(node.outputs[0], results[0], name)
    others = [u for u in total.uses() if u.node is not node]
    if others or total.is_graph_output():
        place.replace(total, results[3])
    else:
        results[3].name = ""
    return True


def _summed(place: Place, add: ir.Node, total: ir.Value) -> bool:
    """``Sum`` in the place of the additions before a norm, in their order: the same numbers."""
    if total.dtype != ir.DataType.FLOAT:
        return False
    terms = list(add.inputs)
    if not place.config.disable_bias_skip_layer_norm_fusion:
        for term in terms:
            inner = made_by(term, "Add")
            if inner is not None and term is not None and only_reader(term) is not None:
                terms.remove(term)
                terms = [*inner.inputs, *terms]
                break
    result = place.builder(add).Sum(*terms)
    result.shape = total.shape
    place.replace(total, result, "Sum")
    return True


def _check(
    node: ir.Node,
    total: ir.Value,
    a: ir.Value,
    skip: ir.Value,
    scale: ir.Value,
    offset: ir.Value | None,
) -> None:
    if any(v.uses() or v.is_graph_output() for v in node.outputs[1:]):
        raise Refused("the norm gives its mean or deviation as well")
    if not is_last_axis(integer(node, "axis", -1), total):
        raise Refused("the norm is over more than the last axis")
    if shapes.rank(total) != 3:
        raise Refused("the sum has other than three axes")
    if _in_order(a, skip) is None:
        raise Refused("one of the two terms may be broadcast")
    width = last(total)
    if not vector(scale, width) or (offset is not None and not vector(offset, width)):
        raise Refused("scale or offset is no vector of the last axis")
    if any(v is not None and v.dtype not in DTYPES for v in (total, scale, offset)):
        raise Refused(f"no kernel computes it in {total.dtype}")
    if integer(node, "stash_type", 1) != 1:
        raise Refused("the norm computes in another dtype")


def _in_order(a: ir.Value, skip: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """The two terms, the second of which may be one row for the whole batch."""
    for full, other in ((a, skip), (skip, a)):
        mine, others = shapes.dims(full), shapes.dims(other)
        if mine is None or others is None or len(mine) != 3 or len(others) != 3:
            continue
        batch = others[0] == 1 or shapes.same(mine[0], others[0])
        if batch and all(shapes.same(x, y) for x, y in zip(mine[1:], others[1:], strict=True)):
            return full, other
    return None


def _apart(
    a: ir.Value, skip: ir.Value, width: int | None
) -> tuple[ir.Value, ir.Value, ir.Value | None]:
    """The two terms, the first without a constant vector that nothing else reads it with."""
    for term, other in ((a, skip), (skip, a)):
        inner = made_by(term, "Add")
        if inner is None or only_reader(term) is None:
            continue
        for x, bias in either_way(inner):
            if weight(bias) is not None and vector(bias, width) and same_shape(x, term):
                return x, other, bias
    return a, skip, None


FUSION = Fusion(
    "skip norm",
    frozenset({("", _LAYER), ("", "SimplifiedLayerNormalization"), ("", "RMSNormalization")}),
    _apply,
    lambda config: not config.disable_skip_layer_norm_fusion,
)
