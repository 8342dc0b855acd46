"""What a function under ``functools.lru_cache`` keeps, and what of it a trace may leave behind.

A memo is no effect of a forward where what it keeps is what the next call would compute anyway:
numbers, strings, and objects of these. So it may grow in a trace, as it grows between two calls of
a graph; what counts is that nothing is taken out of it, since the function may then compute
something else than it did. Results that hold tensors of a trace are no such thing.
"""

from __future__ import annotations

import functools
import gc
import sys
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._subclasses.fake_tensor import FakeTensor

# What is looked into no further: it was there before a trace, or is the same in every one.
_CLOSED = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, torch.nn.Module)
_SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)
_OTHER_STAND_INS = (torch.Tensor, torch.fx.Proxy)
_STAND_INS = (*_SIZES, *_OTHER_STAND_INS)
# Objects behind a new result; a memo of larger ones is emptied, as one with tensors is.
_MOST = 1000
_MEMO = functools._lru_cache_wrapper
# Parts of a key; a size that was hashed with it is not deep in it.
_MOST_OF_A_KEY = 100

_seen: WeakKeyDictionary[Any, tuple[int, int, int]] = WeakKeyDictionary()


def memo_state(function: Any) -> tuple[int, int]:
    """How often a memo was seen to have been emptied, and how many results it has dropped since.

    Results that come in change neither: 0.4 us.
    """
    info = function.cache_info()
    hits, misses, times = _seen.get(function, (0, 0, 0))
    times += info.misses < misses or info.hits < hits
    _seen[function] = info.hits, info.misses, times
    return times, info.misses - info.currsize


def kept_results(function: Any) -> dict[int, Any]:
    """The keys and results that a memo keeps, each by its id."""
    found: dict[int, Any] = {}
    for each in gc.get_referents(function):
        if type(each) is dict:
            for key, result in each.items():
                found[id(key)], found[id(result)] = key, result
        else:
            found[id(each)] = each
    return found


def grew(function: Any, held: dict[int, Any]) -> bool:
    """Whether a memo keeps results that it did not keep when `kept_results` looked."""
    return any(key not in held for key in kept_results(function))


def grew_by_stand_ins(function: Any, held: dict[int, Any]) -> bool:
    """Whether among what it keeps since then anything holds a tensor, or a size of a trace.

    Sizes do not count where `forget_sizes_of` empties the memo.
    """
    new = [value for key, value in kept_results(function).items() if key not in held]
    if not any(_holds(value, _STAND_INS) for value in new):
        return False
    if not any(map(_names_a_size, _keys(function))):
        return True
    return any(_holds(value, _OTHER_STAND_INS) for value in new)


def _holds(value: Any, kinds: tuple[type, ...]) -> bool:
    """Whether there is an object of some classes behind a value, or more than can be looked at."""
    seen: dict[int, Any] = {}
    pending = [value]
    while pending:
        each = pending.pop()
        if id(each) in seen or (isinstance(each, _CLOSED) and each is not FakeTensor):
            continue
        if isinstance(each, kinds) or each is FakeTensor or len(seen) == _MOST:
            return True
        seen[id(each)] = each
        if not isinstance(each, _SIZES):  # behind one is all that its trace knows
            pending.extend(gc.get_referents(each))
    return False


def forget_sizes() -> None:
    """Empties each memo of the process that has a size of a trace in a key.

    A later call of the function with the number would find it there, and a result of symbols.
    """
    for each in _memos():
        forget_sizes_of(each)


def forget_sizes_of(function: Any) -> None:
    """Empties a memo if it has a size of a trace in a key."""
    if any(map(_names_a_size, _keys(function))):
        memo_state(function)
        function.cache_clear()
        _seen[function] = 0, 0, _seen[function][2]  # the function has not emptied it


def _memos() -> list[Any]:
    """The memos of modules and classes, and what others the garbage collector knows.

    It does not tell of what was there when somebody has called ``gc.freeze()``.
    """
    # By their own classes: some objects warn when they are asked for one.
    modules = [each for each in list(sys.modules.values()) if issubclass(type(each), ModuleType)]
    spaces = [vars(each) for each in modules]
    classes = {c for space in spaces for c in list(space.values()) if issubclass(type(c), type)}
    spaces += [dict(vars(each)) for each in classes]
    named = [each for space in spaces for each in list(space.values())]
    found = {id(each): each for each in (*named, *gc.get_objects()) if type(each) is _MEMO}
    return [*found.values()]


def _keys(function: Any) -> list[Any]:
    tables = [each for each in gc.get_referents(function) if type(each) is dict]
    return [key for table in tables for key in table]


def _names_a_size(key: Any) -> bool:
    """Whether a key is a size of a trace, or has one among its parts."""
    pending, count = [key], 0
    while pending and count < _MOST_OF_A_KEY:
        each, count = pending.pop(), count + 1
        if isinstance(each, torch.SymInt):
            return True
        if not isinstance(each, (str, int, *_CLOSED)):
            pending.extend(gc.get_referents(each))
    return False
