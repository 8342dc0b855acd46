"""Statements that are written down without being run: layers of a model are alike.

Running a statement on tensors of symbolic sizes takes milliseconds. Dynamo has run each before, and
has its result. Which operator of ATen a statement is, PyTorch tells only by running it. So of those
that are alike the first runs; the others are the operator that came of it. A few functions are
known to be one operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ortrain.capture.fx.memory import memory_of
from ortrain.pytorch import pytree
from ortrain.pytorch.autocast import active
from ortrain.pytorch.operators import OpOverload, is_mutable, schema_of
from ortrain.pytorch.tracing import as_plain_tensors, has_values, last_node, node_of, write
from ortrain.pytorch.transforms import is_wrapped
from ortrain.pytorch.version import version_of

aten = torch.ops.aten

_PLAIN = (
    bool, int, float, str, torch.dtype, torch.device, torch.memory_format, type(None), type(...),
)  # fmt: skip
# Those that take longest, and are called as their operator is.
_OPERATORS = {
    torch.nn.functional.linear: aten.linear.default,
    torch.nn.functional.scaled_dot_product_attention: aten.scaled_dot_product_attention.default,
}


@dataclass(frozen=True)
class _Known:
    """What came of a statement.

    Attributes:
        operator: the one operator that it is.
        tensors: the nodes of its tensors.
        result: what is known of its result.
        shown: the place of the tensor whose memory the result shows.
    """

    operator: fx.Node
    tensors: list[fx.Node]
    result: tuple[Any, ...]
    shown: int | None


class Repeats:
    """The statements of one trace."""

    def __init__(self) -> None:
        self._known: dict[Any, _Known | None] = {}

    def run(self, compute: Callable[..., Any], result: Any, target: Any, given: Any) -> Any:
        """Runs a statement, or writes it down.

        Args:
            compute: runs it.
            result: the one that Dynamo has.
            target: what is called.
            given: arguments, and arguments by name.

        Returns:
            Its result in this trace.
        """
        if not _is_plain(result):
            return compute(target, *given)
        with as_plain_tensors():
            leaves, spec = pytree.tree_flatten(given)
            tensors = [each for each in leaves if isinstance(each, Tensor)]
            key = _key(target, leaves, spec)
            call = None if key is None else self._call(key, target, given, result, tensors)
            if call is not None:
                write(*call, result)
                return result
            before = last_node()
        computed = compute(target, *given)
        if key is not None and key not in self._known:
            with as_plain_tensors():
                self._known[key] = _one_operator(before, tensors, computed)
        return computed

    def _call(
        self, key: Any, target: Any, given: Any, result: Tensor, tensors: Sequence[Tensor]
    ) -> tuple[Any, Any, Any] | None:
        """What to write down: an operator and its arguments; None where that is not known.

        Nothing may write to a result that is Dynamo's: a trace writes to tensors of its own.
        """
        if version_of(result) or node_of(result) is not None:
            return None
        known, shown = self._known.get(key), _shown(result, tensors)
        if known is not None and known.result == _about(result) and known.shown == shown:
            nodes = dict(zip(known.tensors, map(node_of, tensors), strict=True))
            args = fx.map_arg(known.operator.args, lambda n: nodes.get(n, n))
            kwargs = fx.map_arg(known.operator.kwargs, lambda n: nodes.get(n, n))
            return known.operator.target, args, kwargs
        if target not in _OPERATORS or shown is not None:
            return None
        wants = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
        # What a trace finds out again, such as how many rows a mask leaves, is another symbol.
        unknown = _symbols(result).difference(*map(_symbols, tensors))
        if result.requires_grad == wants and not unknown:
            return _call_of(_OPERATORS[target], *pytree.tree_map_only(Tensor, node_of, given))
        return None


def _call_of(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """A call of an operator as a trace writes it: without defaults behind the last other value."""
    wanted = schema_of(operator).arguments
    given = {each.name: each.default_value for each in wanted}
    given |= {**dict(zip(given, args, strict=False)), **kwargs}
    ordered = [given[each.name] for each in wanted if not each.kwarg_only]
    while ordered and ordered[-1] == wanted[len(ordered) - 1].default_value:
        ordered.pop()
    named = {
        each.name: given[each.name]
        for each in wanted
        if each.kwarg_only and given[each.name] != each.default_value
    }
    return operator, tuple(ordered), named


def _key(target: Any, leaves: Sequence[Any], spec: Any) -> tuple[Any, ...] | None:
    """Equal for statements that are alike; None for one that is like no other."""
    places: dict[int, int] = {}
    rows: list[Any] = []
    for each in leaves:
        if isinstance(each, Tensor):
            if not _is_plain(each) or has_values(each) or node_of(each) is None:
                return None
            rows.append((*_about(each), places.setdefault(id(each), len(places))))
        elif isinstance(each, torch.SymInt):
            rows.append(each.node.expr)
        elif isinstance(each, _PLAIN):
            rows.append((type(each), repr(each)))
        else:
            return None
    return (target, spec, *rows, torch.is_grad_enabled(), active()) if places else None


def _is_plain(value: Any) -> bool:
    """Whether a tensor is memory with sizes and strides."""
    if not isinstance(value, Tensor) or is_wrapped(value):
        return False
    return value.layout is torch.strided and not value.is_complex()


def _about(tensor: Tensor) -> tuple[Any, ...]:
    """What is known of a tensor without its values."""
    sizes = (*tensor.shape, "strides", *tensor.stride(), tensor.storage_offset())
    plain = (each.node.expr if isinstance(each, torch.SymInt) else each for each in sizes)
    return (type(tensor), tensor.dtype, tensor.device, tensor.requires_grad, *plain)


def _symbols(tensor: Tensor) -> set[Any]:
    sizes: list[Any] = [*tensor.shape]
    known = [each.node.expr for each in sizes if isinstance(each, torch.SymInt)]
    return {symbol for each in known for symbol in each.free_symbols}


def _shown(result: Tensor, tensors: Sequence[Tensor]) -> int | None:
    """The place of the tensor whose memory a result shows."""
    own = memory_of(result)
    return next((i for i, each in enumerate(tensors) if memory_of(each) == own), None)


def _one_operator(before: fx.Node, tensors: Sequence[Tensor], result: Any) -> _Known | None:
    """What has been written down behind a node, if it is one operator, and writes to nothing."""
    node = last_node()
    if node.prev is not before or not isinstance(node.target, OpOverload):
        return None
    if is_mutable(node.target) or not isinstance(result, Tensor):
        return None
    nodes = [node_of(each) for each in tensors]
    others = {*node.all_input_nodes} - {*nodes}
    if node_of(result) is not node or any(isinstance(n.meta.get("val"), Tensor) for n in others):
        return None
    known = [each for each in nodes if each is not None]
    return _Known(node, known, _about(result), _shown(result, tensors))
