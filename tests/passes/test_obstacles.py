"""What has work done for all tokens is found, by the line, with the work behind it."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from ortrain.frontend.export import export
from ortrain.graph.cost import Multiplications
from ortrain.passes.tokens import demands, leaves_out, obstacles
from ortrain.program import Program, Role
from tests.breadth import sampled
from tests.token_cases import CASES, LENGTH, LENGTHS, ROWS, WORDS, batch

WIDTH = 8


class Words(nn.Module):
    """Two products with each word, between and behind which a test does something."""

    def __init__(self, between: Use, behind: Use) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.between, self.behind = between, behind

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        words = self.between(self, self.first(self.embedding(input_ids)), attention_mask)
        return self.behind(self, self.second(words), attention_mask)


Use = Callable[[Words, Tensor, Tensor], Tensor]


def as_they_are(module: Words, words: Tensor, mask: Tensor) -> Tensor:
    return words


def first_word(module: Words, words: Tensor, mask: Tensor) -> Tensor:
    return words[:, 0].pow(2).mean()


def real_words(module: Words, words: Tensor, mask: Tensor) -> Tensor:
    return (words * mask.unsqueeze(-1)).sum(1).pow(2).mean()


def attended(make: Callable[[Tensor], Tensor] | None) -> Use:
    """The words after an attention with this mask."""

    def use(module: Words, words: Tensor, mask: Tensor) -> Tensor:
        heads = words.unsqueeze(1)
        shut = None if make is None else make(mask)
        found = nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=shut)
        return found.squeeze(1)

    return use


# What reads all words, and by which name that is told.
MIXING: dict[str, tuple[Use, str, str]] = {
    "statistics": (lambda m, w, k: m.norm(w.mT).mT, "operator", "BatchNorm"),
    "convolution": (lambda m, w, k: m.convolution(w.mT).mT, "operator", "Conv"),
    "sums up to each": (lambda m, w, k: w.cumsum(1), "operator", "CumSum"),
    "another order": (lambda m, w, k: w.flip(1), "operator", ""),
    "less than their mean": (lambda m, w, k: w - w.mean(1, keepdim=True), "operator", "ReduceSum"),
    "no mask": (attended(None), "no mask", "attention"),
    "a mask of queries": (
        attended(lambda m: m.bool()[:, None, :, None]), "mask", "attention"
    ),
}  # fmt: skip
READING: dict[str, tuple[Use, str, str]] = {
    "mean": (lambda m, w, k: w.mean(1).pow(2).mean(), "operator", "ReduceSum"),
    "largest": (lambda m, w, k: w.amax(1).pow(2).mean(), "operator", "ReduceMax"),
    "shown": (lambda m, w, k: w, "output", ""),
}


def taken(between: Use, behind: Use) -> Program:
    torch.manual_seed(0)
    return export(Words(between, behind), (), batch(LENGTHS["some"])).program


SIZES = (ROWS, LENGTH)


def sizes(program: Program) -> dict[str, int]:
    first = program.inputs(Role.USER_INPUT)[0].shape
    assert first is not None
    return {str(d.value): n for d, n in zip(first, SIZES, strict=True)}  # type: ignore[union-attr]


def product() -> int:
    """Multiplications of one product with each word."""
    return ROWS * LENGTH * WIDTH * WIDTH


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_words_is_told_with_the_work_before_it(name: str) -> None:
    use, kind, operator = MIXING[name]
    program = taken(use, first_word)
    (found,) = obstacles(program)
    assert found.kind == kind
    assert operator in found.name
    assert "test_obstacles.py" in found.where
    assert product() <= found.behind(sizes(program)) < 2 * product()
    assert leaves_out(program, "all")  # what is behind it


@pytest.mark.parametrize("name", READING)
def test_what_reads_all_words_at_the_end_is_told_with_all_work(name: str) -> None:
    use, kind, operator = READING[name]
    program = taken(as_they_are, use)
    every = obstacles(program)  # of a maximum there is a check for NaN beside it
    for found in every:
        assert (found.kind, bool(found.where)) == (kind, kind != "output")
        assert found.behind(sizes(program)) >= 2 * product()
    assert any(operator in found.name for found in every)
    assert not leaves_out(program, "all")


@pytest.mark.parametrize("mixing", MIXING)
@pytest.mark.parametrize("reading", READING)
def test_each_is_told_of_several(mixing: str, reading: str) -> None:
    """The last one has the work behind the first one; where both have it, it counts for both."""
    program = taken(MIXING[mixing][0], READING[reading][0])
    found = {each.kind + each.name for each in obstacles(program)}
    assert any(MIXING[mixing][2] in each for each in found)
    assert any(READING[reading][1] in each and READING[reading][2] in each for each in found)


@pytest.mark.parametrize("behind", [first_word, real_words])
def test_where_nothing_is_in_the_way_nothing_is_told(behind: Use) -> None:
    assert obstacles(taken(as_they_are, behind)) == []


def test_layers_that_are_alike_are_told_once() -> None:
    def often(module: Words, words: Tensor, mask: Tensor) -> Tensor:
        for _ in range(3):
            words = module.first(module.convolution(words.mT).mT)
        return words

    (found,) = obstacles(taken(often, first_word))
    assert found.name == "Conv"
    assert not found.others  # one line of one module, which is called three times


@pytest.mark.parametrize("name", sampled(CASES, ["bert", "tags", "t5", "gpt2", "masked words"]))
def test_each_product_is_for_some_words_or_behind_an_obstacle(name: str) -> None:
    """Of each model, as a case has it read, and with its outputs shown."""
    case = CASES[name]
    torch.manual_seed(0)
    program = export(case.make().train(), (), case.given(batch(LENGTHS["some"]))).program
    before = program.text()
    every = {d: LENGTH for v in program.inputs(Role.USER_INPUT) for d in _symbols(v)}
    for shown in (case.shown, "all"):
        walk = demands(program, shown)
        whole = [
            node
            for node in program.graph
            if node.op_type in ("MatMul", "Gemm")
            and node.outputs[0] in walk.frames
            and node.inputs[1] not in walk.frames
            and node.outputs[0] in walk.of
            and node not in walk.plans
        ]
        found = obstacles(program, shown)
        assert bool(found) == bool(whole)
        assert sum(each.behind(every) for each in found) >= Multiplications(whole)(every)
    assert program.text() == before


def _symbols(value: ir.Value) -> list[str]:
    return [d.value for d in value.shape or () if not isinstance(d, int) and d.value]
