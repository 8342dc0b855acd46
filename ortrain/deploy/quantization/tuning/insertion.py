"""The roundings of a quantized model as nodes of a floating point one, gradients included."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortrain.deploy.quantization.tuning.ranges import Attached, LearntRanges, ends_of
from ortrain.deploy.quantization.tuning.roundings import Rounding, Roundings
from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.ops.base import DOMAIN
from ortrain.program import Program, role_of, set_role

_TINY = float(np.finfo(np.float32).tiny)
Steps = tuple[ir.Value, ir.Value]


def insert(program: Program, found: Roundings, learnt: LearntRanges | None = None) -> int:
    """Rounds in a program what a quantized model rounds, in place.

    Args:
        program: a forward whose nodes have the names that the roundings go by.
        found: where, and how.
        learnt: the ranges that are parameters; None for none.

    Returns:
        How many roundings there are now.
    """
    program.model.opset_imports.setdefault(DOMAIN, 1)
    attached = Attached() if learnt is None else learnt.attach(program)
    return _Insertion(program, found, attached).run()


class _Insertion:
    def __init__(self, program: Program, found: Roundings, learnt: Attached) -> None:
        self._program, self._found, self._learnt = program, found, learnt
        self._made: dict[tuple[ir.Value, Rounding], ir.Value] = {}
        self._read: dict[ir.Value, tuple[ir.Value, Rounding]] = {}

    def run(self) -> int:
        graph, places = self._program.graph, self._found.inputs
        for node in list(graph):
            name = node.name or ""
            for index, value in enumerate(node.inputs):
                if value is None:
                    continue
                if value in self._read:  # rows of a table, rounded where they are first read
                    table, how = self._read[value]
                    node.replace_input_with(index, self._rounded(node, value, how, table))
                held = node.inputs[index]
                how_here = places.get((name, index))
                if how_here is not None and held is not None:
                    node.replace_input_with(index, self._rounded(node, held, how_here, held))
            how_rows = self._found.rows.get(name)
            if how_rows is not None and (table_of := node.inputs[0]) is not None:
                self._read[node.outputs[0]] = table_of, how_rows
        for position, value in enumerate(list(graph.outputs)):
            how_out = self._found.outputs.get(value.name or "")
            if how_out is not None:
                self._output(position, value, how_out)
        return len(self._made)

    def _rounded(self, node: ir.Node, value: ir.Value, how: Rounding, ranged: ir.Value) -> ir.Value:
        """A value rounded before a node that reads it; once for all that do."""
        if value.dtype is not None and value.dtype != ir.DataType.FLOAT:
            return value
        if (value, how) not in self._made:
            with Builder.before(node, opset=self._program.opset, prefix=_prefix(value)) as op:
                self._made[value, how] = self._fake(op, value, how, ranged)
        return self._made[value, how]

    def _output(self, position: int, value: ir.Value, how: Rounding) -> None:
        graph, name = self._program.graph, value.name
        with Builder(graph, opset=self._program.opset, prefix=f"{name}_rounded") as op:
            new = self._fake(op, value, how, value)
        self._made[value, how] = new
        role = role_of(value)
        value.name, new.name = f"{name}_whole", name
        if role is not None:
            set_role(new, role)
            value.metadata_props.clear()
        graph.outputs[position] = new

    def _fake(self, op: Builder, value: ir.Value, how: Rounding, ranged: ir.Value) -> ir.Value:
        low, high = how.cut
        if how.learnt is None:
            scale, zero = _steps(op, how, ranged)
        elif how.fixed is not None:
            scale, zero = self._learnt.steps[how.learnt]
        else:
            share = self._learnt.shares[how.learnt]
            scale, zero = _steps(op, how, ranged, share)
            # What lies beyond the range is cut off before it is quantized, too.
            ends = ends_of(how)
            if ends is None:
                limit = _largest(op, how, ranged) * share
                value = op.Max(op.Min(value, limit), op.Neg(limit))
            low, high = ends or how.cut
        result: ir.Value = op.node(
            "FakeQuantize", [value, scale, zero], domain=DOMAIN, low=low, high=high
        )
        return result


def _prefix(value: ir.Value) -> str:
    return f"{value.name}_rounded"


def _steps(op: Builder, how: Rounding, ranged: ir.Value, share: ir.Value | None = None) -> Steps:
    """Scale and zero, as onnxruntime's quantizer computes them of the same numbers.

    They are no function of these numbers to the gradient, as PyTorch has it, but of the share.

    Divided, not multiplied with an inverse: in symmetric unsigned integers the largest number of
    a channel lies between two of them, and the last bit of the scale decides.
    """
    if how.fixed is not None:
        return tuple(op.constant(number, ir.DataType.FLOAT) for number in how.fixed)  # type: ignore[return-value]
    axes = _reduced(ranged, how.axis)
    levels = how.high - how.low
    if how.symmetric:
        middle = float(np.round((how.low + how.high) / 2))
        largest = _largest(op, how, ranged)
        if share is not None:
            largest = largest * share
        return _positive(op, largest * 2.0 / float(levels)), op.constant(middle, ir.DataType.FLOAT)
    kept = int(axes is not None)
    lowest = op.Min(_held(op, op.ReduceMin(ranged, axes, keepdims=kept)), 0.0)
    highest = op.Max(_held(op, op.ReduceMax(ranged, axes, keepdims=kept)), 0.0)
    scale = _positive(op, (highest - lowest) / float(levels))
    return scale, op.Round(float(how.low) - lowest / scale)


def _largest(op: Builder, how: Rounding, ranged: ir.Value) -> ir.Value:
    axes = _reduced(ranged, how.axis)
    return _held(op, op.ReduceMax(op.Abs(ranged), axes, keepdims=int(axes is not None)))


def _held(op: Builder, value: ir.Value) -> ir.Value:
    """A number that no gradient goes to."""
    result: ir.Value = op.node("StopGradient", [value], domain=DOMAIN)
    return result


def _positive(op: Builder, scale: ir.Value) -> ir.Value:
    """1 in the place of the scale of zeros alone."""
    result: ir.Value = op.Where(op.Less(scale, _TINY), 1.0, scale)
    return result


def _reduced(value: ir.Value, axis: int | None) -> list[int] | None:
    """All axes but that of channels; None for all of them."""
    if axis is None:
        return None
    rank = shapes.rank(value)
    assert rank is not None
    return [each for each in range(rank) if each != axis % rank]
