"""Subscribers: what is called before and after each module's forward, by number of the step."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import torch
from torch import nn

from ortrain.errors import StateError
from ortrain.kinds import NONE, expect, expect_whole
from ortrain.module import unwrap
from ortrain.pytorch import pytree

_Subscriber = TypeVar("_Subscriber", bound="SubscriberBase")
_Given = ParamSpec("_Given")
_Returned = TypeVar("_Returned")


@dataclass
class GlobalStates:
    """What is known of a model that is subscribed to.

    Attributes:
        execution_step: how many forwards of the model have ended.
        module_to_module_index: module → its number, parents before their children.
        module_index_to_depth: number → how many modules it is in.
    """

    execution_step: int = 0
    module_to_module_index: dict[nn.Module, int] = field(default_factory=dict)
    module_index_to_depth: dict[int, int] = field(default_factory=dict)


@dataclass
class RuntimeStates:
    """What subscribers are given.

    Attributes:
        global_states: of the model.
    """

    global_states: GlobalStates = field(default_factory=GlobalStates)


class SubscriberBase:
    """Called at each module's forward in the steps from ``start_step`` up to ``end_step``.

    Override the methods that end in ``_impl``; each returns what goes on in place of what it got.

    Args:
        start_step: the first step; 0 by default.
        end_step: the step behind the last one; there is none by default.

    Raises:
        TypeError: no whole number.
        ValueError: no step between the two.
    """

    def __init__(self, start_step: int | None = None, end_step: int | None = None) -> None:
        expect_whole("start_step", start_step, NONE)
        expect_whole("end_step", end_step, NONE)
        self._start_step = 0 if start_step is None else start_step
        self._end_step = sys.maxsize if end_step is None else end_step
        if self._end_step <= self._start_step:
            raise ValueError(
                f"start_step={start_step}, end_step={end_step}: there is no step between them, and "
                "end_step is the one behind the last"
            )

    def active(self, step: int) -> bool:
        """Whether it is called in a step."""
        return self._start_step <= step < self._end_step

    def pre_forward_module_apply_impl(
        self, run_rtx: RuntimeStates, module: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        """Before a module's forward: its arguments."""
        return args, kwargs

    def pre_forward_tensor_apply_impl(
        self, run_rtx: RuntimeStates, module: nn.Module, tensor_index: int, tensor: torch.Tensor
    ) -> torch.Tensor:
        """Before a module's forward: each tensor among its arguments."""
        return tensor

    def post_forward_module_apply_impl(
        self, run_rtx: RuntimeStates, module: nn.Module, args: Any, output: Any
    ) -> tuple[Any, Any]:
        """After a module's forward: its arguments and its result."""
        return args, output

    def post_forward_tensor_apply_impl(
        self, run_rtx: RuntimeStates, module: nn.Module, tensor_index: int, tensor: torch.Tensor
    ) -> torch.Tensor:
        """After a module's forward: each tensor in its result."""
        return tensor

    def post_forward_outmost_module_apply_impl(
        self, run_rtx: RuntimeStates, module: nn.Module, input_args: Any, outputs: Any
    ) -> tuple[Any, Any]:
        """After the forward of the model: its arguments and its result."""
        return input_args, outputs


class _Shared(Generic[_Given, _Returned]):
    """A method that is called on the class as well: of the process's manager, as it once was."""

    def __init__(self, method: Callable[Concatenate[SubscriberManager, _Given], _Returned]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, manager: object, kind: object) -> Callable[_Given, _Returned]:
        own = manager if isinstance(manager, SubscriberManager) else GlobalSubscriberManager
        bound: Callable[_Given, _Returned] = MethodType(self._method, own)
        return bound


class SubscriberManager:
    """Calls subscribers at the forwards of a model and of its modules.

    Old scripts call ``SubscriberManager.subscribe(model, […])`` on the class: that is
    ``GlobalSubscriberManager.subscribe``.
    """

    def __init__(self) -> None:
        self._states = RuntimeStates()
        self._subscribers: list[SubscriberBase] = []
        self._hooks: list[Any] = []
        self._counts = True

    @_Shared
    def subscribe(self, module: nn.Module, subscribers: Iterable[SubscriberBase]) -> None:
        """Subscribes to a model, in place of what was subscribed before; steps count from 0.

        Args:
            module: the model, or an ORTModule around it, which runs in PyTorch meanwhile.
            subscribers: called in this order.

        Raises:
            TypeError: an argument of another type.
        """
        expect("module", module, nn.Module, "a torch.nn.Module")
        hint = "write [subscriber]" if isinstance(subscribers, SubscriberBase) else ""
        expect("subscribers", subscribers, Iterable, "a list of SubscriberBase", hint)
        subscribers = list(subscribers)  # a generator gives them once
        for subscriber in subscribers:
            expect("subscribers", subscriber, SubscriberBase, "a list of SubscriberBase")
        self.unsubscribe()
        self._subscribers = subscribers
        model = unwrap(module)
        states = self._states.global_states
        for name, each in model.named_modules():
            index = len(states.module_to_module_index)
            states.module_to_module_index[each] = index
            states.module_index_to_depth[index] = name.count(".") + 1 if name else 0
            self._hooks += [
                each.register_forward_pre_hook(self._before, with_kwargs=True),
                each.register_forward_hook(self._after),
            ]
        # Behind the model's own: hooks are called in the order in which they are registered.
        self._hooks.append(model.register_forward_hook(self._end))

    def unsubscribe(self) -> None:
        """Takes all subscribers away; the model is as it was."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._subscribers, self._states = [], [], RuntimeStates()

    def get_run_context(self) -> RuntimeStates:
        """The step, and the modules' numbers."""
        return self._states

    def get_subscriber(self, subscriber_type: type[_Subscriber]) -> _Subscriber:
        """The subscriber of a class.

        Raises:
            StateError: there is none.
        """
        for subscriber in self._subscribers:
            if isinstance(subscriber, subscriber_type):
                return subscriber
        raise StateError(
            f"no {subscriber_type.__name__} is subscribed", help="subscribe(model, […]) before"
        )

    @contextmanager
    def no_increase_global_step(self) -> Iterator[None]:
        """Forwards inside are no steps."""
        before, self._counts = self._counts, False
        try:
            yield
        finally:
            self._counts = before

    def active(self) -> list[SubscriberBase]:
        """Those that are called in the step at hand; none where forwards are no steps."""
        step = self._states.global_states.execution_step
        return [s for s in self._subscribers if self._counts and s.active(step)]

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        for subscriber in self.active():
            given = subscriber.pre_forward_module_apply_impl(self._states, module, args, kwargs)
            args, kwargs = _each_tensor(
                given,
                partial(subscriber.pre_forward_tensor_apply_impl, self._states, module),
            )
        return args, kwargs

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        for subscriber in self.active():
            output = _each_tensor(
                output,
                partial(subscriber.post_forward_tensor_apply_impl, self._states, module),
            )
            _, output = subscriber.post_forward_module_apply_impl(
                self._states, module, args, output
            )
        return output

    def _end(self, module: nn.Module, args: Any, output: Any) -> Any:
        for subscriber in self.active():
            _, output = subscriber.post_forward_outmost_module_apply_impl(
                self._states, module, args, output
            )
        if self._counts:
            self._states.global_states.execution_step += 1
        return output


def _each_tensor(values: Any, change: Callable[[int, torch.Tensor], Any]) -> Any:
    """The same structure with each tensor changed, by its number among them.

    A dataclass is looked into whether or not somebody has registered it with PyTorch.
    """
    numbers = itertools.count()

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return change(next(numbers), leaf)
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        made = copy.copy(leaf)
        for each in dataclasses.fields(leaf):
            if hasattr(leaf, each.name):
                value = pytree.tree_map(changed, getattr(leaf, each.name))
                object.__setattr__(made, each.name, value)
        return made

    return pytree.tree_map(changed, values)


GlobalSubscriberManager = SubscriberManager()
"""The one of the process, which `inspect_activation` asks."""


def no_increase_global_step() -> Any:
    """Forwards inside this context are no steps of the process's manager."""
    return GlobalSubscriberManager.no_increase_global_step()
