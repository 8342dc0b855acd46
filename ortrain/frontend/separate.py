"""Whether a module can be copied so that what the copy does is nobody else's business.

``copy.deepcopy`` takes functions and classes as they are. A function that holds something, in its
closure or as a default, goes on with that of the module.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import deque
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, distributed, nn

from ortrain.frontend.watch import Watch
from ortrain.pytorch.hooks import has_hooks
from ortrain.pytorch.parametrizations import parametrizations_are_kept
from ortrain.pytorch.saving import saving_hooks

# Of more things a module is not copied.
MOST = 10_000
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, ModuleType)
_CONTAINERS = (list, dict, set, deque)


def comparable(module: nn.Module, watch: Watch) -> bool:
    """Whether a copy can run aside, and nobody notices.

    Hooks are functions of the user's, which would see the copy. Processes wait for each other. What
    is parametrized may be kept until it is not asked for any more.
    """
    if watch.hooked or saving_hooks(False) is not None or parametrizations_are_kept():
        return False
    if distributed.is_available() and distributed.is_initialized():
        return False
    for each in module.parameters():
        if type(each) is not nn.Parameter or has_hooks(each):
            return False
        if not all(isinstance(value, _PLAIN) for value in vars(each).values()):
            return False
    seen = {id(each) for each in (*module.modules(), *module.parameters(), *module.buffers())}
    return all(_is_separate(vars(part), seen) for part in module.modules()) and not any(
        hasattr(part, "__del__") for part in module.modules()
    )


def _is_separate(value: Any, seen: set[int]) -> bool:
    """Whether a deep copy of a value has nothing that can change in common with it."""
    if isinstance(value, _PLAIN) or id(value) in seen:
        return True
    seen.add(id(value))
    if len(seen) > MOST or hasattr(value, "__del__"):
        return False
    if isinstance(value, FunctionType):
        held = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return not value.__closure__ and all(isinstance(each, _PLAIN) for each in held)
    if isinstance(value, BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, ModuleType)
    return all(_is_separate(each, seen) for each in _parts(value))


def _parts(value: Any) -> Iterable[Any]:
    """What a deep copy of a value has copies of."""
    if isinstance(value, Tensor):
        return vars(value).values()
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    if isinstance(value, functools.partial):
        return value.func, *value.args, *value.keywords.values()
    slots = (name for kind in type(value).__mro__ for name in _slots_of(kind))
    held = [*getattr(value, "__dict__", {}).values(), *(getattr(value, n, None) for n in slots)]
    if isinstance(value, dict):
        return *held, *value.keys(), *value.values()
    return (*held, *value) if isinstance(value, list | tuple | set | frozenset | deque) else held


def _slots_of(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else slots


@contextlib.contextmanager
def _unchanged(containers: Iterable[Any]) -> Iterator[None]:
    """Each container holds afterwards what it holds now."""
    before = [(each, copy.copy(each)) for each in containers]
    try:
        yield
    finally:
        for container, held in before:
            if [*map(id, _parts(container))] == [*map(id, _parts(held))]:
                continue
            if not isinstance(container, dict) or container.keys() != held.keys():
                container.clear()  # else nobody finds it empty meanwhile
            add = container.update if hasattr(container, "update") else container.extend
            add(held)


@contextlib.contextmanager
def put_back(watch: Watch) -> Iterator[None]:
    """Names of a module's code, and containers that have one, are afterwards what they were before.

    Args:
        watch: knows the module's classes.
    """
    tables = watch.namespaces()
    before = [dict(table) for table in tables]
    classes = {kind: dict(vars(kind)) for kind in watch.classes}
    held = {
        id(value): value
        for table in (*before, *classes.values())
        for value in table.values()
        if type(value) in _CONTAINERS and len(value) <= MOST
    }
    try:
        with _unchanged(held.values()):
            yield
    finally:
        for table, names in zip(tables, before, strict=True):
            for name in table.keys() - names.keys():
                if not name.startswith("__"):  # else Dynamo's, of another thread
                    del table[name]
            for name, value in names.items():
                if table.get(name) is not value:
                    table[name] = value
        for kind, names in classes.items():
            for name, value in [*vars(kind).items()]:
                if name not in names:
                    delattr(kind, name)
                elif names[name] is not value and not name.startswith("__"):
                    setattr(kind, name, names[name])
