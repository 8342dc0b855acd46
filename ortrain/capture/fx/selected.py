"""Sizes that the values of a tensor decide, such as how many elements a mask selects.

PyTorch traces them as symbols that no input's size gives a value, takes them for sizes that are
neither 0 nor 1, and asserts in the graph what else the trace went by. Of a call's values the
assertions become checks, as branches on values are.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ortrain.capture.fx.splice import Emitter, arguments_of
from ortrain.capture.origin import BESIDE, captured_error

aten = torch.ops.aten

_RANGES = (aten.sym_constrain_range.default, aten.sym_constrain_range_for_size.default)
_COMPARISONS: dict[Any, Any] = {
    operator.ge: aten.ge.Tensor, operator.le: aten.le.Tensor, operator.gt: aten.gt.Tensor,
    operator.lt: aten.lt.Tensor, operator.eq: aten.eq.Tensor, operator.ne: aten.ne.Tensor,
}  # fmt: skip
_JUNCTIONS: dict[Any, Any] = {
    operator.and_: aten.logical_and.default, operator.or_: aten.logical_or.default,
    torch.sym_not: aten.logical_not.default,
}  # fmt: skip
_ANOTHER_COUNT = "the values select another number of elements there than the code can take"
_ONE = "the values select one element there, and a squeeze takes its dimension away"


def assert_selected_sizes(module: fx.GraphModule) -> None:
    """Makes assertions on values of those on sizes that values decide."""
    for node in list(module.graph.nodes):
        with module.graph.inserting_before(node):
            for holds in _asserted(Emitter(module.graph, node), node):
                module.graph.call_function(aten._assert_async.msg, (holds, _ANOTHER_COUNT))


def _asserted(emit: Emitter, node: fx.Node) -> Iterator[fx.Node]:
    """What a node asserts of such sizes, as tensors."""
    subject: Any = node.args[0] if node.args else None
    if not isinstance(subject, fx.Node) or not free_unbacked_symbols(subject.meta.get("val")):
        return
    if node.target is aten._assert_scalar.default:
        yield _relation(emit, subject)
    elif node.target in _RANGES:
        for bound, compare in (("min", aten.ge.Scalar), ("max", aten.le.Scalar)):
            if node.kwargs.get(bound) is not None:
                yield emit(compare, _number(emit, subject), node.kwargs[bound])


def _relation(emit: Emitter, node: fx.Node) -> fx.Node:
    """A relation between sizes as a tensor."""
    if node.target in _COMPARISONS:
        left, right = (_number(emit, size) for size in node.args)
        return emit(_COMPARISONS[node.target], left, right)
    if node.target in _JUNCTIONS:
        operands: Any = node.args
        return emit(_JUNCTIONS[node.target], *(_relation(emit, each) for each in operands))
    raise captured_error(
        node,
        "the graph holds for some numbers of selected elements only",
        because=f"the code depends on {node.meta['val']}, which values decide",
        help=f"avoid code that depends on how many elements values select; or {BESIDE}",
    )


def assert_dimensions_to_squeeze(module: fx.GraphModule) -> None:
    """Asserts that a dimension is none of one, where a trace has not squeezed it for that."""
    for node in list(module.graph.nodes):
        if getattr(node.target, "overloadpacket", None) is not aten.squeeze:
            continue
        given = node.args[0]
        shape = given.meta["val"].shape
        dims = arguments_of(node).get("dim", [*range(len(shape))])
        for dim in dims if isinstance(dims, list | tuple) else (dims,):
            if not shape or not free_unbacked_symbols(shape[dim]):
                continue
            with module.graph.inserting_before(node):
                emit = Emitter(module.graph, node)
                size = _number(emit, emit(aten.sym_size.int, given, dim))
                several = emit(aten.ne.Scalar, size, 1)
                module.graph.call_function(aten._assert_async.msg, (several, _ONE))


def _number(emit: Emitter, size: Any) -> fx.Node:
    """A size as a tensor."""
    return emit(aten.scalar_tensor.default, size, dtype=torch.int64)
