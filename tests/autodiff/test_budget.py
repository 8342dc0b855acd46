"""A budget of memory: less is held, and the same is computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ortrain.autodiff import differentiate
from ortrain.autodiff.budget import within
from ortrain.autodiff.held import bytes_of, curve, peak
from ortrain.autodiff.partition import is_cheap, partition
from ortrain.errors import BudgetError
from ortrain.program import Program, Role, phase_of, region_of
from tests.programs import program, run

SIZES = {"batch": 96}


def layers(op: Any, x: Any, w: Any) -> Any:
    """Six layers of products and of what PyTorch would keep of activations."""
    for _ in range(6):
        hidden = op.Gelu(op.MatMul(x, w))
        x = op.Add(x, op.Tanh(op.MatMul(op.Softmax(hidden), w)))
    return x


def attentions(op: Any, x: Any, w: Any) -> Any:
    """Two layers whose scores are larger than their operands."""
    for _ in range(2):
        q = op.MatMul(x, w)
        scores = op.Softmax(op.MatMul(q, op.Transpose(x, perm=[0, 2, 1])))
        x = op.Add(op.MatMul(scores, q), x)
    return x


def branches(op: Any, x: Any, w: Any) -> Any:
    """Results that several readers need, far apart."""
    a = op.Sigmoid(op.MatMul(x, w))
    b = op.Exp(op.MatMul(a, w))
    c = op.Mul(op.Sqrt(op.Add(op.MatMul(b, w), 9.0)), a)
    return op.Add(op.Mul(op.Tanh(op.MatMul(c, w)), b), op.Mul(a, c))


def checkpointed(op: Any, x: Any, w: Any) -> Any:
    """Layers of which every other one is checkpointed."""
    for region in ("", "1", "", "2"):
        op.region = region
        x = op.Softmax(op.MatMul(op.Sigmoid(op.MatMul(x, w)), w))
    op.region = ""
    return op.Tanh(op.MatMul(x, w))


BODIES = {
    "layers": (layers, {"x": ("batch", 24), "w": (24, 24)}),
    "attentions": (attentions, {"x": ("batch", 40, 8), "w": (8, 8)}),
    "branches": (branches, {"x": ("batch", 24), "w": (24, 24)}),
    "checkpointed": (checkpointed, {"x": ("batch", 24), "w": (24, 24)}),
}


def whole_of(name: str) -> Program:
    body, shapes = BODIES[name]
    return differentiate(program(body, shapes), ["x", "w"])


def feeds_of(name: str) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    shapes = {**BODIES[name][1], "y.gradient": BODIES[name][1]["x"]}
    return {
        key: generator.standard_normal([SIZES.get(str(d), d) for d in shape]).astype(np.float32)
        for key, shape in shapes.items()
    }


def outputs_of(parts: list[Program], feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    known = dict(feeds)
    for part in parts:
        known |= run(part, {value.name: known[value.name] for value in part.graph.inputs})
    return known


def cheapest(name: str) -> int:
    """The least bytes that a step of a network can hold."""
    return peak(within(whole_of(name), "least", SIZES, 1, is_cheap), SIZES)


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("budget", [0.9, 0.7, "least"])
@pytest.mark.parametrize("name", BODIES)
def test_a_step_within_a_budget_computes_the_same(name: str, budget: Any, pieces: int) -> None:
    whole, feeds = whole_of(name), feeds_of(name)
    expected = outputs_of(partition(whole, pieces), feeds)
    try:
        parts = within(whole, budget, SIZES, pieces, is_cheap)
    except BudgetError:  # of checkpointed layers little is left
        parts = within(whole, "least", SIZES, pieces, is_cheap)
    known = outputs_of(parts, feeds)
    for value in whole.graph.outputs:
        np.testing.assert_array_equal(known[value.name], expected[value.name])


@pytest.mark.parametrize(("name", "share"), [("layers", 0.8), ("attentions", 0.96)])
def test_each_budget_from_the_least_on_is_kept(name: str, share: float) -> None:
    whole = whole_of(name)
    most, least = peak(partition(whole), SIZES), cheapest(name)
    assert least < share * most
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        allowed = int(least + share * (most - least))
        held = peak(within(whole, allowed, SIZES, 1, is_cheap), SIZES)
        assert held <= allowed


@pytest.mark.parametrize("name", ["layers", "attentions", "branches"])
def test_less_than_the_least_is_an_error_that_names_it(name: str) -> None:
    whole, least = whole_of(name), cheapest(name)
    with pytest.raises(BudgetError, match=f"memory_budget={least}") as caught:
        within(whole, least - 1, SIZES, 1, is_cheap)
    assert caught.value.least == least
    within(whole, least, SIZES, 1, is_cheap)


def test_a_budget_that_is_kept_anyway_changes_nothing() -> None:
    whole = whole_of("layers")
    plain = partition(whole)
    for budget in (1.0, peak(plain, SIZES)):
        parts = within(whole, budget, SIZES, 1, is_cheap)
        assert [p.text() for p in parts] == [p.text() for p in plain]


def test_what_runs_again_stands_right_in_front_of_its_first_reader() -> None:
    _, backward = within(whole_of("layers"), "least", SIZES, 1, is_cheap)
    nodes = list(backward.graph)
    forward = {node.name for node in partition(whole_of("layers"))[0].graph}
    place = {node: i for i, node in enumerate(nodes)}
    ready = [n.name not in forward for n in nodes]  # the gradient's own
    again = [n for n in nodes if n.name in forward]
    assert len(again) > 12
    for node in again:
        first = min(place[use.node] for value in node.outputs for use in value.uses())
        # Between it and its first reader is only what runs again for that reader, too.
        assert not any(ready[place[node] + 1 : first])


def test_checkpointed_regions_stay_as_they_are() -> None:
    whole = whole_of("checkpointed")
    plain, least = partition(whole), within(whole, "least", SIZES, 1, is_cheap)

    def kept_of_regions(parts: list[Program]) -> list[str]:
        saved = parts[0].outputs(Role.SAVED)
        return [str(v.name) for v in saved if v.producer() and region_of(v.producer())]

    assert kept_of_regions(plain) == kept_of_regions(least)


def test_the_curve_counts_each_tensor_while_it_lives() -> None:
    def body(op: Any, x: Any, w: Any) -> Any:
        return op.Tanh(op.Transpose(op.MatMul(op.Exp(x), w), perm=[1, 0]))

    parts = partition(differentiate(program(body, {"x": ("batch", 4), "w": (4, 2)}), ["w"]))
    x, made = 96 * 4 * 4, 96 * 2 * 4
    forward = [m.held for m in curve(parts, SIZES) if m.piece == 0]
    # Exp's result is kept for the gradient of w, the product lies under its view, and is written
    # over by Tanh's result, which is the output and kept as well.
    assert forward[-1] == x + made
    assert max(forward) <= x + 2 * made
    assert bytes_of(parts[0].graph.outputs[0], SIZES) == made
    backward = [m for m in curve(parts, SIZES) if m.piece == 1]
    assert all(phase_of(m.node) is not None for m in backward)
