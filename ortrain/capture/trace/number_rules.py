"""What operators do to the elements of tensors whose numbers a trace knows, operator by operator.

An operator that is not here, or a rule that would have to round, makes a tensor whose numbers the
trace does not know.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from ortrain.capture.trace import exact_numbers as exact
from ortrain.capture.trace.exact_numbers import DIGITS, Inexact, Ratio, ratio_of, stored
from ortrain.module_state.dispatch import without_modes

aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Vector:
    """The elements of a tensor, row by row.

    Attributes:
        elements: a :class:`Ratio` each; of a tensor of bools, bools and their symbols.
        shape: of numbers.
        dtype: of the elements.
        device: where they are.
    """

    elements: Sequence[Any]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def on_processor(self) -> bool:
        """Whether it is the processor that computes with them."""
        return self.device.type == "cpu"

    def places(self, first: int = 0) -> torch.Tensor:
        """A tensor of this shape with the number of each element, counted from a first one."""
        return torch.arange(first, first + len(self.elements)).reshape(self.shape)


@dataclass(frozen=True)
class Form:
    """What is known of a result before its elements are."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def of(self, elements: Sequence[Any]) -> Vector:
        """A tensor of this form."""
        return Vector(elements, self.shape, self.dtype, self.device)

    def stored(self, numbers: Sequence[Any]) -> Vector:
        """A tensor of this form that is made of numbers of any kind."""
        on_processor = self.device.type == "cpu"
        return self.of([stored(_ratio(n), self.dtype, on_processor) for n in numbers])


# Of the form of its result and its arguments: the elements.
Rule = Callable[..., Vector]
RULES: dict[Any, Rule] = {}
# Of what these are given as their first argument, only the form counts.
UNREAD: set[Any] = set()


def _operator(name: str) -> Any:
    """That of a name, such as ``"add.Tensor"``."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def known(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(map(_operator, names), rule))
        return rule

    return known


def _ratio(element: Any) -> Ratio:
    """An element as a number: of one that is true or false, a condition."""
    if isinstance(element, torch.SymBool):
        return Ratio(int(bool(element)))
    return element if type(element) is Ratio else ratio_of(element)


def _operands(form: Form, *given: Any) -> list[list[Any]]:
    """The elements of operands that stand over each other, as they are given."""
    found = []
    for each in given:
        if not isinstance(each, Vector):
            found.append([each] * max(1, _count(form.shape)))
            continue
        with _apart():
            places = each.places().expand(form.shape).flatten().tolist()
        found.append([each.elements[place] for place in places])
    return found


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Inside, tensors are PyTorch's own, and the trace sees nothing."""
    with without_modes(), torch._C.DisableTorchFunction():
        yield


def _count(shape: Sequence[int]) -> int:
    return functools.reduce(operator.mul, shape, 1)


def _computed(form: Form, compute: Callable[..., Ratio], *given: Any) -> Vector:
    """An operator that goes element by element, on operands as numbers of the result's dtype."""
    on_processor = form.device.type == "cpu"
    if form.dtype is torch.bool:
        raise Inexact

    def converted(element: Any) -> Ratio:
        number: Ratio = stored(_ratio(element), form.dtype, on_processor)
        return number

    rows = zip(*_operands(form, *given), strict=True)
    return form.stored([compute(*map(converted, row)) for row in rows])


# -- arithmetic ------------------------------------------------------------------------------------


def _arithmetic(compute: Callable[[Ratio, Ratio], Ratio], *names: str) -> None:
    @_rule(*names)
    def rule(form: Form, one: Any, other: Any, alpha: Any = 1) -> Vector:
        if alpha != 1:
            raise Inexact
        return _computed(form, compute, one, other)


_arithmetic(exact.added, "add.Tensor", "add.Scalar")
_arithmetic(exact.subtracted, "sub.Tensor", "sub.Scalar")
_arithmetic(lambda one, other: exact.subtracted(other, one), "rsub.Tensor", "rsub.Scalar")
_arithmetic(exact.multiplied, "mul.Tensor", "mul.Scalar")
_arithmetic(exact.remainder, "remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")
_arithmetic(exact.least, "minimum", "min.other", "clamp_max", "clamp_max.Tensor")
_arithmetic(exact.largest, "maximum", "max.other", "clamp_min", "clamp_min.Tensor")


_TO_WHOLE = {"floor": exact.floored, "trunc": exact.truncated}


@_rule("div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode")
def _div(form: Form, one: Any, other: Any, rounding_mode: str | None = None) -> Vector:
    if rounding_mode is None:
        return _computed(form, exact.divided, one, other)
    to_whole = _TO_WHOLE[rounding_mode]
    on_processor = form.device.type == "cpu"

    def quotient(first: Ratio, second: Ratio) -> Ratio:
        found = exact.divided(first, second)
        if form.dtype in DIGITS:
            found = stored(found, form.dtype, on_processor)
        return to_whole(found)

    return _computed(form, quotient, one, other)


@_rule("floor_divide", "floor_divide.Scalar")
def _floor_divide(form: Form, one: Any, other: Any) -> Vector:
    return _div(form, one, other, rounding_mode="floor")


def _alone(compute: Callable[[Ratio], Ratio], *names: str) -> None:
    @_rule(*names)
    def rule(form: Form, one: Any) -> Vector:
        return _computed(form, compute, one)


_alone(exact.negated, "neg")
_alone(exact.floored, "floor")
_alone(exact.ceiled, "ceil")
_alone(exact.truncated, "trunc")
_alone(exact.rounded, "round")
_alone(lambda number: exact.largest(number, exact.negated(number)), "abs")


@_rule("pow.Tensor_Scalar")
def _pow(form: Form, one: Any, exponent: Any) -> Vector:
    """Of floats, PyTorch multiplies for a square; for others it may round."""
    if type(exponent) is not int or not 1 <= exponent <= (2 if form.dtype in DIGITS else 8):
        raise Inexact
    return _computed(
        form, lambda number: functools.reduce(exact.multiplied, [number] * exponent), one
    )


@_rule("clamp", "clamp.Tensor")
def _clamp(form: Form, one: Any, min: Any = None, max: Any = None) -> Vector:
    given = [each for each in (min, max) if each is not None]

    def clamped(number: Ratio, *bounds: Ratio) -> Ratio:
        rest = list(bounds)
        if min is not None:
            number = exact.largest(number, rest.pop(0))
        return exact.least(number, rest.pop(0)) if max is not None else number

    return _computed(form, clamped, one, *given)


# -- relations -------------------------------------------------------------------------------------


def _common(one: Any, other: Any) -> torch.dtype:
    """The dtype in which PyTorch compares two operands."""

    def like(given: Any) -> Any:
        if isinstance(given, Vector):
            return torch.empty(given.shape, dtype=given.dtype)
        return {torch.SymInt: 1, torch.SymFloat: 1.0}.get(type(given), given)

    with _apart():
        return torch.result_type(like(one), like(other))


def _relation(compare: Callable[[Any, Any], Any], name: str) -> None:
    @_rule(f"{name}.Tensor", f"{name}.Scalar")
    def rule(form: Form, one: Any, other: Any) -> Vector:
        dtype, on_processor = _common(one, other), form.device.type == "cpu"
        if form.dtype is not torch.bool or dtype is torch.bool:
            raise Inexact

        def relation(first: Any, second: Any) -> Any:
            numbers = (stored(_ratio(each), dtype, on_processor) for each in (first, second))
            return compare(*exact.compared(*numbers))

        return form.of([relation(*row) for row in zip(*_operands(form, one, other), strict=True)])


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _relation(getattr(operator, _name), _name)


def _logical(combine: Callable[..., Any], *names: str) -> None:
    @_rule(*names)
    def rule(form: Form, *given: Any) -> Vector:
        vectors = [each for each in given if isinstance(each, Vector)]
        if len(vectors) != len(given) or any(each.dtype is not torch.bool for each in vectors):
            raise Inexact
        rows = zip(*_operands(form, *vectors), strict=True)
        return form.of([combine(*(bool(element) for element in row)) for row in rows])


_logical(lambda one, other: one and other, "logical_and", "bitwise_and.Tensor")
_logical(lambda one, other: one or other, "logical_or", "bitwise_or.Tensor")
_logical(lambda one: not one, "logical_not", "bitwise_not")


# -- reductions ------------------------------------------------------------------------------------


def _all_of(form: Form, vector: Vector, dim: Any = None) -> Sequence[Any]:
    """The elements that become one.

    Raises:
        Inexact: there is more than one result.
    """
    axes = [*range(len(vector.shape))]
    wanted = [dim] if type(dim) is int else axes if dim is None or len(dim) == 0 else dim
    if _count(form.shape) != 1 or {axis % max(1, len(axes)) for axis in wanted} - {0} != {
        *axes[1:]
    }:
        raise Inexact
    if not vector.elements:
        raise Inexact
    return vector.elements


def _adding_up(combine: Callable[[Ratio, Ratio], Ratio], *names: str) -> None:
    """Of floats, only of two: a part of a longer sum may be rounded."""

    @_rule(*names)
    def rule(form: Form, one: Vector, dim: Any = None, keepdim: bool = False, **_: Any) -> Vector:
        elements = _all_of(form, one, dim)
        if form.dtype in DIGITS and len(elements) > 2:
            raise Inexact
        return _folded(form, combine, elements)


_adding_up(exact.added, "sum", "sum.dim_IntList")
_adding_up(exact.multiplied, "prod", "prod.dim_int")


def _folded(form: Form, combine: Callable[[Ratio, Ratio], Ratio], elements: Any) -> Vector:
    numbers = [stored(_ratio(e), form.dtype) for e in elements]
    step: Callable[[Any, Any], Any] = lambda a, b: stored(combine(a, b), form.dtype)  # noqa: E731
    return form.stored([functools.reduce(step, numbers)])


@_rule("max", "amax")
def _max(form: Form, one: Vector, dim: Any = None, keepdim: bool = False) -> Vector:
    return _folded(form, exact.largest, _all_of(form, one, dim))


@_rule("min", "amin")
def _min(form: Form, one: Vector, dim: Any = None, keepdim: bool = False) -> Vector:
    return _folded(form, exact.least, _all_of(form, one, dim))


# -- elements as they are --------------------------------------------------------------------------


def _moved(name: str) -> None:
    """An operator that only moves elements: what it does to their numbers, it does to them."""
    move = _operator(name)

    @_rule(name)
    def rule(form: Form, given: Any, *args: Any, index: int = 0, **kwargs: Any) -> Vector:
        vectors: list[Vector] = [given] if isinstance(given, Vector) else [*given]
        if any(isinstance(each, Vector) for each in args):
            raise Inexact
        elements = [element for each in vectors for element in each.elements]
        starts = accumulate((len(each.elements) for each in vectors), initial=0)
        with _apart():
            places = [each.places(start) for each, start in zip(vectors, starts, strict=False)]
            one = isinstance(given, Vector)
            found = move(places[0] if one else places, *args, **kwargs)
            found = found[index] if isinstance(found, list | tuple) else found
            chosen = [elements[place] for place in found.flatten().tolist()]
        if any(each.dtype is not form.dtype for each in vectors):
            return form.stored(chosen)
        return form.of(chosen)


for _name in (
    "alias", "cat", "clone", "detach", "diagonal", "expand", "flip", "lift_fresh",
    "lift_fresh_copy", "permute", "repeat", "reshape", "select.int", "slice.Tensor", "split.Tensor",
    "split_with_sizes", "squeeze", "squeeze.dim", "squeeze.dims", "stack", "t", "transpose.int",
    "unbind.int", "unsqueeze", "view", "_unsafe_view",
):  # fmt: skip
    _moved(_name)


@_rule("_to_copy", "copy")
def _to_copy(form: Form, one: Vector, other: Vector | None = None, *_: Any, **__: Any) -> Vector:
    given = one if other is None else other
    if given.device != form.device and form.dtype in DIGITS and form.dtype is not given.dtype:
        raise Inexact
    (elements,) = _operands(form, given)
    return form.of(elements) if given.dtype is form.dtype else form.stored(elements)


# -- new tensors -----------------------------------------------------------------------------------


@_rule("scalar_tensor")
def _scalar_tensor(form: Form, number: Any, **_: Any) -> Vector:
    return form.stored([number])


@_rule("full")
def _full(form: Form, size: Any, number: Any, **_: Any) -> Vector:
    return form.stored([number] * _count(form.shape))


@_rule("new_full")
def _new_full(form: Form, like: Any, size: Any, number: Any, **_: Any) -> Vector:
    return form.stored([number] * _count(form.shape))


@_rule("full_like", "fill.Scalar")
def _full_like(form: Form, like: Any, number: Any, **_: Any) -> Vector:
    return form.stored([number] * _count(form.shape))


UNREAD |= {aten.new_full.default, aten.full_like.default, aten.fill.Scalar, aten.copy.default}


@_rule("zeros", "new_zeros", "zeros_like")
def _zeros(form: Form, *_: Any, **__: Any) -> Vector:
    return form.stored([0] * _count(form.shape))


@_rule("ones", "new_ones", "ones_like")
def _ones(form: Form, *_: Any, **__: Any) -> Vector:
    return form.stored([1] * _count(form.shape))


UNREAD |= {
    aten.new_zeros.default, aten.zeros_like.default, aten.new_ones.default, aten.ones_like.default
}  # fmt: skip


@_rule("arange", "arange.start", "arange.start_step")
def _arange(form: Form, *bounds: Any, **_: Any) -> Vector:
    """Of numbers that are whole: ``torch.arange(3)``."""
    if form.dtype in DIGITS or not all(type(bound) is int for bound in bounds):
        raise Inexact
    return form.stored([*range(*bounds)])


# What an operator computes, it writes to its first argument where it is in place.
WRITING: dict[Any, Rule] = {}


def _in_place(name: str) -> None:
    plain, (packet, _, overload) = _operator(name), name.partition(".")
    written = getattr(getattr(aten, f"{packet}_", None), overload or "default", None)
    if written is not None:
        WRITING[written] = RULES[plain]
        if plain in UNREAD:
            UNREAD.add(written)


for _name in (
    "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "div.Tensor_mode", "floor_divide",
    "neg", "ceil", "floor", "trunc", "round", "clamp", "clamp_min", "clamp_max", "copy",
    "fill.Scalar", "remainder.Tensor",
):  # fmt: skip
    _in_place(_name)
