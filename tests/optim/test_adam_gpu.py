"""``FusedAdam`` on a CUDA device: the same updates, with steps and scales where they belong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from ortrain.optim import AdamWMode, FusedAdam, Lamb
from tests.optim.followed import Reference, give_gradients, parameters

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]


def on_device() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(parameter.detach().cuda()) for parameter in parameters()]


def step_with_gradients(optimizer: torch.optim.Optimizer, reference: Reference) -> None:
    give_gradients(optimizer.param_groups[0]["params"])
    reference.step()
    optimizer.step()


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("mode", AdamWMode)
@pytest.mark.parametrize("lr_on_device", [False, True])
def test_every_mode_is_its_formula(
    lr_on_device: bool, mode: AdamWMode, bias_correction: bool
) -> None:
    lr = torch.tensor(0.05, device="cuda") if lr_on_device else 0.05
    optimizer = FusedAdam(on_device(), lr, bias_correction, adam_w_mode=mode, weight_decay=0.1)
    reference = Reference(optimizer, mode)
    for _ in range(10):
        step_with_gradients(optimizer, reference)
    reference.agrees(2e-6)
    host = bias_correction and mode != AdamWMode.ADAMW_TORCH
    for state in optimizer.state.values():
        assert state["step"].is_cpu == host


def test_the_torch_mode_waits_for_nothing() -> None:
    optimizer = FusedAdam(on_device(), 0.05, adam_w_mode=AdamWMode.ADAMW_TORCH)
    reference = Reference(optimizer, AdamWMode.ADAMW_TORCH)
    step_with_gradients(optimizer, reference)
    with waiting_is_an_error():
        optimizer.step()
        optimizer.clip_and_step(0.1)


def test_lamb_updates_without_waiting() -> None:
    optimizer = Lamb(on_device(), 0.05, weight_decay=0.1)
    for target in optimizer.param_groups[0]["params"]:
        target.grad = torch.ones_like(target)
    before = [target.detach().clone() for target in optimizer.param_groups[0]["params"]]
    with waiting_is_an_error():
        optimizer.step()
    for target, value in zip(optimizer.param_groups[0]["params"], before, strict=True):
        assert not value.numel() or not torch.equal(target.detach(), value)
