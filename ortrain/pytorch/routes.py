"""A module's calls by another way, as ``nn.Module.compile`` does, that can be switched off again.

Private: ``nn.Module._compiled_call_impl``, which ``nn.Module.compile`` sets and copies do not have,
and ``_call_impl``, what a module's call is without; ``torch.overrides``' names of the current
function mode. Without them blocks are not compiled each for itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_overrides: Any = torch.overrides


def is_routed(module: nn.Module) -> bool:
    """Whether calls of a module go another way already, as those that a user has compiled do."""
    return module._compiled_call_impl is not None


def way_of(module: nn.Module) -> Any:
    """Where calls of a module go; None where they go to it."""
    return module._compiled_call_impl


def route(module: nn.Module, way: Callable[..., Any] | None) -> None:
    """Has calls of a module go a way; None takes that back."""
    module._compiled_call_impl = way


def plainly(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A module's call, whichever way its calls go."""
    return module._call_impl(*args, **kwargs)


def without(mode: TorchFunctionMode) -> contextlib.AbstractContextManager[Any]:
    """No function mode inside, if it is this one that is on top."""
    if _overrides._get_current_function_mode() is mode:
        popped: contextlib.AbstractContextManager[Any] = _overrides._pop_mode_temporarily()
        return popped
    return contextlib.nullcontext()
