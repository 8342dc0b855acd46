"""Work on tokens that nobody reads is left out: losses and gradients stay what they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain.autodiff.engine import influences
from ortrain.capture.export import Captured, capture
from ortrain.graph.cost import Multiplications
from ortrain.passes.tokens import Packed, packed
from ortrain.program import Program, Role
from ortrain.runtime import engines
from ortrain.step.autograd import Step
from ortrain.step.build import build, likely_upstream
from tests.token_cases import CASES, LENGTH, LENGTHS, Batch, Case, batch


@dataclass
class Taken:
    """One capture, and its program without the tokens that nobody reads."""

    case: Case
    module: nn.Module
    captured: Captured
    packed: Packed


@pytest.fixture(scope="module", params=CASES)
def taken(request: pytest.FixtureRequest) -> Taken:
    case = CASES[request.param]
    torch.manual_seed(0)
    module = case.make().train()
    captured = capture(module, (), case.given(batch(LENGTHS["some"], case.left)))
    found = packed(captured.program, case.shown)
    assert found is not None
    return Taken(case, module, captured, found)


def trained(
    taken: Taken, program: Program, given: Batch, engine: str
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs and gradients of one step, with dropout, always from the same seed."""
    tensors = {**dict(taken.module.named_buffers()), **dict(taken.module.named_parameters())}
    users = program.outputs(Role.USER_OUTPUT, Role.LOSS)
    reached = {value.name for value in influences(program.graph, users)}
    wrt = [v.name or "" for v in program.inputs(Role.PARAMETER) if v.name in reached]
    executor = engines.executor(engine, device=torch.device("cpu"), threads=1)
    plan = build(program, wrt, likely_upstream(program), executor)
    step = Step(plan, tensors, lambda _: step)
    names = [value.name for value in program.inputs(Role.USER_INPUT)]
    torch.manual_seed(7)
    outputs = step.train([given[name or ""] for name in names])
    parameters = dict(taken.module.named_parameters())
    found = torch.autograd.grad(outputs[0], [parameters[name] for name in wrt])
    return [t.detach() for t in outputs], dict(zip(wrt, found, strict=True))


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_losses_and_gradients_are_those_of_the_whole_batch(
    taken: Taken, lengths: str, engine: str
) -> None:
    given = taken.case.given(batch(LENGTHS[lengths], taken.case.left))
    whole, wholes = trained(taken, taken.captured.program, given, engine)
    ours, gradients = trained(taken, taken.packed.program, given, engine)
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
    assert found.cost({**sizes, **half}) < 0.75 * whole(sizes)


def _symbols(value: Any) -> list[str]:
    return [d.value for d in value.shape or () if not isinstance(d, int) and d.value]
