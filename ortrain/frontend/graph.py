"""A graph of Dynamo's as a step: weights, buffers and inputs are arguments of every call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, is_grad_enabled

from ortrain.autodiff.engine import influences
from ortrain.capture.origin import IN_PYTORCH
from ortrain.config import Options
from ortrain.errors import CheckFailed, ExecutionError, NotServed, OrtrainError
from ortrain.frontend.call import CALL
from ortrain.frontend.layouts import orders_of
from ortrain.frontend.original import in_pytorch
from ortrain.frontend.program import translated
from ortrain.guards.layout import laid
from ortrain.program import Role
from ortrain.pytorch.transforms import is_wrapped
from ortrain.runtime import engines
from ortrain.step.autograd import Step
from ortrain.step.build import Plan, build, likely_upstream
from ortrain.step.saved_forward import Received, matters

# Backwards for the same outputs after which others are not reckoned with.
_ENOUGH = 2


@dataclass(frozen=True)
class Way:
    """A step for gradients of some outputs, and what it takes of a call.

    Attributes:
        step: the step.
        places: of its inputs among the graph's.
        numbers: which of these are numbers.
        copied: of which it takes copies.
        first: of which it does where other outputs may receive gradients than is thought.
        held: places of its parameters and buffers among the graph's inputs.
    """

    step: Step
    places: list[int]
    numbers: list[int]
    copied: list[int]
    first: list[int]
    held: list[int]


class Graph:
    """Runs calls of one graph.

    Args:
        module: Dynamo's graph.
        real: its inputs at the call that is being compiled.
        options: settings.
        guarded: whether Dynamo makes sure that inputs require gradients as they do at that call.

    Raises:
        OrtrainError: no engine serves it.
    """

    def __init__(
        self, module: fx.GraphModule, real: Sequence[Any], options: Options, *, guarded: bool = True
    ) -> None:
        if any(isinstance(each, Tensor) and is_wrapped(each) for each in real):
            raise NotServed(
                "an input belongs to a transform of torch.func",
                because="its gradients are the transform's",
                help=IN_PYTORCH,
            )
        self.fallback = in_pytorch(module)
        self.alone = not isinstance(module.graph.output_node().args[0], tuple | list)
        self.translated = found = translated(module, real)
        program = found.program
        if not len(program.graph):
            raise NotServed(
                "the graph computes nothing",
                because="it hands on what it is given, and views of that",
                help="none is needed: PyTorch does so",
            )
        given = [v.name or "" for v in program.graph.inputs if v.name in found.places]
        users = program.outputs(Role.USER_OUTPUT, Role.LOSS)
        influential = {v.name for v in influences(program.graph, users)}
        wrt = [
            name
            for name in given
            if name in influential and is_grad_enabled() and _wants(real[found.places[name]])
        ]
        device = next((t.device for t in real if isinstance(t, Tensor)), torch.device("cpu"))
        self.executor = engines.executor(options.engine, device=device)
        self.program, self.wrt, self.options = program, wrt, options
        self.orders = orders_of(program, {name: real[found.places[name]] for name in wrt})
        self.users = [v.name or "" for v in users]
        self.strided = {i for i, value in enumerate(real) if _is_copied(value)}
        self.ways: dict[tuple[str, ...], Way] = {}
        self.way, self.confirmed = self._way(tuple(likely_upstream(program, wrt))), 0
        wanting = {found.places[name] for name in wrt}
        self.without = [
            i for i, t in enumerate(real) if not (guarded or i in wanting) and isinstance(t, Tensor)
        ]
        self.written = found.original.written

    @property
    def step(self) -> Step:
        """The step that the next call runs."""
        return self.way.step

    def _way(self, upstream: tuple[str, ...]) -> Way:
        way = self.ways.get(upstream)
        if way is None:
            found = self.translated
            numbers = [name for name, place in found.places.items() if place in found.numbers]
            step = Step(self._plan(upstream), None, self._other, found.original, numbers)
            step.orders, step.further = self.orders, lambda: self._further
            places = [found.places[step.feeds.names[i]] for i in step.feeds.users]
            first = [n for n, i in enumerate(places) if i in found.copied or i in self.strided]
            way = self.ways[upstream] = Way(
                step,
                places,
                [n for n, i in enumerate(places) if i in found.numbers],
                [n for n in first if places[n] in found.copied or n in step.plan.reads_back],
                first,
                [found.places[name] for name in step.names],
            )
        return way

    def _other(self, received: Received) -> Step:
        """The step where other outputs receive gradients than was thought, as they probably will.

        The first time, the forward runs again for it.
        """
        upstream = tuple(n for n, given in zip(self.users, received, strict=True) if given)
        self.way, self.confirmed = self._way(upstream), 0
        return self.way.step

    @cached_property
    def _further(self) -> Collection[str]:
        """Inputs that gradients of other outputs may need than those that are expected to."""
        plan = self.way.step.plan
        every = tuple(n for n, own in zip(self.users, plan.reachable, strict=True) if own)
        if len(every) == 1:
            return ()
        try:
            return matters(self._way(every).step.plan, saved_only=True)
        except OrtrainError:  # which is about gradients that nobody may ask for
            return self.translated.places

    def _learn(self, outputs: Sequence[Tensor]) -> None:
        """Counts the backwards through a call's outputs."""

        def learned(*_: Any) -> None:
            self.confirmed += 1

        for node in {each.grad_fn for each in outputs if each.grad_fn is not None}:
            node.register_prehook(learned)

    def _plan(self, upstream: Sequence[str]) -> Plan:
        return build(
            self.program,
            self.wrt,
            upstream,
            self.executor,
            pieces=self.options.backward_pieces,
            budget=self.options.memory_budget,
        )

    def __call__(self, *args: Any) -> Any:
        """The graph's outputs for a call's inputs; one of a part may be no tuple."""
        if (self.without and is_grad_enabled() and self._wants_more(args)) or (
            self.written and self._shared(args)
        ):
            return self.fallback(*args)
        way = self.way
        users, held = [args[i] for i in way.places], [args[i] for i in way.held]
        if any(isinstance(each, Tensor) and not each.numel() for each in users):
            return self.fallback(*args)  # each runtime has its own of statistics of nothing
        for i in way.numbers:
            users[i] = torch.tensor(users[i])
        call, certain = args, self.confirmed >= _ENOUGH
        if copied := way.copied if certain else way.first:
            given = list(args)
            for i in copied:
                users[i] = given[way.places[i]] = users[i].clone()
            call = tuple(given)
        try:
            if self.wrt and is_grad_enabled():
                outputs = [*way.step.train(users, call, held=held, certain=certain)]
                if not certain:
                    self._learn(outputs)
            else:
                outputs = way.step.infer(users, held)
        except (CheckFailed, ExecutionError) as error:
            CALL.failed = error
            return self.fallback(*args)
        CALL.ran += 1
        for i, source in self.translated.sources.items():
            outputs[i] = laid(outputs[i], source.axes, source.back)
        return self._handed_on(args, outputs)

    def _wants_more(self, args: Sequence[Any]) -> bool:
        """Whether an input requires a gradient that did not when the graph was made."""
        return any(_wants(args[i]) for i in self.without)

    def _shared(self, args: Sequence[Any]) -> bool:
        """Whether another input shows the memory of one that is written to, without guard."""
        places = Counter(_storage(each) for each in args if isinstance(each, Tensor))
        return any(places[_storage(args[i])] > 1 for i in self.written)

    def _handed_on(self, args: Sequence[Any], roots: Sequence[Tensor]) -> Any:
        """The graph's outputs, of the step's."""
        outside, views = self.translated.outside, ()
        known = {"input": args, "root": roots}
        if outside.views is not None:
            views = outside.views(*[known[kind][place] for kind, place in outside.given])
        known["view"] = views
        results = tuple(
            each.constant if each.kind == "constant" else known[each.kind][each.index]
            for each in outside.results
        )
        return results[0] if self.alone else results


def _is_copied(value: Any) -> bool:
    """Whether PyTorch's products read a copy of a tensor, so that a user may write to it then."""
    return isinstance(value, Tensor) and value.dim() == 3 and not value.is_contiguous()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _wants(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
