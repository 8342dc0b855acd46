"""Numbers that are made of sizes, as elements of tensors hold them: exactly, or not at all.

An element of a dtype of whole numbers is a number of Python or a symbol. One of a floating dtype is
a quotient of two of these, :class:`Ratio`. A trace may go by it where it is what PyTorch's kernels
compute, to the last bit, at all sizes that the graph is for: where a dtype may be too narrow for
it, the sizes for which it is not are a condition of the trace, and what a dtype would round is
:class:`Inexact`. One rounding is borne, that of a quotient: whether it lies below a whole number,
at it or above is the same before and after, as long as its terms are far from filling the dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.functions import FloatTrueDiv, IntTrueDiv, ToFloat
from torch.utils._sympy.symbol import SymT, symbol_is_type
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

# Binary digits of a number of each dtype.
DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_SPARE = 2  # digits that the terms of a rounded quotient leave free
_FINEST = 2**10  # far from where the numbers of a narrow dtype get too small for it
# What no process can address, let alone hold a tensor along.
_LARGEST_SIZE = 2**57


class Inexact(Exception):
    """Of a number that a trace knows too little of to go by it."""


@dataclass(frozen=True)
class Ratio:
    """A quotient of whole numbers, the second one above 0.

    Attributes:
        over: what is divided.
        under: by what.
        digits: of the narrowest dtype that has rounded it; 0 where none has.
    """

    over: Any
    under: Any = 1
    digits: int = 0

    @property
    def exact(self) -> bool:
        """Whether nothing was rounded."""
        return not self.digits

    @property
    def whole(self) -> bool:
        """Whether it is a whole number whatever the sizes are."""
        return type(self.under) is int and self.under == 1


def is_made_of_sizes(number: Any) -> bool:
    """Whether a float of a trace is made of sizes, and of nothing that a tensor holds."""
    return isinstance(number, torch.SymFloat) and not _is_held(number)


def _is_held(number: Any) -> bool:
    """Whether a number depends on what a tensor holds, or on one that the caller gives."""
    symbols = number.node.expr.free_symbols
    given = any(symbol_is_type(symbol, SymT.FLOAT) for symbol in symbols)
    return given or bool(free_unbacked_symbols(number))


def ratio_of(number: Any) -> Ratio:
    """A number of Python, or a symbol.

    Raises:
        Inexact: it has come of more than one division, or is no number at all.
    """
    if type(number) in (int, bool):
        return Ratio(int(number))
    if type(number) is torch.SymInt:
        if _is_held(number):
            raise Inexact
        return Ratio(_plain(number))
    if type(number) is float:
        if number != number or number in (float("inf"), float("-inf")):
            raise Inexact
        return Ratio(*number.as_integer_ratio())
    if type(number) is torch.SymFloat and not _is_held(number):
        return _of_expression(number.node.expr, number.node.shape_env)
    raise Inexact


def _plain(number: torch.SymInt) -> int | torch.SymInt:
    expression = number.node.expr
    return int(expression) if expression.is_Integer else number


def _of_expression(expression: Any, environment: Any) -> Ratio:
    """What an expression in float64 is, of which at most the last step rounds."""

    def whole(part: Any) -> Any:
        if part.is_Integer:
            return int(part)
        if not part.is_integer:
            raise Inexact
        return torch.SymInt(SymNode(part, environment, int, None))

    kind = expression.func
    if expression.is_Float or expression.is_Rational:
        return ratio_of(float(expression))
    if kind is ToFloat:
        return stored(Ratio(whole(expression.args[0])), torch.float64)
    if kind is IntTrueDiv:
        over, under = (Ratio(whole(part)) for part in expression.args)
        return stored(divided(over, under), torch.float64)
    parts = [_of_expression(part, environment) for part in expression.args]
    if kind is FloatTrueDiv:
        return stored(divided(*parts), torch.float64)
    combine = {sympy.Add: added, sympy.Mul: multiplied}.get(kind)
    if combine is None or not parts:
        raise Inexact
    result, *others = parts
    for part in others:
        result = stored(combine(result, part), torch.float64)
    return result


def number_of(element: Any, dtype: torch.dtype) -> Any:
    """What ``item()`` gives of an element: a number of Python, or a symbol.

    Raises:
        Inexact: symbols do not round as the dtype does.
    """
    if dtype is torch.bool:
        return bool(element)
    if not dtype.is_floating_point:
        return element.over
    if not element.exact and element.digits < DIGITS[torch.float64]:
        raise Inexact
    if type(element.over) is int and type(element.under) is int:
        return element.over / element.under
    return torch.sym_float(element.over) if element.whole else element.over / element.under


# -- what holds at all sizes -----------------------------------------------------------------------


def _bounds(number: Any) -> tuple[Any, Any]:
    """The least and the largest that a number can be, whatever the sizes are."""
    if not isinstance(number, torch.SymInt):
        return number, number
    expression = number.node.expr
    sizes = dict.fromkeys(expression.free_symbols, ValueRanges(1, _LARGEST_SIZE))
    found = bound_sympy(expression, sizes)
    return found.lower, found.upper


def _example(number: Any) -> Any:
    """The number that a symbol stands for in the example."""
    if not isinstance(number, torch.SymInt):
        return number
    return number.node.shape_env.size_hint(number.node.expr)


def within(number: Any, least: int, most: int) -> None:
    """Has a number lie between bounds at all sizes that the trace is for.

    Raises:
        Inexact: it does not in the example.
    """
    if not least <= _example(number) <= most:
        raise Inexact
    lower, upper = _bounds(number)
    if not bool(lower >= least):
        _holds(number >= least)
    if not bool(upper <= most):
        _holds(number <= most)


def _holds(relation: Any) -> None:
    if not relation:
        raise Inexact


def is_negative(number: Any) -> bool:
    """Whether a number is below 0: of one that is so at some sizes only, a condition."""
    lower, upper = _bounds(number)
    if bool(lower >= 0):
        return False
    if bool(upper < 0):
        return True
    return bool(number < 0)


# -- arithmetic ------------------------------------------------------------------------------------


def stored(number: Ratio, dtype: torch.dtype, on_processor: bool = True) -> Any:
    """A number as an element of a dtype, to which PyTorch converts or rounds it.

    Args:
        number: it.
        dtype: of the tensor.
        on_processor: whether quotients are rounded correctly there; graphics cards multiply by
            the reciprocal of a number.
    """
    if dtype is torch.bool:
        return number.over != 0
    if not dtype.is_floating_point:
        if dtype.is_complex or dtype not in _RANGES:
            raise Inexact
        whole = truncated(number)
        within(whole.over, *_RANGES[dtype])
        return whole
    digits = DIGITS.get(dtype)
    if digits is None:
        raise Inexact
    if number.exact and _is_power_of_two(number.under):
        if number.under > _FINEST:
            raise Inexact
        within(number.over, -(2**digits), 2**digits)
        return number
    if not on_processor:
        raise Inexact
    for term in (number.over, number.under):
        within(term, -(2 ** (digits - _SPARE)), 2 ** (digits - _SPARE))
    known = number.digits or digits
    return Ratio(number.over, number.under, min(known, digits))


_WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
_RANGES = {dtype: (torch.iinfo(dtype).min, torch.iinfo(dtype).max) for dtype in _WHOLE}


def _is_power_of_two(number: Any) -> bool:
    return type(number) is int and number > 0 and not number & (number - 1)


def _terms(one: Ratio, other: Ratio) -> tuple[Any, Any, Any]:
    """Both over the same.

    Raises:
        Inexact: something was rounded.
    """
    if not (one.exact and other.exact):
        raise Inexact
    if one.whole and other.whole:
        return one.over, other.over, 1
    if _is_power_of_two(one.under) and _is_power_of_two(other.under):
        under = max(one.under, other.under)
        return one.over * (under // one.under), other.over * (under // other.under), under
    return one.over * other.under, other.over * one.under, one.under * other.under


def added(one: Ratio, other: Ratio) -> Ratio:
    """Their sum."""
    first, second, under = _terms(one, other)
    return Ratio(first + second, under)


def subtracted(one: Ratio, other: Ratio) -> Ratio:
    """Their difference."""
    first, second, under = _terms(one, other)
    return Ratio(first - second, under)


def multiplied(one: Ratio, other: Ratio) -> Ratio:
    """Their product."""
    if not (one.exact and other.exact):
        raise Inexact
    return Ratio(one.over * other.over, one.under * other.under)


def divided(one: Ratio, other: Ratio) -> Ratio:
    """Their quotient."""
    first, second, _ = _terms(one, other)
    if _example(second) == 0:
        raise Inexact
    if is_negative(second):
        first, second = -first, -second
    within(second, 1, _LARGEST_SIZE**2)
    return Ratio(first, second)


def remainder(one: Ratio, other: Ratio) -> Ratio:
    """What their quotient, rounded down, leaves."""
    first, second, under = _terms(one, other)
    if _example(second) == 0:
        raise Inexact
    if is_negative(second):
        return Ratio(-(-first % -second), under)
    within(second, 1, _LARGEST_SIZE**2)
    return Ratio(first % second, under)


def least(one: Ratio, other: Ratio) -> Ratio:
    """The smaller of both."""
    first, second, under = _terms(one, other)
    return Ratio(torch.sym_min(first, second), under)


def largest(one: Ratio, other: Ratio) -> Ratio:
    """The larger of both."""
    first, second, under = _terms(one, other)
    return Ratio(torch.sym_max(first, second), under)


def negated(number: Ratio) -> Ratio:
    """With the other sign."""
    return Ratio(-number.over, number.under, number.digits)


def floored(number: Ratio) -> Ratio:
    """Rounded down."""
    return number if number.whole else Ratio(number.over // number.under)


def ceiled(number: Ratio) -> Ratio:
    """Rounded up."""
    return number if number.whole else Ratio(-(-number.over // number.under))


def truncated(number: Ratio) -> Ratio:
    """Rounded towards 0."""
    if number.whole:
        return number
    return ceiled(number) if is_negative(number.over) else floored(number)


def rounded(number: Ratio) -> Ratio:
    """Rounded to the nearest, halves to the even one."""
    if number.whole:
        return number
    twice = 2 * number.over + number.under
    nearest = twice // (2 * number.under)
    halfway = 1 - torch.sym_min(1, twice % (2 * number.under))
    return Ratio(nearest - nearest % 2 * halfway)


def compared(one: Ratio, other: Ratio) -> tuple[Any, Any]:
    """Two whole numbers that compare as these two do.

    Raises:
        Inexact: a rounding may have brought them together.
    """
    if one.exact and other.exact:
        first, second, _ = _terms(one, other)
        return first, second
    if not (one.exact or other.exact):
        raise Inexact
    first, second = one.over * other.under, other.over * one.under
    digits = one.digits or other.digits
    for term in (first, second):
        within(term, -(2 ** (digits - _SPARE)), 2 ** (digits - _SPARE))
    return first, second
