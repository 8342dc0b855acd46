"""Operators along axes, and products: of tokens there are sums over all, or none."""

from __future__ import annotations

from dataclasses import replace

from ortrain.capture.trace.closed_code import Unproved
from ortrain.capture.trace.token_axes.walk import (
    Axes,
    Step,
    Walk,
    argument,
    axes_of,
    broadcast,
    carries,
    expect_no_tokens,
    without_axes,
)


@carries("sum")
def _sum(walk: Walk, step: Step) -> list[Axes]:
    """Over other axes; or over all tokens, of what is zero where nobody reads it."""
    own = walk.of(step.args[0])
    dims = axes_of(argument(step, 1, "dim"), len(own.sizes))
    keep = bool(argument(step, 2, "keepdim", False))
    labels = without_axes(own, dims, keep)
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


@carries(
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
    if name == "roll" and argument(step, place, word) in (None, []):
        raise Unproved("roll goes over all of a tensor")
    dims = axes_of(argument(step, place, word, default), rank)
    expect_no_tokens(own, dims, name)
    found = []
    for sizes in step.sizes:
        kept = len(sizes) == rank
        if not kept and len(sizes) != rank - len(dims) and name != "squeeze":
            raise Unproved(f"{name} has other sizes than expected")
        if name == "squeeze":
            dims, kept = [d for d in dims if own.sizes[d] == 1], False
        found.append(Axes(sizes, without_axes(own, dims, kept), own.zero and name in _LINEAR))
    return found


_LINEAR = frozenset({"mean", "cumsum", "flip", "roll", "squeeze"})


@carries("_softmax_backward_data")
def _softmax_gradient(walk: Walk, step: Step) -> list[Axes]:
    gradient, output = walk.of(step.args[0]), walk.of(step.args[1])
    expect_no_tokens(gradient, [step.args[2] % len(gradient.sizes)], step.name)
    if gradient.labels != output.labels or gradient.total or output.total:
        raise Unproved("axes of different tokens meet")
    return [Axes(step.sizes[0], gradient.labels, gradient.zero)]


@carries("native_layer_norm")
def _layer_norm(walk: Walk, step: Step) -> list[Axes]:
    own, width = walk.of(step.args[0]), len(step.args[1])
    inner = [*range(len(own.sizes) - width, len(own.sizes))]
    weights = [walk.of(each) for each in step.args[2:4] if each is not None]
    expect_no_tokens(own, inner, step.name)
    if any(each.tokens or each.total for each in weights) or own.total:
        raise Unproved("axes of different tokens meet")
    small = without_axes(own, inner, keep=True)
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


@carries("mm bmm")
def _matrices(walk: Walk, step: Step) -> list[Axes]:
    return [_product(walk, step, walk.of(step.args[0]), walk.of(step.args[1]))]


@carries("addmm")
def _matrices_and_bias(walk: Walk, step: Step) -> list[Axes]:
    made = _product(walk, step, walk.of(step.args[1]), walk.of(step.args[2]))
    bias = walk.of(step.args[0])
    if broadcast([made, bias], made.sizes) != made.labels:
        raise Unproved("axes of different tokens meet")
    return [replace(made, zero=made.zero and bias.zero, total=made.total or bias.total)]
