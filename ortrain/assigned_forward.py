"""A forward that a library binds to an ORTModule, in the place of the module's.

One that calls what it has found there goes around the graph, and stays where it is. One that does
not is the module's new code: trl's trainers put a fused loss there, which calls the parts of the
module itself, so that no call would come to the graph. Such a one becomes the module's own forward,
and what stood there before is the module's code as it was.
"""

from __future__ import annotations

from ortrain.extras import require

require("torch", __name__)

import functools
import threading
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn


class Entry:
    """What an ORTModule has for its forward, as a function that others may hold on to.

    Args:
        module: the module of the ORTModule.
        run: takes the arguments of a call, positional and by name.
        is_part: whether the call that is being converted is part of another graph of ours.

    Attributes:
        function: it.
        calls: of it, so far.
        before: the module's code that it stands for, once the module has another.
    """

    def __init__(
        self, module: nn.Module, run: Callable[..., Any], is_part: Callable[[], bool]
    ) -> None:
        self.calls = 0
        self.before: Callable[..., Any] | None = None

        @functools.wraps(module.forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() and is_part():
                return module(*args, **kwargs)
            self.calls += 1
            if self.before is not None:
                return self.before(*args, **kwargs)
            return run(args, kwargs)

        self.function = call
        self._held: Any = None

    def give_way(self, module: nn.Module, function: FunctionType) -> None:
        """Makes a function the module's forward; its code as it was runs for the entry."""
        before = module.forward
        self._held, self.before = module.__dict__.get("forward"), before
        module.__dict__["forward"] = MethodType(_as_module_code(function, before), module)

    def give_back(self, module: nn.Module) -> None:
        """Takes that back."""
        if self._held is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = self._held
        self._held = self.before = None


def is_bound_to(value: Any, wrapper: nn.Module) -> bool:
    """Whether it is a function of Python that is bound to an ORTModule."""
    return (
        type(value) is MethodType
        and value.__self__ is wrapper
        and isinstance(value.__func__, FunctionType)
    )


def watched(
    function: FunctionType, entry: Entry, adopt: Callable[[Any, FunctionType], None]
) -> Callable[..., Any]:
    """A function to bind that is adopted when a training step of it has not come to the entry.

    Where another one has been put around it by then, that one is.
    """

    @functools.wraps(function)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = entry.calls
        result = function(self, *args, **kwargs)
        in_place = getattr(vars(self).get("forward"), "__func__", None) is forward
        if entry.calls == before and in_place and torch.is_grad_enabled():
            adopt(self, function)
        return result

    return forward


def fits(function: FunctionType, wrapper: type, module: nn.Module) -> bool:
    """Whether a function's ``self`` may be the module: it names nothing that only ORTModule has."""
    own = {name for name in vars(wrapper) if not name.startswith("_")} - {"forward"}
    return not any(not hasattr(module, name) for name in own & _names(function.__code__))


def _names(code: CodeType) -> set[str]:
    """Attributes, globals and strings that code and the functions inside of it name."""
    constants = {each for each in code.co_consts if isinstance(each, str)}
    inner = [_names(each) for each in code.co_consts if isinstance(each, CodeType)]
    return {*code.co_names, *constants}.union(*inner)


def _as_module_code(function: FunctionType, before: Callable[..., Any]) -> Callable[..., Any]:
    """The function as a module's forward; where it calls the module, that runs what was before."""
    inside = threading.local()

    @functools.wraps(function)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(inside, "runs", False):
            return before(*args, **kwargs)
        inside.runs = True
        try:
            return function(self, *args, **kwargs)
        finally:
            inside.runs = False

    return forward
