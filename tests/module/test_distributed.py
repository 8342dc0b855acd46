"""ORTModule under DistributedDataParallel, in a group of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ortrain import Options, ORTModule
from ortrain.errors import ExecutionError, OrtrainWarning
from ortrain.runtime.onnxruntime.executor import Compiled
from tests.module.agreement import GRAPH

PIECES = Options(engine="onnxruntime", fallback="raise", backward_pieces=4)


@pytest.fixture
def group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class Deep(nn.Module):
    """Six layers, and one that only some calls use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.side = nn.Linear(16, 1)
        self.uses_side = True

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x).tanh()
        output = {"loss": x.square().mean()}
        return {**output, "side": self.side(x)} if self.uses_side else output


def without_side(*, unused: bool = False) -> Deep:
    module = Deep()
    module.uses_side = False
    if not unused:
        del module.side
    return module


def rows(seed: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))


def both(module: nn.Module, **settings: Any) -> list[DistributedDataParallel]:
    """Eager and the graph, each under DistributedDataParallel."""
    ours = ORTModule(copy.deepcopy(module), options=PIECES)
    return [DistributedDataParallel(each, **settings) for each in (module, ours)]


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {n.removeprefix("module."): p.grad for n, p in module.named_parameters()}


def assert_same_gradients(ours: nn.Module, eager: nn.Module) -> None:
    expected = gradients(eager)
    for name, gradient in gradients(ours).items():
        known = expected[name]
        assert (gradient is None) is (known is None), name
        if gradient is not None:
            torch.testing.assert_close(gradient, known, msg=name)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
    ],
    ids=lambda s: next(iter(s), "plain"),
)
def test_gradients_are_those_of_eager(settings: dict[str, bool]) -> None:
    module = without_side()
    eager, ours = both(module, **settings)
    for number in range(3):
        for model in (eager, ours):
            model.zero_grad()
            model(rows(number))["loss"].backward()
        assert_same_gradients(ours, eager)
    assert ours.module.report.graph_calls == 3


@pytest.mark.usefixtures("group")
def test_gradients_are_exchanged_while_the_backward_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = without_side()
    _, ours = both(module, bucket_cap_mb=0.001)
    events: list[str] = []

    def exchange(_, bucket):  # whose annotations torch would compare by identity
        events.append("exchange")
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ours.register_comm_hook(None, exchange)
    run: Callable[[Compiled, Any], Any] = Compiled.run_values

    def noted(self: Compiled, feeds: Any) -> Any:
        events.append("piece")
        return run(self, feeds)

    for number in range(3):
        ours.zero_grad()
        loss = ours(rows(number))["loss"]
        events.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Compiled, "run_values", noted)
            loss.backward()
    assert events.count("piece") == 4
    assert _place(events, "exchange", 1) < _place(events, "piece", 3)


def _place(events: list[str], event: str, number: int) -> int:
    return [i for i, each in enumerate(events) if each == event][number - 1]


@pytest.mark.usefixtures("group")
def test_accumulation_without_exchange() -> None:
    module = without_side()
    eager, ours = both(module)
    for _ in range(2):
        for model in (eager, ours):
            model.zero_grad()
            with model.no_sync():
                model(rows(0))["loss"].backward()
            model(rows(1))["loss"].backward()
        assert_same_gradients(ours, eager)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("settings", ["find_unused_parameters", "static_graph"])
def test_an_unused_parameter_has_no_gradient(settings: str) -> None:
    eager, ours = both(without_side(unused=True), **{settings: True})
    for number in range(3):
        for model in (eager, ours):
            model.zero_grad()
            model(rows(number))["loss"].backward()
        assert_same_gradients(ours, eager)
    assert ours.module.side.weight.grad is None


@pytest.mark.usefixtures("group")
def test_an_unused_parameter_that_nobody_looks_for_is_torchs_error() -> None:
    for model in both(without_side(unused=True)):
        model(rows(0))["loss"].backward()
        with pytest.raises(RuntimeError, match="finished reduction in the prior iteration"):
            model(rows(1))


@pytest.mark.usefixtures("group")
def test_gradients_of_other_outputs_than_expected() -> None:
    """The forward runs again for them, and its backward at once."""
    eager = Deep()
    ours = ORTModule(copy.deepcopy(eager), options=PIECES)
    for model in (eager, ours):
        output = model(rows(0))
        (output["loss"] + output["side"].sum()).backward()
    assert_same_gradients(ours, eager)
    assert ours.side.weight.grad is not None


@pytest.mark.usefixtures("group")
def test_one_parameters_gradient_alone() -> None:
    eager = without_side()
    ours = ORTModule(copy.deepcopy(eager), options=PIECES)
    for number in (0, 5):
        found, expected = (
            torch.autograd.grad(model(rows(0))["loss"], [model.layers[number].weight])
            for model in (ours, eager)
        )
        torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("group")
def test_a_second_backward_needs_a_graph_that_is_kept() -> None:
    eager = without_side()
    ours = ORTModule(copy.deepcopy(eager), options=PIECES)
    for model in (eager, ours):
        loss = model(rows(0))["loss"]
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
    assert_same_gradients(ours, eager)


@pytest.mark.usefixtures("group")
def test_gradients_of_gradients_come_through_all_groups() -> None:
    eager = without_side()
    ours = ORTModule(copy.deepcopy(eager), options=PIECES)
    for model in (eager, ours):
        parameters = [p for p in model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(
            model(rows(0))["loss"], parameters, create_graph=True, allow_unused=True
        )
        sum(g.pow(2).sum() for g in gradients if g is not None).backward()
    assert_same_gradients(ours, eager)


@pytest.mark.usefixtures("group")
def test_a_piece_that_fails_is_answered_by_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = without_side()
    fails = Options(engine="onnxruntime", backward_pieces=PIECES.backward_pieces)
    ours = ORTModule(copy.deepcopy(eager), options=fails)
    ours(rows(0))["loss"].backward()
    ours.zero_grad()
    run_values, runs = Compiled.run_values, 0

    def failing(self: Compiled, feeds: Any) -> Any:
        nonlocal runs
        runs += 1
        if runs == 3:  # the forward, one piece, and this one
            raise ExecutionError("out of memory")
        return run_values(self, feeds)

    monkeypatch.setattr(Compiled, "run_values", failing)
    eager(rows(0))["loss"].backward()
    with pytest.warns(OrtrainWarning, match="out of memory"):
        ours(rows(0))["loss"].backward()
    assert_same_gradients(ours, eager)
    assert ours.report.recovered == 1


@pytest.mark.usefixtures("group")
def test_fully_shard_around_a_model_that_shows_its_own_class() -> None:
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    eager = BertForSequenceClassification(config)
    model = ORTModule(copy.deepcopy(eager), options=Options(engine="aten", fallback="raise"))
    fully_shard(model)
    for kind in (FSDPModule, ORTModule, BertForSequenceClassification):
        assert isinstance(model, kind)
    assert type(model.module) is BertForSequenceClassification
    model.set_requires_gradient_sync(False)
    ids = torch.arange(12).reshape(2, 6)
    losses = [each(input_ids=ids, labels=torch.tensor([0, 1])).loss for each in (model, eager)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses)
    assert model.report.graph_calls == 1


def test_autograd_hears_of_no_parameter_that_nothing_depends_on() -> None:
    module = without_side(unused=True)
    model = ORTModule(module, options=GRAPH)
    called: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))
    model(rows(0))["loss"].backward()
    assert sorted(called) == sorted(n for n, _ in module.layers.named_parameters(prefix="layers"))
