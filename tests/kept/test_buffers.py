"""A buffer that is written to around what stays PyTorch's, and in it, holds what PyTorch leaves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kept.buffers import ACCESSES, KINDS, UPDATES, Between, nothing
from tests.kept.twins import Twins

pytestmark = pytest.mark.filterwarnings("ignore:ORTModule runs:ortrain.errors.OrtrainWarning")

# Signs of the inputs, which decide about what is done sometimes: never in the first call.
SIGNS = (-1, -1, 1, -1, 1)


def an_input(step: int, sign: int) -> Tensor:
    made = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
    return sign * (made.abs() + 0.1)


def compare(module: nn.Module, options: dict[str, Any] | None = None) -> Twins:
    """Five steps of training, one of evaluation, and one more of training, beside PyTorch's."""
    # Nothing but what is known of a call keeps a graph that would be wrong from being used.
    settings = {"fallback": "torch", "certificate": "off", **(options or {})}
    twins = Twins(module, "aten", **settings)
    twins.tolerance = 1e-5
    for step, sign in enumerate(SIGNS):
        twins.step(an_input(step, sign), seed=step)
    for training in (False, True):
        twins.eager.train(training)
        twins.graph.train(training)
        twins.step(an_input(9, -1), seed=9)
    return twins


def combined(*others: Sequence[str], each_kind: bool) -> list[Any]:
    """All combinations; in the sample each access, in each kind or one, with others in turn."""
    found = []
    for a, access in enumerate(ACCESSES):
        for k, kind in enumerate(KINDS):
            turns = tuple(part[(3 * a + 2 * k) % len(part)] for part in others)
            for parts in product(*others):
                sampled = parts == turns and (each_kind or a % len(KINDS) == k)
                marks = [] if sampled else [pytest.mark.breadth]
                found.append(pytest.param(access, kind, *parts, marks=marks))
    return found


@pytest.mark.parametrize(
    ("access", "kind", "before", "behind"),
    combined([*UPDATES], ["nothing", "in place"], each_kind=True),
)
def test_outputs_gradients_and_buffers_are_those_of_pytorch(
    access: str, kind: str, before: str, behind: str
) -> None:
    parts = UPDATES[before], KINDS[kind], ACCESSES[access], UPDATES[behind]
    options = {"keep_in_torch": ["inner"]} if kind == "a module" else {}
    compare(Between(*parts, times=1), options)


@pytest.mark.parametrize(("access", "kind", "before"), combined([*UPDATES][::-1], each_kind=False))
def test_two_calls_with_a_write_between(access: str, kind: str, before: str) -> None:
    options = {"keep_in_torch": ["inner"]} if kind == "a module" else {}
    compare(Between(UPDATES[before], KINDS[kind], ACCESSES[access], nothing, times=2), options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", ["in place", "a slice", "statistics"])
def test_a_piece_that_reads_what_the_graph_has_written_is_a_node(kind: str, before: str) -> None:
    options = {"keep_in_torch": ["inner"]} if kind == "a module" else {}
    module = Between(UPDATES[before], KINDS[kind], ACCESSES["reads"], nothing, times=1)
    twins = compare(module, options)
    assert twins.graph.report.graph_calls == 7, str(twins.graph.report)


def _itself(state: Tensor) -> Tensor:
    return state


def _a_part(state: Tensor) -> Tensor:
    return state[:4]


def _in_a_list(state: Tensor) -> Any:
    return [state.view(2, 4)]


def _reads_the_attribute(m: Any, h: Tensor) -> Tensor:
    held = m.held[0] if isinstance(m.held, list) else m.held
    return h * (1 + held.sum())


@pytest.mark.parametrize("made", [_itself, _a_part, _in_a_list])
@pytest.mark.parametrize("kind", KINDS)
def test_what_shows_a_buffer_beside_its_names_is_read_as_it_is(kind: str, made: Any) -> None:
    class Known(Between):
        def __init__(self) -> None:
            super().__init__(UPDATES["in place"], KINDS[kind], _reads_the_attribute, nothing, 1)
            self.held = made(self.state)

    options = {"keep_in_torch": ["inner"]} if kind == "a module" else {}
    compare(Known(), options)
