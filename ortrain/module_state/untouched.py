"""A trace runs the module's Python code; this keeps what that would change."""

from __future__ import annotations

import contextlib
import functools
import pickle
import random
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from ortrain.module_state.aliases import Aliases
from ortrain.module_state.class_table import ClassTables
from ortrain.module_state.dispatch import without_modes
from ortrain.module_state.fact import AROUND, plain
from ortrain.module_state.holder import Attributes, Elements, Holder, Memo, Named
from ortrain.module_state.hooks import HOOKS, watched_hooks, weighed_attributes
from ortrain.module_state.modes import parametrizations_uncached
from ortrain.module_state.references import no_new_references
from ortrain.module_state.stand_in import bear_attributes, standing_in
from ortrain.module_state.survey import Survey
from ortrain.module_state.value import ABSENT, MIXED, frozen, same
from ortrain.pytorch.saving import unhooked

# torch's own registries, which a trace fills with stand-ins, and recurrent modules' lists of them;
# and where transformers notes that it has installed hooks that collect hidden states.
FREE = {
    *torch.nn.Module().__dict__,
    "_flat_weights",
    "_flat_weight_refs",
    "_output_capturing_hooks_installed",
} - {"training"}


@functools.cache
def _of_every_stand_in() -> frozenset[str]:
    # A trace that is under way would have a node of another mode's tensor.
    with without_modes(), FakeTensorMode():
        return frozenset(torch.empty(1).__dict__)


@contextlib.contextmanager
def untouched(module: torch.nn.Module, *, by_failures: bool = False) -> Iterator[None]:
    """Restores random states and all of a module's state but parameters and buffers.

    Calls inside may have others in their places, also where the module holds them a second time.

    Hooks on saved tensors that are around it see nothing of what runs inside: checkpointing counts
    what a forward saves, and then what its repetition saves.

    Args:
        module: whose state it is.
        by_failures: restores the module's state only where something is raised.
    """
    survey = Survey(module)
    held = [each.read() for each in survey.holders]
    generators = _states_of(survey) if survey.memos else {}
    registries = [
        (each, name, dict(each.__dict__[name]))
        for each in survey.modules
        for name in (*HOOKS, "_parameters", "_buffers", "_modules")
    ]

    def put_back() -> None:
        if survey.memos:
            _forget_results(survey, held, generators)
        for holder, before in zip(survey.holders, held, strict=True):
            holder.write(before)
        for each, name, entries in registries:
            _refill(each.__dict__[name], entries)

    with (
        _random_states(survey.generators),
        unhooked(),
        parametrizations_uncached(),
        ExitStack() as around,
        ExitStack() as restored,
    ):
        restored.callback(put_back)
        if not by_failures:
            around.enter_context(no_new_references(survey.tensors))
        with Aliases(module, survey).followed():
            yield
        if by_failures:
            restored.pop_all()


def _forget_results(survey: Survey, held: list[Any], generators: dict[str, bytes]) -> None:
    """Empties the memos that have grown, where anything is put back that their functions may do.

    The function of a result that is kept does not run again: what it draws, or notes elsewhere,
    would never come to be.
    """
    effects = Effects()
    for holder, before in zip(survey.holders, held, strict=True):
        if not isinstance(holder, Memo):
            _compare(holder, before, effects)
    if effects.none and _states_of(survey) == generators:
        return
    for holder, before in zip(survey.holders, held, strict=True):
        if isinstance(holder, Memo):
            holder.forget(before)


def _states_of(survey: Survey) -> dict[str, bytes]:
    """The states of Python's and numpy's generators: of torch's own a trace has the draws."""
    return {
        name: pickle.dumps(generator_state(each))
        for name, each in survey.generators.items()
        if not isinstance(each, torch.Generator)
    }


def _refill(registry: dict[Any, Any], entries: dict[Any, Any]) -> None:
    """Puts back what a dictionary held, if it holds something else."""
    if list(registry) != list(entries) or any(registry[k] is not v for k, v in entries.items()):
        registry.clear()
        registry.update(entries)


def call_aside(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, copies: bool = True
) -> Any:
    """What a module returns, from a call after which it and the random states are as before.

    It gets copies of its parameters and its buffers, as its code may write to any; and of the
    arguments, where these are not some already.
    """
    with calls_aside(module, args, kwargs, copies=copies) as call:
        return call()


@contextlib.contextmanager
def calls_aside(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, copies: bool = True
) -> Iterator[Callable[[], Any]]:
    """Such calls one after the other, each of which finds what the one before has left.

    None of autocast's casts of its copies is left: they would stay as long as the caller's context.
    """
    state = {
        name: tensor.detach().clone().requires_grad_(tensor.requires_grad)
        for name, tensor in module.named_parameters()
    }
    state.update((name, buffer.clone()) for name, buffer in module.named_buffers())
    standing_in(module, state)
    with untouched(module):
        given = functools.partial(_copied, args, kwargs) if copies else lambda: (args, kwargs)
        try:
            yield lambda: torch.func.functional_call(module, state, *given())
        finally:
            torch.clear_autocast_cache()


def _copied(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    copies: dict[int, torch.Tensor] = {}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            own = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            copies[id(tensor)] = own if tensor.is_leaf else own.view_as(own)
        return copies[id(tensor)]

    return pytree.tree_map_only(torch.Tensor, copied, (args, kwargs))


def call_without_contents(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    watching: contextlib.AbstractContextManager[Any],
) -> None:
    """Calls a module on tensors that have sizes and no values, inside of what watches the call.

    As in a trace, a number out of a tensor is a symbol.
    """
    calls_without_contents(module, args, kwargs)(watching)


def calls_without_contents(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[contextlib.AbstractContextManager[Any]], None]:
    """Such calls one after the other, each of which finds the buffers of the one before."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    state, args, kwargs = pytree.tree_map_only(
        torch.Tensor, mode.from_tensor, (state, args, kwargs)
    )
    standing_in(module, state)

    def call(watching: contextlib.AbstractContextManager[Any]) -> None:
        with mode, watching:
            torch.func.functional_call(module, state, args, kwargs)

    return call


@dataclass(frozen=True)
class Filling:
    """A value that a forward puts into an attribute, as transformers' ``problem_type``.

    Attributes:
        path: what a message calls it.
        holder: of the attribute.
        name: of the attribute.
        value: a number, a string or the like.
    """

    path: str
    holder: Named
    name: str
    value: Any

    def apply(self) -> None:
        """Does what the forward did."""
        self.holder.set(self.name, self.value)


@dataclass
class Effects:
    """What a traced forward did besides computing its outputs.

    Attributes:
        assigned: paths of the attributes, globals and free variables that hold another value now.
        filled: paths of the lists, dicts, sets, tensors and memos that hold something else now.
        fillings: what it put where it found nothing, which is not among ``assigned``.
        settings: of what is among ``assigned``, the attributes that hold a constant now.
        recast: paths of the buffers that are now of another shape or dtype.
        drawn: names of the generators, Python's and numpy's, that it drew random numbers from.
        unwatched: paths of what its code names and nothing can watch, each with the reason.
        generators: that it drew from.
    """

    assigned: list[str] = field(default_factory=list)
    filled: list[str] = field(default_factory=list)
    fillings: list[Filling] = field(default_factory=list)
    settings: list[Filling] = field(default_factory=list)
    recast: list[str] = field(default_factory=list)
    drawn: list[str] = field(default_factory=list)
    unwatched: dict[str, str] = field(default_factory=dict)
    generators: list[Any] = field(default_factory=list)

    @property
    def lasting(self) -> list[Filling]:
        """The attributes that a forward has set to constants, if it has done nothing else."""
        others = self.filled or self.recast or self.drawn or self.unwatched
        if others or len(self.settings) < len(self.assigned):
            return []
        return [*self.fillings, *self.settings]

    @property
    def none(self) -> bool:
        """Whether it has done nothing besides computing its outputs."""
        return not any(vars(self).values())


@contextlib.contextmanager
def watched(
    module: torch.nn.Module,
    *,
    traced: bool = True,
    live: Collection[torch.nn.Module] = (),
) -> Iterator[Effects]:
    """Collects what a forward does that a graph would not do again.

    torch.export puts stand-ins into the module before forward begins, and attributes back after it
    has ended, so that the state is looked at right between.

    Args:
        module: whose forward runs inside.
        traced: whether reading a tensor in between would be traced.
        live: sub-modules whose own code runs at each call.
    """
    survey = Survey(module, live)
    effects = Effects(unwatched={_shown(path): why for path, why in survey.unwatched.items()})
    elements = [each for each in survey.holders if isinstance(each, Elements)]
    others = [each for each in survey.holders if not isinstance(each, Elements)]
    contents = [each.read() for each in elements]
    states = _states_of(survey)
    tables = ClassTables(others)
    held_tensors = [
        (registry, name, tensor)
        for each in survey.modules
        for registry in (each._parameters, each._buffers)
        for name, tensor in registry.items()
        if tensor is not None and tensor.__dict__
    ]
    begun: list[tuple[list[Any], list[_Registries], dict[int, frozenset[str]]]] = []

    def begin(_: object, *given: object) -> None:
        with torch._C.DisableTorchFunction():
            registries = [_Registries.of(m) for m in survey.modules]
            before = {id(tensor): frozenset(tensor.__dict__) for tensor in _tensors(given)}
            begun.append(([each.read() for each in others], registries, before))
            tables.lend()
            pairs = ((registry.get(name), tensor) for registry, name, tensor in held_tensors)
            bear_attributes((now, tensor) for now, tensor in pairs if now is not None)

    def end(_: object, *given: object) -> None:
        held, registries, marks = begun.pop()
        with torch._C.DisableTorchFunction():
            tables.take_back()
            for holder, before in zip(others, held, strict=True):
                _compare(holder, before, effects)
            for path, each, before in zip(_paths(survey), survey.modules, registries, strict=True):
                before.compare(path, _Registries.of(each), effects)
            marked = {
                f"a tensor.{name}"
                for tensor in _tensors(given)
                for name in tensor.__dict__.keys() & survey.names_on_tensors
                if name not in marks.get(id(tensor), _of_every_stand_in())
            }
            effects.assigned.extend(sorted(marked))
        for name, state in _states_of(survey).items():
            if state != states[name]:
                effects.drawn.append(_shown(name))
                effects.generators.append(survey.generators[name])
        if not traced:
            look()

    def look() -> None:
        for holder, before in zip(elements, contents, strict=True):
            effects.filled.extend(_shown(path) for path in holder.changed(before))

    handles = [
        module.register_forward_pre_hook(begin, with_kwargs=True),
        module.register_forward_hook(end, with_kwargs=True),
    ]
    try:
        with Aliases(module, survey).followed():
            yield effects
    finally:
        for handle in handles:
            handle.remove()
        tables.take_back()
        if traced:
            look()


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor))


def _compare(holder: Holder, before: Any, effects: Effects) -> None:
    """Adds what has changed in a holder since it was read."""
    changed = holder.changed(before)
    if not changed:
        return
    if not isinstance(holder, Named):
        effects.filled.extend(map(_shown, changed))
        return
    now = holder.read()
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name, ABSENT), now.get(name, ABSENT)
        owner = holder.object if isinstance(holder, Attributes) else None
        free = isinstance(owner, torch.nn.Module) and name in FREE | weighed_attributes(owner)
        if free or same(old, new):
            continue
        path = _shown(f"{holder.path}.{name}" if holder.path else name)
        plainly = isinstance(holder, Attributes) and not isinstance(owner, torch.nn.Module)
        if plainly and (old is ABSENT or old is None) and frozen(new) is not MIXED:
            effects.fillings.append(Filling(path, holder, name, new))
        else:
            effects.assigned.append(path)
            if isinstance(holder, Attributes) and frozen(new) is not MIXED:
                effects.settings.append(Filling(path, holder, name, new))


@dataclass(frozen=True)
class _Registries:
    """What torch's own registries of a module hold, in terms that a trace leaves alone.

    Attributes:
        parameters: by name, and whether each requires a gradient.
        children: by name.
        hooks: those that decide what it computes.
        buffers: by name, as :func:`kind_of` tells them.
    """

    parameters: dict[str, tuple[Any, bool]]
    children: dict[str, Any]
    hooks: dict[str, list[Any]]
    buffers: dict[str, tuple[str, torch.dtype] | None]

    @classmethod
    def of(cls, module: torch.nn.Module) -> _Registries:
        """Those of one module, now."""
        parameters = module._parameters.items()
        return cls(
            {n: (p, p is not None and p.requires_grad) for n, p in parameters},
            dict(module._modules),
            {kind: [h for _, h in watched_hooks(getattr(module, kind))] for kind in HOOKS},
            {
                name: None if buffer is None else kind_of(buffer)
                for name, buffer in module._buffers.items()
            },
        )

    def compare(self, path: str, now: _Registries, effects: Effects) -> None:
        """Adds what has changed since these were read."""
        prefix = f"{path}." if path else ""
        for name in self.parameters.keys() | now.parameters.keys():
            old, grad = self.parameters.get(name, (ABSENT, False))
            new, grad_now = now.parameters.get(name, (ABSENT, False))
            if old is not new:
                effects.assigned.append(f"{prefix}{name}")
            elif grad != grad_now:
                effects.assigned.append(f"{prefix}{name}.requires_grad")
        for name in self.children.keys() | now.children.keys():
            if self.children.get(name, ABSENT) is not now.children.get(name, ABSENT):
                effects.assigned.append(f"{prefix}{name}")
        for kind, hooks in self.hooks.items():
            if [*map(id, hooks)] != [*map(id, now.hooks[kind])]:
                effects.filled.append(f"{prefix}{kind}")
        for name in self.buffers.keys() | now.buffers.keys():
            if name not in self.buffers:
                effects.assigned.append(f"{prefix}{name}")
            elif self.buffers[name] != now.buffers.get(name):
                effects.recast.append(f"{prefix}{name}")


def kind_of(tensor: torch.Tensor) -> tuple[str, torch.dtype]:
    """Shape and dtype, in words: comparing symbolic sizes would add conditions to a trace."""
    return str(tuple(tensor.shape)), tensor.dtype


def _paths(survey: Survey) -> list[str]:
    """The path of each module."""
    return survey.places


def _shown(path: str) -> str:
    """A path as a message shows it."""
    shown = plain(path)
    return shown.partition(" ")[2] if shown.startswith(AROUND) else shown


@contextlib.contextmanager
def random_states(module: torch.nn.Module | None = None) -> Iterator[None]:
    """Restores the random states of Python, numpy and PyTorch, and of a module's generators.

    Of a module what was drawn meanwhile and is memoised goes with them.
    """
    every: dict[str, Any] = {"random": random, "numpy.random": np.random}
    if module is None:
        with _random_states(every):
            yield
        return
    survey = Survey(module)
    memos = [(each, each.read()) for each in survey.holders if isinstance(each, Memo)]
    before = _states_of(survey) if memos else {}
    with _random_states({**every, **survey.generators}):
        try:
            yield
        finally:
            if memos and _states_of(survey) != before:
                for memo, held in memos:
                    memo.forget(held)


@contextlib.contextmanager
def _random_states(generators: dict[str, Any]) -> Iterator[None]:
    states, cpu = [generator_state(each) for each in generators.values()], torch.get_rng_state()
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    devices = torch.cuda.get_rng_state_all() if cuda else []
    try:
        yield
    finally:
        for generator, state in zip(generators.values(), states, strict=True):
            set_state(generator, state)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(devices)


def generator_state(generator: Any) -> Any:
    """The state of a generator of random numbers, of Python, numpy or PyTorch."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state() if hasattr(generator, "get_state") else generator.getstate()


def set_state(generator: Any, state: Any) -> None:
    """Puts such a state back."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.setstate(state)
