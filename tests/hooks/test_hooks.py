"""Statistics of activations are those of the tensors, gradients too, and nothing else changes."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import Options, ORTModule
from ortrain.errors import StateError
from ortrain.hooks import (
    GlobalSubscriberManager,
    StatisticsSubscriber,
    SubscriberBase,
    SubscriberManager,
    inspect_activation,
    no_increase_global_step,
)
from ortrain.hooks.merge_activation_summary import main
from ortrain.hooks.statistics import statistics_of


@pytest.fixture(autouse=True)
def nobody_left() -> Any:
    yield
    GlobalSubscriberManager.unsubscribe()


class Probed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = inspect_activation("hidden", self.first(x).relu())
        return {"loss": self.second(hidden).square().mean(), "hidden": hidden}


NAN, INF = math.nan, math.inf
TENSORS = [
    torch.randn(4, 5),
    torch.randn(1000, dtype=torch.float64) * 1e-6 + 1e3,
    torch.randn(7, 3).to(torch.bfloat16),
    torch.tensor([0.0, -1.0, INF, NAN]),
    torch.tensor([-INF, 2.0]),
    torch.tensor([3, -1, 0]),
    torch.tensor([True, False]),
    torch.tensor(2.5),
    torch.empty(0, 3),
]


@pytest.mark.parametrize("size", [1, 3, 1 << 29])
@pytest.mark.parametrize("tensor", TENSORS, ids=lambda t: f"{t.dtype}{list(t.shape)}")
def test_statistics_do_not_depend_on_how_much_is_looked_at(tensor: torch.Tensor, size: int) -> None:
    found, wide = statistics_of(tensor, size), tensor.double().flatten()
    assert found.nan == wide.isnan().sum()
    assert found.inf == wide.isinf().sum()
    assert (found.negative, found.positive, found.zero) == (
        (wide < 0).sum(),
        (wide > 0).sum(),
        (wide == 0).sum(),
    )
    expected = [NAN] * 4
    if len(wide):
        deviation = wide.std().item() if len(wide) > 1 else NAN
        expected = [wide.min().item(), wide.max().item(), wide.mean().item(), deviation]
    given = [found.least, found.most, found.mean, found.deviation]
    if wide.isfinite().all():
        assert given == pytest.approx(expected, rel=1e-9, abs=1e-12, nan_ok=True)
    else:
        assert given[:2] == pytest.approx(expected[:2], nan_ok=True)


def test_each_output_and_each_gradient_has_a_file(tmp_path: Path) -> None:
    model, x = Probed(), torch.randn(5, 3)
    plain = copy.deepcopy(model)
    plain(x)["loss"].backward()
    GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(tmp_path / "a", end_step=2)])
    for _ in range(3):
        model.zero_grad()
        model(x)["loss"].backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["step_0", "step_1"]
    written = (tmp_path / "a" / "step_1" / "order.txt").read_text().split()
    assert written[:4] == [
        "Linear_1_0th_output_forward",
        "hidden_forward",
        "Linear_2_0th_output_forward",
        "Probed_0_0th_output_forward",
    ]
    assert {n.removesuffix("_forward") for n in written if n.endswith("_forward")} - {
        n.removesuffix("_backward") for n in written if n.endswith("_backward")
    } == {"Probed_0_1th_output"}  # of which no gradient flows back
    text = (tmp_path / "a" / "step_1" / "Linear_1_0th_output_forward").read_text()
    assert text.startswith(">Linear_1_0th_output forward run shape: (5, 4) dtype: torch.float32")
    value = plain.first(x)
    assert f"max: {value.max():.6g}, mean: {value.double().mean():.6g}" in text


def test_an_existing_folder_is_kept_unless_it_may_go(tmp_path: Path) -> None:
    (tmp_path / "step_0").mkdir()
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(FileExistsError, match="override_output_dir"):
        StatisticsSubscriber(tmp_path)
    StatisticsSubscriber(tmp_path, override_output_dir=True)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("first", [0, 1])
def test_a_graph_does_not_pass_over_a_probe(tmp_path: Path, first: int) -> None:
    x = torch.randn(5, 3)
    module = ORTModule(Probed(), options=Options(engine="aten", fallback="raise"))
    other = nn.Linear(1, 1)
    for _ in range(first):  # there is a graph without the probe then
        module(x)["loss"].backward()
    GlobalSubscriberManager.subscribe(other, [StatisticsSubscriber(tmp_path / "a")])
    module(x)["loss"].backward()
    GlobalSubscriberManager.unsubscribe()
    written = {path.name for path in (tmp_path / "a" / "step_0").iterdir()}
    assert {"hidden_forward", "hidden_backward"} < written
    module(x)["loss"].backward()
    assert module.report.mode == "graph"


class Doubling(SubscriberBase):
    def __init__(self) -> None:
        super().__init__(1, 2)
        self.seen: list[str] = []

    def pre_forward_tensor_apply_impl(self, rtx: Any, module: Any, index: int, tensor: Any) -> Any:
        self.seen.append(f"pre {type(module).__name__} {index}")
        return tensor * 2 if isinstance(module, Probed) else tensor

    def post_forward_outmost_module_apply_impl(
        self, rtx: Any, module: Any, args: Any, outputs: Any
    ) -> Any:
        self.seen.append("end")
        return args, {**outputs, "step": rtx.global_states.execution_step}


def test_own_subscribers_change_what_goes_through() -> None:
    model, x, manager, own = Probed(), torch.randn(5, 3), SubscriberManager(), Doubling()
    manager.subscribe(model, [own])
    plain = model(x)["hidden"]
    with manager.no_increase_global_step():
        assert "step" not in model(x)
    doubled = model(x)
    assert doubled["step"] == 1
    assert own.seen == ["pre Probed 0", "pre Linear 0", "pre Linear 0", "end"]
    assert torch.equal(doubled["hidden"], model.first(2 * x).relu())
    assert "step" not in model(x)
    assert torch.equal(model(x)["hidden"], plain)
    assert manager.get_subscriber(Doubling) is own
    assert manager.get_run_context().global_states.execution_step == 4
    with pytest.raises(StateError, match="StatisticsSubscriber"):
        manager.get_subscriber(StatisticsSubscriber)
    manager.unsubscribe()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.filterwarnings("ignore:ORTModule runs Probed in PyTorch. Probed. has a forward")
def test_two_runs_are_merged_in_the_order_of_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, x = Probed(), torch.randn(5, 3)
    for name, wrapped in (("pt", model), ("ort", ORTModule(model))):
        GlobalSubscriberManager.subscribe(wrapped, [StatisticsSubscriber(tmp_path / name)])
        for _ in range(2):
            wrapped(x)["loss"].backward()
        with no_increase_global_step():
            wrapped(x)
    (tmp_path / "ort" / "step_1" / "hidden_forward").unlink()
    command = [f"--{n}_dir={tmp_path / d}" for n, d in (("pt", "pt"), ("ort", "ort"))]
    command.append(f"--output_dir={tmp_path / 'merged'}")
    assert main(command) == 0
    assert "not there: ort/step_1/hidden_forward" in capsys.readouterr().out
    merged = [
        (tmp_path / "merged" / f"merge_{n}" / "step_0_.txt").read_text() for n in ("pt", "ort")
    ]
    assert merged[0] == merged[1]
    assert merged[0].count("run shape") == 9
    assert main(command) == 2
    assert main([*command, "--overwrite"]) == 0
    assert main(["--pt_dir=/nowhere", *command[1:], "--overwrite"]) == 2
    assert "has no statistics" in capsys.readouterr().err


def test_the_class_stands_for_the_manager_of_the_process() -> None:
    class Counting(SubscriberBase):
        forwards = 0

        def post_forward_outmost_module_apply_impl(self, run_rtx: Any, *given: Any) -> Any:
            Counting.forwards += 1
            return given[1:]

    own, net = SubscriberManager(), nn.Linear(2, 2)
    SubscriberManager.subscribe(net, [Counting()])
    assert isinstance(GlobalSubscriberManager.get_subscriber(Counting), Counting)
    with pytest.raises(StateError, match="no Counting is subscribed"):
        own.get_subscriber(Counting)
    net(torch.ones(1, 2))
    assert Counting.forwards == 1
    own.subscribe(net, [Counting()])
    net(torch.ones(1, 2))
    assert Counting.forwards == 3
    own.unsubscribe()
    GlobalSubscriberManager.unsubscribe()
    net(torch.ones(1, 2))
    assert Counting.forwards == 3


class Noting(SubscriberBase):
    """Notes of which modules it has been told."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def post_forward_tensor_apply_impl(
        self, run_rtx: Any, module: nn.Module, tensor_index: int, tensor: torch.Tensor
    ) -> torch.Tensor:
        self.seen.append(type(module).__name__)
        return tensor


@pytest.mark.parametrize("kind", [list, tuple, iter, set])
def test_subscribers_come_in_any_collection(kind: Any) -> None:
    manager, noting = SubscriberManager(), Noting()
    manager.subscribe(model := nn.Sequential(nn.Linear(2, 2)), kind([noting]))
    model(torch.ones(1, 2))
    assert noting.seen == ["Linear", "Sequential"]


@pytest.mark.parametrize("wrong", [None, 3, "name", [nn.ReLU()], Noting])
def test_what_is_no_subscriber_is_refused_and_those_at_hand_stay(wrong: Any) -> None:
    manager, noting = SubscriberManager(), Noting()
    manager.subscribe(model := nn.Sequential(nn.Linear(2, 2)), [noting])
    with pytest.raises(TypeError, match=r"^subscribers=.*: expected a list of SubscriberBase"):
        manager.subscribe(model, wrong)
    with pytest.raises(TypeError, match=r"; write \[subscriber\]$"):
        manager.subscribe(model, noting)  # type: ignore[arg-type]
    model(torch.ones(1, 2))
    assert noting.seen == ["Linear", "Sequential"]


@pytest.mark.parametrize(("start", "end"), [(5, 2), (3, 3), (None, 0), (0, -1)])
def test_steps_between_which_there_are_none_are_refused(start: int | None, end: int) -> None:
    with pytest.raises(ValueError, match=f"start_step={start}, end_step={end}: there is no step"):
        SubscriberBase(start, end)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())  # type: ignore[no-any-return]


class Leaving(nn.Module):
    """Leaves layers out at random, so that no graph has it whole: its layers are graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand([]) > 0.3:
                x = x + layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def trained(model: nn.Module, steps: int) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    left = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(torch.randn(3, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        left.append(loss.detach())
    return left + [p.detach().clone() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize("first", [0, 3])
def test_subscribers_of_a_module_whose_layers_are_graphs_hear_what_they_hear_in_pytorch(
    engine: Any, first: int
) -> None:
    plain = Leaving()
    wrapped = ORTModule(copy.deepcopy(plain), options=Options(engine=engine))
    told = [Noting(), Noting()]
    for model, noting in zip((plain, wrapped), told, strict=True):
        manager = SubscriberManager()
        trained(model, first)
        manager.subscribe(model, [noting])
        trained(model, 2)
        manager.unsubscribe()
    assert told[0].seen == told[1].seen
    assert len(told[0].seen) > 8
    torch.testing.assert_close(trained(wrapped, 3), trained(plain, 3), rtol=1e-4, atol=1e-6)
    assert wrapped.report.mode == "graph"


@dataclass
class Plain:
    """Of a kind that nobody has registered with PyTorch."""

    hidden: torch.Tensor
    more: tuple[torch.Tensor, ...]
    note: str = "text"


@dataclass(frozen=True)
class Frozen:
    inner: Plain
    number: int = 3


class Answering(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(2, 2), kind

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.layer(x)
        plain = Plain(hidden, (hidden + 1, hidden + 2))
        return plain if self.kind is Plain else Frozen(plain)


class Halving(Noting):
    def post_forward_tensor_apply_impl(
        self, run_rtx: Any, module: nn.Module, tensor_index: int, tensor: torch.Tensor
    ) -> torch.Tensor:
        self.seen.append(f"{type(module).__name__} {tensor_index}")
        return tensor / 2


@pytest.mark.parametrize("kind", [Plain, Frozen])
def test_tensors_in_dataclasses_are_heard_and_changed(kind: Any) -> None:
    model, manager, halving = Answering(kind), SubscriberManager(), Halving()
    x = torch.ones(1, 2)
    hidden = model.layer(x) / 2
    manager.subscribe(model, [halving])
    given = model(x)
    plain = given if kind is Plain else given.inner
    assert type(given) is kind
    assert plain.note == "text"
    assert halving.seen == ["Linear 0", *(f"Answering {i}" for i in range(3))]
    torch.testing.assert_close(plain.hidden, hidden / 2)
    torch.testing.assert_close(plain.more, ((hidden + 1) / 2, (hidden + 2) / 2))
