"""Work on tokens that nobody reads is left out: losses and gradients stay what they are."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain.frontend.export import Exported, export
from ortrain.graph.cost import Multiplications
from ortrain.passes.tokens import Packed, packed, places
from ortrain.program import Program, Role
from ortrain.runtime.aten import AtenExecutor
from ortrain.step.tokens import TokenCounts
from tests.breadth import crossed
from tests.token_cases import CASES, LENGTH, LENGTHS, ROWS, SAMPLE, Case, Trained, batch


@dataclass
class Taken:
    """One export, and its program without the tokens that nobody reads."""

    case: Case
    module: nn.Module
    exported: Exported
    packed: Packed
    engine: str
    steps: dict[int, Trained] = field(default_factory=dict)

    def step(self, program: Program) -> Trained:
        """Made once for all batches."""
        if id(program) not in self.steps:
            self.steps[id(program)] = Trained(self.module, program, self.engine)
        return self.steps[id(program)]


def on_engines(names: Collection[str]) -> list[Any]:
    """Some cases, on one engine or the other."""
    return [
        pytest.param(each.values, marks=each.marks, id="-".join(each.values))
        for each in crossed(CASES, ["aten", "onnxruntime"], one_in=2, sample=SAMPLE)
        if each.values[0] in names
    ]


@pytest.fixture(scope="module", params=on_engines(CASES))
def taken(request: pytest.FixtureRequest) -> Taken:
    name, engine = request.param
    case = CASES[name]
    torch.manual_seed(0)
    module = case.make().train()
    exported = export(module, (), case.given(batch(LENGTHS["some"], case.left)))
    found = packed(exported.program, case.shown)
    assert found is not None
    return Taken(case, module, exported, found, engine)


def agrees(taken: Taken, found: Packed, given: dict[str, Tensor]) -> None:
    """Its step is that of the whole batch, but for zeros at the tokens of an output left out."""
    whole, wholes = taken.step(taken.exported.program)(given)
    ours, gradients = taken.step(found.program)(given)
    torch.testing.assert_close(ours[0], whole[0], rtol=1e-5, atol=0.0)
    largest = max(float(g.abs().max()) for g in wholes.values())
    assert gradients.keys() == wholes.keys()
    for name, expected in wholes.items():
        torch.testing.assert_close(
            gradients[name], expected, rtol=1e-4, atol=1e-6 * largest, msg=name
        )
    if taken.case.shown == "tokens":
        real = given["attention_mask"].bool()
        torch.testing.assert_close(ours[1][real], whole[1][real], rtol=1e-4, atol=1e-5)
        assert not ours[1][~real].any()


@pytest.mark.parametrize("lengths", LENGTHS)
def test_losses_and_gradients_are_those_of_the_whole_batch(taken: Taken, lengths: str) -> None:
    given = taken.case.given(batch(LENGTHS[lengths], taken.case.left))
    agrees(taken, taken.packed, given)


# Of these the numbers of tokens are rounded: padded on the right and on the left, with labels, with
# several grids and masks, with an output of tokens, whose zeros stay.
ROUNDED = [
    "bert", "left-padded bert", "gpt2", "t5", "bart", "mean of words", "tags", "deberta-v2",
]  # fmt: skip


@pytest.fixture(scope="module")
def rounded(taken: Taken) -> Packed:
    """The program of batches that are large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(places, "LARGE", 0)
        found = packed(taken.exported.program, taken.case.shown)
    assert found is not None
    return found


@pytest.mark.parametrize("lengths", ["some", "one row of one, none full"])
@pytest.mark.parametrize("taken", on_engines(ROUNDED), indirect=True)
def test_numbers_of_tokens_are_rounded_and_nothing_changes(
    taken: Taken, rounded: Packed, lengths: str
) -> None:
    given = taken.case.given(batch(LENGTHS[lengths], taken.case.left))
    read, more = (_numbers(each, taken.exported.program, given) for each in (taken.packed, rounded))
    agrees(taken, rounded, given)
    if taken.case.shown == "tokens":
        assert more == read
        return
    for grid in {grid for kept, grid in rounded.sets if any(each.kind == "keys" for each in kept)}:
        symbols = zip(rounded.sets, rounded.symbols, strict=False)
        numbers = [more[symbol] for (kept, at), symbol in symbols if at == grid]
        short = dict(zip(rounded.short, rounded.symbols[len(rounded.sets) :], strict=True))
        everything = ROWS * (more[short[grid]] if grid in short else LENGTH)
        assert any(n % places.MULTIPLE == 0 or n == everything for n in numbers)


@pytest.mark.parametrize("taken", on_engines(["mean of words"]), indirect=True)
def test_no_padding_of_rows_without_tokens_is_computed(taken: Taken, rounded: Packed) -> None:
    given = taken.case.given(batch((3, 0, 5, 0)))
    numbers = _numbers(rounded, taken.exported.program, given)
    counted = [numbers[symbol] for symbol in rounded.symbols[: len(rounded.sets)]]
    assert max(counted) == 10  # of two rows of five positions


def _numbers(found: Packed, whole: Program, given: dict[str, Tensor]) -> dict[str, int]:
    """How many tokens each set has, and positions each row that is cut short."""
    count = TokenCounts(found, whole, AtenExecutor())
    return count([given[v.name or ""] for v in whole.inputs(Role.USER_INPUT)])


def test_only_what_is_read_is_computed(taken: Taken) -> None:
    """Products are for as many tokens as the mask, the labels or the position leave."""
    program, found = taken.exported.program, taken.packed
    whole = Multiplications(program.graph)
    sizes = {d: LENGTH for v in program.inputs(Role.USER_INPUT) for d in _symbols(v)}
    half = dict.fromkeys(found.symbols, LENGTH * LENGTH // 2)
    half |= dict.fromkeys(found.symbols[len(found.sets) :], LENGTH)  # rows, which may be whole
    assert found.cost({**sizes, **half}) < taken.case.share * whole(sizes)


def _symbols(value: Any) -> list[str]:
    return [d.value for d in value.shape or () if not isinstance(d, int) and d.value]
