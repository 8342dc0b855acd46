"""Running a compiled step under autograd. Every microsecond here is paid at every step.

A three-layer perceptron of width 64 takes eager PyTorch about 115 µs forward and backward, so this
file, `feeds`, `backward` and `saved_forward` prefer plain lists and local names, and do nothing
twice.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch

from ortrain.errors import StateError
from ortrain.graph.walk import dependencies
from ortrain.pytorch.backwards import keeps_graph
from ortrain.pytorch.layout import laid
from ortrain.pytorch.nodes import is_asked, takes
from ortrain.pytorch.saving import saving_hooks
from ortrain.step.backward import Backward, Group, groups_of
from ortrain.step.build import Plan
from ortrain.step.chain import Chain, Follower
from ortrain.step.feeds import Bound, Feeds
from ortrain.step.links import Linked
from ortrain.step.replay import PROBE, Caller, Gradients, Repeats, Sealed
from ortrain.step.saved_forward import Received, SavedForward, matters, stash_of
from ortrain.step.unread import Unread, Waiting

_STEPS = itertools.count()


class Step:
    """A plan under autograd, for the tensors of one module or of several alike.

    Args:
        plan: the compiled step.
        tensors: parameters and buffers by name; None where each call brings its own.
        other: called where the outputs that receive a gradient are not those the plan expects;
            returns the step for them.
        original: the module, for gradients that no graph gives; None where nobody asks for those.
        numbers: names of the inputs that are numbers of the caller's code.

    Attributes:
        number: tells it from all others.
        numbers: their positions among the tensors of a call.
        names: of the parameters and buffers, in the order in which a call brings them.
        leaves: the parameters that receive a gradient.
        is_partial: whether some of its outputs have zeros for tokens that were left out.
        hidden: positions of outputs that nobody reads, which are zeros.
        unread: says of a call which outputs nobody may read, and what has their numbers; None where
            nobody asks.
        orders: of the axes in memory of some gradients of inputs, by name.
        layouts: of outputs that do not lie row by row in memory, by their places: the order of
            their axes there, and what undoes it.
        linked: how outputs are computed from one another; None where none is.
        further: gives names of inputs that gradients of other outputs may need.
    """

    is_partial = False
    hidden: tuple[int, ...] = ()
    unread: Callable[[SavedForward, Sequence[torch.Tensor]], Waiting | None] | None = None
    orders: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    layouts: Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]] = MappingProxyType({})
    further: Callable[[], Collection[str]] = tuple

    def __init__(
        self,
        plan: Plan,
        tensors: Mapping[str, torch.Tensor] | None,
        other: Callable[[Received], Step],
        original: Repeats | None = None,
        numbers: Collection[str] = (),
    ) -> None:
        self.plan, self.number = plan, next(_STEPS)
        # Whatever the backward is asked for that the plan does not give, the forward runs again
        # for it, from what it has read.
        updated = {name for _, name in plan.updated}
        copied = updated & matters(plan) if plan.arguments and updated else set()
        self.feeds = Feeds(plan, copied, updated, several=tensors is None)
        self.other, self.original = other, original
        self.linked = Linked(plan.linked) if plan.linked else None
        users = [self.feeds.names[i] for i in self.feeds.users]
        self.numbers = {i for i, name in enumerate(users) if name in numbers}
        asked = [name for name in plan.arguments if name not in users]
        self.names = [*dict.fromkeys([*self.feeds.held, *asked, *(n for _, n in plan.updated)])]
        at = {name: i for i, name in enumerate(self.names)}
        self.held = [] if tensors is None else [tensors[name] for name in self.names]
        self.buffers = [(i, at[name]) for i, name in plan.updated]
        place = {name: i for i, name in enumerate(plan.wrt)}
        self.order = [place.get(name, -1) for name in plan.arguments]
        self.inputs = [users.index(name) for name in plan.arguments if name not in at]
        self.parameters = [at[name] for name in asked]
        self.groups = groups_of(plan, self.order)
        self.leaves = [tensors[n] for n in asked if n in place] if tensors is not None else []
        first = len(self.feeds.names) - len(self.feeds.held)
        self.copies = [(first + i, i) for i in sorted(self.feeds.copied)]
        # Autograd is told of what the backward reads, to notice an in-place change of it.
        self.reads_users = [i for i in plan.reads_back if i < len(users)]
        own = [i - first for i in plan.reads_back if i >= first]
        self.reads_held = [i for i in own if i not in self.feeds.copied]

    def read_again(self) -> list[int]:
        """Positions among a call's tensors of those that other gradients than expected need."""
        names = self.further()
        return [n for n, i in enumerate(self.feeds.users) if self.feeds.names[i] in names]

    @cached_property
    def of_numbers(self) -> set[int]:
        """Positions of what the forward saves that follows from numbers alone."""
        if not self.numbers:
            return set()
        forward = self.plan.lowered[0].graph
        numbers = {self.feeds.names[i] for i in self.numbers}
        others = {v for v in forward.inputs if v.name not in numbers}
        return {i for i, v in enumerate(forward.outputs) if not others & dependencies(forward, [v])}

    def infer(
        self, users: Sequence[torch.Tensor], held: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Runs the forward alone; arguments as of :meth:`train`."""
        held = self.held if held is None else held
        fetches = self.plan.forward.run_values(self.feeds(users, self.bind(held)))
        tensors = self.plan.exchange.all(fetches, self.plan.bools)
        for i, place in self.buffers:
            held[place].copy_(tensors[i])
        return self.lie(_expanded(tensors[: self.plan.outputs], self.plan))

    def lie(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs as they lie in memory in PyTorch, in their list."""
        for i, (axes, back) in self.layouts.items():
            if type(outputs[i]) is not Unread:
                outputs[i] = laid(outputs[i], axes, back).detach()
        return outputs

    def bind(self, held: Sequence[torch.Tensor]) -> Bound:
        """What the executor has of parameters and buffers."""
        return self.feeds.bind(held[: len(self.feeds.held)])

    def train(
        self,
        users: Sequence[torch.Tensor],
        call: Sequence[Any] | None = None,
        caller: Caller | None = None,
        held: Sequence[torch.Tensor] | None = None,
        *,
        certain: bool = True,
        viewed: Sequence[Any] = (),
    ) -> Sequence[torch.Tensor]:
        """Runs the forward and leaves a backward with autograd.

        Args:
            users: the tensors that the program takes.
            call: the arguments as they came; None where PyTorch need not run them again.
            caller: hears what the backward needs.
            held: parameters and buffers by :attr:`names`; None for the step's own.
            certain: whether other outputs than the plan expects have not to be reckoned with, for
                which the forward would run again. A caller may have written to arguments by then.
            viewed: the arguments that views are taken of.

        Returns:
            The outputs and, where outputs are computed from one another, the views.
        """
        held = self.held if held is None else held
        kept = SavedForward(self, users, held, call, caller)
        if not certain and saving_hooks(False) is None:
            kept.copies = [each.detach().clone() for each in users]
        inputs, parameters = [users[i] for i in self.inputs], [held[i] for i in self.parameters]
        chained = self.linked is not None and self.original is not None and call is not None
        probe = PROBE if chained else None
        if len(self.groups) == 1:
            result = _Function.apply(kept, None, probe, *inputs, *parameters)
        else:
            arguments, token = [*inputs, *parameters], None
            first, *later = [(group, [arguments[i] for i in group.gives]) for group in self.groups]
            for group, tensors in reversed(later):
                token = _Later.apply(kept, group, token, *tensors)
            result = _Function.apply(kept, token, probe, *first[1])
        if kept.chain is not None:
            *roots, token = result
            return kept.chain.given(roots, token, viewed)
        return result if isinstance(result, tuple) else (result,)


class _Function(torch.autograd.Function):
    """One node of autograd's graph for the whole module.

    Where gradients go to other processes, it gives those of the first group, and a chain of
    :class:`_Later`, held together by tokens, gives the others: autograd hands out each group before
    it asks for the next, so that its exchange begins while the backward goes on.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kept: SavedForward,
        token: torch.Tensor | None,
        probe: torch.Tensor | None,
        *tensors: torch.Tensor,
    ) -> Any:
        step, feeds, users = kept.step, kept.feeds, kept.users
        plan = step.plan
        fetches = plan.forward.run_values(list(feeds))
        count, at = plan.outputs, plan.exchange.at
        made = _expanded([at(fetches, i, i in plan.bools) for i in range(count)], plan)
        # What is kept for the backward must not be what refers to this node, in a circle; and a
        # view, as some are, could not be written to once it has come out of a node. Changes in
        # place are seen in both.
        outputs = [t.detach() for t in made]
        for i, place in step.buffers:
            kept.held[place].copy_(at(fetches, i, False))
        kept.stash = stash_of(plan, feeds, fetches)
        ctx.kept, ctx.group, ctx.chained = kept, step.groups[0], token is not None
        ctx.set_materialize_grads(False)
        if step.unread is not None and kept.caller is not None:
            waiting = step.unread(kept, outputs)
            if waiting is not None:
                places, values = waiting
                kept.values = weakref.ref(values)
                for i in places:
                    outputs[i] = Unread.made(values, i, outputs[i])
        outputs = step.lie(outputs)
        watched = [users[i] for i in step.reads_users]
        if probe is not None:
            assert step.linked is not None
            kept.chain = Chain(kept, outputs, step.linked)
        held = [kept.held[i] for i in step.reads_held]
        packed: list[torch.Tensor] = []
        if saving_hooks(False) is not None:
            packed, watched, kept.node = kept.pack(), [], weakref.ref(ctx)
        ctx.save_for_backward(*watched, *held, *[made[i] for i in plan.keeps_outputs], *packed)
        fixed = [t for t, reachable in zip(outputs, plan.reachable, strict=True) if not reachable]
        if fixed:
            ctx.mark_non_differentiable(*fixed)
        if kept.chain is not None:
            return (*[outputs[i] for i in kept.chain.linked.roots], _zero())
        return outputs[0] if count == 1 else tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *arriving: torch.Tensor | None) -> Any:
        upstream: Sequence[torch.Tensor | None] = arriving
        kept: SavedForward | None = ctx.kept
        changed = packed = None
        try:
            # Raises where one of them was changed in place.
            if kept is None or kept.node is None:
                ctx.saved_tensors  # noqa: B018
            elif kept.packed is not None:
                packed, saved = kept.packed, ctx.saved_tensors
                kept.restore(saved)
        except RuntimeError as error:
            # It may be another output than those that have a gradient, or what leads to one.
            written = "modified by an inplace operation" in str(error)
            if kept is None or kept.packed is not None or not written:
                raise
            changed = error
        if kept is None:
            raise StateError(
                "Trying to backward through the graph of ORTModule a second time",
                because="what the forward saved was freed by the first backward",
                help="call the first backward with retain_graph=True",
            )
        if kept.values is not None and (values := kept.values()) is not None:
            values.make()  # behind the backward, weights change
        keeps = keeps_graph()
        if not keeps:
            ctx.kept = None
        whole = False
        if kept.chain is not None:
            upstream, whole = kept.chain.upstream(upstream[:-1])
        way = Backward(kept, upstream, keeps, changed, whole=whole)
        if ctx.chained:
            kept.way = way
            return (None, _zero(), None, *_taken(ctx, kept, way))
        gradients = _taken(ctx, kept, way)
        if keeps and packed is not None:
            kept.empty(packed)
        return (None, None, None, *gradients)


class _Later(torch.autograd.Function):
    """The node that gives the gradients of a later group."""

    @staticmethod
    def forward(
        ctx: Any,
        kept: SavedForward,
        group: Group,
        token: torch.Tensor | None,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        ctx.kept, ctx.group, ctx.chained = kept, group, token is not None
        return _zero()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        kept: SavedForward = ctx.kept
        way = kept.way
        assert way is not None
        if not keeps_graph():
            ctx.kept = None
        token = _zero() if ctx.chained else None
        if token is None:
            kept.way = None
        return (None, None, token, *_taken(ctx, kept, way))


def _taken(ctx: Any, kept: SavedForward, way: Backward) -> Gradients:
    """The gradients of a node, without those that nobody asks for and autograd would not take.

    It compares the shape of each with that of the node behind, also where it then throws the
    gradient away. A parameter's node stays while any graph has it, and with it the size that the
    parameter had when it was made.
    """
    gradients = way.take(ctx.group)
    if ctx.group.pieces in kept.bound.fitting:
        return gradients
    edges = ctx.next_functions[len(ctx.next_functions) - len(gradients) :]
    misfits = [
        (place, node)
        for place, (gradient, (node, at)) in enumerate(zip(gradients, edges, strict=True))
        if gradient is not None and not takes(node, at, gradient)
    ]
    if not misfits:
        kept.bound.fitting.add(ctx.group.pieces)
    for place, node in misfits:
        if not is_asked(node):
            gradients[place] = None
    return gradients


# What autograd calls.
NODES: tuple[type[Any], ...] = (_Function, _Later, Follower, Sealed)


def _expanded(outputs: list[torch.Tensor], plan: Plan) -> list[torch.Tensor]:
    """The outputs, those that nobody reads in their whole width, in the memory that they have."""
    for i, width in plan.widths:
        outputs[i] = outputs[i].expand(*outputs[i].shape[:-1], width)
    return outputs


def _zero() -> torch.Tensor:
    """The gradient with which autograd goes on to the next node."""
    return torch.zeros((), dtype=torch.float32)
