"""What a kept call changes besides computing: seen, and undone where a call was only a trial."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ortrain.kept.call import Kept
from ortrain.module_state.survey import Survey
from ortrain.module_state.untouched import generator_state, untouched


class Watch:
    """Remembers what a module holds besides parameters, and tells whether that has changed.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        survey = Survey(module)
        self._holders = [(each, each.read()) for each in survey.holders]
        self._buffers = list(_buffers(module))
        self._generators = [g for g in survey.generators.values() if not _is_torchs(g)]
        self._states = [pickle.dumps(generator_state(each)) for each in self._generators]

    def changed(self) -> bool:
        """Whether something is not as it was."""
        return (
            any(
                owner._buffers.get(name) is not tensor or tensor._version != version
                for owner, name, tensor, version in self._buffers
            )
            or [pickle.dumps(generator_state(each)) for each in self._generators] != self._states
            or any(holder.changed(before) for holder, before in self._holders)
        )


def _buffers(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor, int]]:
    for owner in module.modules():
        for name, tensor in owner._buffers.items():
            if tensor is not None:
                yield owner, name, tensor, 0 if tensor.is_inference() else tensor._version


def _is_torchs(generator: Any) -> bool:
    return isinstance(generator, torch.Generator)


def modules_of(calls: Sequence[Kept]) -> list[nn.Module]:
    """The modules whose forwards are kept calls."""
    found = {id(call.module): call.module for call in calls if call.module is not None}
    return list(found.values())


def remembered(calls: Sequence[Kept]) -> Callable[[], None]:
    """Gives what undoes the effects of calls that are about to run, random numbers included."""
    modules, random = modules_of(calls), torch.get_rng_state()
    buffers = [remember_buffers(module) for module in modules]
    surveys = [Survey(module) for module in modules]
    held = [(each, each.read()) for survey in surveys for each in survey.holders]
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def undo() -> None:
        for put_back in buffers:
            put_back()
        for holder, before in held:
            holder.write(before)
        torch.set_rng_state(random)
        if devices:
            torch.cuda.set_rng_state_all(devices)

    return undo


@contextlib.contextmanager
def undone(calls: Sequence[Kept]) -> Iterator[None]:
    """Whatever the modules of some calls change inside is as before, buffers included."""
    modules = modules_of(calls)
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.callback(remember_buffers(module))
            stack.enter_context(untouched(module))
        yield


def remember_buffers(module: nn.Module) -> Callable[[], None]:
    """Gives what puts the contents of a module's buffers back."""
    held = [(owner, name, t, t.detach().clone()) for owner, name, t, _ in _buffers(module)]

    def put_back() -> None:
        with torch.no_grad():
            for owner, name, tensor, contents in held:
                tensor.copy_(contents)
                owner._buffers[name] = tensor

    return put_back
