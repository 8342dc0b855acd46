"""Sizes answer code as numbers do while a module is traced.

A trace has symbols in the place of sizes, of classes of their own: ``isinstance(x.shape[0], int)``
would be false, ``type(n) is int`` too, and ``(n == 7) is True`` for every n. No condition would be
left of such a question, and the graph would go another way than the module at other sizes. So code
that is not PyTorch's gets the answers of numbers: symbols say that they are ints, floats and bools,
and comparing them decides.

``__class__`` of an existing class can only be written past its metaclass, into its dictionary.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import gc
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ortrain.capture.origin import is_library, is_standard
from ortrain.capture.trace.known_numbers import known_number
from ortrain.capture.trace.patched import replaced
from ortrain.capture.trace.statements import only_called
from ortrain.exclusive import this_thread
from ortrain.module_state.survey import Survey

_NUMBERS: dict[Any, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
# Asked 170,000 times in a trace of four layers of BERT: 0.15 s of 3.6.
_is_standard, _is_library = functools.cache(is_standard), functools.cache(is_library)
_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
# What numbers have and torch's symbols lack. Where that is no arithmetic, it fixes the size.
_ATTRIBUTES: dict[str, Any] = {
    "real": property(lambda n: n),
    "imag": property(lambda n: 0),
    "numerator": property(lambda n: n),
    "denominator": property(lambda n: 1),
    "bit_count": lambda n: int(n).bit_count(),
    "to_bytes": lambda n, *how, **keywords: int(n).to_bytes(*how, **keywords),
    "__divmod__": lambda n, divisor: (n // divisor, n % divisor),
    "__rdivmod__": lambda n, number: (number // n, number % n),
    "__invert__": lambda n: -n - 1,
    "__xor__": lambda n, other: int(n) ^ int(other),
    "__rxor__": lambda n, other: int(other) ^ int(n),
}


@contextlib.contextmanager
def symbols_as_numbers(module: nn.Module) -> Iterator[None]:
    """Answers code of other files than PyTorch's and ours, in this thread.

    Args:
        module: that is traced inside; its files get a ``type`` and a ``len`` that know symbols
            while its forward runs.
    """
    here = this_thread()

    def asks(frame: FrameType | None) -> bool:
        """Whether the code that a frame runs is answered as with numbers."""
        while frame is not None and _is_standard(frame.f_code.co_filename):  # abc, functools
            frame = frame.f_back
        return frame is not None and not _is_library(frame.f_code.co_filename) and here()

    def class_of(kind: type) -> property:
        number = _NUMBERS[kind]
        return property(lambda symbol: number if asks(sys._getframe(1)) else kind)

    def deciding(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def decide(symbol: Any, other: Any) -> Any:
            answer = compare(symbol, other)
            if type(answer) is not torch.SymBool or not asks(sys._getframe(1)):
                return answer
            # Of what values decide, ``torch._check`` may say later what is to hold.
            return answer if free_unbacked_symbols(answer) else bool(answer)

        return decide

    compared = [
        (kind, name, vars(kind)[name])
        for kind in _NUMBERS
        for name in _COMPARISONS
        if name in vars(kind)
    ]
    files = [
        (space, name)
        for space, file in _files(module)
        for name in _BUILTINS
        if name not in space and (name not in _CONVERTING or only_called(file, name))
    ]

    def begin(*_: object) -> None:
        for file, name in files:
            file[name] = _BUILTINS[name]

    def end(*_: object) -> None:
        for file, name in files:
            file.pop(name, None)

    hooks = [
        module.register_forward_pre_hook(begin, prepend=True),  # before effects are watched
        module.register_forward_hook(end, always_call=True),
    ]
    for kind in _NUMBERS:
        _write(kind, "__class__", class_of(kind))
    try:
        with contextlib.ExitStack() as patches:
            for kind, name, method in compared:
                patches.enter_context(replaced(kind, name, deciding(method)))
            for name, attribute in _ATTRIBUTES.items():
                patches.enter_context(replaced(torch.SymInt, name, attribute))
            yield
    finally:
        for kind in _NUMBERS:
            _write(kind, "__class__", None)
        for hook in hooks:
            hook.remove()
        end()


class _Type:
    """``type``, to which a symbol is a number."""

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        found = builtins.type(*args, **keywords)
        return _NUMBERS.get(found, found) if len(args) == 1 else found

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, builtins.type)

    def __subclasscheck__(self, value: Any) -> bool:
        return issubclass(value, builtins.type)

    def __mro_entries__(self, bases: Any) -> tuple[Any, ...]:
        return (builtins.type,)

    def __getattr__(self, name: str) -> Any:
        return getattr(builtins.type, name)


def _len(value: Any) -> Any:
    """``len``, to which the first size of a tensor may be a symbol."""
    if isinstance(value, torch.Tensor) and value.dim():
        return value.shape[0]
    return builtins.len(value)


class _Conversion:
    """``int`` or ``float``, which leaves a symbol one; so in the place of a tensor that is known.

    Python takes nothing but its own numbers from ``__int__`` and ``__float__``.
    """

    def __init__(self, own: type, convert: Callable[[Any], Any]) -> None:
        self.own, self.convert = own, convert

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        value = args[0] if len(args) == 1 and not keywords else None
        if isinstance(value, torch.Tensor):
            known = known_number(value)
            value = value if known is None else known
        is_symbol = builtins.type(value) in (torch.SymInt, torch.SymFloat)
        if is_symbol and not free_unbacked_symbols(value):
            return self.convert(value)
        return self.own(*args, **keywords)

    def __instancecheck__(self, value: Any) -> bool:
        number = _NUMBERS.get(builtins.type(value))  # what a symbol says to code that is not ours
        return isinstance(value, self.own) if number is None else issubclass(number, self.own)

    def __subclasscheck__(self, value: Any) -> bool:
        return issubclass(value, self.own)


# Only in files that call them, and ask isinstance(): whatever else is told the name wants a class.
_CONVERTING = {
    "int": _Conversion(int, torch.sym_int),
    "float": _Conversion(float, torch.sym_float),
}
_BUILTINS: dict[str, Any] = {"type": _Type(), "len": _len, **_CONVERTING}


def _files(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """The globals of the files that the module's code is written in, and the files."""
    found: dict[int, tuple[dict[str, Any], str]] = {}
    forwards = [inspect.unwrap(type(each).forward) for each in module.modules()]
    for function in (*forwards, *Survey(module).functions):
        space, code = getattr(function, "__globals__", {}), getattr(function, "__code__", None)
        if code is None:
            continue
        if not is_library(code.co_filename) and not is_standard(code.co_filename):
            found[id(space)] = space, code.co_filename
    return list(found.values())


def _write(kind: type, name: str, value: Any) -> None:
    """Writes an attribute of a class past its metaclass; None removes it."""
    namespace: Any = next(d for d in gc.get_referents(kind.__dict__) if type(d) is dict)
    if value is None:
        namespace.pop(name, None)
    else:
        namespace[name] = value
    kind._ortrain_written = None  # type: ignore[attr-defined]  # has the interpreter look again
    del kind._ortrain_written  # type: ignore[attr-defined]
