"""Methods of one object replaced by functions; its class stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any


def replace_methods(target: object, methods: Mapping[str, Callable[..., Any]]) -> list[str]:
    """Replaces all of the methods, or none where the object lacks one.

    Args:
        target: the object.
        methods: functions that take the object first, by the name of the method.

    Returns:
        The names of methods that the object has not; empty if all were replaced.
    """
    missing = [name for name in methods if not callable(getattr(target, name, None))]
    if not missing:
        for name, function in methods.items():
            setattr(target, name, MethodType(function, target))
    return missing


def is_instance_of(target: object, *names: str) -> bool:
    """Whether a class of that full name is among the object's; nothing is imported for it.

    Args:
        target: the object.
        names: ``"package.module.Class"``.
    """
    return any(f"{kind.__module__}.{kind.__qualname__}" in names for kind in type(target).__mro__)


__all__ = ["is_instance_of", "replace_methods"]
