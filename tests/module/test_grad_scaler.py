"""``torch.amp.GradScaler`` around a graph: scales and skipped steps are eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from tests.devices import DEVICES

BY_ATEN = Options(engine="aten", fallback="raise")
STEPS = 12


class Tied(nn.Module):
    """A weight that two products read, whose gradients are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight).softmax(-1) @ self.weight


class Attending(nn.Module):
    """Attention over the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.attention(x[None], x[None], x[None])[0]
        return result


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "a perceptron": lambda: nn.Sequential(
        nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)
    ),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.SiLU(), nn.Flatten(),
        nn.Linear(24, 3),
    ),
    "attention": Attending,
}  # fmt: skip
# Eager adds in float16 what comes to a weight whose cast autocast has kept, and in some kernels of
# normalizations what comes to their weights. The graph adds in float32, and overflows later.
FINER: dict[str, Callable[[], nn.Module]] = {
    "tied weights": Tied,
    "layer norm": lambda: nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 3)),
    "transformer": lambda: nn.Sequential(
        nn.Unflatten(0, (1, -1)),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        nn.Linear(8, 3),
    ),
}


def network(name: str, device: str) -> nn.Module:
    torch.manual_seed(0)
    return {**NETWORKS, **FINER}[name]().to(device)


@dataclass
class Trace:
    """What a training left: a row a step.

    Attributes:
        scales: behind each step.
        skipped: whether the weights stayed.
        unfinite: which gradients had NaN or infinities.
        losses: of each step.
    """

    scales: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    unfinite: list[list[bool]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def trained(
    model: nn.Module,
    device: str,
    dtype: torch.dtype,
    *,
    start: float,
    clipped: bool = False,
    accumulated: int = 1,
    poisoned: int | None = None,
) -> Trace:
    """Trains with a scale that is doubled after each good step.

    Args:
        model: the model.
        device: that it is on.
        dtype: of autocast.
        start: the first scale.
        clipped: whether gradients are unscaled and clipped before the step.
        accumulated: backward passes of a step.
        poisoned: the step whose input has an infinity.
    """
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.5)
    scaler = torch.amp.GradScaler(device, init_scale=start, growth_interval=1)
    trace = Trace()
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(accumulated):
            generator = torch.Generator().manual_seed(10 * step + part)
            x = torch.randn(6, 8, generator=generator).to(device)
            if step == poisoned:
                x[0, 0] = torch.inf
            with torch.autocast(device, dtype):
                loss = (model(x).float() - 1).square().mean()
            scaler.scale(loss).backward()
        gradients = [p.grad for p in model.parameters()]
        trace.unfinite.append([not bool(g.isfinite().all()) for g in gradients if g is not None])
        if clipped:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        trace.skipped.append(all(map(torch.equal, before, model.parameters())))
        trace.scales.append(scaler.get_scale())
        trace.losses.append(loss.item())
    return trace


def assert_same(name: str, device: str, dtype: torch.dtype, **settings: object) -> Trace:
    eager = network(name, device)
    graph = ORTModule(copy.deepcopy(eager), options=BY_ATEN)
    expected = trained(eager, device, dtype, **settings)  # type: ignore[arg-type]
    found = trained(graph, device, dtype, **settings)  # type: ignore[arg-type]
    assert found.scales == expected.scales
    assert found.skipped == expected.skipped
    assert found.unfinite == expected.unfinite
    assert found.losses == pytest.approx(expected.losses, rel=2e-2, nan_ok=True)
    assert graph.report.eager_calls == 0
    for parameter in graph.parameters():
        assert bool(parameter.isfinite().all())
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("clipped", [False, True], ids=["as they are", "clipped"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_scale_that_grows_until_float16_overflows_skips_eagers_steps(
    name: str, clipped: bool, device: str
) -> None:
    trace = assert_same(name, device, torch.float16, start=2.0**15, clipped=clipped)
    assert any(trace.skipped)
    assert not all(trace.skipped)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*NETWORKS, *FINER])
def test_what_is_infinite_in_the_graph_is_so_in_eager(name: str, device: str) -> None:
    eager = network(name, device)
    graph = ORTModule(copy.deepcopy(eager), options=BY_ATEN)
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).to(device)
    overflows = 0
    for scale in range(10, 30):
        for model in (eager, graph):
            model.zero_grad()
            with torch.autocast(device, torch.float16):
                loss = (model(x).float() - 1).square().mean()
            (loss * 2.0**scale).backward()
        for one, other in zip(eager.parameters(), graph.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            theirs, ours = ~one.grad.isfinite(), ~other.grad.isfinite()
            assert bool((theirs | ~ours).all()), scale
            overflows += int(ours.sum())
            if name in NETWORKS:
                assert torch.equal(theirs, ours), scale
    assert overflows


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NETWORKS)
def test_accumulated_gradients_overflow_where_eagers_do(name: str, device: str) -> None:
    assert any(assert_same(name, device, torch.float16, start=2.0**16, accumulated=3).skipped)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
# An infinity stays in the running statistics of a batch normalization.
@pytest.mark.parametrize("name", ["a perceptron", "attention", *FINER])
def test_an_infinity_in_a_batch_skips_its_step_alone(
    name: str, dtype: torch.dtype, device: str
) -> None:
    trace = assert_same(name, device, dtype, start=2.0, poisoned=4)
    assert trace.skipped == [step == 4 for step in range(STEPS)]
