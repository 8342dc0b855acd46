"""The module as its own methods see it, where they are fetched through its ``ORTModule``.

A method such as ``training_step`` calls ``self(…)``. Bound to the module itself it would run
PyTorch alone, unseen; bound to the ``ORTModule`` it would lose ``super()``, ``isinstance(self, …)``
and the class's own attributes. So ``self`` is a stand-in: an object of a subclass of the module's
class that shares the module's ``__dict__``. Whatever it reads or writes is the module's own; only a
call of it, or of its ``forward``, is one of the ``ORTModule``. Nothing of the module is changed for
that: threads, generators, coroutines and methods that are kept for later need no care, and what the
module's own ``forward`` calls on its ``self`` runs as it does without all this.
"""

from __future__ import annotations

from ortrain.extras import require

require("torch", __name__)

import copy
import functools
import inspect
import weakref
from collections.abc import Callable
from types import MemberDescriptorType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from ortrain.key_value_cache import is_cache
from ortrain.pytorch import pytree
from ortrain.pytorch.backwards import is_traced

WITH_CACHE = "a method of the module calls it with a key-value cache, which a graph cannot take"
WITHOUT_HOOKS = "a method of the module calls its forward past the hooks that are on it"

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

# Runs a call in PyTorch, and notes why.
Aside = Callable[[str, Callable[[], Any]], Any]


class Methods:
    """Makes the ``self`` of methods that are fetched through a wrapper.

    Args:
        wrapper: of the module.
        module: that is wrapped.
        aside: runs a call in PyTorch for a reason.
    """

    def __init__(self, wrapper: nn.Module, module: nn.Module, aside: Aside) -> None:
        self.wrapper, self.module, self.aside = weakref.ref(wrapper), module, aside
        self._kind: type = nn.Module
        self._subclass: type = nn.Module
        self._last: Callable[[], Any] = lambda: None

    def get(self, name: str) -> Any:
        """An attribute of the module, methods bound to the stand-in.

        Raises:
            AttributeError: the module has none of this name.
        """
        module = self.module
        if isinstance(module, torch.jit.ScriptModule):  # whose methods call no Python
            return getattr(module, name)
        own = module.__dict__
        is_held = name in own["_modules"] or name in own["_parameters"] or name in own["_buffers"]
        if is_held and not hasattr(type(module), name):
            return getattr(module, name)
        stand_in = self.stand_in()
        found = getattr(stand_in, name)
        if type(found) is MethodType and found.__self__ is stand_in:
            # Of what such a function returns, nothing is there yet.
            return found if inspect.iscoroutinefunction(found) else _Method(found)
        return self.instead(found)

    def instead(self, found: Any) -> Any:
        """What leaves a method: the wrapper in the stand-in's place."""
        is_self = issubclass(type(found), _Quiet) and _place(found).methods is self
        return self.wrapper() if is_self else found

    def stand_in(self) -> Any:
        """The one stand-in, as long as anything holds it.

        It holds the wrapper, as a bound method holds what it is bound to; the wrapper does not
        hold it, so that both go as soon as nobody needs them.
        """
        module, kind = self.module, type(self.module)
        known = self._last()
        if self._kind is not kind:
            self._kind, self._subclass = kind, _subclass(kind)
        elif known is not None and vars(known) is vars(module):
            return known
        made: Any = object.__new__(self._subclass)
        object.__setattr__(made, "__dict__", module.__dict__)
        object.__setattr__(made, "_ortrain_place", _Place(module, self.wrapper(), self))
        self._last = weakref.ref(made)
        return made


class _Place(NamedTuple):
    """What a stand-in stands between."""

    module: nn.Module
    wrapper: Any
    methods: Methods


class _Method:
    """A method bound to the stand-in, which hands out the wrapper where it returns ``self``."""

    def __init__(self, bound: MethodType) -> None:
        functools.update_wrapper(self, bound)
        self.__self__, self.__func__ = bound.__self__, bound.__func__
        self._place = _place(bound.__self__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _is_traced():
            return self.__func__(self._place.module, *args, **kwargs)
        return self._place.methods.instead(self.__func__(self.__self__, *args, **kwargs))

    def __eq__(self, other: Any) -> bool:
        return (
            isinstance(other, _Method)
            and self.__func__ is other.__func__
            and self._place.wrapper is other._place.wrapper
        )

    def __hash__(self) -> int:
        return hash((self.__func__, self.__self__))

    def __reduce__(self) -> Any:
        return getattr, (self._place.wrapper, self.__func__.__name__)

    def __repr__(self) -> str:
        return f"<bound method {self.__func__.__qualname__} through ORTModule>"


# -- the class of a stand-in ---------------------------------------------------------------------


class _Quiet:
    """First among the bases: a registry that a class keeps of its subclasses hears of nothing."""

    __slots__ = ()

    def __init_subclass__(cls, **_: Any) -> None:
        """Nothing."""


def _subclass(kind: type) -> type:
    """The subclass of a module's class that stand-ins are of."""
    names: dict[str, Any] = {
        "__slots__": ("_ortrain_place",),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__class__": property(lambda _: kind),
        "__new__": lambda _, *args, **kwargs: kind(*args, **kwargs),  # as ``type(self)(…)``
        "__getattribute__": _attribute,
        "__call__": _Call(),
        "__setattr__": lambda stand_in, name, value: setattr(
            _place(stand_in).module, name, _kept(value)
        ),
        "__delattr__": lambda stand_in, name: delattr(_place(stand_in).module, name),
        "forward": property(_forward),
        "__hash__": lambda stand_in: hash(_place(stand_in).module),
        "__eq__": lambda stand_in, other: _place(stand_in).module == _original(other),
        "__reduce_ex__": lambda stand_in, how: _place(stand_in).module.__reduce_ex__(how),
        "__copy__": lambda stand_in: copy.copy(_place(stand_in).module),
        "__deepcopy__": lambda stand_in, memo: copy.deepcopy(_place(stand_in).module, memo),
    }
    if hasattr(kind, "__del__"):  # it is the module's end that this is for
        names["__del__"] = lambda _: None
    for name, slot in _slots_of(kind).items():
        names[name] = _read_from(slot)
    # Not as its metaclass makes classes, which may keep a registry as well.
    return type.__new__(type(kind), kind.__name__, (_Quiet, kind), names)


def _slots_of(kind: type) -> dict[str, MemberDescriptorType]:
    """The slots of a class and its bases, by name."""
    return {
        name: slot
        for base in reversed(kind.__mro__)
        if "__slots__" in base.__dict__
        for name, slot in base.__dict__.items()
        if isinstance(slot, MemberDescriptorType)
    }


def _place(stand_in: Any) -> _Place:
    found: _Place = object.__getattribute__(stand_in, "_ortrain_place")
    return found


def _original(value: Any) -> Any:
    """The module that a stand-in stands for; anything else itself."""
    return _place(value).module if issubclass(type(value), _Quiet) else value


def _kept(value: Any) -> Any:
    """What an attribute keeps is the module, or bound to it."""
    if type(value) is MethodType and issubclass(type(value.__self__), _Quiet):
        return MethodType(value.__func__, _original(value.__self__))
    return _original(value)


def _attribute(stand_in: Any, name: str) -> Any:
    """Methods that the module holds in attributes are bound anew, and those of the class to it."""
    module, subclass = _place(stand_in).module, type(stand_in)
    found = super(subclass, stand_in).__getattribute__(name)
    if type(found) is MethodType and found.__self__ is module:
        return MethodType(found.__func__, stand_in)
    if type(found) is MethodType and found.__self__ is subclass:
        return MethodType(found.__func__, type(module))
    return found


class _Call:
    """``self(…)``: a call of the wrapper, with its hooks and whatever a library put around it."""

    def __get__(self, stand_in: Any, kind: type | None = None) -> Any:
        return self if stand_in is None else functools.partial(_called, stand_in)


def _called(stand_in: Any, /, *args: Any, **kwargs: Any) -> Any:
    module, wrapper, methods = _place(stand_in)
    if _is_traced():
        return module(*args, **kwargs)
    if _has_cache(args, kwargs):
        return methods.aside(WITH_CACHE, lambda: module(*args, **kwargs))
    return wrapper(*args, **kwargs)


def _forward(stand_in: Any) -> Callable[..., Any]:
    """``self.forward``: the wrapper's, as long as the module keeps the one that it has.

    A method that puts another in its place, which calls this one, means the module's by it.
    """
    module, wrapper, methods = _place(stand_in)
    own, reached = module.forward, wrapper.forward

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if _is_traced() or module.forward != own:
            return own(*args, **kwargs)
        if _has_cache(args, kwargs):
            return methods.aside(WITH_CACHE, lambda: own(*args, **kwargs))
        if any(getattr(module, kind) for kind in _HOOKS):
            return methods.aside(WITHOUT_HOOKS, lambda: own(*args, **kwargs))
        return reached(*args, **kwargs)

    return forward


def _is_traced() -> bool:
    """Whether something traces the method, for which a graph would be opaque."""
    return torch.compiler.is_compiling() or is_traced()


def _has_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(map(is_cache, pytree.tree_leaves((args, kwargs), is_leaf=is_cache)))


def _read_from(slot: Any) -> property:
    """A slot of the module's, which its ``__dict__`` does not have."""
    return property(lambda stand_in: slot.__get__(_place(stand_in).module))


__all__ = ["WITHOUT_HOOKS", "WITH_CACHE", "Methods"]
