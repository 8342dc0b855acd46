"""Modules that write to a buffer around, and in, what stays PyTorch's; put together of parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.kept.routines import number

Part = Callable[[Any, Tensor], Any]


# -- in the graph, before and behind the piece -----------------------------------------------------


def _in_place(m: Any, h: Tensor) -> None:
    with torch.no_grad():
        m.state.mul_(0.9).add_(h.mean(0))


def _a_slice(m: Any, h: Tensor) -> None:
    m.state[2:5] += h.detach().mean()


def _another_tensor(m: Any, h: Tensor) -> None:
    m.state = 0.8 * m.state + h.detach().mean(0)


def _statistics(m: Any, h: Tensor) -> Tensor:
    result: Tensor = m.norm(h.detach())  # PyTorch's backward would ask for them as they were
    return result


def _other_name(m: Any, h: Tensor) -> None:
    m.inner.known.add_(h.detach().mean(0))


def _copied(m: Any, h: Tensor) -> None:
    m.state.copy_(h.detach().amax(0))


def nothing(m: Any, h: Tensor) -> None:
    """Leaves it as it is."""


UPDATES: dict[str, Part] = {
    "nothing": nothing,
    "in place": _in_place,
    "a slice": _a_slice,
    "another tensor": _another_tensor,
    "statistics": _statistics,
    "under another name": _other_name,
    "copied": _copied,
}


# -- in the piece ----------------------------------------------------------------------------------


def _ignores(m: Any, h: Tensor) -> Tensor:
    return h * 1.5


def _reads(m: Any, h: Tensor) -> Tensor:
    return h * m.state.clone() + m.state


def _reads_sometimes(m: Any, h: Tensor) -> Tensor:
    return h + m.state if m.turn(h) else h * 2


def _reads_the_other_name(m: Any, h: Tensor) -> Tensor:
    return h + m.inner.known


def _writes(m: Any, h: Tensor) -> Tensor:
    m.state.add_(h.detach().mean(0))
    return h * 2


def _writes_sometimes(m: Any, h: Tensor) -> Tensor:
    if m.turn(h):
        m.state.mul_(0.5)
    return h * 2


def _writes_and_reads(m: Any, h: Tensor) -> Tensor:
    before = m.state.clone()
    m.state[:3] = h.detach()[0, :3]
    return h * before + m.state.clone()


def _assigns_sometimes(m: Any, h: Tensor) -> Tensor:
    if m.turn(h):
        m.state = m.state * 0.5
    return h * 2


def _takes_statistics(m: Any, h: Tensor) -> Tensor:
    return h + nn.functional.batch_norm(h.detach(), m.state, m.variance, training=m.training)


def _takes_statistics_sometimes(m: Any, h: Tensor) -> Tensor:
    if m.turn(h):
        nn.functional.batch_norm(h.detach(), m.state, m.variance, training=m.training)
    return h * 2


ACCESSES: dict[str, Part] = {
    "ignores": _ignores,
    "reads": _reads,
    "reads sometimes": _reads_sometimes,
    "reads the other name": _reads_the_other_name,
    "writes": _writes,
    "writes sometimes": _writes_sometimes,
    "writes and reads": _writes_and_reads,
    "assigns sometimes": _assigns_sometimes,
    "takes statistics": _takes_statistics,
    "takes statistics sometimes": _takes_statistics_sometimes,
}


# -- what the piece is -----------------------------------------------------------------------------


class Inner(nn.Module):
    """Holds the buffer under a name of its own, and the module around it in a list."""

    def __init__(self, state: Tensor) -> None:
        super().__init__()
        self.register_buffer("known", state)
        self.around: list[nn.Module] = []
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, h: Tensor) -> Tensor:
        m: Any = self.around[0]
        result: Tensor = m.access(m, h * self.weight)
        return result


class Passed(torch.autograd.Function):
    """Is given the module itself; its backward is not the derivative."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, m: Any) -> Tensor:
        result: Tensor = m.access(m, h)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 3, None


def _as_a_method(m: Any, h: Tensor) -> Any:
    return m.looked_at(h)


def _as_a_module(m: Any, h: Tensor) -> Any:
    return m.inner(h)


def _as_a_function(m: Any, h: Tensor) -> Any:
    return Passed.apply(h, m)


KINDS: dict[str, Part] = {
    "a method": _as_a_method,
    "a module": _as_a_module,
    "a function": _as_a_function,
}


class Between(nn.Module):
    """Linear layers with a piece between, which may come to a buffer that they write to."""

    def __init__(self, before: Part, kind: Part, access: Part, behind: Part, times: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8, affine=False)
        self.register_buffer("state", self.norm.running_mean)
        self.register_buffer("variance", torch.ones(8))
        self.inner = Inner(self.norm.running_mean)  # type: ignore[arg-type]
        self.inner.around.append(self)
        self.before, self.kind, self.access, self.behind = before, kind, access, behind
        self.times, self.chosen = times, True

    def turn(self, h: Tensor) -> bool:
        """Whether this is a call in which something is done sometimes."""
        return bool(h.detach().sum() > 0)

    def looked_at(self, h: Tensor) -> Any:
        """What no graph can have."""
        return self.access(self, h) * (1 + 1e-3 * number(h))

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.first(x)) + x
        for _ in range(self.times):
            if self.training and (made := self.before(self, h)) is not None:
                h = h + made
            h = self.kind(self, h)
            if self.training:
                self.behind(self, h)
        return self.last(torch.tanh(h) + self.state.clone())  # type: ignore[operator]
