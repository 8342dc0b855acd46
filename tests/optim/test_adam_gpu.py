"""``FusedAdam`` on a CUDA device: the same updates, with steps and scales where they belong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from ortrain.optim import AdamWMode, FusedAdam, Lamb, clip_grad_norm_
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
    # Without corrections it shows that the kernel has 0.999 in float32: steps are 7e-6 too long.
    reference.agrees(2e-6 if bias_correction else 2e-5)
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


def drift(optimizer: torch.optim.Optimizer, mode: AdamWMode, steps: int) -> float:
    """By which share a parameter moves too far; rounding errors of its elements cancel out."""
    (target,) = optimizer.param_groups[0]["params"]
    start = target.detach().double()
    for group in optimizer.param_groups:
        group.setdefault("bias_correction", True)
    reference = Reference(optimizer, mode)
    generator = torch.Generator().manual_seed(3)
    sizes = 10 ** -torch.linspace(0, 5, len(target))
    for _ in range(steps):
        target.grad = (sizes * torch.randn(target.shape, generator=generator)).to(target)
        reference.step()
        optimizer.step()
    moved = reference.rows[0][2] - start
    error = target.detach().double() - start - moved
    return float((error * moved).sum() / moved.square().sum())


@pytest.mark.parametrize("steps", [1, 2, 30])
@pytest.mark.parametrize("mode", AdamWMode)
def test_float32_goes_as_far_as_float64(mode: AdamWMode, steps: int) -> None:
    target = torch.nn.Parameter(torch.zeros(4096, device="cuda"))
    found = abs(drift(FusedAdam([target], eps=1e-8, adam_w_mode=mode), mode, steps))
    if mode == AdamWMode.ADAMW_TORCH:
        with torch.no_grad():
            target.zero_()
        theirs = torch.optim.AdamW([target], fused=True, weight_decay=0.0)
        assert found == abs(drift(theirs, mode, steps))
    else:
        assert found < 1e-6


def test_a_decay_whose_rate_is_on_the_device_adds_up() -> None:
    target = torch.nn.Parameter(torch.zeros(4096, device="cuda"))
    rate = torch.tensor(1e-3, device="cuda")
    optimizer = FusedAdam([target], rate, eps=1e-8, weight_decay=0.01)
    assert abs(drift(optimizer, AdamWMode.ADAMW_TRANSFORMERS, 1000)) < 1e-6


def test_a_scaled_step_waits_for_nothing_in_the_torch_mode() -> None:
    optimizer = FusedAdam(on_device(), 0.05, adam_w_mode=AdamWMode.ADAMW_TORCH)
    targets = optimizer.param_groups[0]["params"]
    give_gradients(targets)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    scaler.scale(torch.zeros((), device="cuda"))
    scaler.step(optimizer)  # makes the state
    scaler.update()
    for bad in (False, True):
        targets[0].grad.fill_(torch.inf if bad else 1.0)
        before = [target.detach().clone() for target in targets]
        with waiting_is_an_error():
            scaler.step(optimizer)
            scaler.update()
        same = [torch.equal(target, old) for target, old in zip(targets, before, strict=True)]
        assert all(same) == bad
        assert {state["step"].item() for state in optimizer.state.values()} == {2.0}
        assert scaler.get_scale() == (2.0 if bad else 4.0)


def test_a_graph_of_cuda_repeats_steps_of_the_torch_mode() -> None:
    optimizers = [
        FusedAdam(on_device(), 0.05, adam_w_mode=AdamWMode.ADAMW_TORCH, weight_decay=0.1)
        for _ in range(2)
    ]
    rows = [optimizer.param_groups[0]["params"] for optimizer in optimizers]
    give_gradients(rows[0])
    with torch.no_grad():
        for one, other in zip(*rows, strict=True):
            other.copy_(one)
            other.grad = one.grad.clone()
    for optimizer in optimizers:
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizers[0].step()
    for _ in range(3):
        graph.replay()
        optimizers[1].step()
    for one, other in zip(*rows, strict=True):
        assert torch.equal(one, other)
        assert optimizers[0].state[one]["step"] == 4


@pytest.mark.parametrize("mode", [AdamWMode.ADAM_L2_REGULARIZATION, AdamWMode.ADAMW_TRANSFORMERS])
def test_a_graph_of_cuda_of_steps_that_are_counted_on_the_host_is_refused(mode: AdamWMode) -> None:
    targets = on_device()
    optimizer = FusedAdam(targets, adam_w_mode=mode)
    give_gradients(targets)
    optimizer.step()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        targets[0].detach().neg()  # torch warns of an empty graph
        with pytest.raises(RuntimeError, match=r"use AdamWMode\.ADAMW_TORCH"):
            optimizer.step()


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("mode", AdamWMode)
def test_parameters_may_be_on_two_devices(mode: AdamWMode, clips: bool) -> None:
    mixed = [*parameters()[::2], *on_device()[1::2]]
    alone = [torch.nn.Parameter(target.detach().cpu()) for target in mixed]
    optimizers = [
        FusedAdam(targets, 0.05, adam_w_mode=mode, weight_decay=0.1) for targets in (mixed, alone)
    ]
    for _ in range(3):
        give_gradients(alone)
        for one, other in zip(mixed, alone, strict=True):
            one.grad = other.grad.to(one.device, copy=True)
        for optimizer in optimizers:
            optimizer.clip_and_step(0.5) if clips else optimizer.step()
    for one, other in zip(mixed, alone, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("mode", AdamWMode)
def test_a_gpu_as_default_device_leaves_parameters_of_the_cpu_alone(mode: AdamWMode) -> None:
    optimizer = FusedAdam(parameters(), 0.05, adam_w_mode=mode, weight_decay=0.1)
    reference = Reference(optimizer, mode)
    for _ in range(3):
        give_gradients(optimizer.param_groups[0]["params"])
        reference.step()
        with torch.device("cuda"):
            optimizer.step()
    reference.agrees()


@pytest.mark.parametrize("norm_type", [2.0, torch.inf])
def test_clipping_waits_for_nothing(norm_type: float) -> None:
    targets = on_device()
    give_gradients(targets)
    clip_grad_norm_(targets, 0.1, norm_type)
    with waiting_is_an_error():
        clip_grad_norm_(targets, 0.1, norm_type)


def test_lamb_updates_without_waiting() -> None:
    optimizer = Lamb(on_device(), 0.05, weight_decay=0.1)
    for target in optimizer.param_groups[0]["params"]:
        target.grad = torch.ones_like(target)
    before = [target.detach().clone() for target in optimizer.param_groups[0]["params"]]
    with waiting_is_an_error():
        optimizer.step()
    for target, value in zip(optimizer.param_groups[0]["params"], before, strict=True):
        assert not value.numel() or not torch.equal(target.detach(), value)
