"""Which functions of the user's code may stay PyTorch's, where a capture refuses what they do."""

from __future__ import annotations

import gc
import pickle
import sys
import traceback
from collections.abc import Iterable, Sequence
from types import CodeType, FrameType, FunctionType
from typing import Any

from torch import nn

from ortrain.capture.origin import is_users
from ortrain.capture.trace.functions import function_of, named_functions
from ortrain.errors import CaptureError
from ortrain.module_state.untouched import call_aside, generator_state

# They take arrays, and none of PyTorch's tensors.
_WITHOUT_TENSORS = {"numpy", "scipy"}


def codes_of(chain: Iterable[BaseException]) -> tuple[CodeType, ...]:
    """The code that ran when errors were raised, the innermost first; the user's own."""
    found: dict[CodeType, None] = {}
    for error in chain:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if is_users(frame.f_code.co_filename):
                found.pop(frame.f_code, None)
                found[frame.f_code] = None
    return tuple(reversed(found))


def candidates(module: nn.Module, error: CaptureError) -> list[FunctionType]:
    """The functions and methods around the place of an error, the innermost first.

    Args:
        module: that was to be captured.
        error: of the capture.
    """
    forwards = _forwards(module)
    codes = [*error.codes, *_codes_at(error.lines)]
    found: dict[FunctionType, None] = {}
    for code in codes:
        function = None if code in forwards else function_of(code)
        if function is not None and _package(function) not in _WITHOUT_TENSORS:
            found[function] = None
    return list(found)


def _package(function: FunctionType) -> str:
    return (function.__module__ or "").partition(".")[0]


def _forwards(module: nn.Module) -> set[CodeType]:
    """The code of what modules are called by, which is theirs to keep."""
    found: set[CodeType] = set()
    for kind in {type(each) for each in module.modules()}:
        for name in ("forward", "__call__"):
            function: Any = getattr(kind, name, None)
            while function is not None:
                if isinstance(function, FunctionType):
                    found.add(function.__code__)
                function = getattr(function, "__wrapped__", None)
    return found


def _codes_at(lines: Sequence[tuple[str, int]]) -> list[CodeType]:
    """The code of the functions that lines of files are in, the last first."""
    found: dict[CodeType, None] = {}
    for file, line in reversed(lines):
        if is_users(file):
            named = (f.__code__ for f in named_functions(file))
            codes = {code for code in named if _has(code, line)} or _nameless(file, line)
            found.update(dict.fromkeys(codes))
    return list(found)


def _has(code: CodeType, line: int) -> bool:
    return any(at == line for *_, at in code.co_lines())


def _nameless(file: str, line: int) -> set[CodeType]:
    """The code of functions without a name of their own that a line is in.

    It walks all there is: 0.3 s where a BERT of transformers is loaded.
    """
    functions = (f for f in gc.get_objects() if type(f) is FunctionType)
    codes = (f.__code__ for f in functions)
    return {code for code in codes if code.co_filename == file and _has(code, line)}


def drawing_codes(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], generators: Iterable[Any]
) -> tuple[CodeType, ...]:
    """The code that draws random numbers when a module is called, the innermost first."""
    watch = _Watch(list(generators))
    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        call_aside(module, args, kwargs)
    except Exception:
        return ()
    finally:
        sys.setprofile(before)
    return tuple(watch.found)


class _Watch:
    """Sees between the beginning and the end of which functions generators have moved on.

    Attributes:
        found: the code of these, the innermost first.
    """

    def __init__(self, generators: list[Any]) -> None:
        self.generators = generators
        self.stack: list[tuple[FrameType, bytes]] = []
        self.found: dict[CodeType, None] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and is_users(frame.f_code.co_filename):
            self.stack.append((frame, self._states()))
        elif event == "return" and self.stack and self.stack[-1][0] is frame:
            before = self.stack.pop()[1]
            if before != self._states():
                self.found[frame.f_code] = None

    def _states(self) -> bytes:
        return pickle.dumps([generator_state(each) for each in self.generators])
