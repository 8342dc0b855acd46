"""Refuses code that could tell the tensor in the place of a number from the number itself.

Where numbers are inputs of a graph (`numbers`, `attributes`), a trace has tensors in their places.
``isinstance(n, float)`` has another answer for one, and so has a look-up in a dictionary or a set,
or the text of it. The example may not show it, because the code goes on alike there.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree

from ortrain.capture.origin import is_users
from ortrain.errors import CaptureError
from ortrain.exclusive import this_thread
from ortrain.module_state.survey import Survey

_METHODS = {"__hash__": "a dictionary or a set", "__format__": "text", "__repr__": "text"}


@contextlib.contextmanager
def stand_ins_watched(
    module: nn.Module, held: Callable[[], Collection[Any]], *, arguments_too: bool
) -> Iterator[None]:
    """Watches a trace.

    Args:
        module: that is traced.
        held: the tensors in the places of numbers that the code does not get as arguments.
        arguments_too: whether tensors among the arguments may stand in for numbers; which ones is
            found as the forward gets them.

    Raises:
        CaptureError: in the trace, code asks what a stand-in is; at its end, where there was one
            and the code names ``type``, which cannot be watched.
    """
    here = this_thread()
    arguments: list[Tensor] = []

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves = pytree.tree_leaves((args, kwargs))
        arguments[:] = [v for v in leaves if own(v, Tensor) and v.ndim == 0]

    def stands_in(value: Any, frame: FrameType) -> bool:
        if frame.f_code.co_name == "is_tensor" and frame.f_back is not None:
            frame = frame.f_back
        known = any(value is each for each in (*arguments, *held()))
        return known and is_users(frame.f_code.co_filename)

    def ask(value: Any, kind: Any) -> bool:
        answer = own(value, kind)
        if here() and own(value, Tensor) and stands_in(value, sys._getframe(1)):
            number: float | int = 0.0 if value.is_floating_point() else 0
            if answer != own(number, kind):
                raise _told_apart("isinstance()")
        return answer

    def asked(method: Callable[..., Any], by: str) -> Callable[..., Any]:
        def ask(value: Tensor, *args: Any, **kwargs: Any) -> Any:
            if here() and stands_in(value, sys._getframe(1)):
                raise _told_apart(by)
            return method(value, *args, **kwargs)

        return ask

    own = builtins.isinstance
    kinds: tuple[Any, ...] = (Tensor, FakeTensor, FunctionalTensor)
    methods = [(k, n, vars(k)[n]) for k in kinds for n in _METHODS if n in vars(k)]
    hook = module.register_forward_pre_hook(begin, with_kwargs=True) if arguments_too else None
    for kind, name, method in methods:
        setattr(kind, name, asked(method, _METHODS[name]))
    builtins.isinstance = ask
    try:
        yield
    finally:
        builtins.isinstance = own
        for kind, name, method in methods:
            setattr(kind, name, method)
        if hook is not None:
            hook.remove()
    if (arguments_too or held()) and Survey(module).asks_class:
        raise _told_apart("type()")


def _told_apart(by: str) -> CaptureError:
    return CaptureError(
        "the forward asks what a number is that changes from call to call",
        because=f"a graph gets a tensor in its place, which {by} tells from a number",
        help="pass it as a tensor, or keep the number as it is",
    )
