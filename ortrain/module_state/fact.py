"""One thing of a module's state that must stay as it is, and what became of it in words."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ortrain.module_state.hooks import HOOKS
from ortrain.module_state.value import MIXED, frozen, short
from ortrain.pytorch.version import version_of

# How the paths begin of what is not in the module but around it.
AROUND = ("class ", "function ", "global ")


class Fact(NamedTuple):
    """One thing that must stay as it is."""

    kind: str
    value: Hashable = None  # compared by equality
    object: Any = None  # compared by identity, and kept alive for it
    text: str = ""  # for people

    def equals(self, other: Fact) -> bool:
        """Whether nothing has changed."""
        return self.kind == other.kind and self.object is other.object and self.value == other.value


# Where it is: the path of a module or object ("" is the root), and the name of what it owns.
Key: TypeAlias = tuple[str, str]


def value_fact(value: Any) -> Fact | None:
    """The fact of a scalar, or of a container of nothing but scalars; None for anything else."""
    copy = frozen(value)
    return None if copy is MIXED else Fact("value", copy, text=short(value))


def layout(tensor: Tensor) -> tuple[torch.dtype, torch.Size, torch.device]:
    """What a graph takes for granted of a tensor."""
    return tensor.dtype, tensor.shape, tensor.device


def tensor_fact(role: str, tensor: Tensor) -> Fact:
    """What must stay of a parameter or a buffer."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    text = f"{dtype}{list(tensor.shape)} on {tensor.device}"
    differentiable = role == "buffer" and tensor.requires_grad
    return Fact(
        role, (*layout(tensor), differentiable), tensor, text + ", differentiable" * differentiable
    )


def constant_state(tensor: Tensor) -> tuple[Hashable, ...]:
    """What must stay of a tensor that is a constant in a graph, besides its layout."""
    version = version_of(tensor)
    try:
        # A stand-in that a trace has left behind is at no place, and warns where it is asked.
        place = 0 if isinstance(tensor, FakeTensor) else tensor.data_ptr()
    except RuntimeError:  # sparse
        place = 0
    return version, place, tensor.requires_grad


def plain(path: str) -> str:
    """A path without the numbers that tell classes and functions of one name apart."""
    return re.sub(r"#\d+", "", path)


def sentence(key: Key, before: dict[Key, Fact], now: dict[Key, Fact], root: str) -> str:
    """Say what became of a fact that differs.

    Args:
        key: which one.
        before: the facts of the earlier survey.
        now: those of the later one.
        root: what to call the module itself, whose path is empty.
    """
    path, name = key
    old, new = before.get(key), now.get(key)
    fact = new or old
    assert fact is not None
    owner = plain(path) or root
    happened = "was removed" if new is None else "was added" if old is None else "was replaced"
    if fact.kind in HOOKS.values():
        return f"{owner}: a {'global ' * name.startswith('_global')}{fact.kind} {happened}"
    if name == "forward" and not path.startswith("class "):
        return f"{owner}: forward was {'restored' if new is None else 'overridden'} on the instance"
    label = f"{fact.kind} {name}" if fact.kind in ("child", "parameter", "buffer") else name
    if old is None or new is None:
        return f"{owner}: {label} {happened}" + (f" ({fact.text})" if fact.text else "")
    if fact.kind == "parameter" and old.object is not new.object:
        if twins := _twins(key, now, root):
            return f"{owner}: {label} {happened}, is now tied to {twins}"
        if twins := _twins(key, before, root):
            return f"{owner}: {label} was tied to {twins}, is no longer"
    if old.text != new.text:
        return f"{owner}: {label} was {old.text}, is {new.text}"
    if old.object is new.object and new.object is not None:
        happened = "was changed in place"
    return f"{owner}: {label} {happened}"


def _twins(key: Key, facts: dict[Key, Fact], root: str) -> str:
    """The other names under which a parameter stands in the module."""
    parameter = facts[key].object
    if parameter is None:
        return ""
    return ", ".join(
        f"{path or root}.{name}"
        for (path, name), fact in facts.items()
        if fact.kind == "parameter" and fact.object is parameter and (path, name) != key
    )
