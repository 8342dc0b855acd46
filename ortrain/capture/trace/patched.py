"""Attributes of PyTorch's classes and modules that are others while a module is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import _FunctionBase
from torch.autograd.function import _SingleLevelFunction

APPLY: Any = vars(_FunctionBase)["apply"]
"""PyTorch's own ``apply`` of custom autograd functions, a class method in C."""


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Puts a value in the place of an attribute; one that was inherited or missing is so again."""
    had, own = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, own)
        else:
            delattr(owner, name)


@contextlib.contextmanager
def apply_replaced(apply: Callable[..., Any]) -> Iterator[None]:
    """Calls `apply` with a custom autograd function and its arguments in the place of ``APPLY``.

    Until PyTorch 2.13 ``Function.apply`` is Python code that calls the ``apply`` which it inherits.
    Since 2.14 it is ``APPLY`` itself: what has been bound to a name before, as in
    ``gelu = GELU.apply``, is not met here.
    """

    def outermost(function: Any, *args: Any, **kwargs: Any) -> Any:
        if torch._C._are_functorch_transforms_active():  # it makes a function that comes here
            return APPLY.__get__(None, function)(*args, **kwargs)
        return apply(function, *args, **kwargs)

    function = torch.autograd.Function
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(_SingleLevelFunction, "apply", classmethod(apply)))
        if vars(function)["apply"] is APPLY:
            stack.enter_context(replaced(function, "apply", classmethod(outermost)))
        yield
