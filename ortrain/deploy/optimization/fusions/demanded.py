"""Of tokens that nobody reads, nothing is computed.

::

    before                                      after
    y = LayerNormalization(x, g, b)             p = Gather<axis=1>(x, [0])
    z = Gather<axis=1>(y, 0)                    z = Squeeze(LayerNormalization(p, g, b), [1])

A classifier reads the first token of the last layer. All operators there that make each token of
the same token alone (products with weights, norms, curves, sums), and attention as far as its
queries go, are given that token only; keys and values are made of all tokens as before. Not made
where another one reads what they make. Of MiniLM's six layers it is a sixth of most products.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ortrain.deploy.optimization.fusions.fusion import Fusion, Place
from ortrain.deploy.optimization.fusions.matching import (
    integer,
    integers,
    is_last_axis,
    operand,
)
from ortrain.graph import shapes

_UNARY = frozenset(
    {"Cast", "Erf", "FastGelu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Neg", "QuickGelu",
     "Reciprocal", "Relu", "Sigmoid", "Sqrt", "Tanh"}
)  # fmt: skip
_SUMS = frozenset({"Add", "Sub", "Mul", "Div", "Sum"})
_NORMS = frozenset({"LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization"})
# Worth it are these; what is else computed of a token costs less than to pick it.
_COSTLY = frozenset({"MatMul", "MultiHeadAttention"})

# Of an operator's inputs those that have tokens, and the axis that these lie on.
_Tokens = dict[int, int]


def _apply(place: Place, node: ir.Node) -> bool:
    source, index = node.inputs[0], integers(node.inputs[1])
    if source is None or integer(node, "axis", 0) != 1 or index is None or len(index) != 1:
        return False
    known = shapes.dims(source)
    if known is None or len(known) != 3 or known[1] == 1:
        return False
    chosen = _chosen(node, source)
    if not any(each.op_type in _COSTLY for each in chosen):
        return False
    picked: dict[ir.Value, ir.Value] = {}
    op = place.builder(node)

    def one(value: ir.Value, axis: int) -> ir.Value:
        if value not in picked:
            dims = shapes.dims(value)
            result = op.Gather(value, op.constant(index, np.dtype(np.int64)), axis=axis)
            if dims is not None:
                result.shape = ir.Shape([1 if i == axis else d for i, d in enumerate(dims)])
            picked[value] = result
        return picked[value]

    for each in place.graph:
        tokens = chosen.get(each)
        if tokens is None:
            continue
        operands = [
            one(value, tokens[i]) if value is not None and i in tokens else value
            for i, value in enumerate(each.inputs)
        ]
        attributes: dict[str, Any] = {
            name: attribute.value for name, attribute in each.attributes.items()
        }
        made = op.node(each.op_type, operands, domain=each.domain, **attributes)
        old = each.outputs[0]
        dims = shapes.dims(old)
        shapes.assign(made, old.dtype, None if dims is None else ir.Shape([dims[0], 1, dims[2]]))
        picked[old] = made
    last = picked[source]
    scalar = shapes.rank(node.inputs[1]) == 0 if node.inputs[1] is not None else False
    result = op.Squeeze(last, [1]) if scalar else op.Identity(last)
    place.replace(node.outputs[0], result)
    place.fused["one token"] += 1
    return True


def _chosen(root: ir.Node, source: ir.Value) -> dict[ir.Node, _Tokens]:
    """The nodes of which one token is read, in the reverse of their order."""
    graph = root.graph
    assert isinstance(graph, ir.Graph)
    found: dict[ir.Node, _Tokens] = {}
    wanted = {source}
    for node in reversed(list(graph)):
        if not any(v in wanted for v in node.outputs):
            continue
        if not _read_by(node, root, found):
            continue
        tokens = _tokens(node)
        if tokens is None:
            continue
        found[node] = tokens
        wanted.update(v for i in tokens if (v := node.inputs[i]) is not None)
    return found


def _read_by(node: ir.Node, root: ir.Node, found: dict[ir.Node, _Tokens]) -> bool:
    """Whether only these read what a node makes, and as tokens."""
    if any(v.uses() or v.is_graph_output() for v in node.outputs[1:]):
        return False
    value = node.outputs[0]
    if value.is_graph_output():
        return False
    return all(
        (use.node is root and use.idx == 0) or found.get(use.node, {}).get(use.idx) == 1
        for use in value.uses()
    )


def _tokens(node: ir.Node) -> _Tokens | None:
    """The inputs that a node makes each token of; None where it takes others for one."""
    known = shapes.dims(node.outputs[0])
    first = node.inputs[0]
    mine = shapes.dims(first)
    if known is None or len(known) != 3 or first is None or mine is None:
        return None
    if node.op_type in _SUMS and not node.domain:
        return _of_sum(node, known[1])
    if len(mine) != 3 or not shapes.same(mine[1], known[1]):
        return None
    if node.op_type in _UNARY or (
        node.op_type in _NORMS and is_last_axis(integer(node, "axis", -1), first)
    ):
        return {0: 1}
    if node.op_type == "MatMul" and not node.domain:
        right = node.inputs[1]
        return {0: 1} if right is not None and shapes.rank(right) == 2 else None
    if node.op_type == "MultiHeadAttention" and not integer(node, "unidirectional", 0):
        if any(operand(node, i) is not None for i in (4, 6, 7, 8, 9)) or len(node.inputs) < 3:
            return None
        bias = operand(node, 5)
        return {0: 1} if bias is None else {0: 1, 5: 2}
    return None


def _of_sum(node: ir.Node, length: shapes.Dim) -> _Tokens | None:
    tokens: _Tokens = {}
    for i, value in enumerate(node.inputs):
        dims = shapes.dims(value)
        if dims is None or len(dims) > 3:
            return None
        if len(dims) < 2 or dims[-2] == 1:
            continue  # the same for all tokens
        if len(dims) != 3 or not shapes.same(dims[1], length):
            return None
        tokens[i] = 1
    return tokens or None


FUSION = Fusion("one token", frozenset({("", "Gather")}), _apply, lambda _: True)
