"""A module on a GPU, and one on the CPU beside it."""

from __future__ import annotations

import copy
from typing import Any

import onnxruntime
import pytest
import torch
from torch import nn

from ortrain import Options, ORTModule
from ortrain.step import marks
from tests.models import MODELS
from tests.module.agreement import loss_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

PROVIDER = "CUDAExecutionProvider"
GRAPH = Options(engine="onnxruntime")
ON_CUDA = Options(engine="onnxruntime", provider=PROVIDER)
BY_ATEN = Options(engine="aten", fallback="raise", cuda_graphs=False)
RECORDED = Options(engine="aten", fallback="raise", cuda_graphs=True)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The loss of one call, after its backward."""
    model.zero_grad()
    loss: Any = model(x).square().mean()
    loss.backward()
    return loss.detach()


def same_gradients(one: nn.Module, other: nn.Module, **tolerance: Any) -> None:
    for mine, its in zip(one.parameters(), other.parameters(), strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        torch.testing.assert_close(mine.grad, its.grad, **tolerance)


@pytest.mark.filterwarnings("ignore:ORTModule runs Sequential in PyTorch")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (GRAPH, "is on cuda:0, for which there is no execution provider"),
        (ON_CUDA, "is on cuda:0, for which there is no execution provider"),
    ],
    ids=["no provider", "a provider"],
)
def test_a_module_on_a_gpu_runs_in_pytorch_and_the_report_says_why(
    options: Options, reason: str
) -> None:
    eager = network().cuda()
    model = ORTModule(copy.deepcopy(eager), options=options)
    for _ in range(3):
        x = torch.randn(5, 4, device="cuda")
        assert torch.equal(step(model, x), step(eager, x))
        same_gradients(model, eager, rtol=0.0, atol=0.0)
    assert (model.report.mode, model.report.eager_calls) == ("eager", 3)
    assert reason in model.report.reason


@pytest.mark.skipif(
    PROVIDER not in onnxruntime.get_available_providers(),
    reason="onnxruntime has no CUDAExecutionProvider",
)
def test_a_graph_of_a_module_on_the_cpu_may_run_on_a_gpu() -> None:
    eager = network()
    model = ORTModule(copy.deepcopy(eager), options=ON_CUDA)
    for _ in range(3):
        x = torch.randn(5, 4)
        torch.testing.assert_close(step(model, x), step(eager, x))
        same_gradients(model, eager)
    assert (model.report.mode, model.report.graph_calls) == ("graph", 3)


@pytest.mark.filterwarnings("ignore:ORTModule runs Sequential in PyTorch")
def test_a_module_that_goes_to_a_gpu_and_back_is_a_graph_again() -> None:
    eager = network()
    model = ORTModule(copy.deepcopy(eager), options=GRAPH)
    modes = []
    for device in ("cpu", "cuda", "cpu"):
        x = torch.randn(5, 4, device=device)
        for module in (model, eager):
            module.to(device)
        torch.testing.assert_close(step(model, x), step(eager, x))
        same_gradients(model, eager)
        modes.append(model.report.mode)
    assert modes == ["graph", "eager", "graph"]


def test_a_capture_leaves_the_random_numbers_of_a_gpu_alone() -> None:
    torch.cuda.manual_seed(3)
    expected = torch.rand(3, device="cuda")
    torch.cuda.manual_seed(3)
    model = ORTModule(nn.Sequential(network(), nn.Dropout(0.5)), options=GRAPH)
    step(model, torch.randn(5, 4))
    assert model.report.mode == "graph"
    assert torch.equal(torch.rand(3, device="cuda"), expected)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", list(MODELS))
def test_a_model_is_a_graph_on_a_gpu(name: str, dtype: torch.dtype | None) -> None:
    """Its certificate compares the first step, dropout and all, with PyTorch's."""
    case = MODELS[name]
    model = ORTModule(case.build(dropout=0.1).cuda(), options=BY_ATEN)
    for number, (batch, length) in enumerate(((3, 7), (2, 9))):
        inputs = case.batch(batch, max(length, case.shortest), number)
        moved = {key: value.cuda() for key, value in inputs.items()}
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            loss = loss_of(model(**moved))
        loss.backward()
    assert model.report.mode == "graph"
    assert model.report.certificate


def trained(
    model: ORTModule,
    case: Any,
    calls: list[tuple[int, int, int]],
    dtype: torch.dtype | None,
    lr: float,
) -> list[torch.Tensor]:
    """The losses of a training on batches of a size, a length and a seed each."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=lr), []
    for batch, length, seed in calls:
        inputs = case.batch(batch, max(length, case.shortest), seed)
        moved = {key: value.cuda() for key, value in inputs.items()}
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            loss = loss_of(model(**moved))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(MODELS))
def test_a_recorded_model_trains_as_it_does_unrecorded(
    name: str, dtype: torch.dtype | None
) -> None:
    case, found = MODELS[name], []
    module = case.build(dropout=0.1).cuda()
    for options in (BY_ATEN, RECORDED):
        model = ORTModule(copy.deepcopy(module), options=options)
        torch.manual_seed(3)
        calls = [(*((3, 7), (2, 9))[number % 2], number) for number in range(12)]
        losses = trained(model, case, calls, dtype, lr=1e-2)
        found.append([*losses, *(p.detach() for p in model.parameters())])
    tolerance = {"rtol": 1e-3, "atol": 1e-5} if dtype is None else {"rtol": 3e-2, "atol": 3e-3}
    for mine, its in zip(*found, strict=True):
        torch.testing.assert_close(mine, its, **tolerance)
    replays = model.report.replays
    assert replays is not None
    print(name, replays)
    assert replays.replayed or replays.refused


def test_a_contest_on_a_gpu_counts_its_own_work() -> None:
    start = marks.now(torch.device("cuda"))
    torch.cuda._sleep(2_000_000)
    end = marks.now(torch.device("cuda"))
    assert isinstance(start, marks.Event)
    assert marks.is_reached(end, wait=True)
    assert 1e-4 < marks.seconds(start, end) < 1.0


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(MODELS))
def test_the_contest_of_eager_and_what_is_recorded_ends_and_trains_as_eager(
    name: str, dtype: torch.dtype | None
) -> None:
    case, found = MODELS[name], []
    module = case.build(dropout=0.0).cuda()
    for options in (Options(engine="torch"), Options(fallback="raise")):
        model = ORTModule(copy.deepcopy(module), options=options)
        model.steps_to_come = 1_000_000
        calls = [(3, 7, number % 4) for number in range(400)]
        losses = trained(model, case, calls, dtype, lr=1e-3)
        found.append(torch.stack(losses).float())
    decided = model.report.contest
    assert decided is not None
    print(name, decided)
    assert decided.winner
    assert [*decided.engines] == ["aten"]
    tolerance = 1e-3 if dtype is None else 3e-2
    torch.testing.assert_close(found[1], found[0], rtol=tolerance, atol=tolerance)
