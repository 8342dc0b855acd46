"""What may stand around a function that stays PyTorch's, and the forms that it may have itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from transformers.utils import ModelOutput

from tests.kept.routines import Around, number


def scale(h: Tensor) -> float:
    """A factor near 1 that no trace knows; as it is no tensor, what calls this is kept."""
    return 1 + 0.1 * float(torch.tanh(h.detach().mean()).numpy())


# -- arguments that are changed in place, and who reads them ---------------------------------------


class ReadBefore(Around):
    def half(self, h: Tensor) -> None:
        h.mul_(scale(h))

    def piece(self, h: Tensor) -> Any:
        h = h * 2
        before = h.sum(-1, keepdim=True)
        self.half(h)
        return before + h


class ReadBeforeAsAView(Around):
    def half(self, h: Tensor) -> None:
        h[:, 1:3] *= scale(h)

    def piece(self, h: Tensor) -> Any:
        h = h * 2
        view, copy = h[:, 2:], h.clone()
        self.half(h)
        return torch.cat([view + 1, copy[:, :2]], -1) + h


class WrittenAsAView(Around):
    def half(self, part: Tensor) -> None:
        part.mul_(scale(part))

    def piece(self, h: Tensor) -> Any:
        h = h * 2
        self.half(h.t()[1])
        self.half(h[:, 4:])
        return h + 1


class WrittenTwice(Around):
    def half(self, h: Tensor, times: int) -> Tensor:
        h.add_(scale(h) * times)
        return h

    def piece(self, h: Tensor) -> Any:
        h = h * 2
        first = self.half(h, 1) * 1.0
        h.mul_(0.5)
        return first + self.half(h, 2)


class WrittenAndReturnedInParts(Around):
    def half(self, h: Tensor) -> Any:
        h.add_(scale(h))
        return h, h * 2

    def piece(self, h: Tensor) -> Any:
        h = h * 2
        same, double = self.half(h)
        same.add_(1)
        return h + double


class BothAreOne(Around):
    """One tensor is passed twice, and changed under one of its names."""

    def half(self, h: Tensor, other: Tensor) -> Tensor:
        h.mul_(scale(h))
        return other * 1.0

    def piece(self, h: Tensor) -> Any:
        h = h * 2
        return self.half(h, h) + h


class PassedAsAView(Around):
    def half(self, h: Tensor, view: Tensor) -> Tensor:
        h.mul_(scale(h))
        return view * 1.0

    def piece(self, h: Tensor) -> Any:
        h = h * 2
        return self.half(h, h[:, :4]).sum(-1, keepdim=True) + h


# -- results ---------------------------------------------------------------------------------------


@dataclass
class Pair:
    """A container of the user's own."""

    one: Tensor
    other: Any = None


pytree.register_dataclass(Pair)


class Named(NamedTuple):
    """Another one."""

    y: Tensor
    rest: Any


@dataclass
class Output(ModelOutput):
    """Of transformers."""

    y: Tensor | None = None
    rest: Tensor | None = None


class OneTwice(Around):
    def found(self, h: Tensor) -> Any:
        y = h * scale(h)
        return y, y

    def piece(self, h: Tensor) -> Any:
        one, other = self.found(h)
        return one + other * 2


class ViewOfAnother(Around):
    def found(self, h: Tensor) -> Any:
        y = h * scale(h)
        return y, y[:, :4]

    def piece(self, h: Tensor) -> Any:
        one, other = self.found(h)
        return one + other.sum()


class ItsArgument(Around):
    def found(self, h: Tensor) -> Any:
        return h, h * scale(h)

    def piece(self, h: Tensor) -> Any:
        one, other = self.found(h)
        return one * other


class WithoutAGradient(Around):
    def found(self, h: Tensor) -> Any:
        return h * scale(h), (h * 2).detach(), h.argmax(-1), h > scale(h)

    def piece(self, h: Tensor) -> Any:
        y, fixed, places, larger = self.found(h)
        return y + fixed + places.unsqueeze(-1) * larger


class ADataclass(Around):
    def found(self, h: Tensor) -> Any:
        return Pair(h * scale(h), {"more": [h.sum(-1, keepdim=True), None]})

    def piece(self, h: Tensor) -> Any:
        found = self.found(h)
        return found.one * found.other["more"][0]


class ANamedTuple(Around):
    def found(self, h: Tensor) -> Any:
        return Named(h * scale(h), None)

    def piece(self, h: Tensor) -> Any:
        found = self.found(h)
        return found.y if found.rest is None else found.rest


class AModelOutput(Around):
    def found(self, h: Tensor) -> Any:
        return Output(y=h * scale(h))

    def piece(self, h: Tensor) -> Any:
        found = self.found(h)
        return found.y + (0 if found.rest is None else 1)


# -- what is around the call -----------------------------------------------------------------------


class InALoop(Around):
    def step(self, h: Tensor, number: int) -> Tensor:
        return h * scale(h) + number

    def piece(self, h: Tensor) -> Any:
        for i in range(3):
            h = torch.tanh(self.step(h, i))
        return h


class Recursive(Around):
    def step(self, h: Tensor, depth: int) -> Tensor:
        h = h * scale(h)
        return h if depth == 0 else torch.sin(self.step(h, depth - 1))

    def piece(self, h: Tensor) -> Any:
        return self.step(h, 2)


class UnderNoGrad(Around):
    def step(self, h: Tensor) -> Tensor:
        return h * scale(h)

    def piece(self, h: Tensor) -> Any:
        with torch.no_grad():
            fixed = self.step(h)
        return h * fixed


class GradWithinNoGrad(Around):
    def step(self, h: Tensor) -> Tensor:
        with torch.enable_grad():
            return h * scale(h)

    def piece(self, h: Tensor) -> Any:
        with torch.no_grad():
            fixed = self.step(h)
        return h * 2 + fixed.detach()


class UnderAutocast(Around):
    def step(self, h: Tensor) -> Tensor:
        return (h @ h.T).float() @ h * scale(h)

    def piece(self, h: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            inside = self.step(h)
        with torch.autocast("cpu", enabled=False):
            return inside.float() + h


class Checkpointed(Around):
    def step(self, h: Tensor) -> Tensor:
        return torch.sin(h * scale(h))

    def piece(self, h: Tensor) -> Any:
        return checkpoint(lambda given: self.step(given) * 2, h, use_reentrant=False)


class CallsAnother(Around):
    def inner(self, h: Tensor) -> Tensor:
        return h * scale(h)

    def outer(self, h: Tensor) -> Tensor:
        return torch.tanh(self.inner(h)) * scale(h)

    def piece(self, h: Tensor) -> Any:
        return self.outer(h) + self.inner(h)


class BetweenDraws(Around):
    """Of PyTorch's generator, whose order both keep."""

    def step(self, h: Tensor) -> Tensor:
        return h * scale(h) + torch.randn(8) * scale(h)

    def piece(self, h: Tensor) -> Any:
        return self.step(torch.tanh(self.step(h)))


# -- forms of functions ----------------------------------------------------------------------------


def made(factor: float) -> Callable[[Tensor], Tensor]:
    """A closure."""

    def closure(h: Tensor) -> Tensor:
        return h * scale(h) * factor

    return closure


def powered(h: Tensor, power: int) -> Tensor:
    """A function of this file."""
    return h * scale(h.abs() ** power)


class Other:
    """An object whose method is called."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def applied(self, h: Tensor) -> Tensor:
        """What is called."""
        return h * scale(h) * self.factor

    def __call__(self, h: Tensor) -> Tensor:
        return h * scale(h) * self.factor * 2


def _wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) * 2

    return call


class Holds(Around):
    """Holds what is called."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def piece(self, h: Tensor) -> Any:
        return self.held(h) + 1


class InAList(Around):
    def __init__(self) -> None:
        super().__init__()
        self.held = [lambda h: h * scale(h), made(0.5)]

    def piece(self, h: Tensor) -> Any:
        return self.held[0](h) + self.held[1](h)


class TwoClosures(Around):
    """Two functions of one code."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = made(0.5), made(1.5)

    def piece(self, h: Tensor) -> Any:
        return self.one(h) * self.other(h)


class MadeInTheForward(Around):
    def piece(self, h: Tensor) -> Any:
        def local(given: Tensor) -> Tensor:
            return given * scale(h)

        return local(h)


class Decorated(Around):
    @_wrapped
    def found(self, h: Tensor, *, power: int = 2) -> Tensor:
        return h * scale(h) ** power

    @staticmethod
    def fixed(h: Tensor) -> Tensor:
        return h * scale(h)

    @classmethod
    def of_the_class(cls, h: Tensor) -> Tensor:
        return cls.fixed(h) + 1

    @property
    def factor(self) -> Tensor:
        return torch.tensor(scale(self.first.weight))

    def piece(self, h: Tensor) -> Any:
        return self.of_the_class(self.found(h, power=3)) * self.factor


@functools.lru_cache(maxsize=8)
def remembered(rows: int) -> Tensor:
    """A table that is made once for each size."""
    return torch.from_numpy(torch.linspace(0, 1, rows).numpy()).unsqueeze(-1)


class Remembered(Around):
    def piece(self, h: Tensor) -> Any:
        return h * scale(h) + remembered(h.shape[0])


class AGenerator(Around):
    def parts(self, h: Tensor) -> Iterator[Tensor]:
        for i in range(2):
            yield h[:, i * 4 : i * 4 + 4] * scale(h)

    def piece(self, h: Tensor) -> Any:
        return torch.cat([*self.parts(h)], -1)


class Defaults(Around):
    def found(self, h: Tensor, /, factor: float = 2.0, *more: Tensor, last: Any = None) -> Tensor:
        return h * scale(h) * factor + sum(m.mean() for m in more) + (0 if last is None else last)

    def piece(self, h: Tensor) -> Any:
        return self.found(h) + self.found(h, 1.0, h, h * 2, last=h.sum(-1, keepdim=True))


# -- what is not the same at each call -------------------------------------------------------------


class OfItsSizes(Around):
    def found(self, h: Tensor) -> Tensor:
        return h * scale(h) if h.shape[0] > 4 else h.sum(-1, keepdim=True) * scale(h) + h

    def piece(self, h: Tensor) -> Any:
        return self.found(h)


class OfItsMode(Around):
    def found(self, h: Tensor) -> Tensor:
        return h * scale(h) if self.training else h - scale(h)

    def piece(self, h: Tensor) -> Any:
        return self.found(h)


class Signed(Around):
    """What stays PyTorch's is given tensors with the sign of the input."""

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.tanh(self.piece(0.1 * torch.tanh(self.first(x)) + x)))


class Levels(Signed):
    """Changes something now and then that the graph reads behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.level, self.notes, self.table = 1.0, [1.0], {"factor": 1.0}
        self.memory = torch.ones(8)

    def note(self, h: Tensor) -> None:
        raise NotImplementedError

    def found(self, h: Tensor) -> Tensor:
        if number(h) > 0:
            self.note(h)
        return h * scale(h)

    def piece(self, h: Tensor) -> Any:
        h = self.found(h)
        return h * self.level * self.notes[-1] * self.table["factor"] + self.memory


class ANumber(Levels):
    def note(self, h: Tensor) -> None:
        self.level += 0.5


class AList(Levels):
    def note(self, h: Tensor) -> None:
        self.notes.append(self.notes[-1] + 0.5)


class ADictionary(Levels):
    def note(self, h: Tensor) -> None:
        self.table["factor"] *= 1.5


class ATensor(Levels):
    def note(self, h: Tensor) -> None:
        self.memory = h.detach().mean(0)


class ATensorInPlace(Levels):
    def note(self, h: Tensor) -> None:
        self.memory.add_(h.detach().mean(0))


LEVEL = 1.0


class AGlobal(Levels):
    def note(self, h: Tensor) -> None:
        global LEVEL
        LEVEL += 0.5

    def piece(self, h: Tensor) -> Any:
        return self.found(h) * LEVEL


class InASubModule(Signed):
    """A kept sub-module that changes now and then what the code around it reads."""

    class Inner(nn.Module):
        """Counts, which no graph does."""

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls, self.level = nn.Linear(8, 8), 0, 1.0

        def forward(self, h: Tensor) -> Tensor:
            self.calls += 1
            if number(h) > 0:
                self.level += 0.5
            result: Tensor = self.linear(h)
            return result

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Inner()

    def piece(self, h: Tensor) -> Any:
        return self.inner(h) * self.inner.level


KINDS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind
    for kind in (
        ReadBefore, ReadBeforeAsAView, WrittenAsAView, WrittenTwice, WrittenAndReturnedInParts,
        BothAreOne, PassedAsAView, OneTwice, ViewOfAnother, ItsArgument, WithoutAGradient,
        ADataclass, ANamedTuple, AModelOutput, InALoop, Recursive, UnderNoGrad, GradWithinNoGrad,
        UnderAutocast, Checkpointed, CallsAnother, BetweenDraws, InAList, TwoClosures,
        MadeInTheForward, Decorated, Remembered, AGenerator, Defaults, OfItsSizes, OfItsMode,
        ANumber, AList, ADictionary, ATensor, ATensorInPlace, InASubModule,
    )
}  # fmt: skip
KINDS |= {
    "a closure": lambda: Holds(made(0.5)),
    "a partial": lambda: Holds(functools.partial(powered, power=3)),
    "a method of another object": lambda: Holds(Other(0.5).applied),
    "another object": lambda: Holds(Other(0.5)),
}
