"""What a forward is given: values of the tensors of a call, the seed, buffers and parameters."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from ortrain.program import Role
from ortrain.step.build import Plan


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
        # Under a tensor of its own: PyTorch swaps none that something else refers to.
        tensor = tensor.clone() if i in self.copied else tensor.detach()
        if i not in self.copied and self.exchange.shares(tensor):
            return self.exchange.take(tensor)
        self.pointers[i] = COPIED
        return self.exchange.take(tensor)


_address = torch.Tensor.data_ptr
COPIED = -1  # the address of no tensor
_ORDER = {Role.USER_INPUT: 0, Role.SEED: 1, Role.BUFFER: 2, Role.PARAMETER: 2}


def draw_seed() -> torch.Tensor:
    """A seed from torch's generator, so that ``torch.manual_seed`` repeats a run."""
    return torch.empty((), dtype=torch.int64).random_()
