"""The hooks on modules.

Private: the tables of hooks that each module has, and those of ``torch.nn.modules.module`` that are
for all modules. ``torch.nn.Module`` lets add hooks, and lists none. Without these names no module
is held: a hook that comes later would not be heard in a graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules import module as of_all

_OWN = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL = tuple(f"_global{name}" for name in _OWN)


def tables_of(modules: Iterable[nn.Module]) -> list[dict[int, Any]]:
    """The tables of the hooks on some modules, and of those on all."""
    found = [getattr(of_all, name) for name in _GLOBAL]
    return [*found, *(getattr(each, name) for each in modules for name in _OWN)]
