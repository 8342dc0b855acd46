"""What operators demand of the values that they are given, as assertions of their own."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import torch
from torch import fx

from ortrain.capture.fx.experts import reaches_experts
from ortrain.capture.fx.splice import Emitter, arguments_of
from ortrain.capture.onnx.translations.base import INT64_MAX
from ortrain.pytorch import pytree

aten = torch.ops.aten

# Below this a score's spacing is above 1e-3: of the normalizer of a row of attention, kept as one
# number with the row's largest score, nothing is left for the gradient of PyTorch's fused kernel.
LOWEST_BIAS = -2e4

_POOLS = (
    aten.max_pool1d, aten.max_pool2d, aten.max_pool3d, aten.max_pool2d_with_indices,
    aten.max_pool3d_with_indices, aten.adaptive_max_pool1d, aten.adaptive_max_pool2d,
    aten.adaptive_max_pool3d,
)  # fmt: skip
# To PyTorch a NaN is larger than every number, and whatever has one is NaN; onnxruntime leaves NaNs
# out, or puts the lowest number in their place. A loss that has become NaN must not look as if it
# were none.
_ORDERING = (
    *_POOLS, aten.max, aten.min, aten.argmax, aten.argmin, aten.amax, aten.amin, aten.aminmax,
    aten.topk, aten.sort, aten.argsort, aten.msort, aten.quantile, aten.scatter_reduce,
    aten.index_reduce,
)  # fmt: skip
_ELEMENTWISE = (aten.max.other, aten.min.other)  # which know NaN
_NORMS = (aten.norm, aten.linalg_vector_norm)
# onnxruntime gives numbers where their gates are NaN.
_GATED = (aten.lstm, aten.gru, aten.lstm_cell, aten.gru_cell)
# Products with a matrix of mostly zeros, which make NaN of whatever is not finite.
_AVERAGING = (
    aten.adaptive_avg_pool1d, aten.adaptive_avg_pool2d, aten.adaptive_avg_pool3d,
    aten._adaptive_avg_pool2d, aten._adaptive_avg_pool3d,
)  # fmt: skip
# In which order equals come is not defined, and PyTorch's is that of its algorithms.
_SORTING = (aten.sort, aten.argsort, aten.msort, aten.quantile, aten.nanquantile)

# Why a graph does not hold.
_NAN = "a NaN is ordered there, which onnxruntime leaves out"
_OVERFLOW = "a number there is not finite, or so large that a sum of products may overflow"
_POWER = "a power there is none that float64 has exactly"
_EMPTY = "a window of a pool has nothing but minus infinity there"
_EQUALS = "equal values are ordered there, and which comes first is PyTorch's own"
_PROBABILITY = "PyTorch raises an error there: a value is no probability"
_NEGATIVE = "PyTorch raises an error there: a count is of numbers from 0 on"
_MASK = "a row of the mask there is shut by finite numbers alone"


def assert_preconditions(module: fx.GraphModule) -> None:
    """Asserts, before an operator, what a graph of it depends on.

    PyTorch raises an error inside of an operator, or its gradient loses what a graph's keeps, or a
    NaN comes out where a graph's is lost, or equals come in an order of its own.
    """
    for node in list(module.graph.nodes):
        packet = getattr(node.target, "overloadpacket", None)
        with module.graph.inserting_before(node):
            if node.target is aten.binary_cross_entropy.default:
                _probabilities(module.graph, node)
            elif packet is aten.bincount:
                emit = Emitter(module.graph, node)
                holds = emit(aten.all.default, emit(aten.ge.Scalar, node.args[0], 0))
                module.graph.call_function(aten._assert_async.msg, (holds, _NEGATIVE))
            elif packet is aten.scaled_dot_product_attention and torch.is_grad_enabled():
                _open_rows(module.graph, node)
            elif packet is aten.pow:
                _within_float64(module.graph, node)
            elif _orders(node):
                _numbers(module.graph, node)
            elif packet in _GATED or (packet in _AVERAGING and _scalars(node) != {1}):
                _finite(module.graph, node)
        if packet in _POOLS:
            _above_lowest(module.graph, node)
        elif packet in _SORTING or packet is aten.topk:
            _unequal(module.graph, node)


def _numbers(graph: fx.Graph, node: fx.Node) -> None:
    """Asserts that there is no NaN, by sums: one pass each, and nothing is written."""
    if _counts(node):
        return
    for given in node.all_input_nodes:
        value = given.meta["val"]
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        emit = Emitter(graph, node)
        total = emit(aten.sum.default, given)
        number = emit(aten.logical_not.default, emit(aten.isnan.default, total))
        graph.call_function(aten._assert_async.msg, (number, _NAN))


def _orders(node: fx.Node) -> bool:
    """Whether the largest or the smallest is looked for, or an order of all."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet in _NORMS:
        return bool(_scalars(node) & {math.inf, -math.inf})
    return packet in _ORDERING and node.target not in _ELEMENTWISE


def _scalars(node: fx.Node) -> set[float]:
    """The numbers among the arguments of an operator, those in lists as well."""
    return {x for x in pytree.tree_leaves(node.args) if isinstance(x, int | float)}


def _finite(graph: fx.Graph, node: fx.Node) -> None:
    """Asserts that no sum of products of what is given can overflow: one pass over each."""
    emit = Emitter(graph, node)
    given = [each for each in node.all_input_nodes if isinstance(each.meta["val"], torch.Tensor)]
    floating = [each for each in given if each.meta["val"].is_floating_point()]
    wide = [
        emit(aten.to.dtype, each, torch.promote_types(each.meta["val"].dtype, torch.float32))
        for each in floating
    ]
    sizes = [emit(aten.linalg_vector_norm.default, each, 1) for each in wide]
    largest = functools.reduce(lambda a, b: emit(aten.add.Tensor, a, b), sizes)
    square = emit(aten.mul.Tensor, largest, largest)
    graph.call_function(aten._assert_async.msg, (emit(aten.isfinite.default, square), _OVERFLOW))


def _within_float64(graph: fx.Graph, node: fx.Node) -> None:
    """Asserts that float64 has a whole number's power; PyTorch's wraps around beyond its dtype."""
    dtype = node.meta["val"].dtype
    base: Any
    exponent: Any
    base, exponent = node.args[:2]
    by_products = isinstance(exponent, int) and exponent > 0
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool or by_products:
        return
    emit = Emitter(graph, node)

    def wide(operand: Any) -> Any:
        if not isinstance(operand, fx.Node):
            return float(operand)
        if not isinstance(operand.meta["val"], torch.Tensor):
            return operand  # a size
        return emit(aten.to.dtype, operand, torch.float64)

    size = emit(aten.abs.default, emit(node.target, wide(base), wide(exponent)))
    most = min(torch.iinfo(dtype).max, 2**53)
    known = emit(aten.all.default, emit(aten.le.Scalar, size, float(most)))
    graph.call_function(aten._assert_async.msg, (known, _POWER))


def _counts(node: fx.Node) -> bool:
    """Whether a reduction into places adds up, and does not order."""
    return any(kind in node.args for kind in ("sum", "mean", "prod"))


def _above_lowest(graph: fx.Graph, node: fx.Node) -> None:
    """Asserts that no window of a pool has nothing but minus infinity: the lowest number comes."""
    pooled = node
    if not isinstance(node.meta["val"], torch.Tensor):
        pooled = next((user for user in node.users if user.args[1] == 0), node)
        if pooled is node:
            return
    value = pooled.meta["val"]
    if not value.is_floating_point():
        return
    with graph.inserting_before(pooled.next):
        emit = Emitter(graph, pooled)
        lowest = emit(aten.amin.default, pooled, [*range(value.ndim)])
        above = emit(aten.gt.Scalar, lowest, torch.finfo(value.dtype).min)
        graph.call_function(aten._assert_async.msg, (above, _EMPTY))


def _unequal(graph: fx.Graph, node: fx.Node) -> None:
    """Asserts that what is ordered has no equals, if places come out or gradients go back."""
    named = arguments_of(node)
    given, dim = named["input"], named.get("dim", 0)
    value = given.meta["val"]
    places = node.target in (aten.argsort.default, aten.argsort.stable) or any(
        user.target is operator.getitem and user.args[1] == 1 for user in node.users
    )
    learns = torch.is_grad_enabled() and value.is_floating_point()
    if named.get("stable") or not value.ndim or not (places or learns):
        return
    if not value.is_floating_point() and reaches_experts(node):
        return  # which put each row back where it was, whatever the order among those of an expert
    with graph.inserting_before(node.next):
        emit = Emitter(graph, node)
        if dim is None:
            given, dim = emit(aten.flatten.using_ints, given), 0
        is_topk = node.target is aten.topk.default
        ordered = emit(
            operator.getitem, node if is_topk else emit(aten.sort.default, given, dim), 0
        )
        later = emit(aten.slice.Tensor, ordered, dim, 1, INT64_MAX)
        earlier = emit(aten.slice.Tensor, ordered, dim, 0, -1)
        equal = emit(aten.any.default, emit(aten.eq.Tensor, later, earlier))
        if is_topk:  # nor is the last that is in equal to one that is out
            last = emit((aten.amax, aten.amin)[named["largest"]].default, ordered, [dim], True)
            reach = emit((aten.le, aten.ge)[named["largest"]].Tensor, given, last)
            many = emit(aten.gt.Scalar, emit(aten.sum.dim_IntList, reach, [dim]), named["k"])
            equal = emit(aten.logical_or.default, equal, emit(aten.any.default, many))
        unequal = emit(aten.logical_not.default, equal)
        graph.call_function(aten._assert_async.msg, (unequal, _EQUALS))


def _probabilities(graph: fx.Graph, node: fx.Node) -> None:
    """Asserts that probabilities and targets are between 0 and 1."""
    for given in node.args[:2]:
        emit = Emitter(graph, node)
        low, high = emit(aten.ge.Scalar, given, 0), emit(aten.le.Scalar, given, 1)
        inside = emit(aten.logical_and.default, low, high)
        graph.call_function(aten._assert_async.msg, (inside, _PROBABILITY))


def _open_rows(graph: fx.Graph, node: fx.Node) -> None:
    """Asserts that a floating mask leaves something of each row, or shuts it by minus infinity."""
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    if not isinstance(mask, fx.Node) or dropout:  # with dropout PyTorch keeps the weights
        return
    value = mask.meta["val"]
    if not value.is_floating_point() or not value.ndim:
        return
    emit = Emitter(graph, node)
    largest = emit(aten.amax.default, mask, [-1])
    is_open = emit(aten.gt.Scalar, largest, LOWEST_BIAS)
    is_shut = emit(aten.eq.Scalar, largest, -math.inf)
    known = emit(aten.logical_or.default, is_open, is_shut)
    graph.call_function(aten._assert_async.msg, (known, _MASK))
