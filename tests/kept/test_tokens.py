"""A custom function that treats each token alone is given those that somebody reads."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ortrain import Options, ORTModule
from ortrain.capture.trace.aside import aside
from ortrain.capture.trace.found import find
from ortrain.capture.trace.rowwise import axes_of
from ortrain.capture.trace.token_axes import POINTWISE
from ortrain.errors import ExecutionError
from ortrain.kept.arguments import Arguments
from ortrain.kept.call import Kept, Site
from ortrain.kept.premises import Premises
from ortrain.step import tokens
from tests.breadth import crossed
from tests.kept import token_functions
from tests.kept.token_functions import ALONE, MIXING, WEIGHTED, function

ROWS, LENGTH = 4, 11
BOTH = (DimDynamic.DYNAMIC, DimDynamic.DYNAMIC, DimDynamic.STATIC)


def asked(applied: Any, weighted: bool = False, dims: Sequence[DimDynamic] = BOTH) -> Kept:
    """A call as a trace has it, with what is known of it."""
    mode: Any = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    context = StatelessSymbolicContext([*dims])
    x = mode.from_tensor(torch.empty(ROWS, LENGTH, 8), symbolic_context=context)
    with mode:
        given = [x, *([torch.empty(8)] if weighted else [])]
    call = Kept(applied.apply, Arguments(tuple(given), {}), Site("it", "", ""), grad=True)
    with aside():
        with mode:
            found = find(call, given, [])
        call.result, call.connected = found.result, found.connected
        axes_of(call, given, {})
    return call


@pytest.mark.parametrize("kind", ALONE)
def test_a_function_that_treats_each_token_alone_is_known(kind: str) -> None:
    call = asked(ALONE[kind], kind in WEIGHTED)
    weight = [-1] if kind in WEIGHTED else []
    assert call.axes == [0, 1, -1, *weight, 0, 1, -1], call.mixes


@pytest.mark.parametrize("kind", MIXING)
def test_its_neighbours_are_not_and_it_is_said_why(kind: str) -> None:
    applied, because = MIXING[kind]
    call = asked(applied, kind in WEIGHTED)
    assert not call.axes
    assert because in call.mixes


def test_of_one_axis_that_is_none_of_sizes_there_is_nothing_to_know() -> None:
    softmax = MIXING["a softmax over tokens"][0]
    static = DimDynamic.STATIC
    assert not asked(softmax, dims=(static, static, static)).axes
    assert asked(softmax, dims=(DimDynamic.DYNAMIC, static, static)).axes == [0, -1, -1] * 2


@pytest.mark.parametrize("name", POINTWISE)
def test_what_is_called_element_by_element_is_that_to_pytorch_too(name: str) -> None:
    others = {"detach", "alias", "_to_copy", "_conj", "log_sigmoid_forward", "hardswish",
              "floor_divide"}  # fmt: skip
    packet = getattr(torch.ops.aten, name)
    tags = [getattr(packet, overload).tags for overload in packet.overloads()]
    is_pointwise = any(torch.Tag.pointwise in each for each in tags)
    assert is_pointwise or name.endswith("_backward") or name in others


def expect_alone(applied: Any, count: int, weights: Sequence[Tensor] = ()) -> None:
    """Compares what tokens get in the whole batch, and without the others: bit for bit."""
    x, gradient = torch.randn(ROWS, LENGTH, 8), torch.zeros(ROWS * LENGTH, 8)
    places = torch.randperm(ROWS * LENGTH)[:count].sort().values
    found = []
    for few in (False, True):
        given = (x.view(-1, 8)[places].unsqueeze(0) if few else x).clone().requires_grad_()
        output = applied.apply(given, *weights)
        width = output.shape[-1]
        if not few:
            gradient = torch.zeros(ROWS * LENGTH, width)
            gradient[places] = torch.randn(count, width)
        arriving = gradient[places].unsqueeze(0) if few else gradient.view_as(output)
        own, *others = torch.autograd.grad(output, [given, *weights], arriving)
        rows = [output.detach().reshape(-1, width), own.reshape(-1, 8)]
        found.append(([each if few else each[places] for each in rows], others))
        if not few:
            left = own.reshape(-1, 8).clone()
            left[places] = 0
            assert not left.any()
    (whole, all_others), (some, others) = found
    for one, other in zip(whole, some, strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(others, all_others, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [1, 3, 17])
@pytest.mark.parametrize("kind", ALONE)
def test_some_tokens_get_what_they_get_in_the_whole_batch(kind: str, count: int) -> None:
    weights = [torch.randn(8, requires_grad=True)] if kind in WEIGHTED else []
    expect_alone(ALONE[kind], count, weights)


# -- generated -------------------------------------------------------------------------------------

STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": lambda x: torch.tanh(x),
    "a number": lambda x: x * 0.5 + 1,
    "squares": lambda x: x.square() / (1 + x.abs()),
    "features": lambda x: x - x.mean(-1, keepdim=True),
    "a softmax": lambda x: torch.softmax(x, -1),
    "halves": lambda x: torch.cat([x[..., 4:], x[..., :4]], -1),
    "heads": lambda x: (x.view(x.shape[0], x.shape[1], 2, 4) * 2).flatten(2),
    "rows": lambda x: (x.reshape(-1, 8) * 3).view(x.shape),
    "across": lambda x: x.transpose(0, 1).neg().transpose(0, 1),
    "where": lambda x: torch.where(x > 0, x, x * 0.1),
    "ones": lambda x: x + x.new_ones(x.shape[1], 1),
    "rounded": lambda x: torch.round(x * 4) / 4,
    "the greatest feature": lambda x: x / x.abs().amax(-1, keepdim=True),
    "an order": lambda x: x.flip(-1).cumsum(-1),
}
MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "a mean": lambda x: x - x.mean(1, keepdim=True),
    "turned": lambda x: x.flip(0),
    "all": lambda x: x / x.norm(),
    "a sum": lambda x: x.cumsum(0),
    "a length": lambda x: x / x.shape[1],
    "rows swapped": lambda x: x.reshape(x.shape[1], x.shape[0], 8).transpose(0, 1),
}


def generated(seed: int) -> tuple[Any, bool]:
    """A function of random steps, and whether one of them mixes tokens."""
    choose = random.Random(seed)
    ahead = tuple(choose.choices([*STEPS.values()], k=choose.randint(1, 4)))
    behind = tuple(choose.choices([*STEPS.values()], k=choose.randint(0, 2)))
    at = choose.choice(["nowhere", "nowhere", "ahead", "behind"])
    mixing = choose.choice([*MIXED.values()])
    if at == "ahead":
        ahead = (*ahead[:1], mixing, *ahead[1:])
    if at == "behind":
        behind = (*behind, mixing)

    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        for step in ahead:
            x = step(x)
        return x

    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        for step in behind:
            x = step(x)
        return torch.clamp(gradient, -1, 1) * x if at != "behind" else gradient * x

    return function(forward, backward), at != "nowhere"


@pytest.mark.parametrize("seed", range(24))
def test_of_generated_functions_those_are_known_in_which_no_step_mixes_tokens(seed: int) -> None:
    applied, mixes = generated(seed)
    call = asked(applied)
    assert bool(call.axes) == (not mixes), call.mixes
    if call.axes:
        expect_alone(applied, 7)


# -- in a graph ------------------------------------------------------------------------------------


class Read(nn.Module):
    """Words through a function between two layers, of which the first of each row is read."""

    def __init__(self, applied: Any, weighted: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 8)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8)) if weighted else None
        self.applied = applied

    def forward(self, ids: Tensor) -> Tensor:
        h = torch.tanh(self.first(self.words(ids)))
        given = (h,) if self.weight is None else (h, self.weight)
        h = self.last(self.applied.apply(*given))
        return (h[:, 0] ** 2).sum()


def ids(rows: int = ROWS, length: int = LENGTH) -> Tensor:
    return torch.randint(50, (rows, length))


@pytest.fixture
def worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """To leave tokens out, in small models, too."""
    monkeypatch.setattr(tokens, "LEAST", 0)


class Pair:
    """A model as a graph, and in PyTorch."""

    def __init__(self, eager: nn.Module, **options: Any) -> None:
        self.eager = eager
        self.graph = ORTModule(copy.deepcopy(eager), options=Options(**options))

    def step(self, *given: Tensor, between: Callable[[], object] = lambda: None) -> None:
        """Compared."""
        found = []
        for model in (self.eager, self.graph):
            loss = model(*given)
            if model is self.graph:
                between()
            loss.backward()
            gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            found.append({"loss": loss.detach(), **gradients})
            model.zero_grad()
        expected, ours = found
        largest = max(float(each.abs().max()) for each in expected.values())
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6 * max(1.0, largest))


SIZES = [(ROWS, LENGTH), (3, 15), (1, 7), (5, 1)]
FEW = ["half of the gradient", "a norm with a weight", "heads", "setup_context"]


@pytest.mark.usefixtures("worth_it")
@pytest.mark.parametrize(
    ("kind", "engine"), crossed(ALONE, ["aten", "onnxruntime"], one_in=2, sample=FEW)
)
def test_training_is_eagers_with_tokens_left_out_around_the_call(kind: str, engine: str) -> None:
    pair = Pair(Read(ALONE[kind], kind in WEIGHTED), engine=engine, fallback="raise")
    for rows, length in SIZES:
        pair.step(ids(rows, length))
    assert pair.graph.report.left_out >= 3  # a row of one token is all there is
    assert pair.graph.report.kept[0].axes


# Of others PyTorch draws other numbers, takes no such sizes, or runs all of the module.
MIXING_GRAPHS = [
    "a softmax over tokens", "the number of elements", "a mean of gradients", "a gradient for all",
    "decay in the backward", "all words for the weight", "positions", "a count in the backward",
]  # fmt: skip


@pytest.mark.usefixtures("worth_it")
@pytest.mark.parametrize("kind", MIXING_GRAPHS)
def test_training_is_eagers_around_a_call_that_is_not_known(kind: str) -> None:
    pair = Pair(Read(MIXING[kind][0], kind in WEIGHTED), engine="aten", fallback="raise")
    for rows, length in SIZES[:2]:
        pair.step(ids(rows, length))
    assert not pair.graph.report.kept[0].axes


def test_what_was_proved_of_code_is_no_longer_known_when_the_code_is_another_one(
    worth_it: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied = ALONE["a number of the module's"]
    pair, call = Pair(Read(applied), engine="aten", fallback="raise"), asked(applied)
    pair.step(ids())
    assert call.treats_tokens_alone
    monkeypatch.setattr(token_functions, "_SCALE", -3.0)
    assert not call.treats_tokens_alone
    pair.step(ids())
    monkeypatch.undo()
    assert call.treats_tokens_alone
    monkeypatch.setattr(applied, "forward", lambda ctx, x: x - x.mean(1, keepdim=True))
    assert not call.treats_tokens_alone
    pair.step(ids())


@pytest.mark.parametrize("known", [(False,), (True, False)])
def test_a_call_whose_code_is_another_one_by_now_gets_all_tokens_or_runs_in_pytorch(
    known: tuple[bool, ...], worth_it: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the call is chosen, or as it comes to run."""
    pair = Pair(Read(ALONE["half of the gradient"]), engine="aten")
    pair.step(ids())
    answers = [*known]
    monkeypatch.setattr(Premises, "hold", lambda _: answers.pop(0) if answers else False)
    pair.step(ids())
    assert not answers
    report = pair.graph.report
    assert (report.left_out, report.astray) == (1, len(known) - 1)


def test_a_backward_whose_code_has_changed_since_the_forward_is_an_error(
    worth_it: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied = function(lambda ctx, x: x.view_as(x))
    pair = Pair(Read(applied), engine="aten", fallback="raise")
    pair.step(ids())

    def change() -> None:
        monkeypatch.setattr(applied, "backward", staticmethod(token_functions.of_the_mean))

    with pytest.raises(ExecutionError, match="between a forward and its backward"):
        pair.step(ids(), between=change)
    pair.step(ids())


@pytest.mark.usefixtures("worth_it")
def test_evaluation_leaves_tokens_out_as_well() -> None:
    model = ORTModule(Read(ALONE["numbers of eight bits"]).eval(), options=Options(engine="aten"))
    given = ids()
    with torch.no_grad():
        torch.testing.assert_close(model(given), model.module(given))
    assert model.report.left_out == 1
