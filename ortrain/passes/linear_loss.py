"""The loss of a large vocabulary, whose logits nobody else reads, becomes one node.

::

    before                                      after
    t = Transpose(w)                            r = Reshape(x, [-1, H])
    l = MatMul(x, t)                            y = Reshape(labels, [-1])
    r = Reshape(l, [-1, C])                     loss = ortrain.LinearCrossEntropy(r, w, y)
    y = Reshape(labels, [-1])
    loss = ortrain.CrossEntropy(r, y)

Between product and loss there may be a bias, casts as autocast puts them, reshapes, and a slice of
rows, as causal models shift them. Logits that are outputs count as read, unless it is said that
nobody reads more than the loss: then there are zeros in their place.

What stays as it is: a loss of each row, which no single gradient stands for; products in float16,
whose gradients may vanish where they are not scaled; logits that are rounded again behind the
product; checkpointed regions, which run twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.graph.check import check
from ortrain.graph.rewire import take_place
from ortrain.graph.rounding import NARROW, WIDE, is_narrowing, is_widening
from ortrain.ops.base import DOMAIN, attributes_of
from ortrain.passes.clean import clean
from ortrain.passes.tokens.demand import Shown, loss_of
from ortrain.program import ROLE, TARGET, Program, Role, region_of, set_width

# Below so many classes the logits are small beside all else.
CLASSES = 8192
# Bytes of a block of logits in float32, and the least rows of one. For each block the weight is
# read and the sum of its gradient read and written, by a pass of its own where products are narrow:
# 4 layers of GPT-2 on 4 x 512 tokens, on one core of a Zen 4, take 0.96 to 1.0 of the time of whole
# logits in blocks of 128 MiB in float32, and in bfloat16 1.05 in such blocks and 0.99 in those of
# 256.
BLOCK, NARROW_BLOCK, ROWS = 128 << 20, 256 << 20, 256

_VIEWS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"})


@dataclass(frozen=True)
class _Head:
    """A loss and the linear layer in front of it.

    Attributes:
        loss: the node.
        x: [..., H], in front of the cast to the products' dtype.
        weight: [C, H], or [H, C] where it is ``flipped``; likewise.
        bias: [C], or None; likewise.
        flipped: whether the weight is to be transposed.
        slices: of the logits' rows, in order.
        products: dtype of the products.
        width: H.
        classes: C.
        shown: the logits among the program's outputs, which have the rows of ``x``.
    """

    loss: ir.Node
    x: ir.Value
    weight: ir.Value
    bias: ir.Value | None
    flipped: bool
    slices: tuple[ir.Node, ...]
    products: ir.DataType
    width: int
    classes: int
    shown: tuple[ir.Value, ...]


def in_blocks(program: Program, shown: Shown = "all") -> tuple[Program, tuple[int, ...]] | None:
    """A program that makes the logits of large vocabularies in blocks.

    Args:
        program: forward, of which shapes are known; left as it is.
        shown: what is read of its outputs; nothing but a ``loss`` in the first place may be.

    Returns:
        The program, with the inputs and outputs of the original one, and the positions of those
        that are zeros now, among the ones that the user gets. None where nothing is to be done.
    """
    if not _heads(program, shown):
        return None
    result = program.clone()
    hidden: set[str | None] = set()
    for head in _heads(result, shown):
        prefix = f"{head.loss.outputs[0].name}/blocks"
        with Builder.before(head.loss, opset=result.opset, prefix=prefix) as op:
            hidden |= {_zeros(op, result, head, value) for value in head.shown}
            take_place(_loss(op, head), head.loss.outputs[0])
        result.graph.remove(head.loss, safe=True)
    clean(result)
    result.import_domains()
    result.name_values()
    check(result.graph, "losses in blocks")
    users = result.outputs(Role.USER_OUTPUT, Role.LOSS)
    return result, tuple(i for i, value in enumerate(users) if value.name in hidden)


def blocks_of(program: Program) -> Iterator[tuple[int, int]]:
    """Of each loss in blocks: how many classes it has, and how many rows a block at most."""
    for node in program.graph:
        if node.op_type == "LinearCrossEntropy":
            classes = (shapes.dims(node.inputs[1]) or (None,))[0]
            yield classes if isinstance(classes, int) else 0, node.attributes["rows"].as_int()


# -- finding them ------------------------------------------------------------------------------


def _heads(program: Program, shown: Shown) -> list[_Head]:
    users = program.outputs(Role.USER_OUTPUT, Role.LOSS)
    unread = set(users) if shown == "loss" and loss_of(program) is not None else set()
    found = (_head(node, unread) for node in program.graph)
    return [head for head in found if head is not None]


def _head(loss: ir.Node, unread: Collection[ir.Value]) -> _Head | None:
    """The linear layer in front of a loss; None where the logits stay."""
    if (loss.domain, loss.op_type) != ("ortrain", "CrossEntropy") or region_of(loss):
        return None
    reduction = loss.attributes.get("reduction")
    if reduction is not None and reduction.as_string() == "none":
        return None
    logits, known = loss.inputs[0], shapes.dims(loss.inputs[0])
    if any(v.uses() or v.is_graph_output() for v in loss.outputs[1:]):
        return None
    if logits is None or not known or not isinstance(known[-1], int) or known[-1] < CLASSES:
        return None
    climb = _Climb(known[-1], unread)
    product = climb.to_product(logits)
    return None if product is None else _layer(loss, logits, product, climb)


class _Climb:
    """The way up from logits to the product that they are of.

    Args:
        classes: size of their last axis.
        unread: outputs that nobody reads.

    Attributes:
        shown: logits that are such outputs.
        slices: of rows, the first one first.
        bias: that is added to the product.
    """

    def __init__(self, classes: int, unread: Collection[ir.Value]) -> None:
        self._classes, self._unread = classes, unread
        self.shown: list[ir.Value] = []
        self.slices: list[ir.Node] = []
        self.bias: ir.Value | None = None
        self._moved = False

    def to_product(self, value: ir.Value) -> ir.Node | None:
        """The product; None where there is none, or something else reads what lies between."""
        while True:
            node = value.producer()
            if node is None or node.domain or region_of(node) or len(value.uses()) > 1:
                return None
            if value.is_graph_output():
                if value not in self._unread:
                    return None
                self.shown.append(value)
            if node.op_type in ("MatMul", "Gemm"):
                return node
            source = self._above(node, value)
            if source is None:
                return None
            value = source

    def _above(self, node: ir.Node, value: ir.Value) -> ir.Value | None:
        """The logits that a node takes; None where it is none of those that may be here."""
        if node.op_type == "Add":
            return self._biased(node, value)
        source, known = node.inputs[0], shapes.dims(node.inputs[0])
        if source is None or not known or known[-1] != self._classes:
            return None
        if node.op_type == "Cast":
            return source if is_widening(node) and self.bias is None else None
        if node.op_type not in (*_VIEWS, "Slice") or self.shown:
            return None  # an output has the rows of the product
        if node.op_type == "Slice":
            axes = shapes.constant(node.inputs[3]) if len(node.inputs) > 3 else None
            if axes is None or (axes % len(known) == len(known) - 1).any():
                return None
            self.slices.insert(0, node)
        elif self.slices:
            return None  # what is cut has not the axes of the product
        return source

    def _biased(self, node: ir.Node, value: ir.Value) -> ir.Value | None:
        if self.bias is not None:
            return None
        for place in (0, 1):
            source, bias = node.inputs[place], node.inputs[1 - place]
            known, own = shapes.dims(source), shapes.dims(bias)
            fits = own and own[-1] == self._classes and all(d == 1 for d in own[:-1])
            if fits and known and known == shapes.dims(value):
                self.bias = bias
                return source
        return None


def _layer(loss: ir.Node, logits: ir.Value, product: ir.Node, climb: _Climb) -> _Head | None:
    """The head of a product, where the operator computes what it does."""
    output, bias, flipped = product.outputs[0], climb.bias, True
    x, weight = product.inputs[:2]
    given = attributes_of(product)
    if product.op_type == "Gemm":
        own = product.inputs[2] if len(product.inputs) > 2 else None
        if given.get("alpha", 1.0) != 1 or given.get("beta", 1.0) != 1 or given.get("transA", 0):
            return None
        columns = (shapes.dims(output) or ())[-1:]
        if own is not None and (bias is not None or shapes.dims(own) != columns):
            return None
        bias, flipped = own or bias, not given.get("transB", 0)
    products, known = output.dtype, shapes.dims(x)
    if x is None or weight is None or not known or len(known) < 2 or shapes.rank(weight) != 2:
        return None
    if products not in (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.BFLOAT16):
        return None
    if logits.dtype != (WIDE if products in NARROW else products):
        return None
    classes = (shapes.dims(logits) or (None,))[-1]
    if not isinstance(known[-1], int) or not isinstance(classes, int):
        return None
    weight = _wide(weight, products)
    if flipped and (source := _transposed(weight)) is not None:
        weight, flipped = _wide(source, products), False
    return _Head(
        loss,
        _wide(x, products),
        weight,
        None if bias is None else _wide(bias, products),
        flipped,
        tuple(climb.slices),
        products,
        known[-1],
        classes,
        tuple(climb.shown),
    )


def _wide(value: ir.Value, products: ir.DataType) -> ir.Value:
    """What a value is rounded from for narrow products: its gradient is not rounded then."""
    node = value.producer()
    if node is None or products not in NARROW or not is_narrowing(node) or region_of(node):
        return value
    source = node.inputs[0]
    return source if source is not None and source.dtype == WIDE else value


def _transposed(value: ir.Value) -> ir.Value | None:
    """The matrix that a value is the transpose of."""
    node = value.producer()
    if node is None or node.op_type != "Transpose" or node.domain:
        return None
    perm = node.attributes.get("perm")
    return node.inputs[0] if perm is None or list(perm.as_ints()) == [1, 0] else None


# -- writing them ------------------------------------------------------------------------------


def _loss(op: Builder, head: _Head) -> ir.Value:
    """The loss in one node."""
    x, weight, target = head.x, head.weight, head.loss.inputs[1]
    for cut in head.slices:
        x = op.Slice(x, *cut.inputs[1:])
    if shapes.rank(x) != 2:
        x = op.Reshape(x, [-1, head.width])
    if target is not None and shapes.rank(target) != 1:
        target = op.Reshape(target, [-1])
    given = attributes_of(head.loss)
    if x.dtype != head.products:
        given["product_type"] = int(head.products)
    bias = head.bias
    if bias is not None and shapes.rank(bias) != 1:
        bias = op.Reshape(bias, [-1])
    inputs = (x, op.Transpose(weight, perm=[1, 0]) if head.flipped else weight, target, bias)
    loss: ir.Value = op.node(
        "LinearCrossEntropy", (*inputs, *head.loss.inputs[2:]), domain=DOMAIN,
        rows=rows_of(head.classes, head.products), **given,
    )  # fmt: skip
    return loss


def rows_of(classes: int, products: ir.DataType) -> int:
    """How many rows of logits are there at a time, at most."""
    return max(ROWS, (NARROW_BLOCK if products in NARROW else BLOCK) // (4 * classes))


def _zeros(op: Builder, program: Program, head: _Head, value: ir.Value) -> str | None:
    """Puts zeros in the place of logits among the outputs; returns the name of that.

    They are one number a row, which whoever runs the program expands.
    """
    rank = shapes.rank(head.x)
    assert rank is not None
    assert value.shape is not None
    rows = op.Shape(head.x, start=0, end=rank - 1)
    zeros = op.Expand(op.constant(0, value.dtype), op.Concat(rows, [1], axis=0))
    zeros.shape = ir.Shape([*value.shape[:-1], 1])
    outputs = program.graph.outputs
    for i, output in enumerate(outputs):
        if output is value:
            outputs[i] = zeros
    for key in (ROLE, TARGET):
        if key in value.metadata_props:
            zeros.metadata_props[key] = value.metadata_props.pop(key)
    name, value.name = value.name, f"{value.name}/unread"
    zeros.name = name
    set_width(zeros, head.classes)
    return name
