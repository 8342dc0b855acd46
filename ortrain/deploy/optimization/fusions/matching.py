"""The words that patterns are written in: what made a value, and what is known of it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from ortrain.graph import shapes


def made_by(value: ir.Value | None, *op_types: str, domain: str = "") -> ir.Node | None:
    """The node that makes a value, if it is one of these operators."""
    node = None if value is None else value.producer()
    return node if node is not None and is_a(node, *op_types, domain=domain) else None


def is_a(node: ir.Node, *op_types: str, domain: str = "") -> bool:
    """Whether a node is one of these operators."""
    return node.op_type in op_types and node.domain == domain


def operand(node: ir.Node, place: int) -> ir.Value | None:
    """A node's input, None where it is left out."""
    return node.inputs[place] if place < len(node.inputs) else None


def integer(node: ir.Node, name: str, default: int) -> int:
    """An attribute that is a whole number."""
    found = node.attributes.get(name)
    return default if found is None else int(found.as_int())


def number(node: ir.Node, name: str, default: float) -> float:
    """An attribute that is a real number."""
    found = node.attributes.get(name)
    return default if found is None else float(found.as_float())


def scalar(value: ir.Value | None) -> float | None:
    """A constant of one element, of whatever rank; None for any other value."""
    if value is None or (shapes.size(value) or 1) != 1:
        return None
    known = shapes.constant(value)
    return float(known.reshape(())) if known is not None and known.size == 1 else None


def integers(value: ir.Value | None) -> list[int] | None:
    """A constant vector of whole numbers."""
    if value is None or (shapes.size(value) or 0) > shapes.MOST_SIZES:
        return None
    known = shapes.constant(value)
    if known is None or known.dtype.kind not in "iu":
        return None
    return [int(v) for v in known.reshape(-1)]


def axes_of(node: ir.Node) -> list[int] | None:
    """The axes of a reduction, a Squeeze or an Unsqueeze: an attribute before opset 13 or 18."""
    if "axes" in node.attributes:
        return [int(a) for a in node.attributes["axes"].as_ints()]
    return integers(operand(node, 1))


def either_way(node: ir.Node) -> Iterable[tuple[ir.Value, ir.Value]]:
    """The operands of a commutative operator, in both orders."""
    a, b = node.inputs[:2]
    if a is not None and b is not None:
        yield a, b
        yield b, a


def times_scalar(value: ir.Value | None) -> tuple[ir.Value, float] | None:
    """``x`` and ``c`` of ``x * c`` or ``x / c`` (then 1/c) with a constant ``c`` of one element.

    The constant has no more axes than ``x``, so that it changes no shape.
    """
    node = made_by(value, "Mul", "Div")
    if node is None:
        return None
    pairs = list(either_way(node))
    if node.op_type == "Div":
        pairs = pairs[:1]
    for x, factor in pairs:
        found = scalar(factor)
        mine, others = shapes.rank(x), shapes.rank(factor)
        if found is None or mine is None or others is None or others > mine:
            continue
        if node.op_type == "Div":
            if found == 0.0:
                continue
            found = 1.0 / found
        return x, found
    return None


def plus_scalar(value: ir.Value | None) -> tuple[ir.Value, float] | None:
    """``x`` and ``c`` of ``x + c`` with a constant of one element."""
    node = made_by(value, "Add")
    for x, other in either_way(node) if node is not None else ():
        if (found := scalar(other)) is not None and scalar(x) is None:
            return x, found
    return None


def close(found: float | None, wanted: float, tolerance: float = 1e-6) -> bool:
    """Whether a constant is a number, as far as float32 keeps it."""
    return found is not None and abs(found - wanted) <= tolerance * max(abs(wanted), 1e-30)


def only_reader(value: ir.Value) -> ir.Node | None:
    """The one node that reads a value, at one place; None where others read it too."""
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def weight(value: ir.Value | None) -> ir.TensorProtocol | None:
    """A constant that is kept in the file, without reading it."""
    if value is None or value.is_graph_input():
        return None
    return value.const_value


def vector(value: ir.Value | None, length: int | None) -> bool:
    """Whether a value is known to be of the shape [length]."""
    return length is not None and shapes.dims(value) == (length,) if value is not None else False


def same_shape(a: ir.Value, b: ir.Value) -> bool:
    """Whether two values are known to have the same shape."""
    mine, others = shapes.dims(a), shapes.dims(b)
    if mine is None or others is None or len(mine) != len(others):
        return False
    return all(shapes.same(x, y) for x, y in zip(mine, others, strict=True))


def last(value: ir.Value | None) -> int | None:
    """The size of the last axis, where it is a known number."""
    known = shapes.dims(value)
    return known[-1] if known and isinstance(known[-1], int) else None


def is_last_axis(axis: int, value: ir.Value) -> bool:
    """Whether a number stands for a value's last axis."""
    rank = shapes.rank(value)
    return axis == -1 or (rank is not None and axis == rank - 1)


def as_numbers(tensor: ir.TensorProtocol) -> np.ndarray:
    """The content of a weight."""
    return np.asarray(tensor.numpy())
