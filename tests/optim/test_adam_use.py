"""``FusedAdam`` goes with closures, hooks, schedulers, scalers and clipping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain.optim import SGD, AdamWMode, FusedAdam, Lamb, clip_grad_norm_
from ortrain.optim.clip import LARGE
from tests.optim.twins import close, network, ours, same, torchs, train, values

# --- loops --------------------------------------------------------------------------------------


def test_a_closure_is_called_with_gradients_on_and_its_loss_returned() -> None:
    (target,) = targets = [nn.Parameter(torch.ones(3))]
    optimizer = ours(targets)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = target.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3.0
    assert (target < 1.0).all()


@pytest.mark.parametrize("kind", [FusedAdam, Lamb, SGD])
def test_a_backward_of_weights_before_the_step_is_an_error(kind: Any) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = kind([weight], lr=0.1)
    weight.square().sum().backward()
    loss = weight.square().sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_accumulated_gradients_are_one_step() -> None:
    one, other = ours(network()), ours(network())
    for target, twin in zip(one.param_groups[0]["params"], network(), strict=True):
        for _ in range(4):
            (target * twin.detach()).sum().backward()
    with torch.no_grad():
        for target, twin in zip(other.param_groups[0]["params"], network(), strict=True):
            target.grad = 4 * twin
    one.step()
    other.step()
    close(one, other)


def test_hooks_run_once_a_step() -> None:
    calls: list[str] = []
    optimizer = ours(network())
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(optimizer, [0])
    optimizer.clip_and_step(1.0)
    assert calls == ["before", "after"] * 2


def test_a_scheduler_sets_the_learning_rate_of_every_step() -> None:
    one, other = ours(network()), torchs(network(), True)
    for optimizer in (one, other):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for seed in range(4):
            train(optimizer, [seed])
            scheduler.step()
    same(one, other)


# --- torch.amp.GradScaler -----------------------------------------------------------------------


def scaled(
    optimizer: torch.optim.Optimizer, scales: Sequence[float], unscales: bool = False
) -> torch.amp.GradScaler:
    """Steps through a scaler, whose gradients are infinite where the scale given is."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    targets = [p for group in optimizer.param_groups for p in group["params"]]
    for seed, scale in enumerate(scales):
        scaler.scale(torch.zeros(()))  # makes its tensors
        generator = torch.Generator().manual_seed(seed)
        for target in targets:
            value = torch.randn(target.shape, generator=generator)
            target.grad = value * scaler.get_scale() * scale
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return scaler


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("mode", AdamWMode)
def test_a_grad_scaler_changes_nothing_and_infinities_skip_the_step(
    mode: AdamWMode, bias_correction: bool, unscales: bool
) -> None:
    options = {"bias_correction": bias_correction}
    one, other = ours(network(), mode, **options), ours(network(), mode, **options)
    scaler = scaled(one, [1.0, 1.0, float("inf"), 1.0], unscales)
    train(other, [0, 1, 3])
    same(one, other)  # the scale is a power of 2
    assert scaler.get_scale() == 512.0
    assert not hasattr(one, "grad_scale")


def test_an_infinity_in_the_first_step_leaves_everything_as_it_was() -> None:
    for mode in AdamWMode:
        optimizer = ours(network(), mode)
        scaled(optimizer, [float("inf")])
        for value, start in zip(values(optimizer), network(), strict=True):
            assert torch.equal(value, start.detach())
        assert all(state["step"] == 0 for state in optimizer.state.values())


def test_the_scaler_leaves_unscaling_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def unscale(*_: Any) -> None:
        raise AssertionError("a pass of its own over the gradients")

    monkeypatch.setattr(torch.amp.GradScaler, "unscale_", unscale)
    optimizer = ours(network())
    scaled(optimizer, [1.0])
    assert all(state["step"] == 1 for state in optimizer.state.values())


# --- clip_and_step ------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e6])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("mode", AdamWMode)
def test_clip_and_step_is_to_clip_and_to_step(
    mode: AdamWMode, norm_type: float, max_norm: float
) -> None:
    one, other = ours(network(), mode), ours(network(), mode)
    for seed in range(4):
        for optimizer in (one, other):
            generator = torch.Generator().manual_seed(seed)
            for target in optimizer.param_groups[0]["params"]:
                target.grad = torch.randn(target.shape, generator=generator)
        norm = one.clip_and_step(max_norm, norm_type)
        assert norm == clip_grad_norm_(other.param_groups[0]["params"], max_norm, norm_type)
        other.step()
        pairs = zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=0.0)
    close(one, other)
    if max_norm == 1e6:
        same(one, other)
    assert not hasattr(one, "grad_scale")


@pytest.mark.parametrize("mode", AdamWMode)
def test_clip_and_step_of_a_large_parameter_is_to_clip_and_to_step(mode: AdamWMode) -> None:
    value, gradient = torch.randn(2, LARGE), torch.randn(2, LARGE)
    one, other = (nn.Parameter(value.clone()) for _ in range(2))
    # A decay that all but cancels a gradient would magnify the rounding of its norm.
    optimizers = [ours([target], mode, weight_decay=0.0) for target in (one, other)]
    for _ in range(2):
        one.grad, other.grad = gradient.clone(), gradient.clone()
        norm = optimizers[0].clip_and_step(1.0)
        torch.testing.assert_close(norm, clip_grad_norm_([other], 1.0), rtol=1e-5, atol=0.0)
        optimizers[1].step()
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_the_millionth_that_torch_adds_to_a_norm_is_added_here_too() -> None:
    one, other = (nn.Parameter(torch.ones(4)) for _ in range(2))
    for target in (one, other):
        target.grad = torch.full((4,), 1e-5)
    ours([one]).clip_and_step(1e-6)
    clip_grad_norm_([other], 1e-6)
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=0.0)


def test_clip_and_step_can_refuse_a_norm_that_is_not_finite_before_anything_changes() -> None:
    optimizer = ours(network())
    for target in optimizer.param_groups[0]["params"]:
        target.grad = torch.full_like(target, float("inf"))
    with pytest.raises(RuntimeError, match="non-finite"):
        optimizer.clip_and_step(1.0, error_if_nonfinite=True)
    assert not optimizer.state
    for value, start in zip(values(optimizer), network(), strict=True):
        assert torch.equal(value, start.detach())


def test_after_a_failed_step_the_next_one_is_not_scaled() -> None:
    def fail(*_: Any) -> None:
        raise OSError("stop")

    (target,) = targets = [nn.Parameter(torch.zeros(3))]
    target.grad = torch.ones(3)
    optimizer = ours(targets)
    hook = optimizer.register_step_pre_hook(fail)
    with pytest.raises(OSError, match="stop"):
        optimizer.clip_and_step(0.1)
    hook.remove()
    assert not hasattr(optimizer, "grad_scale")
    optimizer.step()
    assert torch.equal(target.grad, torch.ones(3))
