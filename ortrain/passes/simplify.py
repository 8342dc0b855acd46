"""Local rules of :mod:`ortrain.passes.clean`: one node, and what it may be replaced by.

A rule ``(context, node)`` returns the value that takes the place of the node's first output, or
None. New nodes carry the phase and origin of the node that they replace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.program import Phase, Program, Role, phase_of, role_of

Rule = Callable[["Context", ir.Node], ir.Value | None]
RULES: dict[str, list[Rule]] = {}


@dataclass
class Context:
    """What the rules know about the graph around a node.

    Attributes:
        program: that is being cleaned.
        symbols: name of a symbolic dimension → an input and the axis where it can be read.
        constants: pool of constants.
    """

    program: Program
    symbols: dict[str, tuple[ir.Value, int]] = field(default_factory=dict)
    constants: dict[tuple[Any, ...], ir.Value] = field(default_factory=dict)

    def before(self, node: ir.Node) -> Builder:
        """A builder that puts new nodes before a node."""
        name = node.outputs[0].name or node.op_type
        return Builder.before(
            node,
            opset=self.program.opset,
            prefix=f"{name}~{node.op_type}",
            constants=self.constants,
        )

    def place_of(self, dim: shapes.Dim, node: ir.Node) -> tuple[ir.Value, int] | None:
        """An input and the axis where a node can read a dimension.

        The forward runs before there are output gradients.
        """
        place = self.symbols.get(str(dim))
        if place is None or phase_of(node) is not Phase.FORWARD:
            return place
        return None if role_of(place[0]) is Role.OUTPUT_GRADIENT else place

    def tells(self, dims: Iterable[shapes.Dim], node: ir.Node) -> bool:
        """Whether constants and inputs tell a node all these dimensions."""
        return all(isinstance(d, int) or self.place_of(d, node) is not None for d in dims)


def rule(*op_types: str) -> Callable[[Rule], Rule]:
    """Enters a rule for some operators of the standard domain."""

    def enter(function: Rule) -> Rule:
        for op_type in op_types:
            RULES.setdefault(op_type, []).append(function)
        return function

    return enter


def known(value: ir.Value | None) -> tuple[int | str, ...] | None:
    """The shape, where every dimension is a number or a named symbol."""
    dims = shapes.dims(value)
    return None if dims is None or None in dims else dims  # type: ignore[return-value]


def same_shape(a: ir.Value | None, b: ir.Value | None) -> bool:
    """Whether two values are known to have one shape."""
    first = known(a)
    return first is not None and first == known(b)


# -- nothing to do -------------------------------------------------------------------------------


@rule("Cast")
def cast_to_its_own_type(context: Context, node: ir.Node) -> ir.Value | None:
    """``Cast(x)`` to the dtype of x → x"""
    x = _input(node, 0)
    return x if x.dtype is not None and x.dtype == node.outputs[0].dtype else None


@rule("CastLike")
def cast_like(context: Context, node: ir.Node) -> ir.Value | None:
    """``CastLike(x, y)`` → ``Cast(x, dtype of y)``, or x"""
    wanted = _input(node, 1).dtype
    if wanted is None:
        return None
    return context.before(node).cast(_input(node, 0), wanted)


@rule("Expand", "Reshape", "Slice", "Pad")
def shape_stays(context: Context, node: ir.Node) -> ir.Value | None:
    """A node that leaves the shape as it was, and can do nothing else → its input"""
    x = _input(node, 0)
    if not same_shape(x, node.outputs[0]):
        return None
    if node.op_type == "Slice" and len(node.inputs) > 4:
        steps = shapes.constant(node.inputs[4])
        if steps is None or (steps != 1).any():
            return None
    if node.op_type == "Pad":
        pads = shapes.constant(_input(node, 1))
        if pads is None or pads.any():
            return None
    return x


@rule("Concat", "Sum", "Max", "Min", "Mean")
def of_one(context: Context, node: ir.Node) -> ir.Value | None:
    """``Concat(x)`` → x"""
    return node.inputs[0] if len(node.inputs) == 1 else None


_NEUTRAL = {"Add": (0, True), "Sub": (0, False), "Mul": (1, True), "Div": (1, False),
            "And": (True, True), "Or": (False, True), "Pow": (1, False)}  # fmt: skip


@rule(*_NEUTRAL)
def neutral_operand(context: Context, node: ir.Node) -> ir.Value | None:
    """``x + 0``, ``x * 1``, ``x and true`` → x, or ``Expand(x)`` where the other side is wider"""
    neutral, commutes = _NEUTRAL[node.op_type]
    result = node.outputs[0]
    for i, j in ((0, 1), (1, 0)) if commutes else ((0, 1),):
        x, filled = _input(node, i), _filled(_input(node, j))
        if filled is None or filled != neutral or x.dtype != result.dtype:
            continue
        if same_shape(x, result):
            return x
        target = _shape_as_sizes(context, node, result)
        if target is not None:
            return context.before(node).Expand(x, target)
    return None


def _filled(value: ir.Value) -> Any:
    """The one number that a constant, expanded or not, consists of; else None."""
    inner = value.producer()
    if inner is not None and inner.op_type == "Expand" and not inner.domain:
        value = _input(inner, 0)
    known = shapes.constant(value)
    if known is None or not 0 < known.size <= 64 or (known != known.flat[0]).any():
        return None
    return known.flat[0].item()


@rule("GreaterOrEqual")
def range_is_not_negative(context: Context, node: ir.Node) -> ir.Value | None:
    """``arange(n) >= 0`` → true: how Transformers spells a mask that hides nothing"""
    bound = _filled(_input(node, 1))
    if bound is None or bound > 0 or not _counts_up(_input(node, 0)):
        return None
    target = _shape_as_sizes(context, node, node.outputs[0])
    if target is None:
        return None
    return context.before(node).Expand(np.array(True), target)


def _counts_up(value: ir.Value) -> bool:
    """Whether the value is a Range from 0 upwards, axes inserted."""
    node = value.producer()
    if node is None or node.domain:
        return False
    if node.op_type == "Unsqueeze":
        return _counts_up(_input(node, 0))
    if node.op_type != "Range":
        return False
    start, step = _filled(_input(node, 0)), _filled(_input(node, 2))
    return start is not None and step is not None and start >= 0 and step > 0


# -- axes ----------------------------------------------------------------------------------------


@rule("Transpose")
def transposes(context: Context, node: ir.Node) -> ir.Value | None:
    """``Transpose(Transpose(x))`` → one, or none; a permutation that moves nothing → x"""
    x = _input(node, 0)
    perm = _perm(node)
    if perm is None:
        return None
    inner = x.producer()
    if inner is not None and inner.op_type == "Transpose" and not inner.domain:
        first = _perm(inner)
        if first is not None:
            x, perm = _input(inner, 0), [first[p] for p in perm]
            if perm == sorted(perm):
                return x
            return context.before(node).Transpose(x, perm=perm)
    return x if perm == sorted(perm) else None


def _perm(node: ir.Node) -> list[int] | None:
    attribute = node.attributes.get("perm")
    if attribute is not None:
        return list(attribute.as_ints())
    length = shapes.rank(_input(node, 0))
    return None if length is None else list(range(length - 1, -1, -1))


@rule("Unsqueeze")
def unsqueezes(context: Context, node: ir.Node) -> ir.Value | None:
    """``Unsqueeze(Squeeze(x, a), a)`` → x; ``Unsqueeze(Unsqueeze(x))`` → one"""
    inner, axes = _input(node, 0).producer(), _axes(node)
    if inner is None or axes is None or inner.domain:
        return None
    inner_axes = _axes(inner) if inner.op_type in ("Squeeze", "Unsqueeze") else None
    if inner_axes is None:
        return None
    x = _input(inner, 0)
    if inner.op_type == "Squeeze":
        return x if axes == inner_axes else None
    length = shapes.rank(node.outputs[0])
    if length is None:
        return None
    kept = [i for i in range(length) if i not in axes]
    merged = sorted([*axes, *(kept[a] for a in inner_axes)])
    return context.before(node).Unsqueeze(x, merged)


@rule("Squeeze")
def squeezes(context: Context, node: ir.Node) -> ir.Value | None:
    """``Squeeze(Unsqueeze(x, a), a)`` → x"""
    inner, axes = _input(node, 0).producer(), _axes(node)
    if inner is None or axes is None or inner.domain or inner.op_type != "Unsqueeze":
        return None
    return _input(inner, 0) if axes == _axes(inner) else None


def _axes(node: ir.Node) -> list[int] | None:
    """Constant axes of Squeeze and Unsqueeze, not negative, sorted."""
    wide = node.outputs[0] if node.op_type == "Unsqueeze" else _input(node, 0)
    length = shapes.rank(wide)
    given = shapes.constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if length is None or given is None:
        return None
    return sorted(int(a) % length for a in given.reshape(-1))


# -- shapes --------------------------------------------------------------------------------------


@rule("Reshape")
def reshape_target(context: Context, node: ir.Node) -> ir.Value | None:
    """A target of constants, 0 ("as it was") and -1 where the known shapes allow it.

    Also ``Reshape(Reshape(x))`` → ``Reshape(x)``.
    """
    x, result = _input(node, 0), node.outputs[0]
    inner = x.producer()
    through = inner is not None and inner.op_type == "Reshape" and not inner.domain
    sources = [_input(inner, 0), x] if through and inner is not None else [x]
    given = shapes.constant(_input(node, 1))
    for source in sources:
        if same_shape(source, result):
            return source
        target = target_of_reshape(known(source), known(result))
        if target is None or (source is x and given is not None and given.tolist() == target):
            continue
        return context.before(node).Reshape(source, target)
    return None


def target_of_reshape(
    before: tuple[int | str, ...] | None, after: tuple[int | str, ...] | None
) -> list[int] | None:
    """The constant target that leads from one shape to another; None where there is none."""
    if before is None or after is None or 0 in before or 0 in after:
        return None
    target, open_dims = [], 0
    for i, dim in enumerate(after):
        if isinstance(dim, int):
            target.append(dim)
        elif i < len(before) and before[i] == dim:
            target.append(0)
        else:
            target.append(-1)
            open_dims += 1
    return target if open_dims <= 1 else None


@rule("Expand")
def expand_target(context: Context, node: ir.Node) -> ir.Value | None:
    """A constant target where each symbolic dimension is the input's own."""
    before, after = known(_input(node, 0)), known(node.outputs[0])
    if before is None or after is None or shapes.constant(_input(node, 1)) is not None:
        return None
    aligned = (1,) * (len(after) - len(before)) + before
    target = [1 if a == b else b for a, b in zip(aligned, after, strict=True)]
    if not all(isinstance(d, int) for d in target):
        return None
    return context.before(node).Expand(_input(node, 0), np.array(target, np.int64))


@rule("Shape")
def shape_of(context: Context, node: ir.Node) -> ir.Value | None:
    """The shape as constants and sizes of inputs, so that nothing need be computed or kept for it.

    Each symbolic dimension is read from one input only: equal shapes are then one value.
    """
    x = _input(node, 0)
    dims = shapes.dims(x)
    if dims is None:
        return None
    start, end = (node.attributes.get(name) for name in ("start", "end"))
    axes = range(len(dims))[start.as_int() if start else 0 : end.as_int() if end else None]
    wanted = [dims[axis] for axis in axes]
    builder = context.before(node)
    if all(isinstance(d, int) for d in wanted):
        return builder.constant(np.array(wanted, np.int64))
    if not context.tells(wanted, node):
        return None
    if len(wanted) == 1 and (place := context.place_of(wanted[0], node)) is not None:
        source, axis = place
        return None if source is x else builder.Shape(source, start=axis, end=axis + 1)
    return None if x.is_graph_input() else _sizes(context, node, wanted)


def _shape_as_sizes(context: Context, node: ir.Node, value: ir.Value) -> ir.Value | None:
    """A value's shape made of constants and sizes of inputs, None where they do not tell it."""
    dims = shapes.dims(value)
    if dims is None or not context.tells(dims, node):
        return None
    return _sizes(context, node, list(dims))


def _sizes(context: Context, node: ir.Node, dims: list[shapes.Dim]) -> ir.Value:
    builder = context.before(node)
    parts = []
    for dim in dims:
        if isinstance(dim, int):
            parts.append(builder.constant(np.array([dim], np.int64)))
        else:
            place = context.place_of(dim, node)
            assert place is not None, "who calls has asked whether the inputs tell it"
            source, axis = place
            parts.append(builder.Shape(source, start=axis, end=axis + 1))
    if not parts:
        return builder.constant(np.array([], np.int64))
    result: ir.Value = parts[0] if len(parts) == 1 else builder.Concat(*parts, axis=0)
    return result


@rule("Size")
def size_of(context: Context, node: ir.Node) -> ir.Value | None:
    """The number of elements, where it is constant"""
    count = shapes.size(_input(node, 0))
    return None if count is None else context.before(node).constant(np.int64(count))


# -- broadcasting --------------------------------------------------------------------------------

_ELEMENTWISE = {"Add", "Sub", "Mul", "Div", "And", "Or", "Where", "Equal", "Greater", "Less",
                "GreaterOrEqual", "LessOrEqual", "Pow", "Max", "Min"}  # fmt: skip


@rule(*_ELEMENTWISE)
def expand_before_elementwise(context: Context, node: ir.Node) -> ir.Value | None:
    """``Expand(x) + y`` → ``x + y`` where y has the shape already"""
    wanted = known(node.outputs[0])
    if wanted is None:
        return None
    for i, value in enumerate(node.inputs):
        inner = value.producer() if value is not None else None
        if inner is None or inner.op_type != "Expand" or inner.domain:
            continue
        operands = list(node.inputs)
        operands[i] = inner.inputs[0]
        if shapes.broadcast(*(known(v) for v in operands)) == wanted:
            attributes = {a.name: a.value for a in node.attributes.values()}
            return context.before(node).node(node.op_type, operands, **attributes)
    return None


@rule("ortrain::Attention")
def expand_before_attention(context: Context, node: ir.Node) -> ir.Value | None:
    """``Attention(q, k, v, Expand(mask))`` → ``Attention(q, k, v, mask)``: it broadcasts"""
    mask = node.inputs[3] if len(node.inputs) > 3 else None
    inner = mask.producer() if mask is not None else None
    if inner is None or inner.op_type != "Expand" or inner.domain:
        return None
    operands = list(node.inputs)
    operands[3] = inner.inputs[0]
    attributes = {a.name: a.value for a in node.attributes.values()}
    result: ir.Value = context.before(node).node(
        node.op_type, operands, domain=node.domain, **attributes
    )
    return result


def _input(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None
    return value
