"""What a kept call changes besides computing: seen, and undone where a call was only a trial."""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from operator import is_
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ortrain.kept.call import Kept
from ortrain.kept.routine import Routine, noting_writes, undo_writes
from ortrain.module_state.holder import Attributes, Container, Holder, Memo, Named, Signature
from ortrain.module_state.survey import Survey
from ortrain.module_state.untouched import FREE, generator_state, set_state, untouched
from ortrain.pytorch.version import put_back, version_of


class Watch:
    """Remembers what a module holds besides parameters, and tells whether that has changed.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        survey = Survey(module)
        self._module, self._loose = module, survey.loose
        self._holders = [(each, each.read()) for each in survey.holders]
        self._buffers = list(_buffers(module))
        self._generators = [g for g in survey.generators.values() if not _is_torchs(g)]
        self._states = [pickle.dumps(generator_state(each)) for each in self._generators]

    def changed(self) -> bool:
        """Whether something is not as it was."""
        return (
            any(
                owner._buffers.get(name) is not tensor or version_of(tensor) != version
                for owner, name, tensor, version in self._buffers
            )
            or [pickle.dumps(generator_state(each)) for each in self._generators] != self._states
            or any(holder.changed(before) for holder, before in self._holders)
        )

    def left_history(self) -> bool:
        """Whether there is a tensor by now that was computed from what may have a gradient.

        A loss that reads it would send gradients to what stood for the inputs of the call.
        """
        known = {*map(id, self._loose)}
        return any(t.requires_grad for t in Survey(self._module).loose if id(t) not in known)


class Surroundings:
    """What a module holds besides parameters and buffers, as the code of its graph has found it.

    Kept calls may not change that: the graph has it as constants. What sub-modules hold that are
    kept calls, and have changed it in their example, is theirs, unless the code around them names
    it.

    Args:
        module: that a graph is of.
        calls: kept in it.
    """

    def __init__(self, module: nn.Module, calls: Sequence[Kept]) -> None:
        survey = Survey(module, modules_of([each for each in calls if not each.repeatable]))
        self._holders = [each for each in survey.holders if not _is_of_a_function(each)]

    def read(self) -> list[tuple[Holder, Any]]:
        """What is held now, with where."""
        return [(each, each.read()) for each in self._holders]


def _is_of_a_function(holder: Holder) -> bool:
    """Whether it holds what no call changes that is under way, or results that are remembered."""
    own = isinstance(holder, Attributes) and isinstance(holder.object, FunctionType)
    return own or isinstance(holder, Memo | Signature)


def changed(before: Sequence[tuple[Holder, Any]]) -> list[str]:
    """The paths of what is not as it was read; what PyTorch has for itself left out."""
    return [
        path
        for holder, held in before
        if not _is_as_read(holder, held)
        for path in holder.changed(held)
        if path.rpartition(".")[2] not in FREE
    ]


def _is_as_read(holder: Holder, held: Any) -> bool:
    """Whether the very same objects are there: 1 us of an object's attributes, where that is so."""
    if type(held) is not dict:
        return False
    now = holder.read()
    return now.keys() == held.keys() and all(map(is_, now.values(), held.values()))


def _buffers(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor, int]]:
    for owner in module.modules():
        for name, tensor in owner._buffers.items():
            if tensor is not None:
                yield owner, name, tensor, version_of(tensor)


def _is_torchs(generator: Any) -> bool:
    return isinstance(generator, torch.Generator)


def modules_of(calls: Sequence[Kept]) -> list[nn.Module]:
    """The modules whose forwards are kept calls."""
    found = {id(call.module): call.module for call in calls if call.module is not None}
    return list(found.values())


def remembered(calls: Sequence[Kept]) -> tuple[Callable[[], None], Callable[[], str]]:
    """Gives what undoes the effects of calls that are about to run, random numbers included.

    And what tells where they have left a tensor with a history, as :meth:`Watch.left_history`.
    """
    own = torch.get_rng_state()
    generators = _states(_generators(calls))
    written = noting_writes() if any(_returned(call) for call in calls) else []
    around = [call.around for call in calls if call.around is not None]
    buffers = [remember_buffers(module) for module in around[:1] or modules_of(calls)]
    # Others are looked at as the module around them is.
    changing = modules_of([call for call in calls if not call.repeatable])
    surveys = [Survey(module) for module in changing]
    held = [(each, each.read()) for survey in surveys for each in survey.holders]
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def undo() -> None:
        for restore in buffers:
            restore()
        for holder, before in held:
            holder.write(before)
        undo_writes(written)
        for generator, state in generators:
            set_state(generator, state)
        torch.set_rng_state(own)
        if devices:
            torch.cuda.set_rng_state_all(devices)

    def left() -> str:
        for holder, before in held:
            if isinstance(holder, Container | Named) and not _is_as_read(holder, before):
                known = {*map(id, pytree.tree_leaves(before))}
                for each in pytree.tree_leaves(holder.read()):
                    if isinstance(each, Tensor) and each.requires_grad and id(each) not in known:
                        return holder.path or "an attribute"
        return ""

    return undo, left


def _generators(calls: Sequence[Kept]) -> list[Any]:
    """Those that calls may have drawn from, Python's and numpy's, beside PyTorch's own."""
    found: dict[int, Any] = {}
    for call in calls:
        if isinstance(call, Routine):
            found.update((id(each), each) for each in call.generators)
        elif call.module is not None:
            found.update((id(each), each) for each in (random, np.random))
    return list(found.values())


def _states(generators: Sequence[Any]) -> list[tuple[Any, Any]]:
    return [(each, generator_state(each)) for each in generators]


def _returned(call: Kept) -> bool:
    return isinstance(call, Routine) and bool(call.returned)


@contextlib.contextmanager
def undone(calls: Sequence[Kept]) -> Iterator[None]:
    """Whatever the modules of some calls change inside is as before, buffers included.

    So are the generators of random numbers that routines draw from.
    """
    modules, generators = modules_of(calls), _states(_generators(calls))
    with contextlib.ExitStack() as stack:
        for generator, state in generators:
            stack.callback(set_state, generator, state)
        for module in modules:
            stack.callback(remember_buffers(module))
            stack.enter_context(untouched(module))
        yield


def remember_buffers(module: nn.Module) -> Callable[[], None]:
    """Gives what puts the contents of a module's buffers back."""
    held = [(*place, place[2].detach().clone()) for place in _buffers(module)]

    def put_all_back() -> None:
        for owner, name, tensor, version, contents in held:
            put_back(tensor, contents, version)
            owner._buffers[name] = tensor

    return put_all_back
