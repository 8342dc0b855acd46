"""What a function under ``functools.lru_cache`` keeps, and what of it a trace may leave behind.

A memo is no effect of a forward where what it keeps is what the next call would compute anyway:
numbers, strings, and objects of these. So it may grow in a trace, as it grows between two calls of
a graph; what counts is that nothing is taken out of it, since the function may then compute
something else than it did. Results that hold tensors of a trace are no such thing.
"""

from __future__ import annotations

import gc
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._subclasses.fake_tensor import FakeTensor

# What is looked into no further: it was there before a trace, or is the same in every one.
_CLOSED = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, torch.nn.Module)
_STAND_INS = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, torch.fx.Proxy)
# Objects behind a new result; a memo of larger ones is emptied, as one with tensors is.
_MOST = 1000

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
    """Whether among what it keeps since then anything holds a tensor, or a size of a trace."""
    new = [value for key, value in kept_results(function).items() if key not in held]
    return any(map(_holds_stand_ins, new))


def _holds_stand_ins(value: Any) -> bool:
    seen: dict[int, Any] = {}
    pending = [value]
    while pending:
        each = pending.pop()
        if id(each) in seen or (isinstance(each, _CLOSED) and each is not FakeTensor):
            continue
        if isinstance(each, _STAND_INS) or each is FakeTensor or len(seen) == _MOST:
            return True
        seen[id(each)] = each
        pending.extend(gc.get_referents(each))
    return False
