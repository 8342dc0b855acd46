"""Methods of one object replaced by functions; its class stays as it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

from ortrain.errors import listing


def replace_methods(
    target: object,
    methods: Mapping[str, Callable[..., Any]],
    *,
    library: str,
    attributes: Sequence[str] = (),
) -> list[str]:
    """Replaces all of the methods, or none where one would not fit.

    Args:
        target: the object.
        methods: functions that take the object first, by the name of the method.
        library: what the object is of, for people.
        attributes: what the functions read of the object.

    Returns:
        What to tell the user: why nothing was replaced; empty if all methods were.
    """
    missing = [name for name in methods if not callable(getattr(target, name, None))]
    missing += [name for name in attributes if not hasattr(target, name)]
    unlike = [name for name in methods if name not in missing]
    unlike = [name for name in unlike if not _takes(methods[name], getattr(target, name))]
    if missing or unlike:
        what = f"no {listing(missing)}" if missing else f"other arguments in {listing(unlike)}"
        stays = "its optimizer stays as it is, with the library's own methods"
        return [f"this version of {library} has {what}; {stays}"]
    for name, function in methods.items():
        setattr(target, name, MethodType(function, target))
    return []


def _takes(function: Callable[..., Any], original: Callable[..., Any]) -> bool:
    """Whether the function, which takes the object first, has all arguments of the original."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    asked = inspect.signature(original).parameters.values()
    names = {parameter.name for parameter in asked if parameter.kind not in variable}
    return names <= inspect.signature(function).parameters.keys()


def is_instance_of(target: object, *names: str) -> bool:
    """Whether a class of that full name is among the object's; nothing is imported for it.

    Args:
        target: the object.
        names: ``"package.module.Class"``.
    """
    return any(f"{kind.__module__}.{kind.__qualname__}" in names for kind in type(target).__mro__)


__all__ = ["is_instance_of", "replace_methods"]
