"""A held module on a card: PyTorch against recorded graphs, on a stand-in that forgives nothing."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch._subclasses import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ortrain import Options, ORTModule
from ortrain.errors import NotServed
from ortrain.frontend import machine, policy
from ortrain.frontend.backend import ortrain
from ortrain.frontend.graph import check_devices
from ortrain.frontend.policy import BLOCKS, TORCH, Challenger
from ortrain.runtime.aten.graphs import recordings
from ortrain.runtime.aten.graphs.recorders import Readers
from ortrain.step.eager_draws import AsGraphs
from ortrain.step.seeds import Seeds
from tests.runtime.aten.recording import Card, install
from tests.runtime.aten.scenarios import (
    SCENARIOS,
    Network,
    Scenario,
    backwards_in_the_other_order,
    batch,
    gradients,
    moved_parameters,
    run_again,
    twice,
    two_forwards,
)

pytestmark = pytest.mark.usefixtures("graph_wins")

PLAIN = Options(engine="aten", fallback="raise", cuda_graphs=False)
RECORDED = Options(engine="aten", fallback="raise", skip_padding=False)
AUTO = Options(skip_padding=False)
# Steps of an optimizer, by other kernels than eager's.
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """The CPU in the place of a card; graphs and recordings may take as long as they will."""
    monkeypatch.setattr("ortrain.frontend.policy.SHARE", 1e9)
    monkeypatch.setattr("ortrain.frontend.autotune.Duel._look_early", lambda *_: None)
    return install(monkeypatch)


class Eager(nn.Module):
    """A module in PyTorch, which draws what graphs draw."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with AsGraphs(Seeds()):
            return self.module(*args, **kwargs)


def replays_of(model: ORTModule) -> Any:
    found = model.report.replays
    assert found is not None
    return found


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_a_recorded_module_does_what_it_does_unrecorded(scenario: Scenario) -> None:
    found, module = [], Network()
    for options in (PLAIN, RECORDED):
        model = ORTModule(copy.deepcopy(module), options=options)
        torch.manual_seed(5)
        found.append([*scenario(model), *model.buffers()])
    for mine, its in zip(*found, strict=True):
        assert torch.equal(mine, its)
    replays = model.report.replays
    assert replays is None or not replays.refused
    if scenario is not run_again:
        assert replays_of(model).replayed > 0


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_a_contest_on_a_card_trains_as_eager_does(scenario: Scenario) -> None:
    found, module = [], Network()
    if scenario in (two_forwards, backwards_in_the_other_order, twice):
        module.norm = nn.LayerNorm(6)  # eager allows one forward a backward of statistics
    for wrap in (Eager, lambda module: ORTModule(module, options=AUTO)):
        model: Any = wrap(copy.deepcopy(module))
        torch.manual_seed(5)
        found.append([each.detach().clone() for _ in range(5) for each in scenario(model)])
        found[-1] += model.buffers()
    for mine, its in zip(*found, strict=True):
        torch.testing.assert_close(mine, its, **CLOSE)
    if scenario not in (run_again, moved_parameters):  # neither has a backward to be timed
        assert replays_of(model).replayed > 0
        assert not replays_of(model).refused


# -- trainings ---------------------------------------------------------------------------------


class Block(nn.Module):
    """Two products, and dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.second(self.dropout(torch.tanh(self.first(x))))
        return result


class Deep(nn.Module):
    """Equal blocks; returns the loss."""

    def __init__(self, layers: int = 4, dropout: float = 0.2, way: str = "") -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.way = way

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            inside = self.way == "checkpoints"
            x = checkpoint(layer, x, use_reentrant=False) if inside else layer(x)
            if self.way == "breaks":
                torch._dynamo.graph_break()
        return x.square().mean()


def trained(
    model: Any, lengths: Sequence[int] = (5,) * 16, seed: int = 3, **how: Any
) -> list[Tensor]:
    """The losses of a training, and the parameters behind it."""
    torch.manual_seed(seed)
    dtype, accumulates = how.get("autocast"), how.get("accumulates", 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=how.get("scales", False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 20, (3, length), generator=generator)
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = model(ids)
        scaler.scale(loss).backward()
        losses.append(loss.detach())
        if step % accumulates == accumulates - 1:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        if between := how.get("between"):
            between(model, step)
    return [*losses, *(p.detach().clone() for p in model.parameters())]


def both_trained(module: nn.Module, *args: Any, options: Options = AUTO, **how: Any) -> ORTModule:
    """Trains a module in PyTorch and on the card, compares, and gives the latter."""
    rtol = 3e-2 if how.get("autocast") is not None else 1e-4
    model = ORTModule(copy.deepcopy(module), options=options)
    expected = trained(Eager(copy.deepcopy(module)), *args, **how)
    found = trained(model, *args, **how)
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, its, rtol=rtol, atol=rtol / 10)
    return model


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"autocast": torch.bfloat16},
        {"autocast": torch.float16, "scales": True},
        {"accumulates": 3},
        {"lengths": [5, 7] * 16},
    ],
    ids=str,
)
@pytest.mark.parametrize("way", ["", "checkpoints", "breaks"])
def test_a_training_on_a_card_is_eagers(way: str, how: dict[str, Any], card: Card) -> None:
    # What a checkpoint repeats draws PyTorch's own numbers where PyTorch runs it.
    module = Deep(3, 0.0 if way == "checkpoints" else 0.2, way)
    replays = replays_of(both_trained(module, **how))
    assert replays.replayed > 12
    assert not replays.refused
    assert card.replayed == replays.replayed or way == "breaks"  # the report has the last graph's


@pytest.fixture
def blocks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are tried, and nothing else is."""
    ways = [Challenger(BLOCKS, cost=0.0, gain=0.9)]
    monkeypatch.setattr(machine, "challengers_of", lambda *_, **__: ways)


@pytest.mark.usefixtures("blocks_alone")
def test_equal_layers_have_a_recording_each_and_share_nothing(card: Card) -> None:
    model = both_trained(Deep(12), [5] * 20)
    assert model._runner.policies[True, True].way == BLOCKS  # type: ignore[union-attr]
    replays = replays_of(model)
    assert replays.recorded == card.recorded == 24
    assert replays.replayed > 24 * 10


@pytest.mark.usefixtures("blocks_alone")
def test_layers_that_share_their_weights_have_recordings_for_calls_at_once() -> None:
    module = Deep(3)
    for layer in module.layers[1:]:
        layer.first, layer.second = module.layers[0].first, module.layers[0].second
    assert replays_of(both_trained(module, [5] * 20)).recorded == 6


def test_a_part_that_pytorch_runs_lies_between_recordings() -> None:
    options = Options(skip_padding=False, keep_in_torch=("layers.1",))
    replays = replays_of(both_trained(Deep(3), options=options))
    assert replays.replayed > 8
    assert not replays.refused


@pytest.fixture
def a_process_group() -> Any:
    """Of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("a_process_group")
@pytest.mark.parametrize("pieces", [0, 3])
def test_buckets_of_gradients_come_out_of_recordings(pieces: int) -> None:
    module = Deep(3)
    options = Options(skip_padding=False, backward_pieces=pieces)
    model = ORTModule(copy.deepcopy(module), options=options)
    found = trained(DistributedDataParallel(model, bucket_cap_mb=1), [5] * 20)
    expected = trained(DistributedDataParallel(Eager(module), bucket_cap_mb=1), [5] * 20)
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, its, **CLOSE)
    replays = replays_of(model)
    assert replays.replayed > 12
    assert replays.recorded == 1 + max(pieces, 1)


BEFORE: list[Tensor] = []


def moves_its_data(model: nn.Module, step: int) -> None:
    """Each parameter lies elsewhere, as after a swap with averaged weights."""
    for parameter in model.parameters():
        BEFORE.append(parameter.data)  # so that nothing else comes to lie there
        parameter.data = parameter.data.clone()


def loads(model: nn.Module, step: int) -> None:
    """Other values in the same memory."""
    model.load_state_dict({name: value * 1.01 for name, value in model.state_dict().items()})


@pytest.mark.parametrize("change", [moves_its_data, loads], ids=lambda f: f.__name__)
@pytest.mark.parametrize("steps", [{9}, {6, 9, 12}, {*range(5, 30)}], ids=str)
def test_weights_that_change_are_read_where_they_are(
    change: Callable[[nn.Module, int], None], steps: set[int]
) -> None:
    def between(model: nn.Module, step: int) -> None:
        if step in steps:
            change(model, step)

    both_trained(Deep(2), [5] * 30, between=between)


def test_weights_that_move_at_every_step_are_copied_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recordings, "MOST_ADDRESSES", 5)
    replays = replays_of(both_trained(Deep(2), [5] * 30, between=moves_its_data))
    assert replays.recorded == 3  # the backward before its weights have moved so often, too
    assert replays.replayed > 10


def test_parameters_that_others_replace_are_read(card: Card) -> None:
    module = Deep(2, 0.0)
    model = ORTModule(copy.deepcopy(module), options=AUTO)
    trained(model)
    for kind in (torch.float32, torch.float64, torch.float32):
        state = {name: value.to(kind) * 0.5 for name, value in module.state_dict().items()}
        for each in (module, model):
            each.load_state_dict(copy.deepcopy(state), assign=True)
        for mine, its in zip(trained(model), trained(module), strict=True):
            torch.testing.assert_close(mine, its, **CLOSE)
    before = card.replayed
    trained(model)
    assert card.replayed > before


# -- memory that recordings share ----------------------------------------------------------------


def against_each_other(wrap: Callable[[nn.Module], Any]) -> list[Tensor]:
    """A generator and a discriminator, whose calls come in one order and in the other."""
    torch.manual_seed(7)
    judge = wrap(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
    maker = wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6)))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (judge, maker)]
    losses = []
    for step in range(50):
        torch.manual_seed(step)
        real, noise = torch.randn(5, 6), torch.randn(5, 4)
        if step < 20:  # so that the judge is recorded first
            loss = judge(real).square().mean()
        else:
            loss = judge(real).mean() - judge(maker(noise)).mean()
        loss.backward()
        losses.append(loss.detach())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def test_modules_that_call_each_other_in_any_order_keep_their_results(card: Card) -> None:
    expected = against_each_other(Eager)
    found = against_each_other(lambda module: ORTModule(module, options=AUTO))
    torch.testing.assert_close(found, expected, **CLOSE)
    assert card.replayed > 60


def test_the_stand_in_notices_results_that_are_written_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Readers, "may_replay", lambda self, number: True)
    expected = against_each_other(Eager)
    found = against_each_other(lambda module: ORTModule(module, options=AUTO))
    assert not torch.stack(found).isfinite().all() or not torch.allclose(
        torch.stack(found), torch.stack(expected)
    )


def test_hooks_that_keep_what_is_saved_keep_it_from_replays(card: Card) -> None:
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    def both(model: nn.Module, call: Any) -> list[Tensor]:
        found = []
        for number in range(8):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                first = call(*batch(model, 4, number))
            second = call(*batch(model, 4, number + 20))
            (first * second).mean().backward()
            found += [first.detach(), second.detach(), *[g.clone() for g in gradients(model)]]
            model.zero_grad()
        return found

    module = Network(0.0)
    module.norm = nn.LayerNorm(6)
    found = both(module, torch.compile(module, backend=ortrain))
    torch.testing.assert_close(found, both(module, module), **CLOSE)
    assert card.replayed > 6


@pytest.mark.parametrize("seed", range(6))
def test_forwards_and_backwards_in_any_order_keep_their_results(seed: int, card: Card) -> None:
    """Of three modules at two sizes each, up to four of which wait for their backward."""
    modules = [nn.Sequential(nn.Linear(4, 6 + n), nn.Tanh(), nn.Linear(6 + n, 4)) for n in range(3)]
    held = [ORTModule(copy.deepcopy(module), options=RECORDED) for module in modules]
    found = []
    for models in (modules, held):
        dice = random.Random(seed)
        waiting: list[Tensor] = []
        results: list[Tensor] = []
        for number in range(120):
            if waiting and (len(waiting) > 3 or dice.random() < 0.5):
                waiting.pop(dice.randrange(len(waiting))).square().sum().backward()
                continue
            x = torch.randn(dice.choice((3, 5)), 4, generator=torch.Generator().manual_seed(number))
            y = models[dice.randrange(3)](x)
            results.append(y.detach().clone())
            if dice.random() < 0.8:
                waiting.append(y)
        found.append([*results, *[p.grad for model in models for p in model.parameters()]])
    for mine, its in zip(*found, strict=True):
        torch.testing.assert_close(mine, its, **CLOSE)
    assert card.replayed > 30


# -- sizes ---------------------------------------------------------------------------------------


def test_sizes_that_come_once_are_not_recorded_and_run_in_pytorch(card: Card) -> None:
    model = both_trained(Deep(2), [*range(3, 40)])
    assert card.recorded == 0
    assert model.report.eager_calls == 37


def test_sizes_that_come_again_are_replayed_among_those_that_do_not(card: Card) -> None:
    lengths = [each for n in range(3, 30) for each in (40, n)]
    model = both_trained(Deep(2), lengths)
    assert card.recorded == 2
    assert model.report.graph_calls > 15
    assert "its sizes, addresses or numbers are new" in replays_of(model).plain


def test_few_sizes_have_recordings_at_a_time(card: Card) -> None:
    lengths = [n for _ in range(4) for n in range(3, 15)]
    both_trained(Deep(2), lengths)
    assert card.recorded == 2 * recordings.MOST


def test_recordings_are_a_share_of_the_run(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy.Policy, "may_convert", property(lambda self: not card.recorded))
    model = both_trained(Deep(2), [5] * 12 + [6, 7, 8] * 5)
    assert card.recorded == 2
    assert "further recordings would take too much of the run" in replays_of(model).plain


def test_nothing_is_recorded_where_memory_is_short(card: Card) -> None:
    card.free = 100
    model = both_trained(Deep(2))
    assert card.recorded == 0
    assert replays_of(model).plain["there is too little memory for a recording"] == 1
    assert not replays_of(model).refused


# -- what fails ----------------------------------------------------------------------------------


def test_what_cannot_be_captured_runs_unrecorded_with_the_reason(card: Card) -> None:
    card.fails = "operation not permitted"
    model = both_trained(Deep(2))
    assert replays_of(model).refused == {"the forward": "RuntimeError: operation not permitted"}
    assert "CUDA graphs" in str(model.report)


@pytest.mark.filterwarnings("ignore:ORTModule runs")
@pytest.mark.parametrize("which", [1, 2], ids=["forward", "backward"])
def test_a_replay_that_fails_is_answered_by_pytorch(card: Card, which: int) -> None:
    def between(model: nn.Module, step: int) -> None:
        if isinstance(model, ORTModule) and step == 12:
            card.healthy = which

    model = both_trained(Deep(2, 0.0), [5] * 20, between=between)
    assert card.healthy <= 0
    (refused,) = replays_of(model).refused.items()
    assert refused == (f"the {['forward', 'backward'][which - 1]}", ILLEGAL)


ILLEGAL = "RuntimeError: an illegal memory access was encountered"


# Operators for which the host would wait, on tensors of a card.
READS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "is_nonzero"}


def reads(call: Callable[[], object]) -> int:
    """How many such operators run."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return sum(event.name.removeprefix("aten::") in READS for event in profile.events() or ())


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_nothing_waits_for_the_card_in_a_settled_step(card: Card, dropout: float) -> None:
    model = ORTModule(Deep(2, dropout), options=AUTO)
    trained(model)
    assert model._runner.policies[True, True].settled  # type: ignore[union-attr]
    card.calls.clear()
    before, ids = card.replayed, torch.zeros(3, 5, dtype=torch.int64)
    assert reads(lambda: model(ids).backward()) == 3 * bool(dropout)  # the seed's, on the host
    assert card.replayed == before + 2
    assert card.waits() == []
    assert reads(lambda: torch.ones(2).sum().item()) == 1


def test_tensors_of_a_card_are_none_for_onnxruntime() -> None:
    with FakeTensorMode():
        x = torch.empty(3, device="cuda")
    with pytest.raises(NotServed, match="is on cuda:0, for which there is no execution provider"):
        check_devices([3, x], Options(engine="onnxruntime"))
    check_devices([3, x], Options(engine="aten"))


def test_a_contest_waits_for_no_event(card: Card) -> None:
    model = ORTModule(Deep(2), options=AUTO)
    trained(model)
    assert "event synchronize" not in card.calls
    contest = model.report.contest
    assert contest is not None
    assert (contest.winner, contest.engine) == ("graph", "aten")


def test_a_user_may_say_no(card: Card) -> None:
    model = both_trained(Deep(2, 0.0), options=Options(cuda_graphs=False, engine="aten"))
    assert card.recorded == 0
    assert model.report.replays is None


def test_a_module_that_has_settled_in_pytorch_and_draws_nothing_pays_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ortrain.frontend.autotune.MARGIN", 0.0)
    for dropout, draws in ((0.0, False), (0.2, True)):
        model = both_trained(Deep(2, dropout), [5] * 20)
        assert model._runner.policies[True, True].way == TORCH  # type: ignore[union-attr]
        assert model._runner.draws is draws  # type: ignore[union-attr]
