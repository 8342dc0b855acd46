"""A trace runs the module's Python code; this keeps what that would change."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

_SCALAR = (type(None), bool, int, float, complex, str)
_WATCHED = (bool, int, float, complex, str, torch.Tensor)
_STORES = ("_parameters", "_buffers", "_modules")


Snapshot = list[tuple[str, torch.nn.Module, dict[str, Any]]]


@contextlib.contextmanager
def untouched(module: torch.nn.Module) -> Iterator[None]:
    """Restores random states and the attributes of all sub-modules."""
    before = snapshot(module)
    with _random_states():
        try:
            yield
        finally:
            _restore(before)


@contextlib.contextmanager
def watched(module: torch.nn.Module) -> Iterator[list[str]]:
    """Collects the paths of numbers and tensors that a traced forward assigns to attributes.

    torch.export puts attributes back by itself, so that they are looked at when forward returns.
    """
    before = snapshot(module)
    changed: list[str] = []

    def look(*_: object) -> None:
        changed.extend(changes(before))

    handle = module.register_forward_hook(look)
    try:
        yield changed
    finally:
        handle.remove()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No cyclic garbage collection: a trace makes objects by the million and drops few.

    Collecting among them costs 0.2 to 0.9 s of a capture.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


@contextlib.contextmanager
def _random_states() -> Iterator[None]:
    python, numpy_state, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    devices = torch.cuda.get_rng_state_all() if cuda else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(devices)


def snapshot(module: torch.nn.Module) -> Snapshot:
    """The attributes of a module and its sub-modules."""
    found = []
    for path, child in module.named_modules():
        kept = dict(child.__dict__)
        for store in _STORES:
            kept[store] = dict(kept[store])
        found.append((path, child, kept))
    return found


def changes(before: Snapshot) -> list[str]:
    """Paths of attributes that hold another number or tensor than they did."""
    changed = []
    for path, child, kept in before:
        now = child.__dict__
        for name in now.keys() | kept.keys():
            old, new = kept.get(name, _MISSING), now.get(name, _MISSING)
            matters = isinstance(old, _WATCHED) or isinstance(new, _WATCHED)
            if name not in _STORES and matters and not _equal(old, new):
                changed.append(f"{path}.{name}" if path else name)
    return sorted(changed)


def _restore(before: Snapshot) -> None:
    for _, child, kept in before:
        now = child.__dict__
        for name in [n for n in now if n not in kept]:
            del now[name]
        for name, value in kept.items():
            if name not in _STORES:
                now[name] = value
            elif now[name].keys() != value.keys() or any(
                now[name][key] is not value[key] for key in value
            ):
                now[name].clear()
                now[name].update(value)


_MISSING = object()


def _equal(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, _SCALAR) and a == b)
