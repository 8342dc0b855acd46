"""Tensors whose numbers a trace knows: those that are made of sizes.

Code of models computes with sizes as numbers of Python, which stay symbols in a trace. It also
makes tensors of sizes and reads numbers back from them: ``torch.div(hidden.size(1), 8,
rounding_mode="trunc")``, ``torch.tensor([x.size(0), 4]).tolist()``. A trace gives tensors without
contents, so that a number that is read from one would be one that only values decide. Here it is
noted beside each small tensor how it has come of sizes and numbers. Where code reads it, as a
number, in the place of a size or as true or false, it gets the symbol, and goes on with that as
with any size. Elements are computed by then only, so that a tensor which stays a tensor asks
nothing of the sizes.

Used of torch beyond what it documents (``tests/capture/trace/test_known_numbers.py`` pins each):
``torch._subclasses.fake_tensor``: ``FakeTensorMode.dispatch``, ``FakeTensor`` and its ``constant``;
``torch.fx.experimental.proxy_tensor``: ``ProxyTorchDispatchMode.__torch_dispatch__``;
``torch._refs.tensor``.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch._refs
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.overrides import TorchFunctionMode

from ortrain.capture.trace import exact_numbers as exact
from ortrain.capture.trace.exact_numbers import Inexact, number_of
from ortrain.capture.trace.number_rules import RULES, UNREAD, WRITING, Form, Rule, Vector
from ortrain.capture.trace.patched import replaced
from ortrain.capture.writes import written_by
from ortrain.exclusive import this_thread
from ortrain.module_state.survey import compared

aten: Any = torch.ops.aten
_base: Any = torch._C.TensorBase
_MOST = 64  # elements of a tensor whose numbers are noted
_SYMBOLS = (torch.SymInt, torch.SymFloat)


class _Unknown(Exception):
    """An argument whose numbers nothing says."""


@dataclass
class _Made:
    """How a tensor was made, and its elements once they were asked for.

    Attributes:
        form: of the tensor.
        rule: of the operator.
        args: of it, with this in the places of tensors.
        kwargs: likewise.
    """

    form: Form
    rule: Rule
    args: Any
    kwargs: dict[str, Any]
    _vector: Vector | None = None
    _failed: bool = False

    def vector(self) -> Vector:
        """The elements.

        Raises:
            Inexact: no rule gives them.
        """
        if self._failed:
            raise Inexact
        if self._vector is None:
            self._failed = True  # unless it comes to the end
            try:
                args, kwargs = _read(self.args), _read(self.kwargs)
                self._vector = self.rule(self.form, *args, **kwargs)
            except (TypeError, IndexError, KeyError, ZeroDivisionError) as error:
                raise Inexact from error  # an argument that the rule does not know
            self._failed = False
        return self._vector


def _read(given: Any) -> Any:
    """Arguments, with elements in the places of how they were made."""
    if isinstance(given, _Made):
        return given.vector()
    if isinstance(given, list | tuple):
        return [_read(each) for each in given]
    return {n: _read(each) for n, each in given.items()} if isinstance(given, dict) else given


class _Known:
    """What is noted in a trace.

    A tensor has it itself, since PyTorch copies one that something else holds (``make_variable``).

    Attributes:
        any: whether there is one that has it.
        writes: how often memory was written to.
    """

    def __init__(self) -> None:
        self.any = False
        self.writes: dict[int, int] = {}

    def of(self, tensor: Any) -> _Made | None:
        """How a tensor was made, if nothing has been written to it since."""
        made, *place = vars(tensor).get(_NOTE, (None,))
        if made is None or place != self._place(tensor) or tuple(tensor.shape) != made.form.shape:
            return None
        return made

    def note(self, tensor: Any, made: _Made) -> None:
        """Notes how a tensor was made."""
        vars(tensor)[_NOTE] = made, *self._place(tensor)
        self.any = True

    def written(self, tensor: Any) -> None:
        """Forgets all that lies where a tensor does."""
        memory = _memory(tensor)
        self.writes[memory] = self.writes.get(memory, 0) + 1

    def _place(self, tensor: Any) -> list[Any]:
        memory = _memory(tensor)
        return [self, memory, self.writes.get(memory, 0)]


_NOTE = "_ortrain_made"


def _memory(tensor: Any) -> int:
    memory: int = _base.untyped_storage(tensor)._cdata
    return memory


_known: _Known | None = None


def is_known(tensor: Any) -> bool:
    """Whether it is noted how a tensor without contents has come of numbers."""
    return _known is not None and _known.any and _NOTE in vars(tensor)


def known_number(tensor: Any) -> Any:
    """The number that a tensor of one element holds, a symbol of the trace; None if unknown."""
    if not is_known(tensor):
        return None
    element = _element(tensor)
    if element is None:
        return None
    try:
        return number_of(element, tensor.dtype)
    except Inexact:
        return None


def _element(tensor: Any) -> Any:
    """The one element of a tensor, None where it is not known or there are several."""
    with torch._C.DisableTorchFunction():
        made = None if _known is None else _known.of(tensor)
        if made is None or math.prod(made.form.shape) != 1:
            return None
    try:
        return made.vector().elements[0]
    except Inexact:
        return None


@contextlib.contextmanager
def numbers_remembered() -> Iterator[None]:
    """Inside, tensors that are made of sizes know their numbers, and give them to code."""
    global _known
    before, _known = _known, _Known()
    known, here, own = _known, this_thread(), FakeTensorMode.dispatch
    proxied = ProxyTorchDispatchMode.__torch_dispatch__

    def dispatch(
        mode: FakeTensorMode, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if mode.shape_env is None or not here():
            return own(mode, operator, types, args, kwargs)
        rule = RULES.get(operator) or WRITING.get(operator)
        first = args[0] if args else None
        if type(first) is FakeTensor and first.constant is None and operator not in UNREAD:
            rule = rule if _NOTE in vars(first) else None  # most tensors hold values
        if rule is None and not known.any:
            return own(mode, operator, types, args, kwargs)
        with torch._C.DisableTorchFunction():
            given = None if rule is None else _given(known, operator, args, kwargs)
        found = own(mode, operator, types, args, kwargs)
        with torch._C.DisableTorchFunction():
            if known.any:
                for written in written_by(operator, args, kwargs, Tensor):
                    known.written(written)
            if rule is not None and given is not None:
                _note(known, rule, *given, found)
        return found

    def read(
        mode: ProxyTorchDispatchMode, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """A number that is known is an expression of sizes, and no node reads it."""
        if operator in _READING and here() and is_known(args[0]):
            with mode:  # the graph gets the arithmetic on sizes
                number = known_number(args[0])
            if number is not None:
                return number
        return proxied(mode, operator, types, args, kwargs or {})

    whole = {"__ceil__": (math.ceil, exact.ceiled), "__floor__": (math.floor, exact.floored)}
    try:
        with contextlib.ExitStack() as patches:
            patches.enter_context(replaced(FakeTensorMode, "dispatch", dispatch))
            patches.enter_context(replaced(ProxyTorchDispatchMode, "__torch_dispatch__", read))
            for name, (own_rounding, rounding) in whole.items():
                patches.enter_context(replaced(Tensor, name, _whole(own_rounding, rounding)))
            patches.enter_context(_Symbolic())
            yield
    finally:
        _known = before


_READING = (aten.item.default, aten._local_scalar_dense.default)


def _given(
    known: _Known, operator: Any, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    """Arguments as rules take them; None where one is a tensor of which the numbers are unknown."""

    def told(value: Any) -> Any:
        if isinstance(value, Tensor):
            return _told(known, value)
        if type(value) in (list, tuple):
            return [told(each) for each in value]
        return value

    try:
        if operator in UNREAD:
            return (None, *map(told, args[1:])), kwargs
        return tuple(map(told, args)), {name: told(value) for name, value in kwargs.items()}
    except _Unknown:
        return None


def _told(known: _Known, tensor: Tensor) -> Any:
    if type(tensor) is FakeTensor:
        made = known.of(tensor)
        if made is not None:
            return made
        held = tensor.constant
    else:
        # What a guard does not compare may hold others at the next call.
        held = tensor if type(tensor) is Tensor and compared(tensor) is not None else None
    if held is None or held.layout is not torch.strided or held.numel() > _MOST:
        raise _Unknown
    form = Form(tuple(held.shape), tensor.dtype, tensor.device)
    numbers = held.flatten().tolist()
    return _Made(form, lambda form: form.stored(numbers), (), {})


def _note(known: _Known, rule: Rule, args: Any, kwargs: dict[str, Any], found: Any) -> None:
    """Notes the rule of an operator at what it gave."""
    results = [found] if isinstance(found, Tensor) else [*found] if _is_row(found) else []
    for index, result in enumerate(results):
        if type(result) is not FakeTensor or result.constant is not None:
            continue
        shape: Any = tuple(result.shape)
        if not all(type(size) is int for size in shape) or math.prod(shape) > _MOST:
            continue
        if result.layout is not torch.strided:
            continue
        form = Form(shape, result.dtype, result.device)
        named = {**kwargs, "index": index} if len(results) > 1 else kwargs
        known.note(result, _Made(form, rule, args, named))


def _is_row(found: Any) -> bool:
    return isinstance(found, list | tuple) and all(isinstance(each, Tensor) for each in found)


def _whole(own: Callable[[float], int], rounding: Callable[[Any], Any]) -> Callable[..., Any]:
    """``math.ceil`` and ``math.floor`` of a tensor, which has no methods for them."""

    def method(tensor: Tensor) -> Any:
        element = _element(tensor) if is_known(tensor) else None
        if element is None or tensor.dtype is torch.bool:
            return own(float(tensor))
        return rounding(element).over

    return method


class _Symbolic(TorchFunctionMode):
    """Makes tensors of symbols in the one way that knows them, which the others turn into numbers.

    ``torch.as_tensor`` and ``new_tensor`` take a symbol for a number.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls the function, or what makes tensors of symbols instead."""
        kwargs = kwargs or {}
        if function == torch.as_tensor:
            named = {**dict(zip(("data", "dtype", "device"), args, strict=False)), **kwargs}
            if _has_symbols(named["data"]):
                return _tensor(named.pop("data"), **named)
        elif function == Tensor.new_tensor:
            tensor: Tensor = args[0]
            like = {"dtype": tensor.dtype, "device": tensor.device}
            given = {name: value for name, value in kwargs.items() if value is not None}
            named = {**like, **dict(zip(("data",), args[1:], strict=False)), **given}
            if _has_symbols(named["data"]):
                return _tensor(named.pop("data"), **named)
        return function(*args, **kwargs)


# What torch.export calls in the place of ``torch.tensor``.
_tensor: Any = torch._refs.tensor


def _has_symbols(data: Any) -> bool:
    if isinstance(data, list | tuple):
        return any(map(_has_symbols, data))
    return type(data) in _SYMBOLS
