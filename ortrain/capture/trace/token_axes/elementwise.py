"""Operators that compute each element of its own place, and tensors of one number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ortrain.capture.trace.closed_code import Unproved
from ortrain.capture.trace.token_axes.walk import (
    RULES,
    Axes,
    Ref,
    Step,
    Walk,
    broadcast,
    carries,
    is_size,
    is_zero,
    leaves,
)

# Zero of zero.
_FIXED = frozenset(
    """neg relu tanh sin sinh asin asinh atan atanh tan erf abs sign sgn sqrt square round floor
    ceil trunc expm1 log1p positive frac silu gelu clone nan_to_num _to_copy detach alias mish elu
    celu leaky_relu hardshrink softshrink""".split()
)
_GRADIENTS = frozenset(
    """gelu_backward tanh_backward sigmoid_backward silu_backward threshold_backward
    hardtanh_backward elu_backward leaky_relu_backward softplus_backward hardswish_backward
    hardsigmoid_backward mish_backward native_dropout_backward""".split()
)


@carries(
    """abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_not
    bitwise_or bitwise_xor ceil celu clamp clamp_max clamp_min clone copysign cos cosh deg2rad
    digamma div elu eq erf erfc erfinv exp exp2 expm1 floor floor_divide fmax fmin fmod frac ge gelu
    gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 isfinite isinf isnan isneginf
    isposinf le leaky_relu lerp lgamma log log10 log1p log2 log_sigmoid_forward logaddexp logaddexp2
    logical_and logical_not logical_or logical_xor logit lt masked_fill maximum minimum mish mul
    nan_to_num ne neg nextafter polygamma positive pow rad2deg reciprocal relu remainder round rsqrt
    rsub selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink special_bessel_j0
    special_bessel_j1 special_bessel_y0 special_bessel_y1 special_entr special_erfcx special_i0e
    special_i1 special_i1e special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1
    special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri special_xlog1py special_zeta
    special_airy_ai special_spherical_bessel_j0 sqrt square sub tan tanh threshold trunc where xlogy
    detach alias _to_copy _conj gelu_backward tanh_backward sigmoid_backward silu_backward
    threshold_backward hardtanh_backward elu_backward leaky_relu_backward softplus_backward
    hardswish_backward hardsigmoid_backward mish_backward"""
)
def _elementwise(walk: Walk, step: Step) -> list[Axes]:
    operands = [walk.of(leaf) for leaf in leaves((step.args, step.kwargs)) if isinstance(leaf, Ref)]
    if step.name.endswith("_") and walk.of(step.args[0]).sizes != step.sizes[0]:
        raise Unproved(f"{step.name} writes to something else")
    total = any(each.total for each in operands)
    zero = not total and _is_zero_at_zeros(walk, step)
    return [
        Axes(sizes, broadcast(operands, sizes), zero and i == 0, total)
        for i, sizes in enumerate(step.sizes)
    ]


def _is_zero_at_zeros(walk: Walk, step: Step) -> bool:
    """Whether a result is zero where the gradients that arrive are."""
    name, args = step.name.removesuffix("_"), step.args

    def zero(value: Any) -> bool:
        return walk.of(value).zero if isinstance(value, Ref) else is_zero(value)

    if name in _FIXED or name in _GRADIENTS:
        return zero(args[0])
    if name == "mul":
        return zero(args[0]) or zero(args[1])
    if name == "div":
        return zero(args[0]) and not zero(args[1])
    if name in ("add", "sub", "rsub", "maximum", "minimum", "fmax", "fmin"):
        return zero(args[0]) and zero(args[1])
    if name == "where":
        return len(args) == 3 and zero(args[1]) and zero(args[2])
    if name == "masked_fill":
        return zero(args[0]) and zero(args[2])
    if name == "pow":
        return zero(args[0]) and isinstance(args[1], int | float) and args[1] > 0
    if name in ("clamp", "clamp_min", "clamp_max", "hardtanh"):
        return zero(args[0]) and not step.kwargs and _is_around_zero(name, args[1:])
    return False


def _is_around_zero(name: str, bounds: Sequence[Any]) -> bool:
    least, most = [*bounds, None, None][:2]
    if name == "hardtanh" and len(bounds) < 2:
        return True if not bounds else isinstance(least, int | float) and least <= 0
    if name == "clamp_max":
        least, most = None, least
    low = least is None or (isinstance(least, int | float) and least <= 0)
    return low and (most is None or (isinstance(most, int | float) and most >= 0))


@carries("index_put_ index_put")
def _masked_write(walk: Walk, step: Step) -> list[Axes]:
    """One number where a mask of the same sizes is true."""
    target, places, value = step.args[:3]
    own = walk.of(target)
    number = walk.of(value) if isinstance(value, Ref) else Axes((), (), is_zero(value))
    added = [*step.args[3:], *step.kwargs.values()]
    mask = walk.of(places[0]) if len(places) == 1 else None
    if mask is None or mask.sizes != own.sizes or mask.labels != own.labels or any(added):
        raise Unproved("a part of a tensor is written to")
    if number.sizes not in ((), (1,)) or number.total or own.total or mask.total:
        raise Unproved("a part of a tensor is written to")
    return [replace(own, zero=own.zero and number.zero)]


@carries("copy_ copy")
def _copied(walk: Walk, step: Step) -> list[Axes]:
    """Of one tensor into the place of another."""
    target, source = walk.of(step.args[0]), walk.of(step.args[1])
    labels = broadcast([target, source], target.sizes)
    if labels != target.labels:
        raise Unproved("tokens are written to what has none")
    return [replace(target, zero=source.zero, total=source.total)]


@carries("zero_ zero fill_ fill")
def _filled(walk: Walk, step: Step) -> list[Axes]:
    target = walk.of(step.args[0])
    if len(step.args) > 1 and isinstance(step.args[1], Ref):
        raise Unproved("a tensor is written to all over")
    zero = len(step.args) < 2 or is_zero(step.args[1])
    return [replace(target, zero=zero, total=False)]


# -- new tensors -----------------------------------------------------------------------------------


@carries("zeros_like ones_like full_like")
def _like(walk: Walk, step: Step) -> list[Axes]:
    own = walk.of(step.args[0])
    zero = step.name == "zeros_like" or (step.name == "full_like" and is_zero(step.args[1]))
    return [Axes(own.sizes, own.labels, zero)]


@carries("zeros ones full new_zeros new_ones new_full", sized=True)
def _created(walk: Walk, step: Step) -> list[Axes]:
    """The same number everywhere; only its sizes may be of tokens."""
    place = 1 if step.name.startswith("new_") else 0
    rest = (*step.args[place + 1 :], *step.kwargs.values())
    if any(is_size(each) for each in leaves(rest)):
        raise Unproved("a number of tokens is in a tensor")
    zero = "zeros" in step.name or ("full" in step.name and is_zero(step.args[place + 1]))
    return [Axes(sizes, walk.made(sizes), zero) for sizes in step.sizes]


@carries("scalar_tensor lift_fresh")
def _scalar(walk: Walk, step: Step) -> list[Axes]:
    if isinstance(step.args[0], Ref):
        raise Unproved("a tensor is made of numbers")
    return [Axes((), (), is_zero(step.args[0]))]


POINTWISE = [name for name, rule in RULES.items() if rule is _elementwise]
