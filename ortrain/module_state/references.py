"""Weak references to a module's tensors, of which a trace leaves some in tables of PyTorch."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator, Sequence

from torch import Tensor


@contextlib.contextmanager
def no_new_references(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Takes tensors out of the tables with weak keys that they came into inside.

    A trace notes there which stand-in is whose. The tables live as long as anything of the trace,
    and PyTorch swaps no tensor that has a weak reference (``torch.utils.swap_tensors``).
    """
    before = [weakref.getweakrefs(tensor) for tensor in tensors]
    try:
        yield
    finally:
        known = {id(each) for refs in before for each in refs}
        new = [r for t in tensors for r in weakref.getweakrefs(t) if id(r) not in known]
        if new:
            for table in gc.get_referrers(*new):
                for each in new if type(table) is dict else ():
                    table.pop(each, None)
