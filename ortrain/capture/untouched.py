"""A trace runs the module's Python code; this keeps what that would change."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ortrain.errors import CaptureError

_SCALAR = (type(None), bool, int, float, complex, str)
_STORES = ("_parameters", "_buffers", "_modules")


@contextlib.contextmanager
def untouched(module: torch.nn.Module) -> Iterator[None]:
    """Restores random states and the attributes of all sub-modules.

    Raises:
        CaptureError: the forward assigns an attribute: a graph would not.
    """
    attributes = _attributes(module)
    with _random_states():
        try:
            yield
        finally:
            changed = _restore(module, attributes)
    if changed:
        raise CaptureError(
            f"the forward changes the attribute {changed[0]!r}",
            because="a graph computes outputs and updates buffers, and nothing else",
            help="make it a buffer that is updated in place, or keep it outside of forward",
        )


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


def _attributes(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module, dict[str, Any]]]:
    found = []
    for path, child in module.named_modules():
        kept = dict(child.__dict__)
        for store in _STORES:
            kept[store] = dict(kept[store])
        found.append((path, child, kept))
    return found


def _restore(
    module: torch.nn.Module, before: list[tuple[str, torch.nn.Module, dict[str, Any]]]
) -> list[str]:
    """Puts the attributes back; returns the paths of numbers and tensors that had changed."""
    changed = []
    for path, child, kept in before:
        now = child.__dict__
        for name in [n for n in now if n not in kept]:
            if _matters(now[name]):
                changed.append(f"{path}.{name}" if path else name)
            del now[name]
        for name, value in kept.items():
            if name in _STORES:
                _restore_store(now[name], value)
            elif now.get(name, _MISSING) is not value:
                latest = now.get(name, _MISSING)
                if (_matters(value) or _matters(latest)) and not _equal(value, latest):
                    changed.append(f"{path}.{name}" if path else name)
                now[name] = value
    return changed


_MISSING = object()


def _restore_store(now: dict[str, Any], kept: dict[str, Any]) -> None:
    if list(now.items()) != list(kept.items()):
        if now.keys() != kept.keys() or any(now[k] is not kept[k] for k in kept):
            now.clear()
            now.update(kept)


def _matters(value: Any) -> bool:
    return isinstance(value, (*_SCALAR, torch.Tensor))


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and isinstance(a, _SCALAR) and a == b
