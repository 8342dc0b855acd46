"""A sum and the norm of it become one operator, which gives the sum too.

::

    before                                      after
    t = a + bias + skip                         y, _, _, t = SkipLayerNormalization<epsilon>(
    y = LayerNormalization<epsilon>(t, g, b)        a, skip, g, b, bias)

and ``SkipSimplifiedLayerNormalization`` likewise of RMS norms. Not made where one of the two would
be broadcast, over other axes than the last, of other than three axes, or where the norm gives its
mean as well.
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
    offset = operand(node, 2)
    width = last(total)
    if a is None or skip is None or weight(a) is not None or weight(skip) is not None:
        return False
    _check(node, total, a, skip, scale, offset)
    bias = None
    if not place.config.disable_bias_skip_layer_norm_fusion:
        a, skip, bias = _apart(a, skip, width)
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
    if not same_shape(a, skip):
        raise Refused("one of the two terms may be broadcast")
    width = last(total)
    if not vector(scale, width) or (offset is not None and not vector(offset, width)):
        raise Refused("scale or offset is no vector of the last axis")
    if any(v is not None and v.dtype not in DTYPES for v in (total, scale, offset)):
        raise Refused(f"no kernel computes it in {total.dtype}")
    if integer(node, "stash_type", 1) != 1:
        raise Refused("the norm computes in another dtype")


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
