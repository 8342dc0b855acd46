"""How each of PyTorch's operators treats axes of tokens: alone, place by place, or mixed.

An axis whose size is a symbol of a trace is one of tokens. An operator carries it where an element
of the result depends, of each operand, on elements at its own place of that axis and on no others,
and on no number of places. In a backward, what is zero wherever the gradients that arrive are zero
may be added up over all tokens at once, as the gradients of weights are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy

from ortrain.capture.trace.closed_code import Unproved

Labels = tuple[int, ...]
Size = Any  # a whole number, or an expression of symbols


@dataclass(frozen=True)
class Axes:
    """What is known of a tensor.

    Attributes:
        sizes: of it.
        labels: of each axis, the symbols whose places it has, one behind another; none where its
            size is a number.
        zero: whether it is zero at each token at which all gradients that arrive are.
        total: whether it is a sum over all tokens, or made of one.
    """

    sizes: tuple[Size, ...]
    labels: tuple[Labels, ...]
    zero: bool = False
    total: bool = False

    @property
    def tokens(self) -> list[int]:
        """The symbols of its axes."""
        return [symbol for labels in self.labels for symbol in labels]


@dataclass(frozen=True)
class Ref:
    """A tensor among the arguments of an operator, by its number in the trace."""

    number: int


@dataclass(frozen=True)
class Step:
    """A call of an operator: tensors are Refs, and sizes of the trace expressions."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int, ...]
    sizes: tuple[tuple[Size, ...], ...]

    @property
    def name(self) -> str:
        """Of the operator, without its overload."""
        return str(self.operator._schema.name).removeprefix("aten::")


class Walk:
    """Goes through the steps of a trace.

    Args:
        symbols: of the sizes; their places are their labels.
        known: number of a tensor → what is known of it.
    """

    def __init__(self, symbols: Sequence[Any], known: dict[int, Axes]) -> None:
        self.symbols, self.known = [*symbols], known

    def through(self, step: Step) -> None:
        """Notes what is known of a step's results.

        Raises:
            Unproved: it is not known to treat tokens alone.
        """
        name = step.name
        writes = step.operator._schema.is_mutable
        if writes and not (name.endswith("_") and len(step.results) == 1):
            raise Unproved(f"{name} writes")
        rule = _RULES.get(name.removesuffix("_") if writes else name)
        if rule is None:
            raise Unproved(f"{name} may mix tokens")
        if name not in _SIZED and any(map(_is_size, _leaves((step.args, step.kwargs)))):
            raise Unproved(f"{name} is given a number of tokens")
        found = rule(self, step)
        if len(found) != len(step.results):
            raise Unproved(f"{name} has other results than expected")
        for number, axes, sizes in zip(step.results, found, step.sizes, strict=True):
            if axes.sizes != sizes or len(axes.labels) != len(sizes):
                raise Unproved(f"{name} has other sizes than expected")
            if len({*axes.tokens}) != len(axes.tokens):
                raise Unproved(f"{name} has pairs of tokens")
            if axes.total and axes.tokens:
                raise Unproved(f"{name} gives a sum over tokens to each of them")
            self.known[number] = axes

    def of(self, value: Any) -> Axes:
        """What is known of an argument that is a tensor."""
        if not isinstance(value, Ref):
            raise Unproved("an argument is no tensor")
        return self.known[value.number]

    def made(self, sizes: Sequence[Size]) -> tuple[Labels, ...]:
        """The labels of a tensor that holds the same number everywhere."""
        return tuple(self._label(size) for size in sizes)

    def _label(self, size: Size) -> Labels:
        if isinstance(size, int):
            return ()
        factors = sympy.Mul.make_args(size)
        if not all(factor in self.symbols for factor in factors):
            raise Unproved(f"a size is {size}")
        return tuple(sorted(self.symbols.index(factor) for factor in factors))


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [leaf for each in value for leaf in _leaves(each)]
    if isinstance(value, dict):
        return _leaves([*value.values()])
    return [value]


def _is_size(value: Any) -> bool:
    return isinstance(value, sympy.Basic)


def _is_zero(value: Any) -> bool:
    return isinstance(value, bool | int | float) and value == 0


Rule = Callable[[Walk, Step], list[Axes]]
_RULES: dict[str, Rule] = {}
_SIZED: set[str] = set()


def _rule(names: str, *, sized: bool = False) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names.split(), rule))
        if sized:
            _SIZED.update(names.split())
        return rule

    return register


# -- element by element ----------------------------------------------------------------------------

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


@_rule(
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
    operands = [
        walk.of(leaf) for leaf in _leaves((step.args, step.kwargs)) if isinstance(leaf, Ref)
    ]
    if step.name.endswith("_") and walk.of(step.args[0]).sizes != step.sizes[0]:
        raise Unproved(f"{step.name} writes to something else")
    total = any(each.total for each in operands)
    zero = not total and _is_zero_at_zeros(walk, step)
    return [
        Axes(sizes, _broadcast(operands, sizes), zero and i == 0, total)
        for i, sizes in enumerate(step.sizes)
    ]


def _broadcast(operands: Sequence[Axes], sizes: tuple[Size, ...]) -> tuple[Labels, ...]:
    """The labels of a result, axes counted from the last."""
    found: list[Labels] = []
    for axis in range(-len(sizes), 0):
        here = [(o.sizes[axis], o.labels[axis]) for o in operands if len(o.sizes) >= -axis]
        wanted = {labels for size, labels in here if size != 1}
        if len(wanted) > 1 or any(size not in (1, sizes[axis]) for size, _ in here):
            raise Unproved("axes of different tokens meet")
        found.append(wanted.pop() if wanted else ())
    return tuple(found)


def _is_zero_at_zeros(walk: Walk, step: Step) -> bool:
    """Whether a result is zero where the gradients that arrive are."""
    name, args = step.name.removesuffix("_"), step.args

    def zero(value: Any) -> bool:
        return walk.of(value).zero if isinstance(value, Ref) else _is_zero(value)

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


@_rule("index_put_ index_put")
def _masked_write(walk: Walk, step: Step) -> list[Axes]:
    """One number where a mask of the same sizes is true."""
    target, places, value = step.args[:3]
    own = walk.of(target)
    number = walk.of(value) if isinstance(value, Ref) else Axes((), (), _is_zero(value))
    added = [*step.args[3:], *step.kwargs.values()]
    mask = walk.of(places[0]) if len(places) == 1 else None
    if mask is None or mask.sizes != own.sizes or mask.labels != own.labels or any(added):
        raise Unproved("a part of a tensor is written to")
    if number.sizes not in ((), (1,)) or number.total or own.total or mask.total:
        raise Unproved("a part of a tensor is written to")
    return [replace(own, zero=own.zero and number.zero)]


@_rule("copy_ copy")
def _copied(walk: Walk, step: Step) -> list[Axes]:
    """Of one tensor into the place of another."""
    target, source = walk.of(step.args[0]), walk.of(step.args[1])
    labels = _broadcast([target, source], target.sizes)
    if labels != target.labels:
        raise Unproved("tokens are written to what has none")
    return [replace(target, zero=source.zero, total=source.total)]


@_rule("zero_ zero fill_ fill")
def _filled(walk: Walk, step: Step) -> list[Axes]:
    target = walk.of(step.args[0])
    if len(step.args) > 1 and isinstance(step.args[1], Ref):
        raise Unproved("a tensor is written to all over")
    zero = len(step.args) < 2 or _is_zero(step.args[1])
    return [replace(target, zero=zero, total=False)]


# -- new tensors -----------------------------------------------------------------------------------


@_rule("zeros_like ones_like full_like")
def _like(walk: Walk, step: Step) -> list[Axes]:
    own = walk.of(step.args[0])
    zero = step.name == "zeros_like" or (step.name == "full_like" and _is_zero(step.args[1]))
    return [Axes(own.sizes, own.labels, zero)]


@_rule("zeros ones full new_zeros new_ones new_full", sized=True)
def _created(walk: Walk, step: Step) -> list[Axes]:
    """The same number everywhere; only its sizes may be of tokens."""
    place = 1 if step.name.startswith("new_") else 0
    rest = (*step.args[place + 1 :], *step.kwargs.values())
    if any(_is_size(each) for each in _leaves(rest)):
        raise Unproved("a number of tokens is in a tensor")
    zero = "zeros" in step.name or ("full" in step.name and _is_zero(step.args[place + 1]))
    return [Axes(sizes, walk.made(sizes), zero) for sizes in step.sizes]


@_rule("scalar_tensor lift_fresh")
def _scalar(walk: Walk, step: Step) -> list[Axes]:
    if isinstance(step.args[0], Ref):
        raise Unproved("a tensor is made of numbers")
    return [Axes((), (), _is_zero(step.args[0]))]


# -- along axes ------------------------------------------------------------------------------------


def _argument(step: Step, place: int, name: str, default: Any = None) -> Any:
    """By position or by keyword."""
    return step.args[place] if len(step.args) > place else step.kwargs.get(name, default)


def _dims(given: Any, rank: int) -> list[int]:
    """Axes as numbers from 0; all where none are named."""
    if given is None or given == []:
        return list(range(rank))
    return [int(d) % rank for d in (given if isinstance(given, list | tuple) else [given])]


def _reduced(own: Axes, dims: Sequence[int], keep: bool) -> tuple[Labels, ...]:
    kept = [() if a in dims else labels for a, labels in enumerate(own.labels)]
    return tuple(kept if keep else [labels for a, labels in enumerate(kept) if a not in dims])


def _alone(own: Axes, dims: Sequence[int], name: str) -> None:
    if any(own.labels[d] for d in dims):
        raise Unproved(f"{name} goes over tokens")


@_rule("sum")
def _sum(walk: Walk, step: Step) -> list[Axes]:
    """Over other axes; or over all tokens, of what is zero where nobody reads it."""
    own = walk.of(step.args[0])
    dims = _dims(_argument(step, 1, "dim"), len(own.sizes))
    keep = bool(_argument(step, 2, "keepdim", False))
    labels = _reduced(own, dims, keep)
    if not any(own.labels[d] for d in dims):
        return [Axes(step.sizes[0], labels, own.zero, own.total)]
    _expect_sum(walk, own)
    return [Axes(step.sizes[0], labels, total=True)]


def _expect_sum(walk: Walk, *operands: Axes) -> None:
    """Raises unless operands have all tokens, and one of them is zero where nobody reads it."""
    everything = set(range(len(walk.symbols)))
    if any({*each.tokens} != everything for each in operands):
        raise Unproved("a sum goes over some axes of tokens, and not over all")
    if not any(each.zero for each in operands):
        raise Unproved("a sum goes over tokens")


@_rule(
    """mean amax amin prod any all logsumexp argmax argmin var std var_mean std_mean median max min
    sort topk cumsum cumprod flip roll _softmax _log_softmax linalg_vector_norm norm glu squeeze"""
)
def _over_others(walk: Walk, step: Step) -> list[Axes]:
    """Over axes that have no tokens: results keep the place of each, as many axes as they have."""
    own, name, rank = walk.of(step.args[0]), step.name, len(walk.of(step.args[0]).sizes)
    place, word = {
        "linalg_vector_norm": (2, "dim"), "norm": (2, "dim"), "topk": (2, "dim"),
        "flip": (1, "dims"), "roll": (2, "dims"),
    }.get(name, (1, "dim"))  # fmt: skip
    names = [argument.name for argument in step.operator._schema.arguments]
    if word not in names or names.index(word) != place or own.total:
        raise Unproved(f"{name} goes over all of a tensor")
    default = -1 if name in ("sort", "topk", "glu") else None
    if name == "roll" and _argument(step, place, word) in (None, []):
        raise Unproved("roll goes over all of a tensor")
    dims = _dims(_argument(step, place, word, default), rank)
    _alone(own, dims, name)
    found = []
    for sizes in step.sizes:
        kept = len(sizes) == rank
        if not kept and len(sizes) != rank - len(dims) and name != "squeeze":
            raise Unproved(f"{name} has other sizes than expected")
        if name == "squeeze":
            dims, kept = [d for d in dims if own.sizes[d] == 1], False
        found.append(Axes(sizes, _reduced(own, dims, kept), own.zero and name in _LINEAR))
    return found


_LINEAR = frozenset({"mean", "cumsum", "flip", "roll", "squeeze"})


@_rule("_softmax_backward_data")
def _softmax_gradient(walk: Walk, step: Step) -> list[Axes]:
    gradient, output = walk.of(step.args[0]), walk.of(step.args[1])
    _alone(gradient, [step.args[2] % len(gradient.sizes)], step.name)
    if gradient.labels != output.labels or gradient.total or output.total:
        raise Unproved("axes of different tokens meet")
    return [Axes(step.sizes[0], gradient.labels, gradient.zero)]


@_rule("native_layer_norm")
def _layer_norm(walk: Walk, step: Step) -> list[Axes]:
    own, width = walk.of(step.args[0]), len(step.args[1])
    inner = [*range(len(own.sizes) - width, len(own.sizes))]
    weights = [walk.of(each) for each in step.args[2:4] if each is not None]
    _alone(own, inner, step.name)
    if any(each.tokens or each.total for each in weights) or own.total:
        raise Unproved("axes of different tokens meet")
    small = _reduced(own, inner, keep=True)
    return [Axes(s, own.labels if i == 0 else small) for i, s in enumerate(step.sizes)]


# -- products --------------------------------------------------------------------------------------


def _product(walk: Walk, step: Step, left: Axes, right: Axes) -> Axes:
    """Rows of the left and columns of the right; or a sum over all tokens."""
    *lead, row, inner = left.labels
    *others, facing, column = right.labels
    if lead != others or inner != facing:
        raise Unproved("axes of different tokens meet")
    labels = (*lead, row, column)
    total = left.total or right.total
    if not inner:
        return Axes(step.sizes[0], labels, (left.zero or right.zero) and not total, total)
    if any(labels) or total:
        raise Unproved("a product goes over some axes of tokens, and not over all")
    _expect_sum(walk, left, right)
    return Axes(step.sizes[0], labels, total=True)


@_rule("mm bmm")
def _matrices(walk: Walk, step: Step) -> list[Axes]:
    return [_product(walk, step, walk.of(step.args[0]), walk.of(step.args[1]))]


@_rule("addmm")
def _matrices_and_bias(walk: Walk, step: Step) -> list[Axes]:
    made = _product(walk, step, walk.of(step.args[1]), walk.of(step.args[2]))
    bias = walk.of(step.args[0])
    if _broadcast([made, bias], made.sizes) != made.labels:
        raise Unproved("axes of different tokens meet")
    return [replace(made, zero=made.zero and bias.zero, total=made.total or bias.total)]


# -- places ----------------------------------------------------------------------------------------


def _moved(own: Axes, step: Step, labels: Sequence[Labels]) -> list[Axes]:
    return [replace(own, sizes=step.sizes[0], labels=tuple(labels))]


@_rule("permute")
def _permuted(walk: Walk, step: Step) -> list[Axes]:
    own = walk.of(step.args[0])
    return _moved(own, step, [own.labels[d] for d in _dims(step.args[1], len(own.sizes))])


@_rule("transpose t")
def _transposed(walk: Walk, step: Step) -> list[Axes]:
    own = walk.of(step.args[0])
    labels = [*own.labels]
    if labels and (step.name == "transpose" or len(labels) == 2):
        a, b = _dims([*step.args[1:3]] if step.name == "transpose" else [0, 1], len(labels))
        labels[a], labels[b] = labels[b], labels[a]
    return _moved(own, step, labels)


@_rule("unsqueeze")
def _unsqueezed(walk: Walk, step: Step) -> list[Axes]:
    own = walk.of(step.args[0])
    labels = [*own.labels]
    labels.insert(step.args[1] % (len(labels) + 1), ())
    return _moved(own, step, labels)


@_rule("select")
def _selected(walk: Walk, step: Step) -> list[Axes]:
    own = walk.of(step.args[0])
    dim = step.args[1] % len(own.sizes)
    _alone(own, [dim], step.name)
    return _moved(own, step, _reduced(own, [dim], keep=False))


@_rule("slice")
def _sliced(walk: Walk, step: Step) -> list[Axes]:
    own = walk.of(step.args[0])
    _alone(own, [_argument(step, 1, "dim", 0) % len(own.sizes)], step.name)
    return _moved(own, step, own.labels)


@_rule("split split_with_sizes unbind")
def _parts(walk: Walk, step: Step) -> list[Axes]:
    own = walk.of(step.args[0])
    dim = _argument(step, 1 if step.name == "unbind" else 2, "dim", 0) % len(own.sizes)
    _alone(own, [dim], step.name)
    labels = _reduced(own, [dim], keep=step.name != "unbind")
    return [replace(own, sizes=sizes, labels=labels) for sizes in step.sizes]


@_rule("cat stack")
def _joined(walk: Walk, step: Step) -> list[Axes]:
    parts = [walk.of(each) for each in step.args[0]]
    labels = [*parts[0].labels]
    dim = _argument(step, 1, "dim", 0) % (len(labels) + (step.name == "stack"))
    if any([*each.labels] != labels or each.total for each in parts):
        raise Unproved("axes of different tokens meet")
    if step.name == "stack":
        labels.insert(dim, ())
    else:
        _alone(parts[0], [dim], step.name)
    return [Axes(step.sizes[0], tuple(labels), all(each.zero for each in parts))]


@_rule("expand", sized=True)
def _expanded(walk: Walk, step: Step) -> list[Axes]:
    own, sizes = walk.of(step.args[0]), step.sizes[0]
    labels: list[Labels] = []
    for axis in range(-len(sizes), 0):
        inside = len(own.sizes) >= -axis
        if inside and own.sizes[axis] == sizes[axis]:
            labels.append(own.labels[axis])
        elif inside and own.sizes[axis] != 1:
            raise Unproved("expand has other sizes than expected")
        else:
            labels.extend(walk.made([sizes[axis]]))
    return _moved(own, step, labels)


@_rule("view _unsafe_view reshape", sized=True)
def _viewed(walk: Walk, step: Step) -> list[Axes]:
    own = walk.of(step.args[0])
    if not isinstance(step.args[1], list | tuple):
        raise Unproved("a tensor is seen as one of another dtype")
    return _moved(own, step, _reshaped(walk, own, step.sizes[0]))


def _reshaped(walk: Walk, own: Axes, sizes: Sequence[Size]) -> list[Labels]:
    """Axes of tokens stay whole, or are put together with one another, or taken apart again."""
    atoms: list[Any] = []  # symbols and numbers, in the order in which they lie
    for size, labels in zip(own.sizes, own.labels, strict=True):
        if labels:
            atoms += labels
        elif size != 1:
            atoms.append(sympy.Integer(size))
    found: list[Labels] = []
    for size in sizes:
        if isinstance(size, int):
            atoms = _without(atoms, size)
            found.append(())
            continue
        rest, joined = size, list[int]()
        while rest != 1:
            if not atoms or not isinstance(atoms[0], int):
                raise Unproved("tokens are put together with something else")
            label = atoms.pop(0)
            rest = sympy.cancel(rest / walk.symbols[label])
            if (rest.is_number and rest != 1) or sympy.denom(rest) != 1:
                raise Unproved("tokens are put together with something else")
            joined.append(label)
        found.append(tuple(joined))
    if atoms:
        raise Unproved("tokens are put together with something else")
    return found


def _without(atoms: list[Any], size: int) -> list[Any]:
    """What is left behind an axis of so many places."""
    left = [*atoms]
    while size != 1:
        if not left or not isinstance(left[0], sympy.Integer):
            raise Unproved("tokens are put together with something else")
        head = int(left.pop(0))
        if head % size == 0:
            if head != size:
                left.insert(0, sympy.Integer(head // size))
            return left
        if size % head:
            raise Unproved("axes are put together in another way")
        size //= head
    return left


POINTWISE = [name for name, rule in _RULES.items() if rule is _elementwise]
