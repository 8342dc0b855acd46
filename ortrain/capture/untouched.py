"""A trace runs the module's Python code; this keeps what that would change."""

from __future__ import annotations

import contextlib
import copy
import gc
import operator
import pickle
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

_SCALAR = (type(None), bool, int, float, complex, str)
_WATCHED = (bool, int, float, complex, str, torch.Tensor)


# (path, sub-module, attribute → its value and, of a container, a copy of what it holds)
Snapshot = list[tuple[str, torch.nn.Module, dict[str, tuple[Any, Any]]]]
# torch's own registries, which a trace fills with stand-ins; and where transformers notes that it
# has installed hooks that collect hidden states.
_FREE = {*torch.nn.Module().__dict__, "_output_capturing_hooks_installed"} - {"training"}


@contextlib.contextmanager
def untouched(module: torch.nn.Module) -> Iterator[None]:
    """Restores random states and the attributes of all sub-modules."""
    before = snapshot(module)
    with random_states(module):
        try:
            yield
        finally:
            _restore(before)


def call_aside(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a module returns, from a call after which it and the random states are as before."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with untouched(module):
        return torch.func.functional_call(module, buffers, args, kwargs)


@dataclass
class Effects:
    """What a traced forward did besides computing its outputs.

    Attributes:
        assigned: paths of the attributes that now hold another number or tensor.
        filled: paths of the lists, dicts and sets that now hold something else.
        recast: paths of the buffers that are now of another shape or dtype.
        drawn: names of the generators, Python's and numpy's, that it drew random numbers from.
    """

    assigned: list[str] = field(default_factory=list)
    filled: list[str] = field(default_factory=list)
    recast: list[str] = field(default_factory=list)
    drawn: list[str] = field(default_factory=list)


@contextlib.contextmanager
def watched(module: torch.nn.Module) -> Iterator[Effects]:
    """Collects what a traced forward does that a graph would not do again.

    torch.export puts attributes back by itself, so that they are looked at when forward returns.
    """
    before, generators = snapshot(module), _generators(module)
    states = {name: pickle.dumps(_state(each)) for name, each in generators.items()}
    effects = Effects()

    def look(*_: object) -> None:
        effects.assigned.extend(changes(before))
        effects.filled.extend(_filled(before))
        effects.recast.extend(_recast(before))
        effects.drawn.extend(
            name for name, each in generators.items() if pickle.dumps(_state(each)) != states[name]
        )

    handle = module.register_forward_hook(look)
    try:
        yield effects
    finally:
        handle.remove()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No cyclic garbage collection: capture and build make objects by the million and drop few.

    Collecting among them costs 0.2 to 0.9 s of a capture, 0.7 s of a build.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


@contextlib.contextmanager
def random_states(module: torch.nn.Module | None = None) -> Iterator[None]:
    """Restores the random states of Python, numpy and PyTorch, and of a module's generators."""
    generators = list(_generators(module).values())
    states, cpu = [_state(each) for each in generators], torch.get_rng_state()
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    devices = torch.cuda.get_rng_state_all() if cuda else []
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            _set_state(generator, state)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(devices)


def _generators(module: torch.nn.Module | None) -> dict[str, Any]:
    """Where a forward may draw numbers that no trace sees, by name: the global ones, its own."""
    kinds = random.Random | np.random.Generator | np.random.RandomState
    own = {
        f"{path}.{name}" if path else name: value
        for path, child in (module.named_modules() if module is not None else ())
        for name, value in child.__dict__.items()
        if isinstance(value, kinds) and not isinstance(value, random.SystemRandom)  # has no state
    }
    return {"random": random, "numpy.random": np.random, **own}


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state() if hasattr(generator, "get_state") else generator.getstate()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.setstate(state)


def snapshot(module: torch.nn.Module) -> Snapshot:
    """The attributes of a module and its sub-modules, and what their containers hold."""
    return [
        (path, child, {name: (value, _contents(value)) for name, value in child.__dict__.items()})
        for path, child in module.named_modules()
    ]


def _contents(value: Any) -> Any:
    """A shallow copy of a container (parameters, hooks, user's lists); None for all else."""
    return copy.copy(value) if isinstance(value, dict | list | set) else None


def changes(before: Snapshot) -> list[str]:
    """Paths of attributes that hold another number or tensor than they did."""
    changed = []
    for path, child, kept in before:
        now = child.__dict__
        for name in (now.keys() | kept.keys()) - _FREE:
            old, new = kept.get(name, (_MISSING,))[0], now.get(name, _MISSING)
            matters = isinstance(old, _WATCHED) or isinstance(new, _WATCHED)
            if matters and not _equal(old, new):
                changed.append(f"{path}.{name}" if path else name)
    return sorted(changed)


def _filled(before: Snapshot) -> list[str]:
    """Paths of containers that hold something else than they did."""
    return sorted(
        f"{path}.{name}" if path else name
        for path, child, kept in before
        for name, (value, contents) in kept.items()
        if contents is not None
        and name not in _FREE
        and child.__dict__.get(name) is value
        and not _same_contents(value, contents)
    )


def _recast(before: Snapshot) -> list[str]:
    """Paths of buffers that are of another shape or dtype than they were, or gone."""
    return [
        f"{path}.{name}" if path else name
        for path, child, kept in before
        for name, buffer in kept["_buffers"][1].items()
        if _form(buffer) != _form(child.__dict__["_buffers"].get(name))
    ]


def _form(buffer: torch.Tensor | None) -> tuple[Any, ...] | None:
    """In words: comparing symbolic sizes with numbers would add conditions to a trace."""
    return None if buffer is None else (str(tuple(buffer.shape)), buffer.dtype)


def _restore(before: Snapshot) -> None:
    for _, child, kept in before:
        now = child.__dict__
        for name in [n for n in now if n not in kept]:
            del now[name]
        for name, (value, contents) in kept.items():
            now[name] = value
            if contents is not None and not _same_contents(value, contents):
                value.clear()
                if isinstance(value, list):
                    value.extend(contents)
                else:
                    value.update(contents)


def _same_contents(now: Any, before: Any) -> bool:
    """By identity: comparing tensors would compare their elements."""
    if isinstance(now, set):
        return now == before
    if isinstance(now, list):
        return len(now) == len(before) and all(map(operator.is_, now, before))
    return list(now) == list(before) and all(map(operator.is_, now.values(), before.values()))


_MISSING = object()


def _equal(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, _SCALAR) and a == b)
