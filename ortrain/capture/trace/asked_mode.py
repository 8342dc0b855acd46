"""Code that asks whether it is traced: ``if not torch.compiler.is_exporting(): self.seen = x``.

A graph stands for calls that are not traced, in which such code does something else. What it
computes then, the certificate compares; what it leaves in the module, nobody would see. So where
the code of a trace asks, the call is made once more, aside and for real, and what that one leaves
counts.
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
from ortrain.exclusive import this_thread
from ortrain.module_state.untouched import Effects, call_aside, watched

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
) -> Effects:
    """What a call that is not traced leaves in a module, beyond what the trace of it has left.

    Nothing of the module is changed. Of a call that raises nothing is known.
    """
    known = keeper()
    try:
        with watched(module, traced=False, live=live_modules(module)) as effects:
            call_aside(module, args, kwargs)
    except Exception:
        return Effects()
    # Functions that stay PyTorch's draw at each call.
    drawn = [] if known is not None and known.routines else effects.drawn
    before, now = (
        [*each.assigned, *(filling.path for filling in each.fillings)] for each in (traced, effects)
    )
    return Effects(
        assigned=[path for path in now if path not in before],
        filled=[path for path in effects.filled if path not in traced.filled],
        recast=[path for path in effects.recast if path not in traced.recast],
        drawn=[name for name in drawn if name not in traced.drawn],
    )
