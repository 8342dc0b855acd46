"""Sizes that the values of a tensor decide, such as how many elements a mask selects.

PyTorch traces them as symbols that no input's size gives a value, takes them for sizes that are
neither 0 nor 1, and asserts in the graph what else the trace went by. Of a call's values the
assertions become checks, as branches on values are.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Set
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ortrain.capture.fx.splice import Emitter, arguments_of
from ortrain.capture.origin import BESIDE, captured_error, operator_name
from ortrain.pytorch.operators import OpOverload, schema_of

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
# The place of the argument that says which elements are selected.
_SELECTING = {aten.nonzero: 0, aten.nonzero_numpy: 0, aten.argwhere: 0, aten.where: 0,
              aten.masked_select: 1}  # fmt: skip
_INDEXING = (aten.index, aten.index_put, aten.index_put_)
_NEVER = (aten.unique_consecutive,)  # of something gives nothing
# What onnxruntime computes of nothing as PyTorch does, gradients included, beside all that goes
# element by element. Its recurrent and its normalising kernels end the process.
_OF_NOTHING = {
    *_SELECTING, *_INDEXING, aten.index_select, aten.index_add, aten.index_add_, aten.gather,
    aten.embedding, aten.linear, aten.matmul, aten.mm, aten.addmm, aten.sum, aten.mean, aten.cat,
    aten.stack, aten.expand, aten.slice, aten.select, aten.unsqueeze, aten.transpose, aten.t,
    aten.permute, aten.numpy_T, aten.view, aten.reshape, aten.flatten, aten.softmax,
    aten.log_softmax, aten.layer_norm, aten.dropout, aten.cross_entropy_loss, aten.nll_loss_nd,
    aten.mse_loss, aten.clone, aten.detach, aten.to, aten.contiguous, aten._to_copy, aten.alias,
    aten.zeros_like, aten.ones_like, aten.sym_size, aten.scatter_add, aten.squeeze, aten.arange,
    aten.bmm, aten.einsum, aten.broadcast_tensors, aten.binary_cross_entropy_with_logits,
    aten.smooth_l1_loss, aten.huber_loss, aten.l1_loss, aten.kl_div, aten._assert_tensor_metadata,
}  # fmt: skip
_NOTHING = "the values select nothing there, of which not every operator of a graph computes"
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
    if _holds_for_sizes(subject.meta["val"]):
        return
    if node.target is aten._assert_scalar.default:
        yield _relation(emit, subject)
    elif node.target in _RANGES:
        for bound, compare in (("min", aten.ge.Scalar), ("max", aten.le.Scalar)):
            if node.kwargs.get(bound) is not None:
                yield emit(compare, _number(emit, subject), node.kwargs[bound])


def _holds_for_sizes(relation: Any) -> bool:
    """Whether a relation says no more than that sizes are not negative."""
    if not isinstance(relation, torch.SymBool):
        return False
    sizes = {
        s: sympy.Dummy(integer=True, nonnegative=True) for s in relation.node.shape_env.size_like
    }
    return bool(relation.node.expr.xreplace(sizes) == sympy.true)


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


def select_something(module: fx.GraphModule) -> None:
    """Selects everything where nothing is selected, and asserts that there is something.

    So no operator is given a tensor without elements. What is selected and reaches only such as
    know what to do with none stays as it is: the experts of a layer in a loop, or
    ``y[outside] = x[outside]``, which is of nothing in most calls.
    """
    nodes = [n for n in module.graph.nodes if isinstance(n.target, OpOverload)]
    reached = [n for n in nodes if any(map(_selected, (n, *n.all_input_nodes)))]
    others = [n for n in reached if not _computes_of_nothing(n)]
    if not others:
        return
    counted = {
        symbol
        for node in module.graph.nodes
        for symbol in node.meta.get("unbacked_bindings") or ()
        if getattr(node.target, "overloadpacket", None) not in (*_SELECTING, *_INDEXING, *_NEVER)
    }
    for node in others:
        if any(_selected(given, counted) for given in node.all_input_nodes):
            raise captured_error(
                node,
                f"{operator_name(node.target)} may be given nothing",
                because="a value is a size of what it is given, and may be 0",
                help=f"select by a mask; or {BESIDE}",
            )
    guarded = _together(reached, {s for node in others for s in _counts(node)})
    masks = {n.args[1][i] for n in reached for i in _masked(n) if _counts(n, given=False) & guarded}
    for node in reached:
        packet = node.target.overloadpacket
        place = _SELECTING.get(packet, 1)
        if packet in _INDEXING:
            some = [*node.args[1]]
            for i in _masked(node):
                if some[i] in masks or _counts(node) & guarded:
                    some[i] = _some(module.graph, node, some[i])
            node.update_arg(1, some)
        elif packet in _SELECTING and len(node.args) == place + 1 and _counts(node) & guarded:
            node.update_arg(place, _some(module.graph, node, node.args[place]))


def _masked(node: fx.Node) -> list[int]:
    """Which of the indices of a node are masks."""
    packet, arguments = getattr(node.target, "overloadpacket", None), list[Any](node.args)
    return [i for i, v in enumerate(arguments[1]) if _is_mask(v)] if packet in _INDEXING else []


def _together(nodes: list[fx.Node], symbols: set[Any]) -> set[Any]:
    """The numbers of selected elements that meet some in a node, or others that do."""
    found, before = set(symbols), -1
    while len(found) != before:
        before = len(found)
        for node in nodes:
            if not found.isdisjoint(met := _counts(node)):
                found |= met
    return found


def _counts(node: fx.Node, given: bool = True) -> set[Any]:
    """The sizes that values decide of what a node returns, and of what it is given."""
    found: set[Any] = set()
    for each in (node, *(node.all_input_nodes if given else ())):
        value = each.meta.get("val")
        for part in value if isinstance(value, list | tuple) else (value,):
            if isinstance(part, torch.Tensor):
                found |= free_unbacked_symbols(part.shape)
            elif isinstance(part, torch.SymInt):
                found |= free_unbacked_symbols(part)
    return found


def _some(graph: fx.Graph, node: fx.Node, mask: fx.Node) -> fx.Node:
    """A mask of all where a mask is of nothing, which is asserted not to be."""
    with graph.inserting_before(node):
        emit = Emitter(graph, node)
        if not _is_mask(mask):
            mask = emit(aten.ne.Scalar, mask, 0)
        some = emit(aten.any.default, mask)
        graph.call_function(aten._assert_async.msg, (some, _NOTHING))
        return emit(aten.logical_or.default, mask, emit(aten.logical_not.default, some))


def _is_mask(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.meta["val"].dtype in (torch.bool, torch.uint8)


def _selected(node: fx.Node, among: Set[Any] | None = None) -> bool:
    """Whether values decide a size of what a node returns, by one of some symbols if given."""
    values = node.meta.get("val")
    found: set[Any] = set()
    for value in values if isinstance(values, list | tuple) else (values,):
        if isinstance(value, torch.Tensor):
            found |= free_unbacked_symbols(value.shape)
    return bool(found if among is None else found & among)


def _computes_of_nothing(node: fx.Node) -> bool:
    target: Any = node.target
    if target is aten.matmul.default:  # of matrices
        return all(given.meta["val"].ndim > 1 for given in node.all_input_nodes)
    asks = schema_of(target).name.startswith("aten::sym_")
    return asks or target.overloadpacket in _OF_NOTHING or torch.Tag.pointwise in target.tags


def assert_dimensions_to_squeeze(module: fx.GraphModule, checked: bool) -> None:
    """Asserts that a dimension is none of one, where a trace has not squeezed it for that.

    Raises:
        CaptureError: nobody looks at the checks of the graph.
    """
    for node in list(module.graph.nodes):
        if getattr(node.target, "overloadpacket", None) is not aten.squeeze:
            continue
        given = node.args[0]
        shape = given.meta["val"].shape
        dims = arguments_of(node).get("dim", [*range(len(shape))])
        for dim in dims if isinstance(dims, list | tuple) else (dims,):
            if not shape or not free_unbacked_symbols(shape[dim]):
                continue
            if not checked:
                raise captured_error(
                    node,
                    "a dimension is squeezed whose size values decide",
                    because="one row would have another shape than several",
                    help=f"name the dimensions to squeeze, and leave this one; or {BESIDE}",
                )
            with module.graph.inserting_before(node):
                emit = Emitter(module.graph, node)
                size = _number(emit, emit(aten.sym_size.int, given, dim))
                several = emit(aten.ne.Scalar, size, 1)
                module.graph.call_function(aten._assert_async.msg, (several, _ONE))


def _number(emit: Emitter, size: Any) -> fx.Node:
    """A size as a tensor."""
    return emit(aten.scalar_tensor.default, size, dtype=torch.int64)
