"""In Megatron-LM's optimizer `FP16_Optimizer` puts methods that answer as the old ones did."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ortrain.optim import FP16_Optimizer
from tests.optim.stand_ins import Collectives, Megatron, named

MEGATRON = "megatron.fp16.fp16.FP16_Optimizer"


def megatron(**more: Any) -> Any:
    return named(Megatron, MEGATRON)(**more)


def grads(optimizer: Any) -> list[torch.Tensor]:
    params = optimizer.optimizer.param_groups[0]["params"]
    return [p.grad for p in params if p.grad is not None]


@pytest.mark.parametrize("norm_type", [2, 1.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.1, 1e4])
def test_megatron_clips_as_it_clipped(max_norm: float, norm_type: float) -> None:
    slow, fast = megatron(), FP16_Optimizer(megatron())
    norms = [optimizer.clip_master_grads(max_norm, norm_type) for optimizer in (slow, fast)]
    assert isinstance(norms[1], float)
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)
    for one, other in zip(grads(fast), grads(slow), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0.0)
    changed = not torch.equal(grads(fast)[0], grads(megatron())[0])
    assert changed == (max_norm == 0.1)


@pytest.mark.parametrize("value", [1.0, math.inf, math.nan])
@pytest.mark.parametrize("place", ["fp16_groups", "fp32_from_fp32_groups"])
def test_megatron_sees_the_overflows_that_it_saw(place: str, value: float) -> None:
    for optimizer in (megatron(), FP16_Optimizer(megatron())):
        getattr(optimizer, place)[0][0].grad.view(-1)[2] = value
        optimizer._check_overflow()
        assert optimizer.overflow is (not math.isfinite(value))
        if optimizer.overflow:
            assert optimizer.clip_master_grads(1.0) == -1


def test_megatron_without_gradients_has_no_overflow() -> None:
    optimizer = FP16_Optimizer(megatron())
    for row in (*optimizer.fp16_groups, *optimizer.fp32_from_fp32_groups):
        for param in row:
            param.grad = None
    optimizer.overflow = True
    assert optimizer._check_overflow() is False
    assert optimizer.overflow is False


@pytest.mark.parametrize("word", ["horizontal", "tensor"])
@pytest.mark.parametrize("norm_type", [2, math.inf])
@pytest.mark.parametrize("rank", [0, 1])
def test_with_rank_and_group_a_norm_is_of_the_whole_model(
    word: str, norm_type: float, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchs = Collectives(2)
    monkeypatch.setattr(torch.distributed, "all_reduce", torchs.all_reduce)
    slow = megatron(rank=lambda: rank)
    options = {
        f"get_{word}_model_parallel_rank": lambda: rank,
        f"get_{word}_model_parallel_group": lambda: "model parallel",
    }
    fast = FP16_Optimizer(megatron(), **options)
    for optimizer in (slow, fast):
        optimizer.optimizer.param_groups[0]["params"][0].model_parallel = True
    norms = [optimizer.clip_master_grads(1e6, norm_type) for optimizer in (slow, fast)]
    two = 1.0 if norm_type == math.inf else math.sqrt(2.0)
    assert norms[1] == pytest.approx(two * norms[0], rel=1e-6)
    fast._check_overflow()
    assert [group for _, group in torchs.calls] == ["model parallel"] * 2


def test_megatrons_own_functions_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    torchs = Collectives(2)
    monkeypatch.setattr(torch.distributed, "all_reduce", torchs.all_reduce)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    mpu: Any = SimpleNamespace(
        get_model_parallel_rank=lambda: 0, get_model_parallel_group=lambda: "of mpu"
    )
    monkeypatch.setitem(sys.modules, "megatron.mpu", mpu)
    FP16_Optimizer(megatron())._check_overflow()
    assert [group for _, group in torchs.calls] == ["of mpu"]
