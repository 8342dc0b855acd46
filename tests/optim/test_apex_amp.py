"""In optimizers of Apex AMP `FP16_Optimizer` puts methods that leave the same gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from ortrain.optim import FP16_Optimizer
from tests.optim.stand_ins import LossScaler, amp, named


def apex(masters: bool, kind: type = torch.optim.SGD) -> Any:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(30).half()), nn.Parameter(torch.randn(4, 5).half())]
    params += [nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(3))]
    params += [nn.Parameter(torch.randn(2).half()), nn.Parameter(torch.randn(2))]
    return amp(kind(params, lr=0.1), masters)


def backward(optimizer: Any, seed: int, scale: float, spoil: float | None = None) -> None:
    """What the scaled loss leaves behind; Apex has put full precision gradients aside."""
    generator = torch.Generator().manual_seed(seed)
    optimizer._amp_lazy_init()
    stash = optimizer._amp_stash
    for own, aside in (
        ("all_fp32_from_fp32_params", "all_fp32_from_fp32_grad_stash"),
        ("all_fp16_params", "all_fp16_grad_stash"),
        ("all_fp32_params", "all_fp32_grad_stash"),
    ):
        if hasattr(stash, own) and hasattr(stash, aside):
            getattr(stash, aside)[:] = [p.grad for p in getattr(stash, own)]
    params = [p for p in [*stash.all_fp16_params, *_full(stash)] if p.numel() != 2]
    for index, param in enumerate(params):
        noise = torch.randn(param.shape, generator=generator)
        # The first and the third have a gradient in the first backward only.
        param.grad = None if seed and index % 2 == 0 else (noise * scale).to(param.dtype)
    if spoil is not None:
        grads = [p.grad for p in params if p.grad is not None]
        grads[-1].view(-1)[1] = spoil


def _full(stash: Any) -> list[nn.Parameter]:
    return getattr(stash, "all_fp32_from_fp32_params", None) or stash.all_fp32_params


def gradients(optimizer: Any) -> list[torch.Tensor | None]:
    stash = optimizer._amp_stash
    low = getattr(stash, "all_fp32_from_fp16_params", None) or stash.all_fp16_params
    return [p.grad for p in [*low, *_full(stash)]]


@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize(("scale", "dynamic"), [(128.0, True), (1.0, True), (1.0, False)])
def test_apex_gets_the_gradients_that_it_got(scale: float, dynamic: bool, masters: bool) -> None:
    slow, fast = apex(masters), FP16_Optimizer(apex(masters))
    assert fast._post_amp_backward.__self__ is fast
    for optimizer in (slow, fast):
        scaler = LossScaler(scale, dynamic, fused=True)
        for seed in range(3):
            backward(optimizer, seed, scale)
            optimizer._post_amp_backward(scaler)
            stash = vars(optimizer._amp_stash)
            assert not any(g is not None for k in stash if "grad_stash" in k for g in stash[k])
        assert not scaler.overflow()
    # Half precision is rounded where float32 is not.
    tolerance = 1e-6 if masters else 2e-3
    for one, other in zip(gradients(fast), gradients(slow), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
            assert one.dtype == other.dtype
    assert sum(gradient is not None for gradient in gradients(fast)) == 4


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_apex_scaler_is_told_of_an_overflow(fused: bool, masters: bool, value: float) -> None:
    for optimizer in (apex(masters), FP16_Optimizer(apex(masters))):
        scaler = LossScaler(128.0, True, fused)
        backward(optimizer, 0, 128.0)
        optimizer._post_amp_backward(scaler)
        assert not scaler.overflow()
        backward(optimizer, 1, 128.0, spoil=value)
        optimizer._post_amp_backward(scaler)
        assert scaler.overflow()


@pytest.mark.parametrize("masters", [True, False])
def test_apex_frees_gradients_or_zeroes_them(masters: bool) -> None:
    optimizer = FP16_Optimizer(apex(masters))
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for options, freed in (({"set_to_none": False}, False), ({}, True)):
        backward(optimizer, 0, 1.0)
        optimizer._post_amp_backward(LossScaler(1.0, True, True))
        optimizer.zero_grad(**options)
        with_gradients = [p for p in params if p.numel() != 2]
        assert all((p.grad is None) == freed for p in with_gradients)
        assert freed or not any(p.grad.any() for p in with_gradients)
        masters_left = getattr(optimizer._amp_stash, "all_fp32_from_fp16_params", [])
        assert all(master.grad is None for master in masters_left)


def test_apex_fused_sgd_keeps_its_own_backward() -> None:
    kind = named(torch.optim.SGD, "apex.optimizers.fused_sgd.FusedSGD")
    optimizer = apex(True, kind)
    before = optimizer._post_amp_backward
    FP16_Optimizer(optimizer)
    assert optimizer._post_amp_backward is before
    backward(optimizer, 0, 1.0)
    optimizer.zero_grad()
