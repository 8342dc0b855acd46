"""Attention spelled out as products, masks and a softmax: made by drawing lots, for the tests."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.token_cases import WORDS

HEADS, SIZE = 2, 8
LOWEST = torch.finfo(torch.float32).min


def causal(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril()


# Of a mask [B, S] what is true where queries see keys, [B, 1, S, S] or broadcast to it.
OPEN: dict[str, Callable[[Tensor], Tensor]] = {
    "padding": lambda m: m.bool()[:, None, None, :],
    "not padding": lambda m: ~(m == 0)[:, None, None, :],
    "causal": lambda m: causal(m.shape[1])[None, None],
    "padding and causal": lambda m: m.bool()[:, None, None, :] & causal(m.shape[1]),
    "both sides": lambda m: (m[:, None, None, :] * m[:, None, :, None]).bool(),
    "queries": lambda m: m.bool()[:, None, :, None],
    "or itself": lambda m: m.bool()[:, None, None, :] | torch.eye(m.shape[1], dtype=torch.bool),
    "before": lambda m: (m.cumsum(1) > 2)[:, None, None, :],
}
NUMBERS = {"lowest": LOWEST, "low": -1e32, "-10,000": -1e4, "-inf": -torch.inf}

# A step from scores to scores.
Step = Callable[["Spelled", Tensor, Tensor], Tensor]


def added(name: str, number: str) -> Step:
    def step(module: Spelled, scores: Tensor, mask: Tensor) -> Tensor:
        return scores + torch.where(OPEN[name](mask), 0.0, NUMBERS[number])

    return step


def times(name: str, number: str) -> Step:
    def step(module: Spelled, scores: Tensor, mask: Tensor) -> Tensor:
        return scores + (1.0 - OPEN[name](mask).float()) * max(NUMBERS[number], LOWEST)

    return step


def filled(name: str, number: str) -> Step:
    def step(module: Spelled, scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(~OPEN[name](mask), NUMBERS[number])

    return step


def chosen(name: str, number: str) -> Step:
    def step(module: Spelled, scores: Tensor, mask: Tensor) -> Tensor:
        return torch.where(OPEN[name](mask), scores, NUMBERS[number])

    return step


def biased(module: Spelled, scores: Tensor, mask: Tensor) -> Tensor:
    size = mask.shape[1]
    far = torch.arange(size)[:, None] - torch.arange(size)[None, :]
    return scores + module.bias(far.abs().clamp(max=7)).permute(2, 0, 1)


def biased_mask(module: Spelled, scores: Tensor, mask: Tensor) -> Tensor:
    """A learned bias and a mask that are one value, as T5 has it."""
    both = biased(module, torch.zeros(1, HEADS, 1, 1), mask)
    return scores + (both + torch.where(OPEN["padding"](mask), 0.0, LOWEST))


def gated(module: Spelled, scores: Tensor, mask: Tensor) -> Tensor:
    """A mask and a number of each key's own that is learned, as one value."""
    own = module.gate(mask.cumsum(1).clamp(max=63))[:, None, None, :, 0]
    return scores + (own + torch.where(OPEN["padding"](mask), 0.0, LOWEST))


def scaled(module: Spelled, scores: Tensor, mask: Tensor) -> Tensor:
    return scores * 0.7


def capped(module: Spelled, scores: Tensor, mask: Tensor) -> Tensor:
    return torch.tanh(scores / 3) * 3


def lifted(module: Spelled, scores: Tensor, mask: Tensor) -> Tensor:
    """Opens what was shut."""
    return scores - torch.where(OPEN["padding"](mask), 0.0, LOWEST)


def raised(module: Spelled, scores: Tensor, mask: Tensor) -> Tensor:
    """Opens some of what was shut, by adding."""
    return scores + torch.where(OPEN["before"](mask), -LOWEST, 0.0)


def reopened(module: Spelled, scores: Tensor, mask: Tensor) -> Tensor:
    """Opens what was shut, and nothing else, by adding."""
    return scores + torch.where(OPEN["padding"](mask), 0.0, -LOWEST)


def bounded(module: Spelled, scores: Tensor, mask: Tensor) -> Tensor:
    return scores.clamp(min=-50.0)


def logarithm(module: Spelled, scores: Tensor, mask: Tensor) -> Tensor:
    return scores + torch.log(mask.float())[:, None, None, :].clamp(min=LOWEST)


def squared(module: Spelled, scores: Tensor, mask: Tensor) -> Tensor:
    return scores + 0.1 * scores.pow(2)


def centred(module: Spelled, scores: Tensor, mask: Tensor) -> Tensor:
    """Scores that know of all keys."""
    return scores - scores.mean(-1, keepdim=True)


def steps(numbers: tuple[str, ...] = tuple(NUMBERS)) -> dict[str, Step]:
    """All of them by name."""
    found: dict[str, Step] = {}
    for kind in (added, times, filled, chosen):
        for name in OPEN:
            for number in numbers:
                found[f"{kind.__name__} {name} {number}"] = kind(name, number)
    return found


OTHERS: dict[str, Step] = {
    each.__name__: each
    for each in (
        biased, biased_mask, gated, scaled, capped, lifted, raised, reopened, bounded, logarithm,
        squared, centred,
    )
}  # fmt: skip

# What becomes of the words that attention makes.
READ: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "first": lambda words, mask: words[:, 0].pow(2).mean(),
    "last": lambda words, mask: words[:, -1].pow(2).mean(),
    "mean of words": lambda words, mask: (
        (words * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
    ).pow(2).mean(),
    "filled": lambda words, mask: words.masked_fill(mask[:, :, None] == 0, 0.0).pow(2).sum(),
    "weighted loss": lambda words, mask: (words.pow(2).sum(-1) * mask).sum() / mask.sum(),
    "product": lambda words, mask: (mask.float()[:, None, :] @ words).pow(2).mean(),
    "all": lambda words, mask: words.pow(2).mean(),
}  # fmt: skip


@dataclass(frozen=True)
class Spelling:
    """Which masks a layer has, and how it multiplies.

    Attributes:
        steps: from scores to scores, by name, for each layer.
        product: ``matmul``, ``bmm`` of merged heads, ``einsum``, or ``turned``: keys in front.
        dropout: of the weights.
        after: what is done to the weights behind the softmax.
        read: what is read of the words.
    """

    steps: tuple[tuple[str, ...], ...]
    product: str = "matmul"
    dropout: float = 0.0
    after: str = ""
    read: str = "first"


STEPS = {**steps(), **OTHERS}
PRODUCTS = ("matmul", "bmm", "einsum", "turned")
AFTER = ("", "", "", "masked", "wrong axis", "doubled")


def drawn(number: int, finite: bool = True) -> Spelling:
    """A spelling by lot; without minus infinity, which makes NaN of what it shuts out whole."""
    lot = random.Random(number)
    usual = [name for name in STEPS if not (finite and name.endswith("-inf"))]
    masks = [name for name in usual if name not in OTHERS]
    shuts = [n for n in masks if "padding" in n or "both" in n]

    def layer() -> tuple[str, ...]:
        count = lot.choice([0, 0, 1, 1, 2])
        names = [lot.choice(shuts)]
        names += [lot.choice(lot.choice([masks, [*OTHERS]])) for _ in range(count)]
        lot.shuffle(names)
        return tuple(names)

    same = layer()
    layers = (same, same, same) if lot.random() < 0.4 else (layer(), layer())
    return Spelling(
        layers,
        lot.choice(PRODUCTS),
        lot.choice([0.0, 0.2]),
        lot.choice(AFTER),
        lot.choice([*READ]),
    )


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HEADS * SIZE)
        self.query = nn.Linear(HEADS * SIZE, HEADS * SIZE)
        self.key = nn.Linear(HEADS * SIZE, HEADS * SIZE)
        self.value = nn.Linear(HEADS * SIZE, HEADS * SIZE)
        self.output = nn.Linear(HEADS * SIZE, HEADS * SIZE)


class Spelled(nn.Module):
    """A few layers of attention, and a loss."""

    def __init__(self, spelling: Spelling) -> None:
        super().__init__()
        self.spelling = spelling
        self.embedding = nn.Embedding(WORDS, HEADS * SIZE)
        self.places = nn.Embedding(64, HEADS * SIZE)
        self.bias = nn.Embedding(8, HEADS)
        self.gate = nn.Embedding(64, 1)
        self.layers = nn.ModuleList(Layer() for _ in spelling.steps)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        words = self.embedding(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        for layer, names in zip(self.layers, self.spelling.steps, strict=True):
            words = words + self.attend(layer, names, layer.norm(words), attention_mask)
        return READ[self.spelling.read](words, attention_mask)

    def attend(self, layer: nn.Module, names: tuple[str, ...], x: Tensor, mask: Tensor) -> Tensor:
        rows, length = mask.shape
        shape = (rows, length, HEADS, SIZE)
        q, k, v = (f(x).view(shape).transpose(1, 2) for f in (layer.query, layer.key, layer.value))
        product = self.spelling.product
        if product == "bmm":
            q, k, v = (t.reshape(rows * HEADS, length, SIZE) for t in (q, k, v))
            scores = torch.bmm(q, k.transpose(1, 2)).view(rows, HEADS, length, length)
        elif product == "einsum":
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
        else:
            scores = q @ k.transpose(-1, -2)
        scores = scores / SIZE**0.5
        for name in names:
            scores = STEPS[name](self, scores, mask)
        if product == "turned":
            weights = torch.softmax(scores.transpose(-1, -2), -2)  # [B, heads, keys, queries]
            weights = weights.transpose(-1, -2)
        else:
            axis = -2 if self.spelling.after == "wrong axis" else -1
            weights = torch.softmax(scores, axis)
        if self.spelling.after == "masked":
            weights = weights * OPEN["both sides"](mask)
        elif self.spelling.after == "doubled":
            weights = weights + 0.1 * torch.tanh(scores.clamp(min=-9.0))
        weights = nn.functional.dropout(weights, self.spelling.dropout, self.training)
        if product == "bmm":
            found = torch.bmm(weights.view(rows * HEADS, length, length), v)
            found = found.view(rows, HEADS, length, SIZE)
        elif product == "einsum":
            found = torch.einsum("bhqk,bhkd->bhqd", weights, v)
        else:
            found = weights @ v
        return layer.output(found.transpose(1, 2).reshape(rows, length, HEADS * SIZE))
