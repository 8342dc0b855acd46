"""``LearntRanges``: the ranges of a model's roundings as parameters of its graph.

Scale and zero are trained beside the weights (Esser et al. 2020, arXiv:1902.08153; zeros, Bhalgat
et al. 2020, arXiv:2004.09576) by the ends of ranges, from which quantizers compute both. An end is
what it was times a power of e that is learnt: a step changes it by a share of itself, as Adam's
steps have one size for all parameters and ranges have not (Jain et al. 2020, arXiv:1903.08066).
That has LSQ's gradient scale in it: Adam divides by the gradient's size, and in the norm that is
clipped a range counts with the share of its scale.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ortrain.deploy.quantization.rewriting import Ranges
from ortrain.deploy.quantization.tuning.roundings import Rounding, Roundings, layout
from ortrain.graph.build import Builder
from ortrain.ops.base import DOMAIN
from ortrain.program import Program, Role, set_role

Array = np.ndarray

_ACTIVATIONS, _WEIGHTS = "ortrain.range.activations", "ortrain.range.weights"
# Parameter → how fast it is trained. A hundredth of a weight's scale moves all of its large numbers
# to other integers, which is noise; an activation's range has as far to go as its data were few.
RATES = {_ACTIVATIONS: 1.0, _WEIGHTS: 0.1}
_TINY = float(np.finfo(np.float32).tiny)
# Shares of a weight's largest number that its range may begin with, the one of least error wins.
_SHARES = np.linspace(0.5, 1.0, 11)
# Of a whole weight's numbers so many are looked at for it.
_LOOKED_AT = 1 << 16
# At a share of 1 there is no slope: ranges begin off it.
_LEAST = 1e-3


@dataclass(frozen=True)
class Activation:
    """The range of an activation.

    Attributes:
        low: its lowest number at first, 0 or below.
        high: its highest, likewise.
        levels: steps between both.
        least: the integer of the lowest number.
        middle: the zero where the range is symmetric; None where it follows from both ends.
        cut: the integers that the zero may be.
    """

    low: float
    high: float
    levels: int
    least: int
    middle: float | None
    cut: tuple[int, int]

    @classmethod
    def of(cls, how: Rounding, given: tuple[float, float], symmetric: bool) -> Activation | None:
        """The range that a rounding follows from; None where it does not.

        Args:
            how: with steps that are fixed.
            given: the calibrated range.
            symmetric: whether ranges are made so.
        """
        assert how.fixed is not None
        scale, zero = how.fixed
        low, high = min(float(given[0]), 0.0), max(float(given[1]), 0.0)
        if symmetric:
            high = max(-low, high)
            low = -high
        levels = round((high - low) / scale)
        if high - low < _TINY or levels not in (how.high - how.low, how.high - how.low - 1):
            return None
        least = how.high - levels
        found = cls(low, high, levels, least, zero if symmetric else None, how.cut)
        near = np.isclose(found.steps(low, high), how.fixed, rtol=1e-5)
        return found if near.all() else None

    def steps(self, low: float, high: float) -> tuple[float, float]:
        """Scale and zero of a range."""
        scale = (high - low) / self.levels
        if self.middle is not None:
            return scale, self.middle
        return scale, float(np.round(self.least - low / scale))


@dataclass(frozen=True)
class Weight:
    """The range of a weight, or those of its channels, as shares of their largest numbers.

    Attributes:
        how: it is rounded.
        order: of the initializer's axes where it is read.
        shares: at first.
    """

    how: Rounding
    order: tuple[int, ...]
    shares: Array

    @property
    def shape(self) -> list[int]:
        """Of the shares, where the weight is read."""
        shape = [1] * len(self.order)
        if self.how.axis is not None:
            shape[self.how.axis] = self.shares.size
        return shape

    def limits(self, weight: Array, shares: Array) -> Array:
        """The largest numbers that there may be, broadcasting to the initializer."""
        largest = _largest(weight.transpose(self.order), self.how.axis)
        limits: Array = largest * shares.reshape(self.shape).astype(np.float32)
        return limits.transpose(np.argsort(self.order))


@dataclass
class LearntRanges:
    """What is learnt of ranges.

    Attributes:
        activations: by name of what has been calibrated.
        weights: by initializer.
    """

    activations: dict[str, Activation] = field(default_factory=dict)
    weights: dict[str, Weight] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: ir.Model,
        found: Roundings,
        followed: Mapping[Place, str],
        ranges: Ranges | None,
        symmetric: bool,
    ) -> tuple[LearntRanges, Roundings]:
        """The ranges that can be learnt, and the roundings with their names.

        Of activations those that a calibrated range decides; of weights those that are symmetric,
        and are read in one way alone.

        Args:
            model: floating point, with names on all of its nodes.
            found: where it rounds.
            followed: place → the calibrated value whose range decides there.
            ranges: of activations; None where each run finds them.
            symmetric: whether ranges of activations are.
        """
        learnt = cls()
        changed: dict[Place, Rounding] = {}
        for place, how in found.places():
            name = followed.get(place)
            if how.fixed is None or name is None or ranges is None or name not in ranges:
                continue
            activation = Activation.of(how, ranges[name], symmetric)
            if activation is None or learnt.activations.setdefault(name, activation) != activation:
                continue
            changed[place] = dataclasses.replace(how, learnt=name)
        changed |= learnt._weights(model, found, ranges)
        return learnt, found.replaced(changed)

    def _weights(
        self, model: ir.Model, found: Roundings, ranges: Ranges | None
    ) -> dict[Place, Rounding]:
        nodes = {node.name or "": node for node in model.graph}
        read: dict[str, dict[Place, tuple[Rounding, tuple[int, ...]] | None]] = {}
        for place, how in found.places():
            if not how.weight or place[0] not in nodes:
                continue
            if ranges is not None and place[0] in found.rows:
                continue  # what reads the rows may have the table's own steps, which are fixed
            where = layout(nodes[place[0]].inputs[place[1]])
            if where is None:
                continue
            root, order = where
            fits = how.symmetric and (how.axis is None or order is not None)
            known = (how, order or tuple(range(len(root.shape or ()))))
            read.setdefault(root.name or "", {})[place] = known if fits else None
        changed: dict[Place, Rounding] = {}
        for name, places in read.items():
            (first, *others) = places.values()
            if first is None or any(other != first for other in others):
                continue
            tensor = model.graph.initializers[name].const_value
            assert tensor is not None
            how, order = first
            axis = None if how.axis is None else how.axis % len(order)
            how = dataclasses.replace(how, axis=axis, learnt=name)
            array = tensor.numpy().transpose(order)
            self.weights[name] = Weight(how, order, _best(array, how))
            changed |= dict.fromkeys(places, how)
        return changed

    def tensors(self) -> dict[str, Array]:
        """The parameters, with what they are at first."""
        found: dict[str, Array] = {}
        if self.activations:
            found[_ACTIVATIONS] = np.zeros(2 * len(self.activations), np.float32)
        if self.weights:
            shares = np.concatenate([each.shares for each in self.weights.values()])
            found[_WEIGHTS] = np.maximum(-np.log(shares), _LEAST).astype(np.float32)
        return found

    def attach(self, program: Program) -> Attached:
        """Adds the parameters to a program, and what is computed of them.

        Args:
            program: a forward.
        """
        held: dict[str, ir.Value] = {}
        for name, array in self.tensors().items():
            kind, shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(array.shape)
            held[name] = ir.Value(name=name, shape=shape, type=kind)
            program.graph.inputs.append(set_role(held[name], Role.PARAMETER))
        made = Attached()
        if not held:
            return made
        first = program.graph[0]
        with Builder.before(first, opset=program.opset, prefix="range") as op:
            if self.activations:
                ends = _split(op, held[_ACTIVATIONS], [1] * (2 * len(self.activations)))
                for index, (name, each) in enumerate(self.activations.items()):
                    made.steps[name] = _steps(op, each, *ends[2 * index : 2 * index + 2])
            if self.weights:
                sizes = [each.shares.size for each in self.weights.values()]
                parts = _split(op, held[_WEIGHTS], sizes)
                for part, (name, weight) in zip(parts, self.weights.items(), strict=True):
                    # Of two sides of 1 the same share: a range never gets wider than its weight.
                    share = op.Exp(op.Neg(op.Abs(part)))
                    whole = weight.how.axis is None
                    made.shares[name] = share if whole else op.Reshape(share, weight.shape)
        return made

    def ranges(self, tensors: Mapping[str, Array]) -> dict[str, tuple[float, float]]:
        """The ranges of activations after training, as quantizers take them.

        Args:
            tensors: the parameters.
        """
        if not self.activations:
            return {}
        powers = np.exp(tensors[_ACTIVATIONS].reshape(-1, 2).astype(np.float32))
        found = {}
        for (name, each), (low, high) in zip(self.activations.items(), powers, strict=True):
            top = np.float32(each.high) * high
            bottom = -top if each.middle is not None else np.float32(each.low) * low
            found[name] = float(bottom), float(top)
        return found

    def cut(self, weights: Mapping[str, Array], tensors: Mapping[str, Array]) -> dict[str, Array]:
        """Weights without what lies beyond their ranges, so that quantizers find these.

        Args:
            weights: by name.
            tensors: the parameters.
        """
        found = dict(weights)
        start = 0
        for name, each in self.weights.items():
            end = start + each.shares.size
            shares = np.exp(-np.abs(tensors[_WEIGHTS][start:end]))
            start = end
            limits = each.limits(weights[name], shares)
            found[name] = np.clip(weights[name], -limits, limits)
        return found


@dataclass
class Attached:
    """What a program computes of the parameters.

    Attributes:
        steps: activation → its scale and its zero.
        shares: weight → share of the largest number, of a shape that broadcasts where it is read.
    """

    steps: dict[str, tuple[ir.Value, ir.Value]] = field(default_factory=dict)
    shares: dict[str, ir.Value] = field(default_factory=dict)


Place = tuple[str, int]


def ends_of(how: Rounding) -> tuple[int, int] | None:
    """The integers of the two ends of a symmetric range.

    None of unsigned integers, whose ends lie between two: the last bit of the scale decides there.
    """
    half, odd = divmod(how.high - how.low, 2)
    middle = round((how.low + how.high) / 2)
    return None if odd else (middle - half, middle + half)


def _steps(
    op: Builder, each: Activation, low: ir.Value, high: ir.Value
) -> tuple[ir.Value, ir.Value]:
    top = op.Exp(high) * each.high
    if each.middle is not None:
        scale = top * (2.0 / each.levels)
        return scale, op.constant(each.middle, ir.DataType.FLOAT)
    bottom = op.Exp(low) * each.low
    scale = (top - bottom) / float(each.levels)
    # The zero is rounded as everything is here, so that its gradient goes straight through.
    zero = op.node(
        "FakeQuantize",
        [float(each.least) - bottom / scale, op.constant(1.0, ir.DataType.FLOAT),
         op.constant(0.0, ir.DataType.FLOAT)],
        domain=DOMAIN, low=each.cut[0], high=each.cut[1],
    )  # fmt: skip
    return scale, zero


def _split(op: Builder, value: ir.Value, sizes: Sequence[int]) -> list[ir.Value]:
    if len(sizes) == 1:
        return [value]
    parts = op.node("Split", [value, op.constant([*sizes], ir.DataType.INT64)],
                    outputs=len(sizes), axis=0)  # fmt: skip
    for part, size in zip(parts, sizes, strict=True):
        part.shape = ir.Shape([size])
    return list(parts)


def _largest(array: Array, axis: int | None) -> Array:
    axes = tuple(each for each in range(array.ndim) if axis is None or each != axis)
    largest: Array = np.abs(array).max(axes, keepdims=True)
    return largest


def _best(array: Array, how: Rounding) -> Array:
    """The share of its largest number with which a weight is rounded to the least square error."""
    largest = _largest(array, how.axis)
    if how.axis is None and array.size > _LOOKED_AT:
        array = array.reshape(-1)[:: array.size // _LOOKED_AT]
        largest = largest.reshape(1)
    axes = tuple(each for each in range(array.ndim) if how.axis is None or each != how.axis)
    half = (how.high - how.low) / 2
    errors = []
    for share in _SHARES:
        scale = np.maximum(largest * share * 2 / (how.high - how.low), _TINY)
        held = np.clip(np.round(array / scale), -half, half) * scale
        errors.append(np.square(held - array).mean(axes).reshape(-1))
    # The widest of equals: of zeros alone all are.
    best: Array = _SHARES[::-1][np.argmin(errors[::-1], 0)]
    return best.astype(np.float32)
