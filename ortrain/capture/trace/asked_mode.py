"""Code that asks whether it is traced: ``if not torch.compiler.is_exporting(): self.seen = x``.

A graph stands for calls that are not traced, in which such code does something else. What it
computes then, the certificate compares; what it leaves in the module, nobody would see. So where
the code of a trace asks, the call is made once more, aside and for real, and what that one leaves
counts. It may also go by values there, by which it goes another way in another call.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import nn

from ortrain.capture.origin import is_users
from ortrain.capture.trace.aside import is_aside
from ortrain.capture.trace.functions import called_instead, twin_of
from ortrain.capture.trace.keeping import keeper, live_modules
from ortrain.capture.trace.patched import replaced
from ortrain.exclusive import this_thread
from ortrain.module_state.untouched import Effects, calls_aside, watched
from ortrain.pytorch.saving import NothingSaved

_compiler: Any = torch.compiler
_QUESTIONS: tuple[FunctionType, ...] = (
    _compiler.is_exporting,
    _compiler.is_compiling,
    _compiler.is_dynamo_compiling,
)


@contextlib.contextmanager
def questions_noted() -> Iterator[list[str]]:
    """Collects what the code inside asks of this kind, by name; it gets the answers of a trace."""
    asked, here = list[str](), this_thread()

    def noted(question: FunctionType) -> Callable[[], Any]:
        answer = twin_of(question)

        def note() -> Any:
            if here() and is_aside():  # as at each call, which is not traced
                return False
            caller: FrameType | None = sys._getframe(2)  # behind the function that hands on
            if here() and caller is not None and is_users(caller.f_code.co_filename):
                asked.append(question.__name__)
            return answer()

        return note

    with called_instead({question: noted(question) for question in _QUESTIONS}):
        yield asked


def left_by_a_call(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], traced: Effects
) -> tuple[Effects, bool]:
    """What a call that is not traced leaves in a module, beyond what the trace of it has left.

    Nothing of the module is changed. Of a call that raises nothing is known.

    Returns:
        It, and whether the code of the call goes by the values of tensors.
    """
    known = keeper()
    try:
        effects, places = _effects_of(module, args, kwargs)
    except Exception:
        return Effects(), True
    # Functions that stay PyTorch's draw at each call.
    drawn = [] if known is not None and known.routines else effects.drawn
    before, now = (
        [*each.assigned, *(filling.path for filling in each.fillings)] for each in (traced, effects)
    )
    left = Effects(
        assigned=[path for path in now if path not in before],
        filled=[path for path in effects.filled if path not in traced.filled],
        recast=[path for path in effects.recast if path not in traced.recast],
        drawn=[name for name in drawn if name not in traced.drawn],
    )
    return left, bool(places)


def _effects_of(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Effects, list[str]]:
    """What a call aside does, and the files whose code goes by values.

    No backward follows it. So nothing is saved for one, unless its own code has one.
    """

    def call_with(saving: contextlib.AbstractContextManager[Any]) -> tuple[Effects, list[str]]:
        with (
            watched(module, traced=False, live=live_modules(module)) as effects,
            calls_aside(module, args, kwargs) as call,
            saving,
            _values_noted() as places,
        ):
            call()
        return effects, places

    with contextlib.suppress(Exception):
        nothing = NothingSaved()
        found = call_with(nothing)
        if not nothing.asked:
            return found
    return call_with(contextlib.nullcontext())


@contextlib.contextmanager
def _values_noted() -> Iterator[list[str]]:
    """Collects the files whose code asks for the truth, or the number, of a tensor inside."""
    asked, here = list[str](), this_thread()

    def noted(own: Callable[..., Any]) -> Callable[..., Any]:
        def method(tensor: torch.Tensor) -> Any:
            file = sys._getframe(1).f_code.co_filename
            if here() and is_users(file):
                asked.append(file)
            return own(tensor)

        return method

    kind: Any = torch.Tensor
    with contextlib.ExitStack() as patches:
        for name in ("__bool__", "item"):
            patches.enter_context(replaced(kind, name, noted(getattr(kind, name))))
        yield asked
