"""What a forward leaves for its backward, and how it runs again for another one."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ortrain.errors import StateError, listing
from ortrain.graph.walk import dependencies
from ortrain.pytorch.backwards import is_checkpointed
from ortrain.pytorch.version import contents, count
from ortrain.step.build import Plan
from ortrain.step.feeds import COPIED
from ortrain.step.replay import Caller, Gradients, Repeated

if TYPE_CHECKING:
    from ortrain.step.autograd import Step
    from ortrain.step.backward import Backward
    from ortrain.step.chain import Chain
    from ortrain.step.unread import Values


Received = tuple[bool, ...]
"""Which outputs receive a gradient."""


class SavedForward:
    """What a forward leaves for its backward, or for several, and for running again.

    It can run again as a graph, for other gradients, or in PyTorch. The seed is among the feeds, so
    that the graph saves the same to the bit.

    Attributes:
        stash: what the pieces take of it.
        way: the backward that is under way, where gradients are given in groups.
        chain: where outputs are computed from others.
        copies: of the call's tensors, for running again; None where that is not expected.
        packed: where autograd holds the tensors of this; None where they are here.
        node: of autograd's graph, which has them or had them; None where there are no hooks.
        values: of the outputs that nobody has read so far, as long as there is one.
    """

    __slots__ = (
        "__weakref__", "bound", "call", "caller", "chain", "copies", "feeds", "held", "node",
        "packed", "pointers", "stash", "step", "users", "values", "versions", "way",
    )  # fmt: skip

    def __init__(
        self,
        step: Step,
        users: Sequence[torch.Tensor],
        held: Sequence[torch.Tensor],
        call: Sequence[Any] | None,
        caller: Caller | None,
    ) -> None:
        self.step, self.users, self.held, self.call, self.caller = step, users, held, call, caller
        self.bound = step.bind(held)
        self.feeds = step.feeds(users, self.bound)
        self.pointers = self.bound.pointers
        watched = [held[i] for i in self.bound.lasting]
        try:
            self.versions = [*map(count, watched), *map(count, users)]
        except RuntimeError:  # an argument was made in inference mode
            self.versions = contents([*watched, *users])
        self.stash: list[Any] = []
        self.way: Backward | None = None
        self.chain: Chain | None = None
        self.copies: list[torch.Tensor] | None = None
        self.packed: Packed | None = None
        self.node: Callable[[], Any] | None = None
        self.values: Callable[[], Values | None] | None = None

    def pack(self) -> list[torch.Tensor]:
        """Hands what is held here to autograd, whose hooks may keep it elsewhere.

        A checkpoint around the call keeps nothing, and has the forward run again for it. Numbers of
        the caller's code stay what they were at the first time: PyTorch saves them in its nodes.
        """
        step, give = self.step, self.step.plan.exchange.give
        read = {*step.reads_users, *step.read_again()}
        users = [
            i
            for i, tensor in enumerate(self.users)
            if i not in step.numbers and (tensor.requires_grad or i in read)
        ]
        shared = {
            id(value)
            for i, (value, own) in enumerate(zip(self.bound.values, self.held, strict=False))
            if isinstance(own, torch.nn.Parameter) and i not in step.feeds.copied
        }
        shared |= {id(self.feeds[i]) for i in range(len(self.users)) if i not in users}
        feeds = {id(self.feeds[i]): i for i in users}
        seeded = [(self.feeds, len(self.users))] if step.feeds.seeded else []
        overwritten = [(self.feeds, place) for place, _ in step.copies]
        places = [*seeded, *overwritten, *_places(step, self.stash)]
        places = [
            (values, i)
            for values, i in places
            if id(values[i]) not in shared and id(values[i]) not in feeds and _is_tensor(values[i])
        ]
        again = [
            (values, i, feeds[id(value)])
            for values in self.stash
            for i, value in enumerate(values)
            if id(value) in feeds
        ]
        tensors = [*(self.users[i] for i in users), *(give(values[i]) for values, i in places)]
        packed = {id(self.users[i]): i for i in users}
        given = self.call if isinstance(self.call, tuple) else ()
        call = {i: packed[id(v)] for i, v in enumerate(given) if id(v) in packed}
        self.empty(Packed(users, places, again, call, is_checkpointed()))
        return [*tensors, torch.tensor(self._marks(users, len(tensors)))]

    def empty(self, packed: Packed) -> None:
        """Holds nothing any more that autograd holds."""
        self.packed = packed
        nothing: Any = None
        for values, i in packed.places:
            values[i] = nothing
        for values, i, _ in packed.again:
            values[i] = nothing
        self.users = list(self.users)
        for i in packed.users:
            self.users[i] = self.feeds[i] = nothing
        if packed.call:
            given: Any = self.call
            self.call = tuple(None if i in packed.call else v for i, v in enumerate(given))

    def restore(self, saved: Sequence[torch.Tensor]) -> None:
        """Puts back what :meth:`pack` has handed to autograd.

        Where a checkpoint's repetition has run another step, since something of the module is not
        as it was, its arguments, seed and buffers are put back, and this forward runs again on
        them: as in PyTorch it is the first run that is differentiated.

        Args:
            saved: what the node has, packed tensors last.

        Raises:
            StateError: it cannot run again.
        """
        if (packed := self.packed) is None:
            return
        self.packed = None
        count = len(packed.users)
        own = self._marks(packed.users, count + len(packed.places))
        marks = saved[-1].tolist() if packed.repeats else own
        number, read, handed = marks
        tensors = saved[-1 - handed : -1]
        take = self.step.plan.exchange.take
        users = list(self.users)
        for i, tensor in zip(packed.users, tensors, strict=False):
            users[i], self.feeds[i] = tensor, take(tensor)
        self.users = users
        if number == own[0]:
            for (values, i), tensor in zip(packed.places, tensors[count:], strict=True):
                values[i] = take(tensor)
            for values, i, user in packed.again:
                values[i] = self.feeds[user]
        elif read == own[1]:
            for (values, i), tensor in zip(packed.places, tensors[count:], strict=False):
                if values is self.feeds:
                    values[i] = take(tensor)
            self.save_again()
        else:
            raise StateError(
                "a checkpoint's repetition has run another graph than its first run",
                because="the module has changed in between, and the first graph cannot run again: "
                "it has calls of PyTorch's, writes to its arguments, or takes other ones",
                help='leave this module to PyTorch: Options(engine="torch")',
            )
        if packed.call:
            call = list(self.call or ())
            for i, user in packed.call.items():
                call[i] = users[user]
            self.call = tuple(call)
        watched = [self.held[i] for i in self.bound.lasting]
        self.versions = [*self.versions[: len(watched)], *contents(users)]

    def _marks(self, users: Sequence[int], count: int) -> list[int]:
        """The step, a number for the names of what it reads, and how many tensors it has packed.

        What it reads are arguments at these positions, the seed, and buffers that it overwrites.
        """
        feeds, copies = self.step.feeds, self.step.copies
        names = [feeds.names[i] for i in [*users, *[i for i, _ in copies]]]
        read = zlib.crc32(repr((feeds.seeded, names)).encode())
        return [self.step.number, read, count]

    def follow(self) -> None:
        """Takes parameters again whose memory was freed and made anew since the forward."""
        moved = self.bound.moved()
        for values in [self.feeds, *self.stash] if moved else ():
            for place, value in enumerate(values or ()):
                if id(value) in moved:
                    values[place] = self.step.plan.exchange.take(moved[id(value)])

    def again(self, received: Received) -> tuple[Step, list[Any]]:
        """The step for gradients of these outputs, and what its forward saves.

        Raises:
            StateError: what the backward depends on was changed in place.
        """
        other = self.step.other(received)
        feeds = self._feeds_of(other, matters(other.plan, saved_only=True))
        fetches = other.plan.forward.run_values(list(feeds))
        return other, stash_of(other.plan, feeds, fetches)

    @property
    def may_be_spent(self) -> bool:
        """Whether what one backward has freed may be made again for another."""
        return len(self.step.groups) == 1 and self.node is None

    def save_again(self) -> None:
        """Has the forward run once more for what a backward has freed of it."""
        plan = self.step.plan
        self.stash = stash_of(plan, self.feeds, plan.forward.run_values(list(self.feeds)))

    def outputs_of(self, other: Step) -> list[torch.Tensor]:
        """What another step makes of the same call.

        Raises:
            StateError: what it depends on was changed in place.
        """
        plan = other.plan
        fetches = plan.forward.run_values(self._feeds_of(other, matters(plan)))
        return plan.exchange.all(fetches, plan.bools)[: plan.outputs]

    def _feeds_of(self, other: Step, names: set[str]) -> list[Any]:
        """What another step takes, of which inputs with these names must not have changed."""
        known = list(self.feeds)
        if self.copies is not None:
            own = {*self.step.feeds.names[: len(self.copies)]}
            names -= own - {other.plan.feeds[i][1] for i in other.plan.reads_back}
            known[: len(self.copies)] = map(other.plan.exchange.take, self.copies)
        self._expect_unchanged(names)
        place = {name: i for i, name in enumerate(self.step.feeds.names)}
        return [known[place[name]] for name in other.feeds.names]

    def in_pytorch(
        self, upstream: Sequence[torch.Tensor | None], *, create_graph: bool
    ) -> Gradients:
        """The gradients of all arguments, from PyTorch.

        Raises:
            StateError: a tensor that these outputs depend on was changed.
            CaptureError: PyTorch cannot draw the same random numbers.
        """
        received = [gradient is not None for gradient in upstream]
        with self.repeated(received) as repeated:
            return repeated.gradients(upstream, create_graph=create_graph)

    @contextlib.contextmanager
    def repeated(self, received: Sequence[bool]) -> Iterator[Repeated]:
        """The module's own forward once more, for gradients of these outputs; errors as above."""
        node = self.node() if self.node is not None and self.packed is not None else None
        if node is not None:
            self.restore(node.saved_tensors)
        step = self.step
        assert step.original is not None
        assert self.call is not None
        forward = step.plan.lowered[0].graph
        chosen = [value for value, is_in in zip(forward.outputs, received, strict=False) if is_in]
        self._expect_unchanged({v.name or "" for v in dependencies(forward, chosen)})
        give = step.plan.exchange.give
        seed = int(give(self.feeds[len(self.users)])) if step.feeds.seeded else None
        buffers = {id(self.held[place]): give(self.feeds[i]) for i, place in step.copies}
        with step.original.around(self.call):
            yield step.original.forward(self.call, self.wrt(), buffers, seed=seed)

    def wrt(self) -> list[torch.Tensor]:
        """The arguments and parameters that required a gradient."""
        step = self.step
        return [*[self.users[i] for i in step.inputs], *[self.held[i] for i in step.parameters]]

    def _expect_unchanged(self, names: Collection[str]) -> None:
        """Raises where one of these inputs of the program holds another value than it did."""
        step = self.step
        lasting = [(step.names[i], self.held[i]) for i in self.bound.lasting]
        tensors = [*lasting, *zip(step.feeds.names, self.users, strict=False)]
        now = contents([tensor for _, tensor in tensors])
        changed = [
            name
            for (name, _), before, version in zip(tensors, self.versions, now, strict=True)
            if before != version and name in names
        ]
        moved = [
            name
            for name, before, tensor in zip(step.feeds.held, self.pointers, self.held, strict=False)
            if before not in (COPIED, tensor.data_ptr()) and name in names
        ]
        if changed or moved:
            raise StateError(
                f"a parameter or an input that these gradients need has been modified by an "
                f"inplace operation: {listing([*changed, *moved])}",
                because="it was changed between forward and backward",
                help="call backward before the optimizer steps",
            )


@dataclass(frozen=True)
class Packed:
    """Where the tensors of a forward belong that autograd holds: first those of the call.

    Attributes:
        users: positions of the call's.
        places: of those behind them, as lists and positions.
        again: where else a value of the call's stands: as lists and positions, with the user's.
        call: positions among the call's arguments, with those among the users'.
        repeats: whether a checkpoint gives them back, from its repetition of the call.
    """

    users: list[int]
    places: list[tuple[list[Any], int]]
    again: list[tuple[list[Any], int, int]]
    call: dict[int, int]
    repeats: bool


def _places(step: Step, stash: Sequence[list[Any]]) -> Iterator[tuple[list[Any], int]]:
    """The places of what a stash holds, beside what numbers alone lead to."""
    for piece, values in zip(step.plan.pieces, stash, strict=True):
        for i, (is_fetch, index) in enumerate(piece.kept):
            if not (is_fetch and index in step.of_numbers):
                yield values, i


def _is_tensor(value: Any) -> bool:
    """Whether an executor's value holds numbers, and is no mark of its own."""
    asked = getattr(value, "is_tensor", None)
    return isinstance(value, torch.Tensor) or (asked is not None and bool(asked()))


def matters(plan: Plan, *, saved_only: bool = False) -> set[str]:
    """Names of the inputs that outputs and backward depend on; only the backward if asked.

    Batch normalization in training mode reads its running statistics for nothing but their update.
    """
    forward = plan.lowered[0].graph
    taken = {s.index for p in plan.pieces for s in p.takes if s.kind == "fetch"}
    outputs = taken if saved_only else taken | set(range(plan.outputs))
    found = dependencies(forward, [forward.outputs[i] for i in outputs])
    return {v.name or "" for v in found} | {plan.feeds[i][1] for i in plan.reads_back}


def stash_of(plan: Plan, feeds: Sequence[Any], fetches: Any) -> list[Any]:
    """The feeds of each backward piece, as far as the forward knows them."""
    return [
        [fetches[index] if is_fetch else feeds[index] for is_fetch, index in piece.kept]
        for piece in plan.pieces
    ]
