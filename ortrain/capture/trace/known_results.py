"""What an operator gives in a trace is found out once for each kind of arguments.

A trace runs operators on tensors without contents, and PyTorch finds out the shape of each result
by going through what the operator does, with symbols for sizes: 26 ms of processor time for a layer
normalization, 28 for a softmax. The layers of a model ask the same of it again and again. Here the
shape, the strides and the dtype of a result are kept, and a tensor is made of them where the same
operator comes by with arguments of the same kind: 2.0 s instead of 2.8 for four layers of BERT.

The conditions on sizes that an operator makes are those of its arguments' shapes, so that they are
known from the first time. Left alone is whatever is more than a new tensor: views and changes in
place, results whose size the values decide, and tensors whose values a trace knows.

Used of torch beyond what it documents (``tests/capture/trace/test_known_results.py`` pins each):
``torch._subclasses.fake_tensor``: ``FakeTensorMode.dispatch``, ``FakeTensor`` and its ``constant``;
``ShapeEnv.suppress_guards`` and ``_replacements_version_counter``; ``SymNode``'s constructor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.sym_node import SymNode

from ortrain.capture.trace.known_numbers import is_known
from ortrain.capture.trace.patched import replaced
from ortrain.exclusive import this_thread

_base: Any = torch._C.TensorBase  # below what watches `stride` in the forward's own code
_PLAIN = frozenset(
    {
        type(None),
        int,
        float,
        bool,
        str,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    }
)
_LEFT_ALONE = frozenset(
    {
        torch.Tag.data_dependent_output,
        torch.Tag.dynamic_output_shape,
        torch.Tag.inplace_view,
    }
)


_Sequence = Callable[[list[Any]], Any]


class _Unknown(Exception):
    """Arguments, or a result, of a kind that is not kept."""


@dataclass(frozen=True)
class _Size:
    """A size of a result that is no number.

    Attributes:
        argument: which of the arguments' sizes it is; None where it is computed.
        expression: where it is computed.
        hint: its value in the example.
    """

    argument: int | None
    expression: Any
    hint: int

    def of(self, symbols: list[Any], environment: Any) -> Any:
        if self.argument is not None:
            return symbols[self.argument]
        return torch.SymInt(SymNode(self.expression, environment, int, self.hint))


@dataclass(frozen=True)
class _Result:
    """A new tensor that an operator gives.

    Attributes:
        shape: numbers and :class:`_Size`.
        stride: likewise.
        dtype: of the elements.
        device: where PyTorch would have it.
        order: of the axes in memory, the outermost first; None where there are gaps between rows.
        facts: what has to be the same of one that is made: see :func:`_facts`.
    """

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    order: list[int] | None
    facts: tuple[Any, ...]

    def made(self, mode: FakeTensorMode, symbols: list[Any]) -> FakeTensor:
        environment: Any = mode.shape_env

        def sizes(of: tuple[Any, ...]) -> list[Any]:
            return [s.of(symbols, environment) if type(s) is _Size else s for s in of]

        shape = sizes(self.shape)
        kind: dict[str, Any] = {"dtype": self.dtype, "device": "meta"}
        if self.order is None:
            meta = torch.empty_strided(shape, sizes(self.stride), **kind)
        elif self.order == sorted(self.order):
            meta = torch.empty(shape, **kind)
        else:
            meta = torch.empty_permuted(shape, self.order, **kind)
        tensor = FakeTensor(mode, meta, self.device)
        if self.facts != _facts(tensor):
            raise _Unknown
        return tensor


@contextlib.contextmanager
def results_found_once() -> Iterator[None]:
    """Inside, a result in a trace with symbols is made of what is known of the same operation."""
    here, own = this_thread(), FakeTensorMode.dispatch
    kept: dict[Any, tuple[_Sequence | None, list[_Result]] | None] = {}
    eligible: dict[int, bool] = {}

    def dispatch(
        mode: FakeTensorMode, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        wanted = eligible.get(id(operator))
        if wanted is None:
            wanted = eligible[id(operator)] = _gives_new_tensors(operator)
        environment: Any = mode.shape_env
        if not wanted or environment is None or not here():
            return own(mode, operator, types, args, kwargs or {})
        symbols: list[Any] = []
        try:
            with torch._C.DisableTorchFunction():
                key = (
                    mode,
                    environment._replacements_version_counter,
                    torch.is_grad_enabled(),
                    torch.get_default_dtype(),
                    operator,
                    *_kind(args, mode, symbols),
                    *_kind(list((kwargs or {}).items()), mode, symbols),
                )
        except _Unknown:
            return own(mode, operator, types, args, kwargs or {})
        known = kept.get(key)
        if known is not None:
            sequence, results = known
            try:
                with torch._C.DisableTorchFunction(), environment.suppress_guards():
                    tensors = [each.made(mode, symbols) for each in results]
                return tensors[0] if sequence is None else sequence(tensors)
            except _Unknown:
                kept[key] = None
        found = own(mode, operator, types, args, kwargs or {})
        if key not in kept and environment._replacements_version_counter == key[1]:
            try:
                with torch._C.DisableTorchFunction():
                    kept[key] = _described(found, mode, symbols, [args, kwargs])
            except _Unknown:
                kept[key] = None
        return found

    with replaced(FakeTensorMode, "dispatch", dispatch):
        yield


def _gives_new_tensors(operator: Any) -> bool:
    """Whether an operator only computes tensors from tensors, as far as it says."""
    if not isinstance(operator, torch._ops.OpOverload) or operator.namespace != "aten":
        return False
    schema = operator._schema
    return (
        not schema.is_mutable
        and not _LEFT_ALONE & set(operator.tags)
        and bool(schema.returns)
        and all(str(r.type) == "Tensor" and r.alias_info is None for r in schema.returns)
    )


def _kind(arguments: Any, mode: FakeTensorMode, symbols: list[Any]) -> list[Any]:
    """What of arguments decides about results; the sizes that are no numbers go to ``symbols``."""
    kind: list[Any] = []

    def add(value: Any) -> None:
        given = type(value)
        if given is FakeTensor:
            if value.fake_mode is not mode or value.constant is not None or is_known(value):
                raise _Unknown
            if value.layout is not torch.strided or value.is_nested:
                raise _Unknown
            kind.append((value.dtype, value.device, _keys(value), value.dim()))
            for size in (*value.shape, *_base.stride(value), _base.storage_offset(value)):
                number(size)
        elif given is torch.SymInt:
            kind.append(given)
            number(value)
        elif given in _PLAIN:
            kind.append((given, value))
        elif given is list or given is tuple:
            kind.append((given, len(value)))
            for each in value:
                add(each)
        else:
            raise _Unknown

    def number(size: Any) -> None:
        if type(size) is int:
            kind.append(size)
            return
        kind.append((_expression(size), size.node._hint))
        symbols.append(size)

    add(arguments)
    return kind


def _described(
    found: Any, mode: FakeTensorMode, symbols: list[Any], arguments: Any
) -> tuple[_Sequence | None, list[_Result]]:
    """How to make such results again.

    Raises:
        _Unknown: they are no new tensors, or more than that.
    """
    sequence: Any = type(found) if isinstance(found, tuple | list) else None
    tensors = [found] if sequence is None else [*found]
    sequence = getattr(sequence, "_make", sequence)  # of a named tuple
    places = {id(size.node): place for place, size in reversed([*enumerate(symbols)])}
    memory = {_storage(t)._cdata for t in _tensors(arguments)}

    def described(size: Any) -> Any:
        if type(size) is int:
            return size
        return _Size(places.get(id(size.node)), _expression(size), size.node._hint)

    results = []
    for tensor in tensors:
        if type(tensor) is not FakeTensor or tensor.fake_mode is not mode:
            raise _Unknown
        if tensor.constant is not None or tensor.layout is not torch.strided or tensor.is_nested:
            raise _Unknown
        storage = _storage(tensor)
        if storage._cdata in memory or _plain(_base.storage_offset(tensor)) != 0:
            raise _Unknown
        memory.add(storage._cdata)
        results.append(
            _Result(
                tuple(map(described, tensor.shape)),
                tuple(map(described, _base.stride(tensor))),
                tensor.dtype,
                tensor.device,
                _order(tensor),
                _facts(tensor),
            )
        )
    return sequence, results


def _tensors(arguments: Any) -> Iterator[torch.Tensor]:
    if isinstance(arguments, torch.Tensor):
        yield arguments
    elif isinstance(arguments, list | tuple):
        for each in arguments:
            yield from _tensors(each)
    elif isinstance(arguments, dict):
        yield from _tensors([*arguments.values()])


def _expression(size: Any) -> Any:
    """Of a size that the example knows.

    Raises:
        _Unknown: only values decide about it, or it is no expression.
    """
    node = size.node
    if type(node) is not SymNode or type(node._hint) is not int:
        raise _Unknown
    return node.expr


def _plain(size: Any) -> Any:
    return size if type(size) is int else _expression(size)


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Strides and bytes in memory, as expressions, and what PyTorch dispatches by."""
    strides = tuple(map(_plain, _base.stride(tensor)))
    return strides, _plain(_storage(tensor).nbytes()), _keys(tensor)


def _order(tensor: torch.Tensor) -> list[int] | None:
    """The axes in the order in which they lie in memory, if no memory lies between."""
    shape, strides = [*map(_plain, tensor.shape)], [*map(_plain, _base.stride(tensor))]
    left, order, expected = [*range(len(shape))], list[int](), 1
    while left:
        axis = next((a for a in reversed(left) if strides[a] == expected), None)
        if axis is None:
            return None
        left.remove(axis)
        order.insert(0, axis)
        expected = expected * shape[axis]
    return order


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    storage: torch.UntypedStorage = _base.untyped_storage(tensor)
    return storage


_keys: Callable[[torch.Tensor], str] = torch._C._dispatch_key_set
