"""Everything about a module that its ``forward`` may read: what a capture of it has frozen.

A `Survey` walks a module once, completely and slowly (7 ms for BERT-base), and yields facts that
can be compared one by one. `Guard` keeps one, and makes another when it has seen a difference.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from enum import Enum
from functools import partial
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.optim import Optimizer

HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
# What the hooks of a dictionary above are called with, in dictionaries beside it.
_HOOK_FLAGS = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
# No forward reads these.
_UNWATCHED = {
    *HOOKS,
    *_HOOK_FLAGS,
    "_is_full_backward_hook",
    "_is_hf_initialized",
    "_output_capturing_hooks_installed",
    "_load_state_dict_post_hooks",
    "_load_state_dict_pre_hooks",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_parameters",
    "_buffers",
    "_modules",
}
# transformers' settings of generate(), which Seq2SeqTrainer changes between two calls of a model.
_SETTINGS = ("generation_config", "GenerationConfig")
# Hooks with which transformers collects hidden states and attentions; a capture traces them.
_TRACED_HOOKS = "transformers.utils.output_capturing"
# Hooks of transformers and PEFT that make embeddings require a gradient, so that checkpointing
# with reentrance has something to differentiate. In a graph they do nothing.
_IDLE_HOOKS = {"make_inputs_require_grads", "make_inputs_require_grad"}
_LIBRARIES = {"transformers", "peft"}

_SCALARS = (
    type(None),
    int,
    str,
    bytes,
    complex,
    Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_SEQUENCES = (tuple, list, set, frozenset, deque)
# Watched by identity only: they hold no configuration, or change with every step.
_OPAQUE = (
    type,
    FunctionType,
    MethodType,
    BuiltinFunctionType,
    ModuleType,
    partial,
    logging.Logger,
    Optimizer,
    Tensor,
)
_OPAQUE_PACKAGES = {
    "torch", "threading", "weakref", "lightning", "pytorch_lightning", "accelerate", "ortrain",
}  # fmt: skip
# Classes whose namespaces are not watched.
_FOREIGN_CLASSES = {"abc", "builtins", "collections", "enum", "torch", "typing"}
# A config, and the config that it holds of a part of the model.
_OBJECT_DEPTH = 2


class Fact(NamedTuple):
    """One thing that must stay as it is."""

    kind: str
    value: Hashable = None  # compared by equality
    object: Any = None  # compared by identity, and kept alive for it
    text: str = ""  # for people

    def equals(self, other: Fact) -> bool:
        """Whether nothing has changed."""
        return self.kind == other.kind and self.value == other.value and self.object is other.object


# Where it is: the path of a module or object ("" is the root), and the name of what it owns.
Key: TypeAlias = tuple[str, str]


class Survey:
    """Walks a module; notes every fact, and everything that the fast check has to look at.

    Attributes:
        facts: in the order of the walk, a parent's before its children's.
        modules: in the order of ``named_modules``, then those in plain attributes and lists.
        owners: modules and plain objects, whose ``__dict__`` counts.
        paths: where each owner's facts are.
        dicts: every other dictionary that is not empty.
        empty: dictionaries of hooks, children, parameters and buffers that are.
        lists: lists, sets and deques, which can change in place.
        namespaces: of the classes of the owners and those they hold, torch's own left out.
        tensors: parameters, buffers and loose tensors.
        loose: tensors that are neither parameter nor buffer, and so constants in a graph.
    """

    def __init__(self, module: nn.Module) -> None:
        self.facts: dict[Key, Fact] = {}
        self.modules: list[nn.Module] = []
        self.owners: list[Any] = []
        self.paths: list[str] = []
        self.dicts: list[dict[Any, Any]] = []
        self.empty: list[dict[Any, Any]] = []
        self.lists: list[Any] = []
        self.namespaces: list[Any] = []
        self.tensors: list[Tensor] = []
        self.loose: list[Tensor] = []
        self._seen: set[int] = set()
        self._held_classes: list[type] = []
        self._registered = {id(tensor) for tensor in chain(module.parameters(), module.buffers())}

        self._hooks("every module", global_hooks.__dict__, "_global")
        self._module("", module)
        called = {type(each) for each in self.modules}
        kinds = dict.fromkeys([*map(type, self.owners), *self._held_classes])
        for serial, kind in enumerate(dict.fromkeys(chain.from_iterable(k.__mro__ for k in kinds))):
            self._class(kind, serial, called=kind in called)

    def _module(self, path: str, module: nn.Module) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        self.modules.append(module)
        self.owners.append(module)
        self.paths.append(path)
        kind = type(module)
        self.facts[path, "__class__"] = Fact("class", object=kind, text=kind.__qualname__)
        for name, child in self._entries(module._modules):
            self.facts[path, name] = Fact("child", object=child)
        self._hooks(path, module.__dict__, "")
        for name, value in module.__dict__.items():
            if name not in _UNWATCHED and (name, type(value).__name__) != _SETTINGS:
                self._attribute(path, name, value, 0)
        for role, entries in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in self._entries(entries):
                if tensor is None:
                    self.facts[path, name] = Fact(role, text="None")
                else:
                    self.tensors.append(tensor)
                    self.facts[path, name] = _tensor_fact(role, tensor)
        for name, child in module._modules.items():
            if child is not None:
                self._module(_join(path, name), child)

    def _entries(self, entries: dict[str, Any]) -> Iterable[tuple[str, Any]]:
        (self.dicts if entries else self.empty).append(entries)
        return entries.items()

    def _hooks(self, path: str, state: dict[str, Any], prefix: str) -> None:
        for attribute, kind in HOOKS.items():
            hooks = state[prefix + attribute]
            self._entries(hooks)
            for number, hook in untraced_hooks(hooks):
                flags = tuple(number in state.get(prefix + flag, ()) for flag in _HOOK_FLAGS)
                self.facts[path, f"{prefix}{attribute}[{number}]"] = Fact(kind, flags, hook)
        for flag in _HOOK_FLAGS:
            if state.get(prefix + flag):
                self.dicts.append(state[prefix + flag])

    def _class(self, kind: type, serial: int, *, called: bool) -> None:
        """Watch the namespace of a class; of torch's own only ``forward``, and by identity."""
        # The serial number tells two classes of one name apart, as two calls of a function make.
        path = f"class {kind.__qualname__}#{serial}"
        if called:
            forward: Any = kind.forward  # type: ignore[attr-defined]
            self.facts[path, "forward"] = Fact("object", object=forward, text=_short(forward))
        if kind.__module__.partition(".")[0] in _FOREIGN_CLASSES:
            return
        self.namespaces.append(kind.__dict__)
        for name, value in kind.__dict__.items():
            fact = value_fact(value)
            self.facts[path, name] = fact or Fact("object", object=value, text=_short(value))

    def _attribute(self, path: str, name: str, value: Any, depth: int) -> None:
        """Note an attribute, or an element of one, of what stands at ``path``.

        Args:
            path: the module or object.
            name: the attribute; ``name[0]`` for an element.
            value: its value.
            depth: how many plain objects lie between the module and it.
        """
        first_time = id(value) not in self._seen
        shared = None if first_time else value  # its elements are noted elsewhere
        if (fact := value_fact(value)) is not None:
            self.facts[path, name] = fact
            self._watch(value)
        elif isinstance(value, Tensor) and id(value) not in self._registered:
            self.facts[path, name] = _tensor_fact("tensor", value, *contents([value]))
            self.tensors.append(value)
            self.loose.append(value)
        elif isinstance(value, _SEQUENCES):
            self.facts[path, name] = Fact("value", (type(value), len(value)), shared, _short(value))
            if first_time:
                self._seen.add(id(value))
                self.lists.append(value)
                for index, child in enumerate(value):
                    self._attribute(path, f"{name}[{index}]", child, depth)
        elif isinstance(value, dict):
            names = [repr(key) if _frozen(key) is not _MIXED else f"#{id(key)}" for key in value]
            self.facts[path, name] = Fact("value", (type(value), *names), shared, _short(value))
            if first_time:
                self._seen.add(id(value))
                self.dicts.append(value)
                for key, child in zip(names, value.values(), strict=True):
                    self._attribute(path, f"{name}[{key}]", child, depth)
        else:
            self.facts[path, name] = Fact("object", object=value, text=_short(value))
            if isinstance(value, nn.Module):
                self._module(_join(path, name), value)
            elif isinstance(value, type):
                self._held_classes.append(value)
            elif depth < _OBJECT_DEPTH and first_time and _is_plain(value):
                self._seen.add(id(value))
                self.owners.append(value)
                self.paths.append(_join(path, name))
                for attribute, child in value.__dict__.items():
                    self._attribute(_join(path, name), attribute, child, depth + 1)

    def _watch(self, value: Any) -> None:
        """Watch what can change in place inside a container of scalars."""
        if not isinstance(value, (*_SEQUENCES, dict)) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, dict):
            self.dicts.append(value)
        elif not isinstance(value, tuple | frozenset):
            self.lists.append(value)
        for child in value.values() if isinstance(value, dict) else value:
            self._watch(child)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def value_fact(value: Any) -> Fact | None:
    """The fact of a scalar, or of a container of nothing but scalars; None for anything else."""
    frozen = _frozen(value)
    return None if frozen is _MIXED else Fact("value", frozen, text=_short(value))


_MIXED = object()  # not a scalar, nor a container of nothing but scalars


def _frozen(value: Any, levels: int = 6) -> Hashable:
    """A copy of a scalar, or of a container of scalars, that is equal only to the very same value.

    Args:
        value: anything.
        levels: how far to look into containers, some of which contain themselves.

    Returns:
        A hashable in which ``1``, ``1.0`` and ``True`` differ and a NaN equals itself; `_MIXED` for
        anything that holds anything else.
    """
    kind = type(value)
    if isinstance(value, float):
        return kind, value.hex()
    if isinstance(value, _SCALARS):
        return kind, value
    if levels == 0:
        return _MIXED
    if isinstance(value, dict):
        parts = [_frozen(part, levels - 1) for item in value.items() for part in item]
    elif isinstance(value, _SEQUENCES):
        parts = [_frozen(part, levels - 1) for part in value]
    else:
        return _MIXED
    if any(part is _MIXED for part in parts):
        return _MIXED
    return kind, frozenset(parts) if isinstance(value, set | frozenset) else tuple(parts)


def _is_plain(value: Any) -> bool:
    """Whether an object may hold configuration in its attributes."""
    if isinstance(value, _OPAQUE) or type(value).__module__.partition(".")[0] in _OPAQUE_PACKAGES:
        return False
    return isinstance(getattr(value, "__dict__", None), dict)


def untraced_hooks(hooks: dict[int, Any]) -> Iterator[tuple[int, Any]]:
    """The hooks that a capture does not trace."""
    for number, hook in hooks.items():
        place = getattr(hook, "__module__", None) or ""
        idle = getattr(hook, "__name__", "") in _IDLE_HOOKS and place.split(".")[0] in _LIBRARIES
        if not idle and place != _TRACED_HOOKS:
            yield number, hook


def layout(tensor: Tensor) -> tuple[torch.dtype, torch.Size, torch.device]:
    """What a graph takes for granted of a tensor."""
    return tensor.dtype, tensor.shape, tensor.device


def contents(tensors: list[Tensor]) -> list[int]:
    """A number for each tensor that grows with each write in place."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _tensor_fact(role: str, tensor: Tensor, version: int = 0) -> Fact:
    dtype = str(tensor.dtype).removeprefix("torch.")
    text = f"{dtype}{list(tensor.shape)} on {tensor.device}"
    return Fact(role, (*layout(tensor), version), tensor, text)


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
    owner = path.partition("#")[0] or root
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


def _short(value: Any) -> str:
    """A value for a sentence: in full where it is short, else its type."""
    if isinstance(value, (float, *_SCALARS, *_SEQUENCES, dict)):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    if isinstance(value, BuiltinFunctionType):
        return value.__name__  # torch.relu calls itself _VariableFunctionsClass.relu in full
    return getattr(value, "__qualname__", None) or f"a {type(value).__qualname__}"
