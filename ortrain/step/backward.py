"""One backward: the pieces of a graph one after another, or PyTorch in their place."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import is_grad_enabled

from ortrain.errors import ExecutionError, OrtrainError
from ortrain.pytorch.backwards import profiled
from ortrain.pytorch.hooks import without_gradient
from ortrain.pytorch.layout import laid
from ortrain.pytorch.transforms import is_batched, tangents, transform_around
from ortrain.step.build import Piece, Plan
from ortrain.step.ranges import marked
from ortrain.step.replay import Gradients, Sealed
from ortrain.step.saved_forward import Received, SavedForward

if TYPE_CHECKING:
    from ortrain.step.autograd import Step


class _Here(threading.local):
    spent: list[SavedForward] | None = None


_here = _Here()


@contextlib.contextmanager
def frees() -> Iterator[None]:
    """Backwards of this thread that leave the graph for others free what the forward has saved.

    So that is not in memory beside the gradients. Afterwards the forward runs again for it.
    """
    found: list[SavedForward] = []
    _here.spent = found
    try:
        yield
    finally:
        _here.spent = None
        for kept in found:
            if any(values is None for values in kept.stash):
                kept.save_again()


@dataclass(frozen=True)
class Group:
    """Gradients that autograd gets together.

    Attributes:
        pieces: so many pieces of the backward have made them.
        gives: whose gradients they are: positions among the arguments.
    """

    pieces: int
    gives: tuple[int, ...]


def groups_of(plan: Plan, order: Sequence[int]) -> list[Group]:
    """One group; where gradients are early, one for each piece that makes any."""
    if not plan.early or len(plan.pieces) < 2:
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


class Backward:
    """One backward on its way through the pieces.

    Args:
        kept: what the forward left.
        upstream: the gradients of the outputs.
        keeps: whether another backward may follow, for which the forward's values stay.
        changed: what autograd says where something that the pieces read is not as it was.
        whole: whether the gradients of outputs have in them what later outputs have sent, so that
            PyTorch gives those of the arguments.
    """

    __slots__ = (
        "carried", "changed", "done", "gradients", "keeps", "kept", "order", "pieces", "stash",
        "upstream", "whole",
    )  # fmt: skip

    def __init__(
        self,
        kept: SavedForward,
        upstream: Sequence[torch.Tensor | None],
        keeps: bool,
        changed: RuntimeError | None,
        *,
        whole: bool = False,
    ) -> None:
        self.kept, self.stash, self.upstream = kept, kept.stash, upstream
        if keeps and _here.spent is not None and kept.may_be_spent:
            _here.spent.append(kept)
            keeps = False
        self.keeps, self.changed, self.done, self.whole = keeps, changed, 0, False
        self.carried: list[Any] = []
        if whole:
            self._take_all(self._of_whole())
            return
        if is_grad_enabled() or tangents() >= 0 or transform_around() is not None:
            self._take_all(self._transformed())
            return
        step = kept.step
        kept.follow()
        self._choose(step)
        for given, expected in zip(upstream, step.plan.upstream, strict=True):
            if (given is not None) is not expected or changed is not None:
                self._run_again(tuple([g is not None for g in upstream]))
                break

    def take(self, group: Group) -> Gradients:
        """The gradients of a group, once its pieces have run. Nothing here refers to them after."""
        count = len(self.pieces) if self.whole else group.pieces
        if self.done < count:
            if profiled():
                with marked("backward"):
                    self._run_until(count)
            else:
                self._run_until(count)
        order, gradients = self.order, self.gradients
        taken = [gradients[order[i]] for i in group.gives]
        if any(each is None for each in taken):
            tensors = self.kept.wrt()
            for i, each in zip(group.gives, taken, strict=True):
                if each is None:
                    without_gradient(tensors[i])
        if len(taken) < len(order):  # else this object goes with them
            for i in group.gives:
                gradients[order[i]] = None
        orders = self.kept.step.orders
        if orders:
            names = self.kept.step.plan.arguments
            for place, (i, each) in enumerate(zip(group.gives, taken, strict=True)):
                if each is not None and names[i] in orders:
                    taken[place] = laid(each, orders[names[i]])
        return taken

    def _run_until(self, count: int) -> None:
        try:
            for number in range(self.done, count):
                self._run(number, self.pieces[number])
        except Exception as error:
            self._take_all(self._recovered(error))

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
            if not again or tangents() >= 0 or transform_around() is not None:
                raise
            why = error
        step = self.kept.step
        with torch.no_grad():
            plain = Backward(self.kept, self.upstream, self.keeps, None)
            everything = Group(len(step.plan.pieces), tuple(range(len(step.order))))
            gradients = plain.take(everything)
        connected = [*self.kept.wrt(), *self.upstream]
        return list(Sealed.apply(why, len(gradients), *gradients, *connected))

    def _of_whole(self) -> Gradients:
        """Those of the arguments where hooks on outputs have seen what passes there."""
        again = is_grad_enabled()
        if again and self.kept.caller is not None:
            self.kept.caller.differentiated_again()
        with self.kept.repeated([g is not None for g in self.upstream]) as repeated:
            return repeated.gradients(self.upstream, create_graph=again, whole=True)

    def _recovered(self, error: Exception) -> Gradients:
        """PyTorch's gradients in the place of a graph's that failed."""
        call, caller = self.kept.call, self.kept.caller
        if call is None or caller is None:
            raise error
        if any(g is not None and is_batched(g) for g in self.upstream):
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
