"""Dictionaries by class, in which a trace's tensors are found where PyTorch's own are.

A library that serves several frameworks looks up what to do in ``table[type(x)]``, and notes there
what it has found. The tensors of a trace are of a class of their own, which no such table knows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ortrain.module_state.holder import Entries, Holder
from ortrain.module_state.value import dict_kind

_KINDS = (Tensor, nn.Parameter)


class ClassTables:
    """Lets tables hold for the class of a trace's tensors what they hold for PyTorch's.

    Args:
        holders: the dictionaries among them are the tables.
    """

    def __init__(self, holders: Iterable[Holder]) -> None:
        self._tables = [each.object for each in holders if isinstance(each, Entries)]
        self._lent: list[tuple[dict[Any, Any], Any]] = []

    def lend(self) -> None:
        """Puts the entries in, where a table has one of PyTorch's classes, or the same for both."""
        for table in self._tables:
            found = [dict.get(table, kind) for kind in _KINDS if dict.__contains__(table, kind)]
            known = dict.__contains__(table, FakeTensor)
            if found and found[0] is found[-1] and not known:
                dict_kind(table).__setitem__(table, FakeTensor, found[0])
                self._lent.append((table, found[0]))

    def take_back(self) -> None:
        """Takes them out again; what the forward has put in their place stays."""
        while self._lent:
            table, value = self._lent.pop()
            if dict.get(table, FakeTensor) is value:
                dict_kind(table).__delitem__(table, FakeTensor)
