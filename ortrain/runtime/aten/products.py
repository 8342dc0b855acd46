"""Products as PyTorch computes them best: layers whole, and no transposes around them.

A linear layer of more than two axes is captured as a product with a transposed weight and a sum::

    w = Transpose<perm=[1,0]>(weight)
    p = MatMul(x, w)                     →    y = aten.Linear(x, weight, bias)
    y = Add(p, bias)

and the gradient of its weight as a transposed product, which has its operands exchanged::

    p = MatMul(Transpose(x), dy)         →    d = MatMul(Transpose(dy), x)
    d = Transpose<perm=[1,0]>(p)

Narrow operands of a product in float32 are widened by the product, which lays them out as it reads
them::

    w = Cast<to=FLOAT>(q)                →    s = aten.WideMatMul(q, k)
    s = MatMul(w, k)

And a factor between a product and its rounding is the product's, which sums in float32 anyway::

    p = aten.WideMatMul(q, k)            →    y = aten.ScaledMatMul<alpha=0.2>(q, k)
    y = Cast<to=BFLOAT16>(Mul(p, 0.2))
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.graph.rewire import take_place
from ortrain.graph.rounding import NARROW, WIDE, is_narrowing, is_widening
from ortrain.graph.walk import only_reader
from ortrain.program import Program

DOMAIN = "aten"


def fuse_layers(program: Program) -> int:
    """Makes linear layers whole; returns how many."""
    changed = 0
    for node in list(program.graph):
        if node.op_type != "MatMul" or node.domain:
            continue
        x, transposed = node.inputs
        weight = flipped(transposed)
        if x is None or weight is None or transposed is None or (shapes.rank(x) or 0) < 2:
            continue
        last, inputs = node, [x, weight]
        reader = only_reader(node.outputs[0])
        if reader is not None and reader.op_type == "Add" and not reader.domain:
            bias = next((v for v in reader.inputs if v is not node.outputs[0]), None)
            width = shapes.dims(weight)
            if bias is not None and width is not None and shapes.dims(bias) == width[:1]:
                last, inputs = reader, [x, weight, bias]
        replace_with(program, last, "Linear", inputs)
        if last is not node:
            program.graph.remove(node, safe=True)
        changed += 1
    return changed


def turn_transposed_products(program: Program) -> int:
    """(a b)ᵀ = bᵀ aᵀ: has a transposed product made the way it is read; returns how many."""
    changed = 0
    for node in list(program.graph):
        source = flipped(node.outputs[0]) if node.op_type == "Transpose" else None
        product = source.producer() if source is not None else None
        if product is None or product.op_type != "MatMul" or product.domain:
            continue
        a, b = product.inputs
        if source is None or only_reader(source) is not node or a is None or b is None:
            continue
        if shapes.rank(a) != 2 or shapes.rank(b) != 2:
            continue
        with Builder.before(node, opset=program.opset) as op:
            left, right = (flipped(v) or op.Transpose(v, perm=[1, 0]) for v in (b, a))
            take_place(op.MatMul(left, right), node.outputs[0])
        program.graph.remove(node, safe=True)
        program.graph.remove(product, safe=True)
        changed += 1
    return changed


def widen_in_products(program: Program) -> int:
    """Has products in float32 read narrow operands; returns how many."""
    changed = 0
    for node in list(program.graph):
        if node.op_type != "MatMul" or node.domain or node.outputs[0].dtype != WIDE:
            continue
        inputs = [_narrow(value) for value in node.inputs]
        if any(new is not old for new, old in zip(inputs, node.inputs, strict=True)):
            replace_with(program, node, "WideMatMul", inputs)
            changed += 1
    return changed


def scale_in_products(program: Program) -> int:
    """Has wide products of a batch be scaled and rounded by themselves; returns how many."""
    changed = 0
    for node in list(program.graph):
        if node.op_type != "WideMatMul":
            continue
        a, b = node.inputs
        scaling = only_reader(node.outputs[0])
        rounding = only_reader(scaling.outputs[0]) if scaling is not None else None
        factor = _factor(scaling, node.outputs[0])
        if a is None or b is None or factor is None or scaling is None or rounding is None:
            continue
        narrow = a.dtype in NARROW and a.dtype == b.dtype == rounding.outputs[0].dtype
        if not narrow or not is_narrowing(rounding) or min(map(_rank, (a, b))) < 3:
            continue
        replace_with(program, rounding, "ScaledMatMul", [a, b], alpha=factor)
        for old in (scaling, node):
            program.graph.remove(old, safe=True)
        changed += 1
    return changed


def _factor(node: ir.Node | None, value: ir.Value) -> float | None:
    """The number that a node multiplies a value by."""
    if node is None or node.op_type != "Mul" or node.domain:
        return None
    number = shapes.constant(next((v for v in node.inputs if v is not value), None))
    return float(number) if number is not None and number.ndim == 0 else None


def _rank(value: ir.Value) -> int:
    return shapes.rank(value) or 0


def _narrow(value: ir.Value | None) -> ir.Value:
    """What a value was before it was widened for its one reader."""
    assert value is not None
    cast = value.producer()
    if cast is None or not is_widening(cast) or only_reader(value) is None:
        return value
    source = cast.inputs[0]
    assert source is not None
    return source


def replace_with(
    program: Program, node: ir.Node, op_type: str, inputs: list[ir.Value], **attributes: Any
) -> None:
    """Puts an operator that the kernels alone know in the place of a node's first output."""
    with Builder.before(node, opset=program.opset) as op:
        made = op.node(op_type, tuple(inputs), domain=DOMAIN, **attributes)
        take_place(made, node.outputs[0])
    program.graph.remove(node, safe=True)
    program.model.opset_imports.setdefault(DOMAIN, 1)


def flipped(value: ir.Value | None) -> ir.Value | None:
    """The matrix that a value is the transpose of."""
    node = value.producer() if value is not None else None
    if value is None or node is None or node.op_type != "Transpose" or node.domain:
        return None
    if shapes.rank(value) != 2:
        return None
    perm = node.attributes.get("perm")
    return node.inputs[0] if perm is None or list(perm.as_ints()) == [1, 0] else None
