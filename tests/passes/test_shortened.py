"""Attention is computed as far as the longest row of a batch, and no further."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain.autodiff.held import bytes_of
from ortrain.frontend.export import export
from ortrain.passes.tokens import Packed, demands, packed
from ortrain.passes.tokens.shortened import shortened
from ortrain.program import Program, Role
from ortrain.runtime import engines
from ortrain.step.tokens import TokenCounts
from tests.breadth import sampled
from tests.token_cases import CASES, LENGTH, LENGTHS, ROWS, Batch, Case, Trained, batch

# Whose attention is not seen as such, and is computed for whole rows.
WHOLE = {"answers", "deberta-v2", "deberta-v2 words"}
SHORT = [name for name in CASES if name not in WHOLE]
SAMPLE = ["bert", "bert spelled out", "t5", "t5 spelled out", "left-padded gpt2"]


def of(case: Case, given: Batch) -> tuple[Program, Packed]:
    torch.manual_seed(0)
    program = export(case.make().train(), (), given).program
    found = packed(program, case.shown)
    assert found is not None
    return program, found


@pytest.mark.parametrize("name", sampled(SHORT, SAMPLE))
def test_scores_are_of_the_positions_up_to_the_last_token(name: str) -> None:
    case = CASES[name]
    given = case.given(batch(LENGTHS["one row of one, none full"], case.left))
    program, found = of(case, given)
    assert found.short
    real = given["attention_mask"] != 0 if "attention_mask" in given else given["labels"] != -100
    longest = LENGTH if case.left else int(real.any(0).nonzero().max()) + 1
    assert counted(program, found, given) == longest


# What shuts keys out of the product with the values, and so has nobody read them there; whether the
# softmax has none of them, either.
MASKED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "behind it": (lambda s, m: s.softmax(-1) * m, False),
    "before it, by zero": (lambda s, m: (s * m).softmax(-1) * m, False),
    "before it, by a low number": (lambda s, m: (s + (m - 1) * 30.0).softmax(-1) * m, False),
    "before it": (lambda s, m: (s + (m - 1) * 1e32).softmax(-1), True),
    "on both sides": (lambda s, m: (s + (m - 1) * 1e32).softmax(-1) * m, True),
}


@pytest.mark.parametrize("name", MASKED)
def test_what_a_softmax_divides_by_is_of_all_keys_that_it_sees(name: str) -> None:
    """Weights that are zero behind it are there, in the sum of its exponents."""
    weigh, short = MASKED[name]

    class Weighed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(100, 8)
            self.of = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            words, mask = self.embedding(input_ids), attention_mask.float()
            *inputs, last = self.of
            query, key, value = (each(words) for each in inputs)
            found = last(weigh(query @ key.transpose(1, 2), mask[:, None]) @ value)
            return (found * mask.unsqueeze(-1)).square().sum()

    torch.manual_seed(0)
    module, given = Weighed().train(), batch(LENGTHS["one row of one, none full"])
    program = export(module, (), given).program
    found = packed(program)
    assert found is not None
    longest = max(LENGTHS["one row of one, none full"])
    assert (counted(program, found, given) if found.short else LENGTH) == (
        longest if short else LENGTH
    )
    (whole,), wholes = Trained(module, program)(given)
    (ours,), gradients = Trained(module, found.program)(given)
    torch.testing.assert_close(ours, whole, rtol=1e-5, atol=0.0)
    for each, expected in wholes.items():
        torch.testing.assert_close(gradients[each], expected, rtol=1e-4, atol=1e-5, msg=each)


class Attention(nn.Module):
    """Of words, with a mask of which nothing is known but that it is added."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 8)
        self.of = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.drop, self.out = nn.Dropout(0.3), nn.Linear(8, 8)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, bias: Tensor) -> Tensor:
        words = self.embedding(input_ids)
        query, key, value = (each(words) for each in self.of)
        scores = query @ key.transpose(1, 2) + bias
        found = self.out(self.drop(scores.softmax(-1)) @ value)
        return (found * attention_mask.unsqueeze(-1)).square().sum() / attention_mask.sum()


# What the mask adds for padding, before the last position and there; as far as rows are computed.
SHUT = {
    "by a number": (-1e32, -1e32, 8),
    "but at the end": (-torch.inf, 0.0, LENGTH),
    "both ways": (-torch.inf, -1e32, LENGTH),
}


@pytest.mark.parametrize("shut", SHUT)
def test_a_query_that_loses_all_but_the_end_of_its_row_makes_no_number_other(shut: str) -> None:
    """Padding that sees no key, the last one by a number and the others by minus infinity: rows
    stay whole then, for a softmax of fewer positions would be of nothing but that."""
    given = batch(LENGTHS["one row of one, none full"])
    real, (before, last, rows) = given["attention_mask"].bool(), SHUT[shut]
    seen = real[:, :, None] & real[:, None, :]
    bias = torch.where(seen, 0.0, before)
    bias[:, :, -1] = torch.where(real, before, last)
    given["bias"] = bias
    torch.manual_seed(0)
    module = Attention().train()
    program = export(module, (), given).program
    found = packed(program)
    assert found is not None
    assert counted(program, found, given) == rows
    (whole,), wholes = Trained(module, program)(given)
    (ours,), gradients = Trained(module, found.program)(given)
    torch.testing.assert_close(ours, whole, rtol=1e-5, atol=0.0)
    assert not whole.isnan()
    for name, expected in wholes.items():
        torch.testing.assert_close(gradients[name], expected, rtol=1e-4, atol=1e-6, msg=name)


def counted(program: Program, found: Packed, given: Batch) -> int:
    """As far as which position the longest rows are computed."""
    counts = TokenCounts(found, program, engines.executor("aten", device=torch.device("cpu")))
    numbers = counts([given[v.name or ""] for v in program.inputs(Role.USER_INPUT)])
    return max(numbers[symbol] for symbol in found.symbols[len(found.sets) :])


def test_what_somebody_reads_of_the_scores_keeps_them_whole() -> None:
    class Shown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(100, 8)
            self.of = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
            words = self.embedding(input_ids)
            query, key, value = (each(words) for each in self.of)
            shut = torch.where(attention_mask == 0, torch.finfo(torch.float32).min, 0.0)
            weights = (query @ key.transpose(1, 2) + shut[:, None, :]).softmax(-1)
            return (weights @ value)[:, 0].square().sum(), weights

    program = export(Shown(), (), batch(LENGTHS["some"])).program
    assert not list(shortened(program.graph, demands(program)))


def test_scores_of_short_rows_are_counted_as_such() -> None:
    """What a step is predicted to hold, and to multiply, follows the longest row."""
    case = CASES["bert"]
    program, found = of(case, case.given(batch(LENGTHS["some"])))
    sizes = {str(d): ROWS if a == 0 else LENGTH for a, d in enumerate(inputs(program)[0].shape)}
    tokens = dict.fromkeys(found.symbols, ROWS * LENGTH // 2)
    (short,) = found.symbols[len(found.sets) :]
    half, full = ({**sizes, **tokens, short: count} for count in (LENGTH // 2, LENGTH))
    assert found.cost(half) < found.cost(full)
    outputs = [v for node in found.program.graph for v in node.outputs]
    assert sum(bytes_of(v, half) for v in outputs) < sum(bytes_of(v, full) for v in outputs)


def inputs(program: Program) -> Any:
    return program.inputs(Role.USER_INPUT)
