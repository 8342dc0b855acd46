"""Standard ONNX and ortrain's operators → what the stock onnxruntime runs fastest.

``MatMul(Transpose(a), b)`` becomes one ``com.microsoft.FusedMatMul`` that reads ``a`` as it lies,
and a constant factor before or after a product becomes its ``alpha``::

    t = Transpose<perm=[0,1,3,2]>(k)
    s = MatMul(q, t)                 →    y = com.microsoft.FusedMatMul<transB=1, alpha=0.125>(q, k)
    y = Mul(s, 0.125)

A transpose of the product itself is absorbed too, by exchanging the operands. ``FusedMatMul`` takes
floating-point tensors alone, and its ``alpha`` is a float32: a factor that this would round stays
where a product of float64 has it. Over an axis of no elements the product of a batch is whatever
the memory held, and stays ``MatMul``, which is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.graph.rewire import take_place
from ortrain.graph.scatter import reduce_places
from ortrain.graph.walk import only_reader
from ortrain.ops import expand
from ortrain.passes.clean import clean
from ortrain.program import Program

MICROSOFT = "com.microsoft"
# What shape inference calls a size that follows from numbers, not from sizes.
_UNKNOWN = "unk__"
# From how long a last axis on a pass of its own is less than what a product saves by it.
LONG = 256


def lower(program: Program) -> Program:
    """Lowers a copy of the program."""
    result = program.clone()
    make_standard(result)
    fuse_products(result)
    lay_out_left_operands(result)
    sum_rows_by_products(result)
    clean(result)
    result.name_values()
    return result


def make_standard(program: Program) -> None:
    """Makes a program one of standard operators, in place."""
    expand(program.graph, opset=program.opset)
    count_axes_from_the_front(program)
    pad_along_all_axes(program)
    spell_scattered_reductions(program)
    spell_choices_of_bools(program)
    spell_logarithms_of_softmax(program)
    clean(program)
    program.import_domains()


def count_axes_from_the_front(program: Program) -> int:
    """Reduces over the same axes by their numbers from 0 on; returns how many nodes changed.

    onnxruntime reduces a tensor of no elements over none of the axes that are counted from the end.
    """
    changed = 0
    for node in list(program.graph):
        x = node.inputs[0] if node.inputs else None
        length = None if x is None else shapes.rank(x)
        if not length or node.domain or not node.op_type.startswith(("Reduce", "Arg")):
            continue
        axis = node.attributes.get("axis")
        given = shapes.constant(node.inputs[1]) if len(node.inputs) > 1 else None
        if axis is not None and axis.as_int() < 0:
            node.attributes["axis"] = ir.AttrInt64("axis", axis.as_int() + length)
            changed += 1
        elif given is not None and (given < 0).any():
            with Builder.before(node, opset=program.opset) as op:
                node.replace_input_with(1, op.constant(given % length))
            changed += 1
    return changed


def pad_along_all_axes(program: Program) -> int:
    """Gives the pads of some axes as those of all, in their order; returns how many nodes changed.

    Where onnxruntime moves a transpose past a ``Pad``, it reorders the pads as if they were of all
    axes, and so pads others or fails.
    """
    changed = 0
    for node in list(program.graph.all_nodes()):
        if node.op_type != "Pad" or node.domain or len(node.inputs) < 4:
            continue
        data, pads, _, places = node.inputs[:4]
        rank, axes = (None if data is None else shapes.rank(data)), shapes.constant(places)
        if axes is None or pads is None or not rank:
            continue
        ends = np.concatenate([axes % rank, axes % rank + rank]).astype(np.int64)
        known = shapes.constant(pads)
        with Builder.before(node, opset=program.opset) as op:
            whole = np.zeros(2 * rank, np.int64)
            if known is None:
                full = op.ScatterElements(op.constant(whole), op.constant(ends), pads, axis=0)
            else:
                whole[ends] = known
                full = op.constant(whole)
        node.replace_input_with(1, full)
        node.replace_input_with(3, None)
        changed += 1
    return changed


def fuse_products(program: Program) -> int:
    """Absorbs transposes and constant factors into matrix products; returns how many changed."""
    changed = 0
    for node in list(program.graph):
        if node.op_type == "MatMul" and not node.domain and _fuse(program.graph, node):
            changed += 1
    if changed:
        program.model.opset_imports.setdefault(MICROSOFT, 1)
    return changed


def spell_scattered_reductions(program: Program) -> int:
    """``ScatterND`` that adds, … → ``ScatterElements``: see :mod:`ortrain.graph.scatter`.

    Raises:
        GraphError: the ranks around such a node are not known.
    """
    changed = 0
    for node in list(program.graph):
        reduction = node.attributes.get("reduction")
        if node.op_type != "ScatterND" or reduction is None or reduction.as_string() == "none":
            continue
        data, indices, updates = node.inputs[:3]
        assert data is not None
        assert indices is not None
        assert updates is not None
        with Builder.before(node, opset=program.opset) as op:
            total = reduce_places(op, data, indices, updates, reduction.as_string())
        take_place(total, node.outputs[0])
        program.graph.remove(node, safe=True)
        changed += 1
    return changed


def spell_choices_of_bools(program: Program) -> int:
    """``Where`` of bools → ``And`` and ``Or``; returns how many. onnxruntime has no such kernel."""
    changed = 0
    for node in list(program.graph.all_nodes()):
        if node.op_type != "Where" or node.domain or node.outputs[0].dtype != ir.DataType.BOOL:
            continue
        condition, chosen, other = node.inputs
        with Builder.before(node, opset=program.opset) as op:
            left = op.And(op.Not(condition), other)
            take_place(op.Or(op.And(condition, chosen), left), node.outputs[0])
        assert node.graph is not None
        node.graph.remove(node, safe=True)
        changed += 1
    return changed


def spell_logarithms_of_softmax(program: Program) -> int:
    """``LogSoftmax`` of float64 → its formula; returns how many.

    onnxruntime's kernel makes numbers of a row that has a NaN or an infinity.
    """
    changed = 0
    for node in list(program.graph.all_nodes()):
        if node.op_type != "LogSoftmax" or node.domain:
            continue
        (x,) = node.inputs
        assert x is not None
        if x.dtype != ir.DataType.DOUBLE:
            continue
        axis = node.attributes["axis"].as_int() if "axis" in node.attributes else -1
        with Builder.before(node, opset=program.opset) as op:
            rest = op.Sub(x, op.ReduceMax(x, [axis], keepdims=1))
            sums = op.ReduceSum(op.Exp(rest), [axis], keepdims=1)
            take_place(op.Sub(rest, op.Log(sums)), node.outputs[0])
        assert node.graph is not None
        node.graph.remove(node, safe=True)
        changed += 1
    return changed


def lay_out_left_operands(program: Program) -> int:
    """Transposes large left operands before a product instead of in it; returns how many.

    onnxruntime's kernel reads a transposed left operand in strides: the gradient of a weight of
    3072 x 768 over 1024 rows takes 12.9 ms so, and 11.7 ms with the transpose as a pass of its own.
    """
    changed = 0
    for node in list(program.graph):
        if node.op_type != "FusedMatMul" or not node.attributes["transA"].as_int():
            continue
        left = node.inputs[0]
        known = shapes.dims(left)
        if left is None or known is None or len(known) != 2 or not _large(known[1]):
            continue
        builder = Builder.before(node, opset=program.opset, prefix=f"{left.name}/transposed")
        node.replace_input_with(0, builder.Transpose(left, perm=[1, 0]))
        node.attributes["transA"] = ir.AttrInt64("transA", 0)
        changed += 1
    return changed


def sum_rows_by_products(program: Program) -> int:
    """``ReduceSum`` over all axes but a long last one → a product with ones; returns how many.

    The gradient of a bias over 1536 rows of 1536 takes 0.17 ms as a sum and 0.09 as a product.
    """
    changed = 0
    constants: dict[tuple[Any, ...], ir.Value] = {}
    for node in list(program.graph):
        x = node.inputs[0] if node.op_type == "ReduceSum" and not node.domain else None
        known = shapes.dims(x)
        if x is None or not known or x.dtype != ir.DataType.FLOAT or not _large(known[-1]):
            continue
        axes = shapes.constant(node.inputs[1]) if len(node.inputs) > 1 else None
        keepdims = node.attributes.get("keepdims")
        if axes is None or keepdims is None or keepdims.as_int():
            continue
        if sorted(int(a) % len(known) for a in axes.reshape(-1)) != [*range(len(known) - 1)]:
            continue
        with Builder.before(node, opset=program.opset, constants=constants) as op:
            count = op.ReduceProd(op.Shape(x, start=0, end=len(known) - 1), keepdims=1)
            ones = op.Expand(np.float32(1), op.Concat([1], count, axis=0))
            ones.shape = ir.Shape([1, None])  # or onnx's own inference would be asked for it
            sums = op.MatMul(ones, op.Reshape(x, [-1, known[-1]]))
            take_place(op.Reshape(sums, [-1]), node.outputs[0])
        program.graph.remove(node, safe=True)
        changed += 1
    return changed


def _large(size: shapes.Dim) -> bool:
    return isinstance(size, int) and size >= LONG


def _fuse(graph: ir.Graph, node: ir.Node) -> bool:
    if node.inputs[0] is None or node.inputs[0].dtype not in shapes.FLOATING:
        return False
    if _is_batch_over_nothing(node):
        return False
    alpha, transposed = 1.0, [0, 0]
    operands: list[ir.Value] = []
    # onnxruntime passes over transA and transB where the other operand is a vector.
    matrices = all(v is not None and (shapes.rank(v) or 0) >= 2 for v in node.inputs)
    for side in (0, 1):
        operand = node.inputs[side]
        assert operand is not None
        factor, operand = _unscaled(operand)
        alpha *= factor
        flipped = _flipped(operand) if matrices else None
        if flipped is not None:
            transposed[side], operand = 1, flipped
            factor, operand = _unscaled(operand)
            alpha *= factor
        operands.append(operand)
    output, absorbed = node.outputs[0], [node]
    same_rank = shapes.rank(operands[0]) == shapes.rank(operands[1]) is not None
    while (reader := only_reader(output)) is not None:
        factor_of_output = _factor(reader)
        if factor_of_output is not None:
            alpha *= factor_of_output[0]
        elif same_rank and _flipped(reader.outputs[0]) is output:
            # (a b)ᵀ = bᵀ aᵀ: a weight's gradient comes out in the weight's own layout.
            operands.reverse()
            transposed = [1 - transposed[1], 1 - transposed[0]]
        else:
            break
        output = reader.outputs[0]
        absorbed.append(reader)
    if alpha == 1.0 and not any(transposed) and len(absorbed) == 1:
        return False
    if node.inputs[0].dtype == ir.DataType.DOUBLE and not shapes.fits_float32(alpha):
        return False
    fused = ir.Node(
        MICROSOFT,
        "FusedMatMul",
        operands,
        ir.convenience.convert_attributes(
            {"alpha": alpha, "transA": transposed[0], "transB": transposed[1]}
        ),
        num_outputs=1,
        metadata_props=dict(node.metadata_props),
    )
    result = fused.outputs[0]
    graph.insert_after(absorbed[-1], fused)
    take_place(result, output)
    for old in reversed(absorbed):
        graph.remove(old, safe=True)
    return True


def _is_batch_over_nothing(node: ir.Node) -> bool:
    """Whether a product of a batch sums over an axis that may have no elements.

    A symbol has some: calls of modules for which one has none run in PyTorch.
    """
    left, right = (shapes.dims(value) for value in node.inputs)
    if left is None or right is None:
        return True
    if max(len(left), len(right)) < 3:
        return False
    inner = (left[-1], right[-2] if len(right) > 1 else right[-1])
    if any(isinstance(size, int) for size in inner):
        return 0 in inner
    return not any(isinstance(s, str) and not s.startswith(_UNKNOWN) for s in inner)


def _flipped(value: ir.Value) -> ir.Value | None:
    """The source of a transpose of the last two axes."""
    producer = value.producer()
    if producer is None or producer.op_type != "Transpose" or producer.domain:
        return None
    perm = producer.attributes.get("perm")
    if perm is None:
        length = shapes.rank(value)
        order: Sequence[int] = range(length - 1, -1, -1) if length == 2 else ()
    else:
        order = perm.as_ints()
    length = len(order)
    if length < 2 or list(order) != [*range(length - 2), length - 1, length - 2]:
        return None
    return producer.inputs[0]


def _factor(node: ir.Node) -> tuple[float, ir.Value] | None:
    """The constant scalar of a ``Mul`` and its other operand."""
    if node.op_type != "Mul" or node.domain:
        return None
    for i in (0, 1):
        known = shapes.constant(node.inputs[i])
        other = node.inputs[1 - i]
        if known is None or known.ndim or other is None:
            continue
        if known.dtype != np.float64 or shapes.fits_float32(float(known)):
            return float(known), other
    return None


def _unscaled(value: ir.Value) -> tuple[float, ir.Value]:
    """The operand without a constant factor, where every reader is a product that absorbs it."""
    producer = value.producer()
    if producer is None or value.is_graph_output():
        return 1.0, value
    found = _factor(producer)
    absorbed = all(
        use.node.graph is producer.graph
        and (_is_product(use.node) or _flips_into_products(use.node))
        for use in value.uses()
    )
    return found if found is not None and absorbed else (1.0, value)


def _is_product(node: ir.Node) -> bool:
    return node.op_type in ("MatMul", "FusedMatMul") and node.domain in ("", MICROSOFT)


def _flips_into_products(node: ir.Node) -> bool:
    out = node.outputs[0]
    return _flipped(out) is not None and all(
        use.node.graph is node.graph and _is_product(use.node) for use in out.uses()
    )
