"""Functions and methods whose code no graph can have, by kind; each within a module of its own."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def number(tensor: Tensor) -> float:
    """One that a trace does not know."""
    return float(tensor.detach().double().numpy().sum())


class Around(nn.Module):
    """A linear layer, something below a module, and another linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def piece(self, h: Tensor) -> Any:
        """What stays PyTorch's."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Any:
        h = self.piece(torch.relu(self.first(x)) + 0.1 * x)
        return self.last(torch.tanh(h))


# -- values ----------------------------------------------------------------------------------------


class LoopsByValue(Around):
    def piece(self, h: Tensor) -> Any:
        y = h
        for _ in range(int(h.detach().abs().mean().item() * 5) + 1):
            y = torch.sin(y + h)
        return y


class Selects(Around):
    def piece(self, h: Tensor) -> Any:
        y = h * 0.1
        for i in (h.sum(-1) > 0).nonzero()[:, 0].tolist():
            y = torch.cat([y[:i], torch.tanh(h[i : i + 1]), y[i + 1 :]])
        return y


class LeavesForNumpy(Around):
    def piece(self, h: Tensor) -> Any:
        scale = np.tanh(h.detach().numpy()).astype(np.float32)
        return h * torch.from_numpy(scale)


class Experts(Around):
    """A loop over experts, each of which gets the rows that choose it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def dispatch(self, h: Tensor, weights: Tensor, chosen: Tensor) -> Any:
        output = torch.zeros_like(h)
        for i in sorted({*chosen.flatten().tolist()}):
            rows, place = torch.where(chosen == i)
            found = self.experts[i](h[rows]) * weights[rows, place, None]
            output.index_add_(0, rows, found)
        return output

    def piece(self, h: Tensor) -> Any:
        weights, chosen = torch.topk(torch.softmax(self.router(h), -1), 2)
        return self.dispatch(h, weights, chosen) + h


# -- random numbers --------------------------------------------------------------------------------


class DrawsWithNumpy(Around):
    def piece(self, h: Tensor) -> Any:
        return h * float(np.random.rand())  # noqa: NPY002


class DrawsWithPython(Around):
    def piece(self, h: Tensor) -> Any:
        return h * random.random()


class DrawsOfItsOwn(Around):
    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(4)

    def piece(self, h: Tensor) -> Any:
        return h * float(self.generator.random())


class DrawsTwice(Around):
    """In an order that both see."""

    def noise(self, h: Tensor) -> Any:
        return h + float(np.random.rand())  # noqa: NPY002

    def piece(self, h: Tensor) -> Any:
        first = self.noise(h)
        return first * self.noise(h)


class DrawsWithTorch(Around):
    def piece(self, h: Tensor) -> Any:
        return h * 2 if int(torch.rand(()).item() * 2) else h * torch.rand(8)


# -- in place --------------------------------------------------------------------------------------


class Masks(Around):
    """As wav2vec 2.0 does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(8))

    def piece(self, h: Tensor) -> Any:
        if not self.training:
            return h
        mask = torch.tensor(np.random.rand(h.shape[0]) < 0.5)  # noqa: NPY002
        h[mask] = self.embedding.to(h.dtype)
        return h


class MasksAndReturnsNothing(Around):
    def mask(self, h: Tensor) -> None:
        h[torch.tensor(np.random.rand(*h.shape) < 0.5)] = 0  # noqa: NPY002

    def piece(self, h: Tensor) -> Any:
        view = h[:, :4]
        self.mask(h)
        return torch.cat([view, h[:, 4:] * 2], -1)


class MasksAView(Around):
    def mask(self, h: Tensor) -> Any:
        h[torch.tensor(np.random.rand(*h.shape) < 0.5)] = 0.5  # noqa: NPY002
        return h

    def piece(self, h: Tensor) -> Any:
        h = h * 2
        part = self.mask(h[:, 2:6])
        return h + part.sum()


class MasksAnArgument(Around):
    """Of the module: a tensor that its caller holds."""

    def mask(self, x: Tensor) -> Any:
        x[torch.tensor(np.random.rand(*x.shape) < 0.5)] = 0  # noqa: NPY002
        return x

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.tanh(self.first(self.mask(x))))


class WritesABuffer(Around):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("seen", torch.zeros(8))

    def note(self, h: Tensor) -> Any:
        self.seen[: int(h.detach().abs().sum().item()) % 8] += 1  # type: ignore[index]
        return h * self.mean.clone() + self.seen.clone()  # type: ignore[operator]

    def piece(self, h: Tensor) -> Any:
        self.mean.mul_(0.9).add_(h.detach().mean(0))  # type: ignore[operator]
        h = self.note(h) + self.seen
        self.mean.mul_(2)  # type: ignore[operator]
        return h + self.mean


# -- arguments and results -------------------------------------------------------------------------


class Structured(Around):
    def found(self, h: Tensor, *, more: Any, times: int, nothing: None = None) -> Any:
        scale = more["scale"] * times + number(h.max())
        return {"y": h * scale, "none": nothing, "places": (h.argmax(-1), h.detach() * 0.5)}

    def piece(self, h: Tensor) -> Any:
        found = self.found(h, more={"scale": h.mean()}, times=h.shape[0])
        return found["y"] + found["places"][0].unsqueeze(-1) + found["places"][1]


class WithoutGradients(Around):
    @torch.no_grad()
    def scale(self, h: Tensor) -> Any:
        return h / max(number(h.abs().max()), 1e-3)

    def piece(self, h: Tensor) -> Any:
        return h * self.scale(h)


class OfTheClass(Around):
    @classmethod
    def shifted(cls, h: Tensor, by: float = 2.0) -> Any:
        return h * by + number(h)

    @staticmethod
    def scaled(h: Tensor) -> Any:
        return h * number(h.mean())

    def piece(self, h: Tensor) -> Any:
        return self.shifted(self.scaled(h)) + self.shifted(h, by=3.0)


def _noted(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


@_noted
def normalized(h: Tensor, power: int = 2) -> Tensor:
    """Decorated, and known under two names."""
    return h / (1 + number(h.abs().pow(power)))


same = normalized


class OfTheFile(Around):
    def piece(self, h: Tensor) -> Any:
        return normalized(h) + same(h, power=1)


class WithSuper(Around):
    def piece(self, h: Tensor) -> Any:
        return h * len(super().__repr__()) * 1e-3 * number(h.mean())


class FrozenWeight(Around):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8), requires_grad=False)

    def piece(self, h: Tensor) -> Any:
        return (h @ self.weight) * number(h.mean())


class Ends(Around):
    """The loss is what stays PyTorch's."""

    def piece(self, h: Tensor) -> Any:
        return h

    def loss(self, logits: Tensor) -> Any:
        lengths = [int(n) for n in (logits[:, 0] > 0).long() + 1]
        return sum(logits[i, :n].sum() for i, n in enumerate(lengths)) / len(lengths)

    def forward(self, x: Tensor) -> Any:
        return self.loss(super().forward(x))


KINDS: dict[str, type[Around]] = {
    kind.__name__: kind
    for kind in (
        LoopsByValue, Selects, LeavesForNumpy, Experts, DrawsWithNumpy, DrawsWithPython,
        DrawsOfItsOwn, DrawsTwice, DrawsWithTorch, Masks, MasksAndReturnsNothing, MasksAView,
        MasksAnArgument, WritesABuffer, Structured, WithoutGradients, OfTheClass, OfTheFile,
        WithSuper, FrozenWeight, Ends,
    )
}  # fmt: skip


# -- what is not the same at each call -------------------------------------------------------------


class Alternating(Around):
    """Does one thing for positive inputs, and another for negative ones."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def usual(self, h: Tensor) -> Any:
        return h * self.one

    def unusual(self, h: Tensor) -> Any:
        raise NotImplementedError

    def way(self, h: Tensor, x: Tensor) -> Any:
        np.random.rand()  # noqa: NPY002
        return self.usual(h) if x.sum().item() > 0 else self.unusual(h)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.way(torch.relu(self.first(x)), x.detach()))


class ReadsAnother(Alternating):
    def unusual(self, h: Tensor) -> Any:
        return h * self.other


class Detaches(Alternating):
    def unusual(self, h: Tensor) -> Any:
        return (h * self.one).detach()


class Attaches(Alternating):
    def usual(self, h: Tensor) -> Any:
        return (h * self.one).detach()

    def unusual(self, h: Tensor) -> Any:
        return h * self.one


class WritesSometimes(Alternating):
    def unusual(self, h: Tensor) -> Any:
        h *= 2
        return h * self.one

    def forward(self, x: Tensor) -> Any:
        return self.last(self.way(self.first(x), x.detach()))


class WritesTheArgumentSometimes(Alternating):
    def way(self, h: Tensor, x: Tensor) -> Any:
        np.random.rand()  # noqa: NPY002
        if x.sum().item() < 0:
            x *= 2
        return h * self.one

    def forward(self, x: Tensor) -> Any:
        scale = self.way(torch.relu(self.other), x)
        return self.last(torch.relu(self.first(x)) * scale)


class ReturnsItsArgument(Alternating):
    def unusual(self, h: Tensor) -> Any:
        return h


class ReturnsAView(Alternating):
    def unusual(self, h: Tensor) -> Any:
        return h.view(-1, 8)


class OtherDtype(Alternating):
    def unusual(self, h: Tensor) -> Any:
        return (h * self.one).to(torch.bfloat16).float().bfloat16()

    def forward(self, x: Tensor) -> Any:
        return self.last(self.way(torch.relu(self.first(x)), x.detach()).float())


class OtherSize(Alternating):
    def unusual(self, h: Tensor) -> Any:
        return (h * self.one)[:2]


class IgnoresItsArgument(Alternating):
    def unusual(self, h: Tensor) -> Any:
        return self.one.expand(h.shape).clone()


ALTERNATING: dict[str, type[Alternating]] = {
    kind.__name__: kind
    for kind in (
        ReadsAnother, Detaches, Attaches, WritesSometimes, WritesTheArgumentSometimes,
        ReturnsItsArgument, ReturnsAView, OtherDtype, OtherSize, IgnoresItsArgument,
    )
}  # fmt: skip


# -- what stays out --------------------------------------------------------------------------------


class ReturnsANumber(Around):
    def factor(self, h: Tensor) -> float:
        return number(h.abs().max())

    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(x) * self.factor(x))


class ReturnsAnArray(Around):
    def factor(self, h: Tensor) -> Any:
        return h.detach().numpy().max()

    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(x) * float(self.factor(x)))


class TakesAnObject(Around):
    def scaled(self, h: Tensor, held: Any) -> Any:
        return h * held.factor * number(h.max())

    def forward(self, x: Tensor) -> Any:
        held = type("Held", (), {})()
        held.factor = self.first(x).mean()
        return self.last(self.scaled(self.first(x), held))


class Counts(Around):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def counted(self, h: Tensor) -> Any:
        self.calls += 1
        return h * number(h.max())

    def forward(self, x: Tensor) -> Any:
        return self.last(self.counted(self.first(x)))


class WritesAParameter(Around):
    def scaled(self, h: Tensor) -> Any:
        with torch.no_grad():
            self.last.weight.mul_(0.9)
        return h * number(h.max())

    def forward(self, x: Tensor) -> Any:
        return self.scaled(self.first(x)) @ self.last.weight.T


class GivesAView(Around):
    def part(self, h: Tensor) -> Any:
        return h[: int(number(h) * 0) + 2]

    def forward(self, x: Tensor) -> Any:
        return self.last(self.part(self.first(x)))


# Each with a word of the reason.
REFUSED: dict[str, tuple[type[Around], str]] = {
    "a number": (ReturnsANumber, "numpy"),
    "an array": (ReturnsAnArray, "numpy"),
    "an object": (TakesAnObject, "numpy"),
    "an attribute": (Counts, "numpy"),
    "a parameter": (WritesAParameter, "numpy"),
    "a view": (GivesAView, "numpy"),
}
