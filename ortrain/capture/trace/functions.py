"""Functions of the user's code: found behind the code that a frame runs, and replaced for a while.

A function may be known under many names: of its class, of its file, of files that import it, inside
of a decorator. Its code is one, so that what is put in the place of the code is met under each.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

# Keyword of a replaced function under which it finds what is called instead.
_INSTEAD = "_ortrain_called_instead"
# Functions of ours with the user's code.
_twins: weakref.WeakSet[FunctionType] = weakref.WeakSet()
_ODD = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def function_of(code: CodeType) -> FunctionType | None:
    """The function that runs a code; None where several do, or one that yields."""
    if code.co_flags & _ODD:
        return None
    found = {f for f in named_functions(code.co_filename) if f.__code__ is code}
    if not found:  # it has no name: garbage collection knows it, unless it was told to forget it
        functions = (f for f in gc.get_referrers(code) if type(f) is FunctionType)
        found = {f for f in functions if f.__code__ is code}
    found -= {*_twins}
    return found.pop() if len(found) == 1 else None


def named_functions(file: str) -> Iterator[FunctionType]:
    """The functions of a file that have a name in it or in one of its classes."""
    for module in [*sys.modules.values()]:
        if getattr(module, "__file__", None) == file:
            yield from _functions_of(vars(module), module.__name__, file)


def _functions_of(namespace: Mapping[str, Any], module: str, file: str) -> Iterator[FunctionType]:
    for value in [*namespace.values()]:
        if isinstance(value, type):
            if value.__module__ == module and value.__dict__ is not namespace:
                yield from _functions_of(vars(value), module, file)
            continue
        seen = set[int]()
        while value is not None and id(value) not in seen:
            seen.add(id(value))
            if type(value) is FunctionType and value.__code__.co_filename == file:
                yield value
            value = _inside(value)


def _inside(value: Any) -> Any:
    """What a decorator has around it; None without one."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    if isinstance(value, property):
        return value.fget
    if isinstance(value, functools.cached_property | functools.partial):
        return value.func
    return vars(value).get("__wrapped__") if type(value) is FunctionType else None


def twin_of(function: FunctionType) -> FunctionType:
    """Another function that does the same, and goes on to do so while the first one is replaced."""
    twin = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__qualname__, twin.__module__ = function.__qualname__, function.__module__
    _twins.add(twin)
    return twin


@contextlib.contextmanager
def called_instead(calls: Mapping[FunctionType, Callable[..., Any]]) -> Iterator[None]:
    """Inside, other callables are called with the arguments of some functions."""
    before = [
        (function, function.__code__, function.__defaults__, function.__kwdefaults__)
        for function in calls
    ]
    for function, call in calls.items():
        function.__code__ = _handing_on(function.__code__)
        # Arguments that a call leaves out are the other callable's own to find.
        function.__defaults__ = None
        function.__kwdefaults__ = {_INSTEAD: call}
    try:
        yield
    finally:
        for function, code, defaults, keywords in before:
            function.__code__ = code
            function.__defaults__, function.__kwdefaults__ = defaults, keywords


def _handing_on(code: CodeType) -> CodeType:
    """Code that hands its arguments on, for a function that closes over as much as another code."""
    cells = ", ".join(code.co_freevars)
    bound = f"  {' = '.join(code.co_freevars)} = None\n" if cells else ""
    named = f"    if 0: {cells}\n" if cells else ""
    text = (
        f"def around():\n{bound}"
        f"  def handing_on(*args, {_INSTEAD}, **kwargs):\n"
        f"{named}    return {_INSTEAD}(*args, **kwargs)\n"
        "  return handing_on\n"
    )
    plain = compile(text, code.co_filename, "exec", dont_inherit=True)
    for _ in range(2):  # down to the inner function
        plain = next(each for each in plain.co_consts if isinstance(each, CodeType))
    result = plain.replace(co_name=code.co_name, co_firstlineno=code.co_firstlineno)
    assert result.co_freevars == code.co_freevars
    return result
