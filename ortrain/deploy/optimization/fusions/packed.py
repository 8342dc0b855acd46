"""The three projections of an attention become one product within it.

::

    before                                      after
    q = MatMul(x, Wq) + bq                      y = Attention<h, scale>(x, [Wq Wk Wv], [bq bk bv],
    k = MatMul(x, Wk) + bk                                              attention_bias=mask)
    v = MatMul(x, Wv) + bv
    y = MultiHeadAttention<h, scale>(q, k, v, mask)

Also where a single product makes all three, and a Split or Slices take it apart. Not made where the
projections read different values or their weights are no constants. Weights that several layers
share are packed once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ortrain.deploy.optimization.fusions.fusion import DTYPES, Fusion, Place, Refused
from ortrain.deploy.optimization.fusions.layout import order
from ortrain.deploy.optimization.fusions.matching import (
    as_numbers,
    either_way,
    integer,
    integers,
    is_last_axis,
    last,
    made_by,
    number,
    operand,
    times_scalar,
    weight,
)
from ortrain.graph import shapes


@dataclass(frozen=True)
class Projection:
    """``x W + b``, or some columns of it.

    Attributes:
        source: x, [batch, length, width].
        weight: that W is made of.
        transposed: whether W is its transpose.
        bias: of all columns of W, if there is one.
        start: the first of the columns.
        stop: the column behind the last.
    """

    source: ir.Value
    weight: ir.Value
    transposed: bool
    bias: ir.Value | None
    start: int
    stop: int

    def columns(self) -> np.ndarray:
        """W, [width, columns]."""
        tensor = weight(self.weight)
        assert tensor is not None
        array = as_numbers(tensor)
        return (array.T if self.transposed else array)[:, self.start : self.stop]

    def biases(self) -> np.ndarray:
        """b, zeros where there is none."""
        tensor = weight(self.bias)
        if tensor is None:
            assert self.weight.dtype is not None
            return np.zeros(self.stop - self.start, self.weight.dtype.numpy())
        return as_numbers(tensor)[self.start : self.stop]


def _apply(place: Place, node: ir.Node) -> bool:
    parts = [_with_scale(operand(node, i)) for i in range(3)]
    if any(part is None for part in parts):
        return False
    (query, q_scale), (key, k_scale), (value, v_scale) = [p for p in parts if p is not None]
    three = (query, key, value)
    if v_scale != 1.0:
        raise Refused("values have a factor")
    if not all(part.source is query.source for part in three):
        return False  # cross attention
    if node.outputs[0].dtype not in DTYPES or operand(node, 3) is not None:
        return False
    if any(operand(node, i) is not None for i in (4, 6, 7, 8, 9)):
        return False
    widths = [part.stop - part.start for part in three]
    if widths[0] != widths[1]:
        raise Refused("query and key have other sizes than each other")
    op = place.builder(node)
    heads = integer(node, "num_heads", 1)
    scale = number(node, "scale", 0.0) or (widths[0] // heads) ** -0.5
    packed, bias = place.once(
        tuple((p.weight, p.transposed, p.bias, p.start, p.stop) for p in three),
        lambda: _packed(place, node, three),
    )
    attributes: dict[str, Any] = {"num_heads": heads, "scale": scale * q_scale * k_scale}
    if integer(node, "unidirectional", 0):
        attributes["unidirectional"] = 1
    if len(set(widths)) > 1:
        attributes["qkv_hidden_sizes"] = widths
    # Without a bias the kernel of onnxruntime 1.31 reads where there is nothing, and crashes.
    result = op.node(
        "Attention",
        [query.source, packed, bias, None, None, operand(node, 5)],
        domain="com.microsoft",
        **attributes,
    )
    result.shape = node.outputs[0].shape
    place.replace(node.outputs[0], result, "Attention")
    place.fused["MultiHeadAttention"] -= 1
    return True


def _packed(
    place: Place, node: ir.Node, three: tuple[Projection, ...]
) -> tuple[ir.Value, ir.Value]:
    """The weights [width, columns of all] and the biases, as initializers."""
    first, dtype = three[0], three[0].weight.dtype
    assert dtype is not None
    name = first.weight.name or node.outputs[0].name or "attention"
    adjacent = (
        all(p.weight is first.weight and p.bias is first.bias for p in three)
        and not first.transposed
        and [p.start for p in three] == [0, three[0].stop, three[1].stop]
        and three[2].stop == last(first.weight)
    )
    columns = sum(p.stop - p.start for p in three)
    width = shapes.dims(first.source)
    assert width is not None
    if adjacent:
        weights = first.weight
    else:
        weights = place.initializer(
            f"{name}.packed",
            ir.LazyTensor(
                lambda: ir.tensor(np.concatenate([p.columns() for p in three], 1)),
                dtype=dtype,
                shape=ir.Shape([width[2], columns]),
                name=f"{name}.packed",
            ),
        )
    if adjacent and first.bias is not None:
        return weights, first.bias
    biases = np.concatenate([p.biases() for p in three])
    return weights, place.initializer(f"{name}.packed_bias", ir.tensor(biases))


def _with_scale(value: ir.Value | None) -> tuple[Projection, float] | None:
    """A projection, and a constant factor behind it."""
    factor = 1.0
    while (scaled := times_scalar(value)) is not None:
        value, factor = scaled[0], factor * scaled[1]
    found = projection(value)
    return None if found is None else (found, factor)


def projection(value: ir.Value | None) -> Projection | None:
    """``x W + b`` of constants W and b, with x of three axes; None for any other value."""
    node = made_by(value, "Add", "MatMul", "Reshape", "Split", "Slice")
    if node is None or value is None:
        return None
    if node.op_type == "MatMul":
        return _product(node, None)
    if node.op_type == "Add":
        for product, bias in either_way(node):
            matmul = made_by(product, "MatMul")
            if matmul is not None and weight(bias) is not None:
                columns = last(product)
                if columns is not None and shapes.dims(bias) == (columns,):
                    return _product(matmul, bias)
        return None
    if node.op_type == "Reshape":
        return _gemm(node)
    return _part(node, value)


def _product(node: ir.Node, bias: ir.Value | None) -> Projection | None:
    source, right = node.inputs[:2]
    if source is None or right is None or shapes.rank(source) != 3:
        return None
    transposed = made_by(right, "Transpose")
    if transposed is not None and order(transposed) == [1, 0]:
        right = transposed.inputs[0]
    known = shapes.static(right) if right is not None else None
    if right is None or known is None or len(known) != 2 or weight(right) is None:
        return None
    return Projection(
        source, right, transposed is not None, bias, 0, known[0 if transposed is not None else 1]
    )


def _gemm(node: ir.Node) -> Projection | None:
    """``Reshape(Gemm(Reshape(x, [-1, width]), W, b), [batch, length, columns])``."""
    gemm = made_by(node.inputs[0], "Gemm")
    flat = None if gemm is None else made_by(gemm.inputs[0], "Reshape")
    if gemm is None or flat is None or flat.inputs[0] is None:
        return None
    source, right, bias = flat.inputs[0], gemm.inputs[1], operand(gemm, 2)
    if number(gemm, "alpha", 1.0) != 1.0 or integer(gemm, "transA", 0):
        return None
    if bias is not None and (number(gemm, "beta", 1.0) != 1.0 or weight(bias) is None):
        return None
    transposed = bool(integer(gemm, "transB", 0))
    known = shapes.static(right) if right is not None else None
    if right is None or known is None or weight(right) is None:
        return None
    width, columns = known if not transposed else known[::-1]
    before, after = shapes.dims(source), shapes.dims(node.outputs[0])
    rows = shapes.dims(flat.outputs[0])
    if before is None or after is None or rows is None:
        return None
    if len(before) != 3 or len(after) != 3 or len(rows) != 2:
        return None
    if before[2] != width or rows[1] != width or after[2] != columns:
        return None
    if not (shapes.same(before[0], after[0]) or shapes.same(before[1], after[1])):
        return None
    if bias is not None and shapes.dims(bias) != (columns,):
        return None
    return Projection(source, right, transposed, bias, 0, columns)


def _part(node: ir.Node, value: ir.Value) -> Projection | None:
    """Some columns of a projection, by a Split or a Slice of its last axis."""
    source = node.inputs[0]
    whole = projection(source)
    if whole is None or source is None:
        return None
    columns = whole.stop - whole.start
    if node.op_type == "Split":
        if not is_last_axis(integer(node, "axis", 0), source):
            return None
        sizes = [last(output) for output in node.outputs]
        if any(size is None for size in sizes):
            return None
        known = [size for size in sizes if size is not None]
        start = sum(known[: node.outputs.index(value)])
        stop = start + (last(value) or 0)
        if sum(known) != columns:
            return None
    else:
        starts, ends = integers(operand(node, 1)), integers(operand(node, 2))
        axes = operand(node, 3)
        chosen = [0] if axes is None else integers(axes)
        steps = operand(node, 4)
        if starts is None or ends is None or chosen is None or len(chosen) != 1 or axes is None:
            return None
        if not is_last_axis(chosen[0], source) or (steps is not None and integers(steps) != [1]):
            return None
        start, stop, _ = slice(starts[0], ends[0]).indices(columns)
        if stop - start != last(value):
            return None
    return Projection(
        whole.source,
        whole.weight,
        whole.transposed,
        whole.bias,
        whole.start + start,
        whole.start + stop,
    )


FUSION = Fusion(
    "packed projections",
    frozenset({("com.microsoft", "MultiHeadAttention")}),
    _apply,
    lambda config: (
        not (
            config.disable_attention_fusion
            or config.use_multi_head_attention
            or config.disable_packed_qkv
        )
    ),
)
