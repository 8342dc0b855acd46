"""Running a compiled step under autograd. Every microsecond here is paid at every step.

A three-layer perceptron of width 64 takes eager PyTorch about 115 µs forward and backward, so this
file prefers plain lists and local names, and does nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import is_grad_enabled
from torch.autograd import forward_ad

from ortrain.errors import ExecutionError, OrtrainError, StateError, listing
from ortrain.graph.walk import dependencies
from ortrain.guards.structure import FlatCall
from ortrain.module_state.fact import contents
from ortrain.program import Role
from ortrain.step.build import Piece, Plan
from ortrain.step.replay import Caller, Gradients, Original, Sealed

# Whether the backward that is running leaves the graph for another one, retain_graph=True.
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
_transforms = torch._C._functorch.peek_interpreter_stack
_is_batched = torch._C._functorch.is_legacy_batchedtensor

Received = tuple[bool, ...]
"""Which outputs receive a gradient."""


class Feeds:
    """The feeds of a forward: what changes at every call first, then parameters and buffers.

    The executor's value of a parameter is made once, and again where its memory has moved; the
    guard tells of other strides. One that cannot share the parameter's memory is a copy, and made
    at every call.

    Args:
        plan: the compiled step.
        tensors: parameters and buffers by name.
        copied: buffers to copy, because this forward overwrites what its backward still reads.
    """

    def __init__(
        self, plan: Plan, tensors: dict[str, torch.Tensor], copied: Collection[str] = ()
    ) -> None:
        self.exchange = plan.exchange
        self.names = [name for _, name in plan.feeds]
        self.users = [i for i, (role, _) in enumerate(plan.feeds) if role is Role.USER_INPUT]
        self.seeded = any(role is Role.SEED for role, _ in plan.feeds)
        held = (Role.PARAMETER, Role.BUFFER)
        self.held = [tensors[name] for role, name in plan.feeds if role in held]
        roles = [role for role, _ in plan.feeds]
        assert roles == sorted(roles, key=_ORDER.__getitem__), "feeds come by role"
        names = [name for role, name in plan.feeds if role in held]
        self.copied = {i for i, name in enumerate(names) if name in copied}
        self.pointers = [*map(_address, self.held)]
        self.values = [self._again(i, tensor) for i, tensor in enumerate(self.held)]

    def __call__(self, users: Sequence[torch.Tensor]) -> list[Any]:
        """All feeds of one forward, in the order of the program's inputs."""
        take = self.exchange.take
        feeds = [take(tensor) for tensor in users]
        if self.seeded:
            feeds.append(take(draw_seed()))
        pointers = [*map(_address, self.held)]
        if pointers != self.pointers:
            before, self.pointers = self.pointers, pointers  # earlier forwards may still read those
            for i, tensor in enumerate(self.held):
                if pointers[i] != before[i]:
                    self.values[i] = self._again(i, tensor)
        feeds += self.values
        return feeds

    def _again(self, i: int, tensor: torch.Tensor) -> Any:
        if i in self.copied:
            tensor = tensor.clone()
        elif self.exchange.shares(tensor):
            return self.exchange.take(tensor)
        self.pointers[i] = _COPIED
        return self.exchange.take(tensor)


_address = torch.Tensor.data_ptr
_COPIED = -1  # the address of no tensor
_ORDER = {Role.USER_INPUT: 0, Role.SEED: 1, Role.BUFFER: 2, Role.PARAMETER: 2}


def draw_seed() -> torch.Tensor:
    """A seed from torch's generator, so that ``torch.manual_seed`` repeats a run."""
    return torch.empty((), dtype=torch.int64).random_()


class Step:
    """A plan bound to the tensors of one module.

    Args:
        plan: the compiled step.
        tensors: parameters and buffers by name.
        other: called where the outputs that receive a gradient are not those the plan expects;
            returns the step for them.
        original: the module, for gradients that no graph gives; None where nobody asks for those.

    Attributes:
        leaves: the parameters that receive a gradient.
    """

    def __init__(
        self,
        plan: Plan,
        tensors: dict[str, torch.Tensor],
        other: Callable[[Received], Step],
        original: Original | None = None,
    ) -> None:
        self.plan = plan
        # Whatever the backward is asked for that the plan does not give, the forward runs again
        # for it, from what it has read.
        updated = {name for _, name in plan.updated}
        copied = updated & _matters(plan) if plan.arguments and updated else set()
        self.feeds = Feeds(plan, tensors, copied)
        self.other, self.original = other, original
        self.buffers = [(i, tensors[name]) for i, name in plan.updated]
        names = self.feeds.names
        users = [names[i] for i in self.feeds.users]
        place = {name: i for i, name in enumerate(plan.wrt)}
        self.order = [place.get(name, -1) for name in plan.arguments]
        self.inputs = [users.index(n) for n in plan.arguments if n not in tensors]
        self.parameters = [tensors[n] for n in plan.arguments if n in tensors]
        self.groups = _groups(plan, self.order)
        self.leaves = [tensors[n] for n in plan.arguments if n in tensors and n in place]
        first = len(names) - len(self.feeds.held)
        self.copies = [(first + i, self.feeds.held[i]) for i in sorted(self.feeds.copied)]
        # The others, with their names. What an inference tensor holds cannot change.
        self.lasting = [
            (names[first + i], tensor)
            for i, tensor in enumerate(self.feeds.held)
            if names[first + i] not in updated and not tensor.is_inference()
        ]
        self.watched = [tensor for _, tensor in self.lasting]
        # Autograd is told of what the backward reads, to notice an in-place change of it.
        self.reads_users = [i for i in plan.reads_back if i < len(users)]
        own = [i - first for i in plan.reads_back if i >= first]
        self.reads_held = [self.feeds.held[i] for i in own if i not in self.feeds.copied]

    def infer(self, users: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs the forward alone."""
        fetches = self.plan.forward.run_values(self.feeds(users))
        tensors = self.plan.exchange.all(fetches, self.plan.bools)
        self.write_back(tensors)
        return tensors[: self.plan.outputs]

    def train(
        self,
        users: Sequence[torch.Tensor],
        call: FlatCall | None = None,
        caller: Caller | None = None,
    ) -> Sequence[torch.Tensor]:
        """Runs the forward and leaves a backward with autograd.

        Args:
            users: the tensors that the program takes.
            call: the arguments as they came; None where PyTorch need not run them again.
            caller: hears what the backward needs.
        """
        kept, inputs = _Kept(self, users, call, caller), [users[i] for i in self.inputs]
        if len(self.groups) == 1:
            result = _Function.apply(kept, None, *inputs, *self.parameters)
        else:
            arguments, token = [*inputs, *self.parameters], None
            first, *later = [(group, [arguments[i] for i in group.gives]) for group in self.groups]
            for group, tensors in reversed(later):
                token = _Later.apply(kept, group, token, *tensors)
            result = _Function.apply(kept, token, *first[1])
        return result if isinstance(result, tuple) else (result,)

    def write_back(self, tensors: list[torch.Tensor]) -> None:
        """Updates the buffers in place."""
        for i, buffer in self.buffers:
            buffer.copy_(tensors[i])


@dataclass(frozen=True)
class Group:
    """Gradients that autograd gets together.

    Attributes:
        pieces: so many pieces of the backward have made them.
        gives: whose gradients they are: positions among the arguments.
    """

    pieces: int
    gives: tuple[int, ...]


def _groups(plan: Plan, order: Sequence[int]) -> list[Group]:
    """One group; where gradients go to other processes, one for each piece that makes any."""
    if not plan.exchanged or len(plan.pieces) < 2:
        return [Group(len(plan.pieces), tuple(range(len(order))))]
    argument = {place: i for i, place in enumerate(order)}
    groups = [
        Group(number, tuple(sorted(argument[place] for _, place in piece.gives)))
        for number, piece in enumerate(plan.pieces, 1)
        if piece.gives
    ]
    # What has no gradient here may have one where other outputs receive one.
    without = tuple([i for i, place in enumerate(order) if place < 0])
    return [Group(groups[0].pieces, groups[0].gives + without), *groups[1:]]


class _Way:
    """One backward on its way through the pieces.

    Args:
        kept: what the forward left.
        upstream: the gradients of the outputs.
        keeps: whether another backward may follow, for which the forward's values stay.
        changed: what autograd says where something that the pieces read is not as it was.
    """

    __slots__ = (
        "carried", "changed", "done", "gradients", "keeps", "kept", "order", "pieces", "stash",
        "upstream", "whole",
    )  # fmt: skip

    def __init__(
        self,
        kept: _Kept,
        upstream: Sequence[torch.Tensor | None],
        keeps: bool,
        changed: RuntimeError | None,
    ) -> None:
        self.kept, self.stash, self.upstream = kept, kept.stash, upstream
        self.keeps, self.changed, self.done, self.whole = keeps, changed, 0, False
        self.carried: list[Any] = []
        if is_grad_enabled() or forward_ad._current_level >= 0 or _transforms() is not None:
            self._take_all(self._transformed())
            return
        step = kept.step
        self._choose(step)
        for given, expected in zip(upstream, step.plan.upstream, strict=True):
            if (given is not None) is not expected or changed is not None:
                self._run_again(tuple([g is not None for g in upstream]))
                break

    def take(self, group: Group) -> Gradients:
        """The gradients of a group, once its pieces have run. Nothing here refers to them after."""
        count = len(self.pieces) if self.whole else group.pieces
        if self.done < count:
            try:
                for number in range(self.done, count):
                    self._run(number, self.pieces[number])
            except Exception as error:
                self._take_all(self._recovered(error))
        order, gradients = self.order, self.gradients
        taken = [gradients[order[i]] for i in group.gives]
        if len(taken) < len(order):  # else this object goes with them
            for i in group.gives:
                gradients[order[i]] = None
        return taken

    def _choose(self, step: Step) -> None:
        self.pieces, self.order = step.plan.pieces, step.order
        # The last one is what -1 in the order finds.
        self.gradients: Gradients = [None] * (len(step.plan.wrt) + 1)

    def _take_all(self, gradients: Gradients) -> None:
        """Takes the gradients of all groups, in the order of the arguments."""
        self.pieces, self.done = (), 0
        self.whole = True
        self.order, self.gradients = list(range(len(gradients))), gradients

    def _run_again(self, received: Received) -> None:
        """Chooses the pieces for gradients of other outputs than expected."""
        if not any(received):
            self._take_all([None] * len(self.kept.step.order))
            return
        try:
            step, self.stash = self.kept.again(received)
        except Exception as error:
            if self.changed is not None:
                raise self.changed from None
            self._take_all(self._recovered(error))
        else:
            self.keeps, self.whole = False, True
            self._choose(step)

    def _run(self, number: int, piece: Piece) -> None:
        exchange = self.kept.step.plan.exchange
        feeds = self.stash[number]
        if self.keeps:
            feeds = list(feeds)
        else:
            self.stash[number] = None
        for is_upstream, index in piece.given:
            if is_upstream:
                gradient = self.upstream[index]
                assert gradient is not None
                feeds.append(exchange.take(gradient))
            else:
                feeds.append(self.carried[index])
        fetches = piece.compiled.run_values(feeds)
        del feeds
        self.done = number + 1
        for i in piece.frees:
            self.carried[i] = None
        gradients = self.gradients
        if piece.carries:
            self.carried += [fetches[i] for i in piece.carries]
            for position, place in piece.gives:
                gradients[place] = exchange.at(fetches, position, False)
        else:
            tensors = exchange.all(fetches)
            for position, place in piece.gives:
                gradients[place] = tensors[position]

    def _transformed(self) -> Gradients:
        """Gradients that are differentiated again, have tangents, or are batches: PyTorch's.

        Where PyTorch cannot run the forward again, they are the graph's, and an error once they are
        differentiated.
        """
        again = is_grad_enabled()
        if again and self.kept.caller is not None:
            self.kept.caller.differentiated_again()
        try:
            return self._in_pytorch(create_graph=again)
        except OrtrainError as error:
            if self.changed is not None:
                raise self.changed from None
            if not again or forward_ad._current_level >= 0 or _transforms() is not None:
                raise
            why = error
        step = self.kept.step
        with torch.no_grad():
            plain = _Way(self.kept, self.upstream, self.keeps, None)
            everything = Group(len(step.plan.pieces), tuple(range(len(step.order))))
            gradients = plain.take(everything)
        connected = [*self.kept.wrt(), *self.upstream]
        return list(Sealed.apply(why, len(gradients), *gradients, *connected))

    def _recovered(self, error: Exception) -> Gradients:
        """PyTorch's gradients in the place of a graph's that failed."""
        call, caller = self.kept.call, self.kept.caller
        if call is None or caller is None:
            raise error
        if any(g is not None and _is_batched(g) for g in self.upstream):
            return self._in_pytorch(create_graph=False)  # no error: autograd.grad(is_grads_batched)
        if not isinstance(error, OrtrainError):
            error = ExecutionError(
                "the graph's backward failed", because=f"{type(error).__name__}: {error}"
            )
        try:
            gradients = self._in_pytorch(create_graph=False)
        except OrtrainError:
            raise error from None
        if not caller.recovers(error, call):
            raise error
        return gradients

    def _in_pytorch(self, *, create_graph: bool) -> Gradients:
        return self.kept.in_pytorch(self.upstream, create_graph=create_graph)


class _Function(torch.autograd.Function):
    """One node of autograd's graph for the whole module.

    Where gradients go to other processes, it gives those of the first group, and a chain of
    :class:`_Later`, held together by tokens, gives the others: autograd hands out each group before
    it asks for the next, so that its exchange begins while the backward goes on.
    """

    @staticmethod
    def forward(ctx: Any, kept: _Kept, token: torch.Tensor | None, *tensors: torch.Tensor) -> Any:
        step, feeds, users = kept.step, kept.feeds, kept.users
        plan = step.plan
        fetches = plan.forward.run_values(list(feeds))
        count, at = plan.outputs, plan.exchange.at
        outputs = [at(fetches, i, i in plan.bools) for i in range(count)]
        for i, buffer in step.buffers:
            buffer.copy_(at(fetches, i, False))
        kept.stash = _stash(plan, feeds, fetches)
        ctx.kept, ctx.group, ctx.chained = kept, step.groups[0], token is not None
        ctx.set_materialize_grads(False)
        watched = [users[i] for i in step.reads_users]
        ctx.save_for_backward(*watched, *step.reads_held, *[outputs[i] for i in plan.keeps_outputs])
        fixed = [t for t, reachable in zip(outputs, plan.reachable, strict=True) if not reachable]
        if fixed:
            ctx.mark_non_differentiable(*fixed)
        return outputs[0] if count == 1 else tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> Any:
        kept: _Kept | None = ctx.kept
        changed = None
        try:
            ctx.saved_tensors  # noqa: B018  (raises where one of them was changed in place)
        except RuntimeError as error:
            # It may be another output than those that have a gradient, or what leads to one.
            if kept is None or "modified by an inplace operation" not in str(error):
                raise
            changed = error
        if kept is None:
            raise StateError(
                "Trying to backward through the graph of ORTModule a second time",
                because="what the forward saved was freed by the first backward",
                help="call the first backward with retain_graph=True",
            )
        keeps = _keeps_graph()
        if not keeps:
            ctx.kept = None
        way = _Way(kept, upstream, keeps, changed)
        if not ctx.chained:
            return (None, None, *way.take(ctx.group))
        kept.way = way
        return (None, _zero(), *way.take(ctx.group))


class _Later(torch.autograd.Function):
    """The node that gives the gradients of a later group."""

    @staticmethod
    def forward(
        ctx: Any, kept: _Kept, group: Group, token: torch.Tensor | None, *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.kept, ctx.group, ctx.chained = kept, group, token is not None
        return _zero()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        kept: _Kept = ctx.kept
        way = kept.way
        assert way is not None
        if not _keeps_graph():
            ctx.kept = None
        token = _zero() if ctx.chained else None
        if token is None:
            kept.way = None
        return (None, None, token, *way.take(ctx.group))


def _zero() -> torch.Tensor:
    """The gradient with which autograd goes on to the next node."""
    return torch.zeros((), dtype=torch.float32)


class _Kept:
    """What a forward leaves for its backward, or for several, and for running again.

    It can run again as a graph, for other gradients, or in PyTorch. The seed is among the feeds, so
    that the graph saves the same to the bit.

    Attributes:
        stash: what the pieces take of it.
        way: the backward that is under way, where gradients are given in groups.
    """

    __slots__ = (
        "call", "caller", "feeds", "pointers", "stash", "step", "users", "versions", "way",
    )  # fmt: skip

    def __init__(
        self,
        step: Step,
        users: Sequence[torch.Tensor],
        call: FlatCall | None,
        caller: Caller | None,
    ) -> None:
        self.step, self.users, self.call, self.caller = step, users, call, caller
        self.feeds = step.feeds(users)
        self.pointers = step.feeds.pointers
        try:
            self.versions = [t._version for t in [*step.watched, *users]]
        except RuntimeError:  # an argument was made in inference mode
            self.versions = contents([*step.watched, *users])
        self.stash: list[Any] = []
        self.way: _Way | None = None

    def again(self, received: Received) -> tuple[Step, list[Any]]:
        """The step for gradients of these outputs, and what its forward saves.

        Raises:
            StateError: what the backward depends on was changed in place.
        """
        other = self.step.other(received)
        self._expect_unchanged(_matters(other.plan, saved_only=True))
        place = {name: i for i, name in enumerate(self.step.feeds.names)}
        feeds = [self.feeds[place[name]] for name in other.feeds.names]
        return other, _stash(other.plan, feeds, other.plan.forward.run_values(list(feeds)))

    def in_pytorch(
        self, upstream: Sequence[torch.Tensor | None], *, create_graph: bool
    ) -> Gradients:
        """The gradients of all arguments, from the module itself.

        Raises:
            StateError: the module, or a tensor that these outputs depend on, was changed.
            CaptureError: PyTorch cannot draw the same random numbers.
            UnsupportedGradient: the module reads parameters that are not its own.
        """
        step = self.step
        assert step.original is not None
        assert self.call is not None
        forward = step.plan.lowered[0].graph
        received = zip(forward.outputs, upstream, strict=False)
        chosen = [value for value, gradient in received if gradient is not None]
        self._expect_unchanged({v.name or "" for v in dependencies(forward, chosen)})
        give = step.plan.exchange.give
        seed = int(give(self.feeds[len(self.users)])) if step.feeds.seeded else None
        buffers = {id(buffer): give(self.feeds[i]) for i, buffer in step.copies}
        return step.original.gradients(
            self.call, self.wrt(), buffers, upstream, seed=seed, create_graph=create_graph
        )

    def wrt(self) -> list[torch.Tensor]:
        """The arguments and parameters that required a gradient."""
        return [*[self.users[i] for i in self.step.inputs], *self.step.parameters]

    def _expect_unchanged(self, names: Collection[str]) -> None:
        """Raises where one of these inputs of the program holds another value than it did."""
        step = self.step
        tensors = [*step.lasting, *zip(step.feeds.names, self.users, strict=False)]
        now = contents([tensor for _, tensor in tensors])
        changed = [
            name
            for (name, _), before, version in zip(tensors, self.versions, now, strict=True)
            if before != version and name in names
        ]
        moved = [
            name
            for name, before, tensor in zip(
                reversed(step.feeds.names),
                reversed(self.pointers),
                reversed(step.feeds.held),
                strict=False,
            )
            if before not in (_COPIED, tensor.data_ptr()) and name in names
        ]
        if changed or moved:
            raise StateError(
                f"a parameter or an input was changed in place between forward and backward: "
                f"{listing([*changed, *moved])}",
                because="the forward has to run again on the same values for these gradients",
                help="call backward before the optimizer steps",
            )


def _matters(plan: Plan, *, saved_only: bool = False) -> set[str]:
    """Names of the inputs that outputs and backward depend on; only the backward if asked.

    Batch normalization in training mode reads its running statistics for nothing but their update.
    """
    forward = plan.lowered[0].graph
    taken = {s.index for p in plan.pieces for s in p.takes if s.kind == "fetch"}
    outputs = taken if saved_only else taken | set(range(plan.outputs))
    found = dependencies(forward, [forward.outputs[i] for i in outputs])
    return {v.name or "" for v in found} | {plan.feeds[i][1] for i in plan.reads_back}


def _stash(plan: Plan, feeds: Sequence[Any], fetches: Any) -> list[Any]:
    """The feeds of each backward piece, as far as the forward knows them."""
    return [
        [fetches[index] if is_fetch else feeds[index] for is_fetch, index in piece.kept]
        for piece in plan.pieces
    ]
