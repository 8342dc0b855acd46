"""Modules on padded batches, made from a seed: what mixes tokens, what masks them, what is read.

Each draws its layers, how attention is written and masked, and how a loss comes of the words, from
tables in which what shuts tokens out stands beside what only seems to.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch
from torch import Tensor, nn

WIDTH, HEADS, WORDS = 8, 2, 40
LOWEST = torch.finfo(torch.float32).min

Mask = Callable[[Tensor, Tensor], Tensor]
"""Scores [B, H, S, S] or [B, S, S] and a mask [B, S] of ones and zeros → scores."""


def _keys(mask: Tensor, scores: Tensor) -> Tensor:
    """The mask's keys along the last axis of scores, bool."""
    return mask.bool().view(mask.shape[0], *[1] * (scores.dim() - 2), mask.shape[1])


def _queries(mask: Tensor, scores: Tensor) -> Tensor:
    return _keys(mask, scores).transpose(-1, -2)


def _causal(scores: Tensor) -> Tensor:
    return torch.ones(scores.shape[-2:], dtype=torch.bool).tril()


MASKS: dict[str, Mask] = {
    "filled with minus infinity": lambda s, m: s.masked_fill(~_keys(m, s), -math.inf),
    "filled with the lowest": lambda s, m: s.masked_fill(~_keys(m, s), LOWEST),
    "filled with -10,000": lambda s, m: s.masked_fill(~_keys(m, s), -1e4),
    "the lowest is added": lambda s, m: s + (1.0 - _keys(m, s).float()) * LOWEST,
    "-10,000 are added": lambda s, m: s + (1.0 - _keys(m, s).float()) * -1e4,
    "chosen": lambda s, m: torch.where(_keys(m, s), s, torch.tensor(LOWEST)),
    "chosen the other way round": lambda s, m: torch.where(~_keys(m, s), s, torch.tensor(LOWEST)),
    "causal too": lambda s, m: s.masked_fill(~(_keys(m, s) & _causal(s)), LOWEST),
    "causal, added": lambda s, m: (
        s + torch.where(_causal(s), 0.0, LOWEST) + torch.where(_keys(m, s), 0.0, LOWEST)
    ),
    "causal alone": lambda s, m: s.masked_fill(~_causal(s), -math.inf),
    "of queries": lambda s, m: s.masked_fill(~_queries(m, s), LOWEST),
    "of both": lambda s, m: s.masked_fill(~(_keys(m, s) & _queries(m, s)), LOWEST),
    "of one or the other": lambda s, m: s.masked_fill(~(_keys(m, s) | _queries(m, s)), LOWEST),
    "filled, then opened": lambda s, m: s.masked_fill(~_keys(m, s), LOWEST).masked_fill(
        _causal(s).T & _causal(s), 0.0
    ),
    "filled, then clamped": lambda s, m: s.masked_fill(~_keys(m, s), LOWEST).clamp(min=-30.0),
    "filled, then scaled": lambda s, m: s.masked_fill(~_keys(m, s), LOWEST) * 1e-37,
    "filled, then negated": lambda s, m: -s.masked_fill(~_keys(m, s), LOWEST),
    "filled twice": lambda s, m: s.masked_fill(~_keys(m, s), LOWEST).masked_fill(
        ~_keys(m, s), -1e4
    ),
    "multiplied": lambda s, m: s * _keys(m, s).float(),
    "none": lambda s, m: s,
}
AXES = {"keys": -1, "queries": -2}
BEHIND: dict[str, Mask] = {
    "nothing": lambda p, m: p,
    "dropout": lambda p, m: nn.functional.dropout(p, 0.3),
    "a mask": lambda p, m: p * _keys(m, p).float(),
    "a mask and a sum": lambda p, m: (p * _keys(m, p)) / (p * _keys(m, p)).sum(-1, keepdim=True),
    "half of it": lambda p, m: p * 0.5,
    "something added": lambda p, m: p + 0.1,
    "zeros where it is small": lambda p, m: p.masked_fill(p < 0.1, 0.0),
}


class SpelledAttention(nn.Module):
    """Products, a scale, a mask, a softmax, whatever comes behind it, and a product."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.inputs = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.heads = draw.random() < 0.7
        self.mask = draw.choice([*MASKS])
        self.behind = draw.choice([*BEHIND, *["nothing", "dropout"] * 3])
        self.axis = "queries" if draw.random() < 0.1 else "keys"
        self.bias = nn.Parameter(torch.randn(16, 16)) if draw.random() < 0.3 else None
        self.scales_late = draw.random() < 0.3

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (self.split(layer(words)) for layer in self.inputs)
        scores = query @ key.transpose(-1, -2)
        if not self.scales_late:
            scores = scores / math.sqrt(WIDTH)
        if self.bias is not None:
            scores = scores + self.bias[: words.shape[1], : words.shape[1]]
        scores = MASKS[self.mask](scores, mask)
        if self.scales_late:
            scores = scores / math.sqrt(WIDTH)
        weights = BEHIND[self.behind](scores.softmax(AXES[self.axis]), mask)
        mixed = weights @ value
        if not self.heads:
            return mixed
        return mixed.transpose(1, 2).reshape(words.shape)

    def split(self, words: Tensor) -> Tensor:
        if not self.heads:
            return words
        return words.view(*words.shape[:2], HEADS, -1).transpose(1, 2)

    def extra_repr(self) -> str:
        names = [self.mask, f"behind it {self.behind}", f"over {self.axis}"]
        return ", ".join([*names, *["a bias"] * (self.bias is not None)])


CONDITIONS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "keys": lambda m: m.bool()[:, None, None, :],
    "keys, causal": lambda m: m.bool()[:, None, None, :] & _causal(m[:1].expand(m.shape[1], -1)),
    "keys and queries": lambda m: m.bool()[:, None, None, :] & m.bool()[:, None, :, None],
    "queries": lambda m: m.bool()[:, None, :, None].expand(-1, -1, -1, m.shape[1]),
    "the lowest": lambda m: (1.0 - m.float())[:, None, None, :] * LOWEST,
    "-10,000": lambda m: (1.0 - m.float())[:, None, None, :] * -1e4,
    "weights": lambda m: m.float()[:, None, None, :],
    "none": lambda m: None,
}


class FusedAttention(nn.Module):
    """``scaled_dot_product_attention`` under a mask."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.inputs = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.condition = draw.choice([*CONDITIONS, *["keys"] * 4])

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        split = [
            layer(words).view(*words.shape[:2], HEADS, -1).transpose(1, 2) for layer in self.inputs
        ]
        condition = CONDITIONS[self.condition](mask)
        mixed = nn.functional.scaled_dot_product_attention(*split, attn_mask=condition)
        return mixed.transpose(1, 2).reshape(words.shape)

    def extra_repr(self) -> str:
        return self.condition


class Between(nn.Module):
    """What works on each token, or looks as if it did."""

    KINDS = (
        "layer", "layer", "layer", "norm", "gelu", "dropout", "times the mask", "shifted",
        "less the mean", "reversed", "square root",
    )  # fmt: skip

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.kind = draw.choice(self.KINDS)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        match self.kind:
            case "layer":
                return words + self.layer(words).tanh()
            case "norm":
                return self.norm(words)
            case "gelu":
                return nn.functional.gelu(self.layer(words))
            case "dropout":
                return nn.functional.dropout(words, 0.2)
            case "times the mask":
                return words * mask.unsqueeze(-1)
            case "shifted":
                return words + torch.cat([words[:, 1:], words[:, :1]], 1)
            case "less the mean":
                return words - words.mean(1, keepdim=True)
            case "reversed":
                return words.flip(1)
            case _:
                return (words.abs() + 1e-3).sqrt()

    def extra_repr(self) -> str:
        return self.kind


def _last(words: Tensor, mask: Tensor) -> Tensor:
    places = mask.sum(1) - 1
    return words[torch.arange(len(words)), places]


POOLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the first": lambda w, m: w[:, 0],
    "the very last": lambda w, m: w[:, -1],
    "the last real": _last,
    "a mean of the real": lambda w, m: (w * m.unsqueeze(-1)).sum(1) / m.sum(1, keepdim=True),
    "a mean, weighted with floats": lambda w, m: (
        (w * m.unsqueeze(-1).float()).sum(1) / m.sum(1, keepdim=True).clamp(min=1e-9)
    ),
    "a sum of the real, filled": lambda w, m: w.masked_fill(m.unsqueeze(-1) == 0, 0.0).sum(1),
    "a sum with others filled": lambda w, m: w.masked_fill(m.unsqueeze(-1) == 1, 0.0).sum(1),
    "a sum, filled with ones": lambda w, m: w.masked_fill(m.unsqueeze(-1) == 0, 1.0).sum(1),
    "chosen": lambda w, m: torch.where(m.bool().unsqueeze(-1), w, 0.0).sum(1),
    "the largest of the real": lambda w, m: w.masked_fill(m.unsqueeze(-1) == 0, LOWEST).amax(1),
    "a mean of all": lambda w, m: w.mean(1),
    "the mask squared": lambda w, m: (w * (m * m).unsqueeze(-1)).sum(1),
    "the mask, less one": lambda w, m: (w * (m - 1).unsqueeze(-1)).sum(1),
    "a product of two": lambda w, m: ((w * m.unsqueeze(-1)) * (w * m.unsqueeze(-1))).sum(1),
    "a sum of both": lambda w, m: (w * m.unsqueeze(-1)).sum(1) + w[:, 0],
    "a matrix product": lambda w, m: (m.float().unsqueeze(1) @ w)[:, 0],
}


class Generated(nn.Module):
    """A few layers over embedded words, and a loss.

    Args:
        seed: of its layers.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList()
        for _ in range(draw.choice([1, 2, 2, 3])):
            kind = draw.choice([SpelledAttention, SpelledAttention, FusedAttention, Between])
            self.layers.append(kind(draw))
            if draw.random() < 0.5:
                self.layers.append(Between(draw))
        self.residual = draw.random() < 0.5
        self.pool = draw.choice([*POOLS, "labels", "labels", "two"])
        self.head = nn.Linear(WIDTH, WORDS if self.pool == "labels" else 3)
        self.beside = draw.choice([*BESIDE])
        self.types = nn.Embedding(2, WIDTH)
        self.places = nn.Embedding(17, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        words = self.embedding(input_ids)
        words = BESIDE[self.beside](self, words, input_ids, attention_mask)
        for layer in self.layers:
            found = layer(words, attention_mask)
            words = words + found if self.residual else found
        if self.pool == "labels":
            logits = self.head(words).flatten(0, 1)
            return nn.functional.cross_entropy(logits, labels.flatten())
        if self.pool == "two":
            first = POOLS["a mean of the real"](words, attention_mask)
            return self.head(first).square().mean() + self.head(words[:, 0]).tanh().sum()
        return self.head(POOLS[self.pool](words, attention_mask)).square().mean()

    def extra_repr(self) -> str:
        return f"beside={self.beside}, pool={self.pool}, residual={self.residual}"


Beside = Callable[[Generated, Tensor, Tensor, Tensor], Tensor]
"""A module, words [B, S, W], ids [B, S] and a mask [B, S] → words."""
BESIDE: dict[str, Beside] = {
    "nothing": lambda own, w, i, m: w,
    "types of zeros": lambda own, w, i, m: w + own.types(torch.zeros_like(i)),
    "types of ones by size": lambda own, w, i, m: (
        w + own.types(torch.ones(i.shape, dtype=torch.long))
    ),
    "one type, expanded": lambda own, w, i, m: w + own.types(i.new_zeros(1, 1).expand(i.shape)),
    "a type of each row": lambda own, w, i, m: w + own.types(i[:, :1] % 2).expand_as(w),
    "types, then a layer": lambda own, w, i, m: w * own.layer(own.types(torch.zeros_like(i))),
    "a vector, expanded": lambda own, w, i, m: w * own.types.weight[0].expand(*i.shape, WIDTH),
    "a vector at padding": lambda own, w, i, m: torch.where(
        m.bool().unsqueeze(-1), w, own.types.weight[0].expand_as(w)
    ),
    "ones, normalized": lambda own, w, i, m: (
        w + nn.functional.layer_norm(torch.ones_like(w) * own.types.weight[0], [WIDTH])
    ),
    "places": lambda own, w, i, m: w + own.places(torch.arange(i.shape[1])),
    "places of each row": lambda own, w, i, m: (
        w + own.places(torch.arange(i.shape[1]).expand(i.shape))
    ),
    "places that are counted": lambda own, w, i, m: w + own.places(m.cumsum(1) * m),
}
