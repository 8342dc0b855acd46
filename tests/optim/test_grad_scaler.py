"""Under the same ``torch.amp.GradScaler``, losses and weights are those of torch's optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from ortrain.optim import SGD, AdamWMode, FusedAdam, Lamb, clip_grad_norm_
from tests.devices import DEVICES
from tests.optim import formulas
from tests.optim.formulas import Moments

SCALE = 1024.0
STEPS, OVERFLOW = 5, 2
Make = Callable[[Any], torch.optim.Optimizer]


class Written(torch.optim.Optimizer):
    """A published update, in float64 where it is computed."""

    def __init__(self, params: Any, update: Callable[..., Tensor], **options: Any) -> None:
        super().__init__(params, options)
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            options = {name: value for name, value in group.items() if name != "params"}
            for target in group["params"]:
                moments = self.state[target].setdefault("moments", Moments())
                target.copy_(self.update(target, target.grad, moments, **options))


ADAM: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.98), "weight_decay": 0.1}
LAMB: dict[str, Any] = {**ADAM, "eps": 1e-6, "bias_correction": True}


def adam(mode: AdamWMode, eps: float) -> Make:
    return lambda params: FusedAdam(params, adam_w_mode=mode, eps=eps, **ADAM)


# Ours, what it is to equal, and to which difference; 0 is bit for bit.
PAIRS: dict[str, tuple[Make, Make, float]] = {
    "FusedAdam, mode of torch": (
        adam(AdamWMode.ADAMW_TORCH, 1e-6),
        lambda params: torch.optim.AdamW(params, eps=1e-6, fused=True, **ADAM),
        0.0,
    ),
    # Eps has another place in this mode than in torch.
    "FusedAdam, L2": (
        adam(AdamWMode.ADAM_L2_REGULARIZATION, 0.0),
        lambda params: torch.optim.Adam(params, eps=0.0, fused=True, **ADAM),
        1e-6,
    ),
    # torch has neither this mode nor Lamb.
    "FusedAdam, mode of transformers": (
        adam(AdamWMode.ADAMW_TRANSFORMERS, 1e-6),
        lambda params: Written(
            params, formulas.adam, mode=1, eps=1e-6, bias_correction=True, **ADAM
        ),
        1e-6,
    ),
    "Lamb": (
        lambda params: Lamb(params, max_norm_clip=None, **LAMB),
        lambda params: Written(params, formulas.lamb, ratio_min=0.0, ratio_max=10.0, **LAMB),
        1e-6,
    ),
    "SGD": (
        lambda params: SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
        0.0,
    ),
}


def network(device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(device)


def train(
    model: nn.Module,
    make: Make,
    *,
    overflow: int | None = None,
    max_norm: float | None = None,
    autocast: bool = False,
    clip: Callable[..., Any] = clip_grad_norm_,
) -> tuple[list[float], list[float]]:
    """Losses, and the scales after each step.

    Args:
        model: is trained.
        make: makes the optimizer.
        overflow: the step whose loss is infinite.
        max_norm: to which gradients are clipped after they are unscaled.
        autocast: whether the forward runs in float16.
        clip: clips.
    """
    optimizer = make(model.parameters())
    device = next(model.parameters()).device
    scaler = torch.amp.GradScaler(device.type, init_scale=SCALE)
    losses, scales = [], []
    for step in range(STEPS):
        rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).to(device)
        with torch.autocast(device.type, torch.float16, enabled=autocast):
            loss = model(rows).float().square().mean()
        losses.append(loss.item())
        if step == overflow:
            loss = loss * torch.inf
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            clip(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return losses, scales


def assert_close(model: nn.Module, other: nn.Module, tolerance: float) -> None:
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("max_norm", [None, 0.1], ids=["as they are", "clipped"])
@pytest.mark.parametrize("overflow", [None, OVERFLOW], ids=["finite", "overflow"])
@pytest.mark.parametrize("name", PAIRS)
def test_losses_scales_and_weights_are_those_of_torch(
    name: str, overflow: int | None, max_norm: float | None, device: str
) -> None:
    make, theirs, tolerance = PAIRS[name]
    ours, other = network(device), network(device)
    losses, scales = train(ours, make, overflow=overflow, max_norm=max_norm)
    expected, others = train(
        other, theirs, overflow=overflow, max_norm=max_norm, clip=nn.utils.clip_grad_norm_
    )
    assert losses == pytest.approx(expected, rel=tolerance, abs=0.0)
    halved = SCALE if overflow is None else SCALE / 2
    assert scales == others
    assert scales[-1] == halved
    assert_close(ours, other, tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PAIRS)
def test_a_step_with_an_overflow_is_as_if_it_had_not_been(name: str, device: str) -> None:
    make, _, _ = PAIRS[name]
    model = network(device)
    optimizer = make(model.parameters())
    scaler = torch.amp.GradScaler(device, init_scale=SCALE)

    def step(seed: int, factor: float) -> None:
        rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)).to(device)
        optimizer.zero_grad()
        scaler.scale(model(rows).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()

    step(0, 1.0)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    step(1, torch.inf)
    for key, value in model.state_dict().items():
        assert torch.equal(value, weights[key]), key
    for index, entries in optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            if value is not None:
                assert torch.equal(value, state["state"][index][key]), key
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PAIRS)
def test_under_autocast_to_float16_too(name: str, device: str) -> None:
    make, theirs, tolerance = PAIRS[name]
    ours, other = network(device), network(device)
    losses, scales = train(ours, make, autocast=True, overflow=OVERFLOW)
    expected, others = train(other, theirs, autocast=True, overflow=OVERFLOW)
    # A weight that is rounded to another float16 is a thousandth away.
    loose = 1e-3 if tolerance else 0.0
    assert losses == pytest.approx(expected, rel=loose, abs=0.0)
    assert scales == others
    assert_close(ours, other, loose)


@pytest.mark.parametrize("name", PAIRS)
def test_with_the_gradients_of_a_graph(name: str) -> None:
    make, _, _ = PAIRS[name]
    eager = network()
    model = ORTModule(network(), options=Options(engine="onnxruntime", fallback="raise"))
    losses, scales = train(model, make, overflow=OVERFLOW)
    expected, others = train(eager, make, overflow=OVERFLOW)
    assert model.report.graph_calls == STEPS
    assert losses == pytest.approx(expected, rel=1e-5)
    assert scales == others
    assert_close(model, eager, 1e-5)
