"""``ortrain::LinearCrossEntropy``: a linear layer and the cross entropy of what it gives.

Of a vocabulary of 50,000 words a thousand logits rows are 200 MB, their logarithm and its gradient
as much again. Where only the loss is read they are made for some rows at a time, and so are their
gradients: the loss is a number, so that the gradients of all that it depends on are what they are
for an upstream gradient of 1, times that gradient. Those the forward makes as well, of a block of
logits while it is there.

Credit: Liger Kernel's fused linear cross entropy (Hsu et al., 2024), which makes the gradients in
the forward; Cut Cross-Entropy (Wijmans et al., 2024), which keeps no logits either.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.graph.rounding import NARROW, WIDE
from ortrain.graph.scan import Values, scan
from ortrain.ops.base import operator
from ortrain.ops.cross_entropy import cross_entropy, normalizer
from ortrain.ops.gradients.softmax import cross_entropy as d_cross_entropy


def loss_type(x: ir.Value, product_type: int) -> ir.DataType | None:
    """The dtype of softmax, loss and gradients: float32 where the products are narrow."""
    products = ir.DataType(product_type) if product_type else x.dtype
    return WIDE if products in NARROW else products


def _types(node: ir.Node) -> None:
    x, weight = node.inputs[:2]
    assert x is not None
    assert weight is not None
    given = node.attributes.get("product_type")
    dtype = loss_type(x, 0 if given is None else given.as_int())
    classes = (shapes.dims(weight) or (None,))[0]
    wanted = [ir.Shape([]), x.shape, weight.shape, ir.Shape([classes])]
    for value, shape in zip(node.outputs, wanted, strict=False):
        shapes.assign(value, dtype, shape)


@operator("LinearCrossEntropy", outputs=("loss", "d_x", "d_weight", "d_bias"), types=_types)
def linear_cross_entropy(
    op: Builder,
    x: ir.Value,
    weight: ir.Value,
    target: ir.Value,
    bias: ir.Value | None = None,
    class_weight: ir.Value | None = None,
    *,
    rows: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    product_type: int = 0,
    needs: Sequence[int] = (0, 0, 0),
) -> tuple[ir.Value | None, ...]:
    """``CrossEntropy(x weightᵀ + bias, target)``, some rows at a time.

    The rows are cut into blocks of equal size; the last one is filled up with rows of zeros whose
    target is ``ignore_index``.

    Args:
        op: the builder.
        x: [N, H], floating.
        weight: [C, H].
        target: [N], integer class indices, as in CrossEntropy.
        bias: [C].
        class_weight: [C] factor of each class.
        rows: so many of ``x`` at a time, at most.
        ignore_index: as in CrossEntropy, like the rest.
        label_smoothing: likewise.
        reduction: ``mean`` or ``sum``: without one the loss is no number.
        product_type: dtype of the operands of the products, as ONNX counts them, and of the logits
            as they come out; 0 is that of ``x``.
        needs: which of the gradients are made.

    Returns:
        The loss [], and for an upstream gradient of 1 the gradients of ``x``, ``weight`` and
        ``bias``. All have the dtype of the products, in float32 where that is narrower.
    """
    assert x.dtype is not None
    products = ir.DataType(product_type) if product_type else x.dtype
    wide = loss_type(x, product_type)
    assert wide is not None
    class_weight = None if class_weight is None else op.cast(class_weight, wide)
    needs_x, needs_weight, needs_bias = map(bool, needs)
    narrow_weight = op.cast(weight, products)
    narrow_bias = None if bias is None else op.cast(bias, products)
    count, width = op.dim(x, 0), op.dim(x, 1)
    blocks = op.Max((count + (rows - 1)) / rows, [1])
    each = (count + blocks - 1) / blocks
    missing = each * blocks - count
    padded = op.Pad(op.cast(x, products), op.Concat([0, 0], missing, [0], axis=0))
    ignored = op.constant(ignore_index, target.dtype)
    targets = op.Pad(target, op.Concat([0], missing, axis=0), ignored)
    slices = [
        op.Reshape(padded, op.Concat(blocks, each, width, axis=0), allowzero=1),
        op.Reshape(targets, op.Concat(blocks, each, axis=0), allowzero=1),
    ]
    # The gradient of the sum, for an upstream gradient of 1 of the mean.
    one, total = op.constant(1, wide), None
    if reduction == "mean":
        total = normalizer(op, one, target, class_weight, ignore_index=ignore_index)
    upstream = one if total is None else op.Div(one, total)
    states = [op.constant(0, wide)]
    if needs_weight:
        states.append(op.Expand(op.constant(0, wide), op.shape(weight)))
        states[-1].shape = weight.shape
    if needs_bias:
        states.append(op.Expand(op.constant(0, wide), op.dim(weight, 0)))

    def step(op: Builder, states: Values, slices: Values) -> tuple[Values, Values]:
        (loss, *sums), (x, target) = states, slices
        logits = op.cast(op.Gemm(x, narrow_weight, narrow_bias, transB=1), wide)
        options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
        more, log_prob = cross_entropy(op, logits, target, class_weight, reduction="sum", **options)
        after: list[ir.Value] = [op.Add(loss, more)]
        collected: list[ir.Value] = []
        if not any(needs):
            return after, collected
        d_logits = d_cross_entropy(
            op, upstream, log_prob, target, class_weight, reduction="sum", **options
        )
        d_logits = op.cast(d_logits, products)
        if needs_x:
            collected.append(op.cast(op.MatMul(d_logits, narrow_weight), wide))
        if needs_weight:
            if products == wide:
                after.append(op.Gemm(d_logits, x, sums[0], transA=1))
            else:
                part = op.Gemm(d_logits, x, transA=1)
                after.append(op.Add(sums[0], op.cast(part, wide)))
        if needs_bias:
            part = op.ReduceSum(op.cast(d_logits, wide), [0], keepdims=0)
            after.append(op.Add(sums[-1], part))
        return after, collected

    (loss, *sums), collected = scan(op, step, states, slices)
    d_x = None
    if needs_x:
        flat = op.Reshape(collected[0], op.Concat([-1], width, axis=0))
        d_x = op.Slice(flat, [0], count, [0])
        d_x.shape = x.shape
    d_weight = sums[0] if needs_weight else None
    d_bias = sums[-1] if needs_bias else None
    if total is not None:
        loss = op.Div(loss, total)
    return loss, d_x, d_weight, d_bias


__all__ = ["linear_cross_entropy", "loss_type"]
