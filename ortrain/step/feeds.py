"""What a forward is given: values of the tensors of a call, the seed, buffers and parameters."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import torch

from ortrain.program import Role
from ortrain.step.build import Plan
from ortrain.step.seeds import draw_seed


@dataclass(frozen=True)
class Bound:
    """What an executor has of the parameters and buffers of one set.

    Attributes:
        values: that it computes with.
        pointers: where the tensors were when these were made.
        lasting: places of those that may change between forward and backward, and should not.
        references: to the tensors, which tell when one is gone.
        shown: by their places, tensors of the memory of those values that are no tensors
            themselves and lie over it.
        fitting: groups of gradients, by their pieces, that have the sizes autograd expects.
    """

    values: list[Any]
    pointers: list[int]
    lasting: list[int]
    references: list[weakref.ref[torch.Tensor]]
    shown: dict[int, torch.Tensor]
    fitting: set[int] = field(default_factory=set)

    def moved(self) -> dict[int, torch.Tensor]:
        """Tensors whose memory was freed and made anew, as sharding does, by ids of values."""
        moved = [i for i, own in self.shown.items() if own.data_ptr() != self.pointers[i]]
        return {id(self.values[i]): self.shown[i] for i in moved}


class Feeds:
    """The feeds of a forward: what changes at every call first, then parameters and buffers.

    The executor's value of a parameter is made once, and again where its memory has moved; the
    guard tells of other strides. One that cannot share the parameter's memory is a copy, and made
    at every call. A step may serve several sets of parameters: values of the latest ones are kept
    until one of their tensors is gone.

    Args:
        plan: the compiled step.
        copied: buffers to copy, because this forward overwrites what its backward still reads.
        written: buffers that the forward updates.
        several: whether there may be several sets, which others hold. What refers weakly to a
            tensor keeps PyTorch from swapping it, so one set that the step holds itself has none.

    Attributes:
        streams: that a forward draws of its seed.
    """

    def __init__(
        self,
        plan: Plan,
        copied: Collection[str] = (),
        written: Collection[str] = (),
        *,
        several: bool = False,
    ) -> None:
        self.exchange = plan.exchange
        self.names = [name for _, name in plan.feeds]
        self.users = [i for i, (role, _) in enumerate(plan.feeds) if role is Role.USER_INPUT]
        self.seeded = any(role is Role.SEED for role, _ in plan.feeds)
        roles = [role for role, _ in plan.feeds]
        assert roles == sorted(roles, key=_ORDER.__getitem__), "feeds come by role"
        self.held = [name for role, name in plan.feeds if role in (Role.PARAMETER, Role.BUFFER)]
        self.copied = {i for i, name in enumerate(self.held) if name in copied}
        self.lasting = [i for i, name in enumerate(self.held) if name not in written]
        self.several = several
        self.streams = streams_of(plan.programs[0].graph) if self.seeded else 0
        self.bound: dict[tuple[int, ...], Bound] = {}

    def __call__(self, users: Sequence[torch.Tensor], bound: Bound) -> list[Any]:
        """All feeds of one forward, in the order of the program's inputs."""
        take = self.exchange.take
        feeds = [take(tensor) for tensor in users]
        if self.seeded:
            feeds.append(take(draw_seed(self.streams)))
        feeds += bound.values
        return feeds

    def bind(self, held: Sequence[torch.Tensor]) -> Bound:
        """The values of a set of parameters and buffers, in the order of their names."""
        key = tuple(map(id, held)) if self.several else ()
        bound, pointers = self.bound.get(key), [*map(_address, held)]
        if bound is None or pointers != bound.pointers:
            # A new object, for earlier forwards and other threads may still read the one before.
            bound = self.bound[key] = self._again(key, held, pointers, bound)
        return bound

    def _again(
        self,
        key: tuple[int, ...],
        held: Sequence[torch.Tensor],
        pointers: list[int],
        before: Bound | None,
    ) -> Bound:
        values, shown = list[Any](), dict[int, torch.Tensor]()
        for i, tensor in enumerate(held):
            if before is not None and pointers[i] == before.pointers[i]:
                values.append(before.values[i])
                if i in before.shown:
                    shown[i] = before.shown[i]
                continue
            # Under a tensor of its own: PyTorch swaps none that something else refers to.
            own = tensor.clone() if i in self.copied else tensor.detach()
            values.append(self.exchange.take(own))
            if i in self.copied or not self.exchange.shares(own):
                pointers[i] = COPIED
            elif not isinstance(values[i], torch.Tensor):
                shown[i] = own
        if before is not None:
            return Bound(values, pointers, before.lasting, before.references, shown)
        while len(self.bound) >= MOST_SETS:
            self.bound.pop(next(iter(self.bound)), None)
        lasting = [i for i in self.lasting if not held[i].is_inference()]
        return Bound(values, pointers, lasting, self._references(key, held), shown)

    def _references(
        self, key: tuple[int, ...], held: Sequence[torch.Tensor]
    ) -> list[weakref.ref[torch.Tensor]]:
        if not self.several:
            return []
        sets = weakref.ref(self)

        def forget(_: Any) -> None:
            feeds = sets()
            if feeds is not None:
                feeds.bound.pop(key, None)

        return [weakref.ref(tensor, forget) for tensor in held]


def streams_of(graph: ir.Graph) -> int:
    """How many streams the draws of a forward are numbered by."""
    numbered = (node.attributes.get("stream") for node in graph.all_nodes())
    return max((stream.as_int() + 1 for stream in numbered if stream is not None), default=0)


# Sets of parameters whose values a step keeps: the layers of a model that share one.
MOST_SETS = 256
_address = torch.Tensor.data_ptr
COPIED = -1  # the address of no tensor
_ORDER = {Role.USER_INPUT: 0, Role.SEED: 1, Role.BUFFER: 2, Role.PARAMETER: 2}
