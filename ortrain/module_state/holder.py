"""What holds a module's state: each kind can be read, compared with what it held, and put back."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CellType, FunctionType, MemberDescriptorType
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from ortrain.module_state.memo import (
    forget_sizes_of,
    grew,
    grew_by_stand_ins,
    kept_results,
    memo_state,
)
from ortrain.module_state.value import ABSENT, dict_kind, elements, entries, same
from ortrain.pytorch.version import at_version, version_of


@dataclass(frozen=True, eq=False, slots=True)
class Holder:
    """A place that holds values.

    Attributes:
        path: what a message calls it: ``config.sizes``; empty for the module itself.
        object: the object that is the place.
    """

    path: str
    object: Any

    def read(self) -> Any:
        """A copy of what it holds."""
        return self._read()

    def write(self, held: Any) -> None:
        """Puts back what :meth:`read` returned."""
        self._write(held)

    def changed(self, held: Any) -> list[str]:
        """The paths of what is no longer as :meth:`read` returned it."""
        return self._changed(held)

    def _read(self) -> Any:
        raise NotImplementedError

    def _write(self, held: Any) -> None:
        raise NotImplementedError

    def _changed(self, held: Any) -> list[str]:
        raise NotImplementedError


# -- under names -----------------------------------------------------------------------------------


class Named(Holder):
    """Holds values under names: what is written to it is assigned."""

    __slots__ = ()

    def _write(self, held: dict[str, Any]) -> None:
        now = self._read()
        for name in now.keys() - held.keys():
            self._put(name, ABSENT)
        for name, value in held.items():
            if now.get(name, ABSENT) is not value:
                self._put(name, value)

    def _changed(self, held: dict[str, Any]) -> list[str]:
        now = self._read()
        return [
            f"{self.path}.{name}" if self.path else name
            for name in sorted(now.keys() | held.keys())
            if not same(held.get(name, ABSENT), now.get(name, ABSENT))
        ]

    def set(self, name: str, value: Any) -> None:
        """Puts a value under a name, or removes the name where the value is absent."""
        self._put(name, value)

    def _put(self, name: str, value: Any) -> None:
        raise NotImplementedError


class Attributes(Named):
    """The ``__dict__`` of a module or object."""

    __slots__ = ()

    def _read(self) -> dict[str, Any]:
        return dict(self.object.__dict__)

    def _put(self, name: str, value: Any) -> None:
        if value is ABSENT:
            del self.object.__dict__[name]
        else:
            self.object.__dict__[name] = value


class Namespace(Named):
    """The attributes of a class."""

    __slots__ = ()

    def _read(self) -> dict[str, Any]:
        return dict(self.object.__dict__)

    def _put(self, name: str, value: Any) -> None:
        if value is ABSENT:
            type.__delattr__(self.object, name)
        else:
            type.__setattr__(self.object, name, value)


class Slots(Named):
    """The slots of an object."""

    __slots__ = ()

    def _read(self) -> dict[str, Any]:
        slots = slots_of(type(self.object)).items()
        return {name: slot_value(slot, self.object) for name, slot in slots}

    def _put(self, name: str, value: Any) -> None:
        slot = slots_of(type(self.object))[name]
        if value is not ABSENT:
            slot.__set__(self.object, value)
        elif slot_value(slot, self.object) is not ABSENT:
            slot.__delete__(self.object)


def slots_of(kind: type) -> dict[str, MemberDescriptorType]:
    """The slots of a class and its bases, by name."""
    return {
        f"{name}": slot
        for base in reversed(kind.__mro__)
        if "__slots__" in base.__dict__
        for name, slot in base.__dict__.items()
        if isinstance(slot, MemberDescriptorType)
    }


def slot_value(slot: MemberDescriptorType, owner: Any) -> Any:
    """What is in a slot, or nothing."""
    try:
        return slot.__get__(owner)
    except AttributeError:
        return ABSENT


class Closure(Named):
    """The free variables of a function."""

    __slots__ = ()

    def _read(self) -> dict[str, Any]:
        function: FunctionType = self.object
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        return {name: cell_value(cell) for name, cell in cells}

    def _put(self, name: str, value: Any) -> None:
        function: FunctionType = self.object
        cell = (function.__closure__ or ())[function.__code__.co_freevars.index(name)]
        if value is ABSENT:
            del cell.cell_contents
        else:
            cell.cell_contents = value


def cell_value(cell: CellType) -> Any:
    """What is in a cell, or nothing."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


class Signature(Named):
    """The code and the defaults of a function."""

    __slots__ = ()

    def _read(self) -> dict[str, Any]:
        names = ("__code__", "__defaults__", "__kwdefaults__")
        return {name: getattr(self.object, name) for name in names}

    def _put(self, name: str, value: Any) -> None:
        setattr(self.object, name, value)


@dataclass(frozen=True, eq=False, slots=True)
class Globals(Named):
    """Those of a file's globals that matter.

    Attributes:
        names: of them; it may grow.
    """

    names: dict[str, None]

    def _read(self) -> dict[str, Any]:
        return {name: self.object.get(name, ABSENT) for name in self.names}

    def _put(self, name: str, value: Any) -> None:
        if value is ABSENT:
            self.object.pop(name, None)
        else:
            self.object[name] = value


# -- containers ------------------------------------------------------------------------------------


class Container(Holder):
    """Holds values, or the elements of a tensor: what is written to it fills it."""

    __slots__ = ()

    def _changed(self, held: Any) -> list[str]:
        return [] if self._holds(held) else [self.path]

    def _holds(self, held: Any) -> bool:
        raise NotImplementedError


class Items(Container):
    """A list or a deque."""

    __slots__ = ()

    def _read(self) -> list[Any]:
        return elements(self.object)

    def _write(self, held: list[Any]) -> None:
        if not self._holds(held):
            kind = deque if isinstance(self.object, deque) else list
            kind.clear(self.object)
            kind.extend(self.object, held)

    def _holds(self, held: list[Any]) -> bool:
        now = elements(self.object)
        return len(now) == len(held) and all(map(same, now, held))


class Members(Container):
    """A set."""

    __slots__ = ()

    def _read(self) -> set[Any]:
        return {*elements(self.object)}

    def _write(self, held: set[Any]) -> None:
        if not self._holds(held):
            set.clear(self.object)
            set.update(self.object, held)

    def _holds(self, held: set[Any]) -> bool:
        now = elements(self.object)
        return same({*now}, held) or {*map(id, now)} == {*map(id, held)}


class Entries(Container):
    """A dictionary."""

    __slots__ = ()

    def _read(self) -> dict[Any, Any]:
        return dict(entries(self.object))

    def _write(self, held: dict[Any, Any]) -> None:
        if not self._holds(held):
            kind = dict_kind(self.object)
            kind.clear(self.object)
            for key, value in held.items():
                kind.__setitem__(self.object, key, value)

    def _holds(self, held: dict[Any, Any]) -> bool:
        now = entries(self.object)
        try:
            return [key for key, _ in now] == list(held) and all(
                map(same, [value for _, value in now], held.values())
            )
        except TypeError:  # an OrderedDict asks each key for its hash; sizes of a trace have none
            return False


class Elements(Container):
    """The contents of a numpy array, a bytearray or a tensor, and its version and history."""

    __slots__ = ()

    def _read(self) -> Any:
        if not isinstance(self.object, torch.Tensor):
            return self.object.copy()
        held = self.object.detach().clone().requires_grad_(self.object.requires_grad)
        return held, version_of(self.object)

    def _write(self, before: Any) -> None:
        if not isinstance(self.object, torch.Tensor):
            if not self._holds(before):
                self.object[...] = before
            return
        held, version = before
        if self.object.requires_grad > held.requires_grad:
            with contextlib.suppress(RuntimeError):  # of a view it cannot be taken off
                self.object.detach_()  # a trace has written to it what may have a gradient there
        if _form(self.object) != _form(held):
            self.object.data = held.detach()  # a trace may have put one without contents there
        elif not self._holds(before):
            self.object.data.copy_(held.detach())
        at_version(self.object, version)

    def _holds(self, before: Any) -> bool:
        if isinstance(self.object, torch.Tensor):
            return same_elements(self.object.detach(), before[0].detach())
        return _bytes(self.object) == _bytes(before)


def same_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same bit by bit, NaN included."""
    if _form(one) != _form(other):
        return False
    return torch.equal(_bits(one), _bits(other))


def _form(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


class Contents:
    """What a tensor holds, for writes that count no version: those to its data, or by numpy.

    Args:
        tensor: of any layout; what has no strides, or no contents as in a trace, is not looked at.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._place = tensor, tensor.detach()
        has = tensor.layout is torch.strided and not isinstance(tensor, FakeTensor)
        self._held = self._place.clone() if has else None

    def put_back(self) -> bool:
        """Has its memory hold that again; whether the tensor held something else, or elsewhere."""
        if self._held is None or same_elements(self._tensor.detach(), self._held):
            return False
        self._place.data.copy_(self._held)
        return True


def were_written(contents: Iterable[Contents]) -> bool:
    """Puts all back; whether there was anything to put back."""
    return True in [each.put_back() for each in contents]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():
        return tensor
    return resolved(tensor).contiguous().view(-1).view(torch.uint8)


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its numbers as they lie in memory: no view that conjugates or negates."""
    return tensor.resolve_conj().resolve_neg()


def reader(tensor: torch.Tensor) -> Callable[[], bytes] | None:
    """Reads the contents of a tensor where it lies now; None where numpy cannot.

    1 us for a small one.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
        return None
    if tensor.layout is not torch.strided:
        return None
    detached = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():  # numpy has no views that conjugate or negate
        return lambda: resolved(detached).numpy().tobytes()
    try:
        return detached.numpy().tobytes
    except RuntimeError:  # one of a transform of torch.func has no memory of its own
        return None
    except TypeError:  # numpy has no bfloat16
        plain = {1: torch.uint8, 2: torch.int16}.get(tensor.element_size())
        return detached.view(plain).numpy().tobytes if plain else None


def _bytes(array: Any) -> bytes:
    return array.tobytes() if isinstance(array, np.ndarray) else bytes(array)


class Memo(Container):
    """The results that a function under ``functools.lru_cache`` keeps."""

    __slots__ = ()

    def _read(self) -> tuple[tuple[int, int], dict[int, Any]]:
        return memo_state(self.object), kept_results(self.object)

    def _write(self, held: tuple[tuple[int, int], dict[int, Any]]) -> None:
        if not self._holds(held):
            self.object.cache_clear()  # no single result can be removed

    def _holds(self, held: tuple[tuple[int, int], dict[int, Any]]) -> bool:
        before, results = held
        holds = memo_state(self.object) == before and not grew_by_stand_ins(self.object, results)
        forget_sizes_of(self.object)
        return holds

    def forget(self, held: tuple[tuple[int, int], dict[int, Any]]) -> None:
        """Empties a memo that has any new result."""
        if grew(self.object, held[1]):
            self.object.cache_clear()


def container(path: str, value: Any) -> Holder | None:
    """The holder of a container that can change in place; None for any other value."""
    if isinstance(value, dict):
        return Entries(path, value)
    if isinstance(value, list | deque):
        return Items(path, value)
    if isinstance(value, set):
        return Members(path, value)
    return None
