"""Work on tokens that nobody reads is left out: losses and gradients stay what they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from ortrain.capture.export import Captured, capture
from ortrain.graph.cost import Multiplications
from ortrain.passes.tokens import Packed, packed
from ortrain.program import Program, Role
from tests.breadth import crossed
from tests.token_cases import CASES, LENGTH, LENGTHS, SAMPLE, Case, Trained, batch


@dataclass
class Taken:
    """One capture, and its program without the tokens that nobody reads."""

    case: Case
    module: nn.Module
    captured: Captured
    packed: Packed
    engine: str
    steps: dict[int, Trained] = field(default_factory=dict)

    def step(self, program: Program) -> Trained:
        """Made once for all batches."""
        if id(program) not in self.steps:
            self.steps[id(program)] = Trained(self.module, program, self.engine)
        return self.steps[id(program)]


ON_ENGINES = [
    pytest.param(each.values, marks=each.marks, id="-".join(each.values))
    for each in crossed(CASES, ["aten", "onnxruntime"], one_in=2, sample=SAMPLE)
]


@pytest.fixture(scope="module", params=ON_ENGINES)
def taken(request: pytest.FixtureRequest) -> Taken:
    name, engine = request.param
    case = CASES[name]
    torch.manual_seed(0)
    module = case.make().train()
    captured = capture(module, (), case.given(batch(LENGTHS["some"], case.left)))
    found = packed(captured.program, case.shown)
    assert found is not None
    return Taken(case, module, captured, found, engine)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_losses_and_gradients_are_those_of_the_whole_batch(taken: Taken, lengths: str) -> None:
    given = taken.case.given(batch(LENGTHS[lengths], taken.case.left))
    whole, wholes = taken.step(taken.captured.program)(given)
    ours, gradients = taken.step(taken.packed.program)(given)
    torch.testing.assert_close(ours[0], whole[0], rtol=1e-5, atol=0.0)
    largest = max(float(g.abs().max()) for g in wholes.values())
    assert gradients.keys() == wholes.keys()
    for name, expected in wholes.items():
        torch.testing.assert_close(
            gradients[name], expected, rtol=1e-4, atol=1e-6 * largest, msg=name
        )
    if taken.case.shown == "tokens":  # the others are zeros
        real = given["attention_mask"].bool()
        torch.testing.assert_close(ours[1][real], whole[1][real], rtol=1e-4, atol=1e-5)
        assert not ours[1][~real].any()


def test_only_what_is_read_is_computed(taken: Taken) -> None:
    """Products are for as many tokens as the mask, the labels or the position leave."""
    program, found = taken.captured.program, taken.packed
    whole = Multiplications(program.graph)
    sizes = {d: LENGTH for v in program.inputs(Role.USER_INPUT) for d in _symbols(v)}
    half = dict.fromkeys(found.symbols, LENGTH * LENGTH // 2)
    half |= dict.fromkeys(found.symbols[len(found.sets) :], LENGTH)  # rows, which may be whole
    assert found.cost({**sizes, **half}) < taken.case.share * whole(sizes)


def _symbols(value: Any) -> list[str]:
    return [d.value for d in value.shape or () if not isinstance(d, int) and d.value]
