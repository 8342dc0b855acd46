"""``use_auth_token=``, which is ``token=`` today, of ``from_pretrained`` and of functions."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ortrain.errors import OrtrainWarning

_OLD, _NEW = "use_auth_token", "token"
# On what is called in place of a function, and on copies of that: transformers makes some.
_MARK = "_ortrain_takes_use_auth_token"


def extend(module: ModuleType) -> None:
    """Has the ``from_pretrained`` of a module's classes take ``use_auth_token``.

    Args:
        module: of transformers; classes that inherit the method have it by their base.
    """
    for value in [*vars(module).values()]:
        if isinstance(value, type) and value.__module__.startswith("transformers."):
            method = vars(value).get("from_pretrained")
            if isinstance(method, classmethod) and not hasattr(method.__func__, _MARK):
                new: Any = classmethod(taking(method.__func__))
                value.from_pretrained = new  # type: ignore[attr-defined]


def taking(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with ``use_auth_token`` given to it as its ``token``; None is left out.

    Raises (when it is called):
        ValueError: both are given.
    """

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if _OLD in kwargs and (given := kwargs.pop(_OLD)) is not None:
            if kwargs.get(_NEW) is not None:
                raise ValueError(f"{function.__name__}: {_OLD} and {_NEW} are one: give {_NEW}")
            message = f"{function.__name__}: {_OLD} is {_NEW} now"
            warnings.warn(message, OrtrainWarning, stacklevel=2)
            kwargs[_NEW] = given
        return function(*args, **kwargs)

    setattr(called, _MARK, True)
    return called
