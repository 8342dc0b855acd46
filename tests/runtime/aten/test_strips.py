"""Attention in strips: the numbers of attention at once, whatever its masks, biases and heads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ortrain
from ortrain.runtime.aten import hash, strips

BATCH, HEADS, WIDTH, QUERIES, KEYS = 3, 4, 8, 6, 5
# Elements of a strip: a head, two, three of four, a batch, two batches, all.
SIZES = [1, 70, 100, 120, 240, 1 << 30]


class Attention(nn.Module):
    """Attention of queries [B, L, H * E] and keys [B, S, H * E] whose scores a function changes."""

    def __init__(
        self, change: Callable[..., Tensor], *, heads: int = HEADS, key_heads: int = HEADS,
        dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.change, self.heads, self.key_heads = change, heads, key_heads
        self.query = nn.Linear(heads * WIDTH, heads * WIDTH)
        self.key, self.value = (nn.Linear(heads * WIDTH, key_heads * WIDTH) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(heads, QUERIES, KEYS))
        self.gate = nn.Parameter(torch.randn(heads, 1, 1))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(y), self.value(y)
        if self.heads > 1:
            q = q.unflatten(-1, (self.heads, WIDTH)).transpose(1, 2)
            k, v = (z.unflatten(-1, (self.key_heads, WIDTH)).transpose(1, 2) for z in (k, v))
        scores = self.change(self, q @ k.mT, mask)
        context = self.dropout(torch.softmax(scores, -1).to(v.dtype)) @ v
        return context.transpose(1, 2).flatten(2) if self.heads > 1 else context


def of_heads(mask: Tensor) -> Tensor:
    return mask[:, None, None, :]


# ``change(module, scores, mask)`` gives the scores that the softmax is of; mask: bool [B, S].
CHANGES: dict[str, Callable[..., Tensor]] = {
    "none": lambda m, s, mask: s,
    "scaled": lambda m, s, mask: s / math.sqrt(WIDTH),
    "keys masked": lambda m, s, mask: s.masked_fill(~of_heads(mask), -math.inf),
    "keys chosen": lambda m, s, mask: torch.where(of_heads(mask), s, -1e9),
    "added mask": lambda m, s, mask: s * 0.3 + (1.0 - of_heads(mask).to(s.dtype)) * -1e9,
    "mask of queries": lambda m, s, mask: (
        s + torch.zeros_like(s[:, :1]).masked_fill(~of_heads(mask), -9.0)
    ),
    "triangle": lambda m, s, mask: s.masked_fill(
        torch.ones(QUERIES, KEYS).triu(1).bool(), -math.inf
    ),
    "bias of heads": lambda m, s, mask: s + m.bias,
    "bias of a batch": lambda m, s, mask: s + m.bias.unsqueeze(0),
    "bias of one head": lambda m, s, mask: s + m.bias[0],
    "slopes of heads": lambda m, s, mask: s - m.gate.abs() * torch.arange(KEYS, dtype=s.dtype),
    "gates": lambda m, s, mask: s * m.gate,
    "capped": lambda m, s, mask: torch.tanh(s / 5.0) * 5.0,
    "float32": lambda m, s, mask: s.float() + of_heads(mask).float(),
    "clamped": lambda m, s, mask: s.clamp(-2.0, 2.0),
    "several": lambda m, s, mask: torch.tanh((s * m.gate + m.bias) / 3.0)
    .masked_fill(~of_heads(mask), -math.inf)
    .mul(2.0),
}  # fmt: skip


# What the backward reads of the scores, the forward keeps: neither is cut.
KEPT = frozenset({"capped", "clamped", "several"})
# A gradient that is summed over strips leaves the backward as large as the scores.
SUMMED = frozenset(
    {"bias of heads", "bias of a batch", "bias of one head", "slopes of heads", "gates"}
)


def expected_cuts(change: str) -> tuple[bool, bool]:
    """Whether the forward is cut, and the backward."""
    return change not in KEPT, change not in KEPT | SUMMED


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    x, y = torch.randn(BATCH, QUERIES, HEADS * WIDTH), torch.randn(BATCH, KEYS, HEADS * WIDTH)
    mask = torch.rand(BATCH, KEYS) > 0.3
    mask[:, 0] = True
    return x, y, mask


@pytest.fixture
def computes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward makes scores again, as it does at long lengths."""
    monkeypatch.setattr("ortrain.autodiff.attention._RATIO", 0)


def step(
    module: ortrain.ORTModule, given: tuple[Tensor, ...], precision: torch.dtype
) -> list[Tensor]:
    """What a call gives, and the gradients of everything."""
    torch.manual_seed(2)
    module.zero_grad()
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in given]
    with torch.autocast("cpu", precision, enabled=precision is not torch.float32):
        y = module(*leaves)
    torch.manual_seed(3)
    y.backward(torch.randn_like(y))
    grads = [*(x.grad for x in leaves), *(p.grad for p in module.parameters())]
    return [y.detach(), *(g.clone() for g in grads if g is not None)]


def sources(module: ortrain.ORTModule) -> list[str]:
    plan = module._runner.graphs.last.graphs[-1].step.plan
    return [plan.forward.source, *(piece.compiled.source for piece in plan.pieces)]


def in_strips(
    model: nn.Module,
    given: tuple[Tensor, ...],
    monkeypatch: pytest.MonkeyPatch,
    precision: torch.dtype = torch.float32,
) -> tuple[ortrain.ORTModule, list[Tensor]]:
    """The module, and the numbers of its step, which are the same in strips of each size."""
    wrapped = ortrain.ORTModule(model, options=ortrain.Options(engine="aten"))
    monkeypatch.setattr(strips, "STRIP", SIZES[-1])
    whole = step(wrapped, given, precision)
    for size in SIZES:
        monkeypatch.setattr(strips, "STRIP", size)
        for part, expected in zip(step(wrapped, given, precision), whole, strict=True):
            torch.testing.assert_close(part, expected, rtol=1e-5, atol=1e-6)
    return wrapped, whole


def cut(module: ortrain.ORTModule) -> tuple[bool, bool]:
    """Whether the forward runs in strips, and the backward."""
    forward, *backward = ("strips.run(" in source for source in sources(module))
    return forward, any(backward)


@pytest.mark.parametrize("change", CHANGES)
def test_strips_are_the_whole(change, computes_again, monkeypatch):
    torch.manual_seed(0)
    model, given = Attention(CHANGES[change]), inputs()
    wrapped, ours = in_strips(model, given, monkeypatch)
    assert cut(wrapped) == expected_cuts(change)
    for mine, theirs in zip(ours, step(model, given, torch.float32), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("change", CHANGES)
def test_a_mask_of_dropout_does_not_depend_on_strips(
    change, precision, computes_again, monkeypatch
):
    torch.manual_seed(0)
    wrapped, _ = in_strips(
        Attention(CHANGES[change], dropout=0.4), inputs(), monkeypatch, precision
    )
    assert cut(wrapped) == expected_cuts(change)


@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (HEADS, 1)])
def test_heads_may_be_one_or_share_a_key(heads, key_heads, computes_again, monkeypatch):
    torch.manual_seed(0)
    x, y, mask = inputs()
    given = (x[..., : heads * WIDTH].contiguous(), y[..., : heads * WIDTH].contiguous(), mask)
    model = Attention(CHANGES["scaled"], heads=heads, key_heads=key_heads, dropout=0.4)
    wrapped, _ = in_strips(model, given, monkeypatch)
    assert cut(wrapped)[0]


class Seen(nn.Module):
    """Attention that gives its weights as well."""

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.softmax(x @ y.mT, -1)
        return weights @ y, weights


def test_scores_that_others_read_stay_whole(computes_again):
    wrapped = ortrain.ORTModule(Seen(), options=ortrain.Options(engine="aten"))
    y, weights = wrapped(*inputs())
    assert cut(wrapped) == (False, False)
    assert weights.shape == (BATCH, QUERIES, KEYS)
    assert y.shape == (BATCH, QUERIES, HEADS * WIDTH)


# -- the loop over strips --------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "heads"), [*itertools.product((1, 2, 5), (1, 3, 4))])
@pytest.mark.parametrize("size", [1, 7, 12, 30, 1000])
def test_strips_hold_what_they_may_and_are_all_there_is(batch, heads, size, monkeypatch):
    monkeypatch.setattr(strips, "STRIP", size)
    scores, seen = 6, []

    def body(row: int, x: Tensor, bias: Tensor, shared: Tensor) -> list[Tensor]:
        rows, columns = x.shape[:2]
        assert rows * columns * scores <= max(size, scores)
        seen.extend(range(row, row + rows * columns))
        return [x + bias + shared, x.mT * 2]

    x, bias, shared = (
        torch.randn(batch, heads, 2, 3),
        torch.randn(heads, 1, 3),
        torch.randn(batch, 1, 2, 1),
    )
    total, turned = strips.run(body, [x, bias, shared], [0, 1, 0], 2, scores)
    torch.testing.assert_close(total, x + bias + shared, rtol=0, atol=0)
    torch.testing.assert_close(turned, x.mT * 2, rtol=0, atol=0)
    assert seen == [*range(batch * heads)], "each head once, in the order of rows"


def test_nothing_is_one_strip():
    (found,) = strips.run(lambda row, x: [x + 1], [torch.zeros(0, 4, 2, 2)], [0], 2, 4)
    assert found.shape == (0, 4, 2, 2)


@pytest.mark.parametrize("first", [1, 3, 2**31 + 5])
def test_rows_of_a_mask_may_begin_anywhere(first):
    rows = torch.arange(first, first + 6) % 2**32
    x = torch.ones(6, 9)
    expected = hash.dropout(x, 11, 4, 2**31, 2.0, rows)
    assert torch.equal(hash.dropout(x, 11, 4, 2**31, 2.0, first=first), expected)
