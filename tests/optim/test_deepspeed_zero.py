"""In ZeRO's optimizers `FP16_Optimizer` puts methods that answer as the old ones did."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper
from torch import nn

from ortrain.optim import FP16_Optimizer
from tests.optim.stand_ins import Collectives, Zero, named

ZERO = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
OLD_ZERO = "deepspeed.runtime.zero.stage2.FP16_DeepSpeedZeroOptimizer"


@pytest.fixture
def comm(monkeypatch: pytest.MonkeyPatch) -> Collectives:
    """``deepspeed.comm`` of two processes."""
    result = Collectives(2)
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(comm=result))
    monkeypatch.setitem(sys.modules, "deepspeed.comm", result)  # type: ignore[arg-type]
    return result


@pytest.fixture(params=[(ZERO, True), (OLD_ZERO, False)], ids=["newer", "older"])
def zero(request: pytest.FixtureRequest, comm: Collectives) -> Callable[..., Any]:
    """Makes ZeRO's optimizer in the style of either version."""
    name, newer = request.param
    return lambda **more: named(Zero, name)(comm, newer, **more)


def test_zeros_methods_are_replaced_in_the_object_alone(zero: Callable[..., Any]) -> None:
    optimizer = zero()
    assert FP16_Optimizer(optimizer) is optimizer
    own = {"has_overflow_serial", "has_overflow_partitioned_grads_serial", "get_grad_norm_direct"}
    assert own <= set(vars(optimizer))
    assert not own & set(vars(zero()))


@pytest.mark.parametrize("value", [1.0, 65504.0, math.inf, -math.inf, math.nan])
def test_zero_sees_the_overflows_that_it_saw(zero: Callable[..., Any], value: float) -> None:
    slow, fast = zero(), FP16_Optimizer(zero())
    for optimizer in (slow, fast):
        optimizer.averaged_gradients[1][0][3] = value
    assert fast.has_overflow() is slow.has_overflow() is (not math.isfinite(value))
    groups = [getattr(o, "bit16_groups", None) or o.fp16_groups for o in (slow, fast)]
    answers = [o.has_overflow_serial(g[1]) for o, g in zip((slow, fast), groups, strict=True)]
    assert bool(answers[0]) == bool(answers[1]) == (not math.isfinite(value))
    assert not fast.has_overflow_serial(groups[1][0])
    assert not fast.has_overflow_serial([nn.Parameter(torch.ones(1))]), "without a gradient"


@pytest.mark.parametrize("norm_type", [2, 1.0, math.inf])
@pytest.mark.parametrize("rank", [0, 1])
def test_zero_gets_the_norms_that_it_got(
    zero: Callable[..., Any], norm_type: float, rank: int, comm: Collectives
) -> None:
    slow, fast = zero(), FP16_Optimizer(zero())
    norms = []
    for optimizer in (slow, fast):
        optimizer.model_parallel_rank = rank
        params = (getattr(optimizer, "bit16_groups", None) or optimizer.fp16_groups)[0]
        params[0].model_parallel = True
        norms.append(
            float(
                optimizer.get_grad_norm_direct(optimizer.averaged_gradients[0], params, norm_type)
            )
        )
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)
    assert norms[0] > 0
    assert comm.calls == [("max" if norm_type == math.inf else "sum", "data parallel")]
    assert fast.model_parallel_calls == ["max" if norm_type == math.inf else "sum"]


def test_zeros_callers_take_what_the_new_methods_return(zero: Callable[..., Any]) -> None:
    slow, fast = zero(), FP16_Optimizer(zero())
    for optimizer in (slow, fast):
        optimizer.averaged_gradients[1].pop()
    assert fast.scaled_global_norm() == pytest.approx(slow.scaled_global_norm(), rel=1e-6)


def test_a_replicated_parameter_is_counted_once(zero: Callable[..., Any]) -> None:
    slow, fast = zero(), FP16_Optimizer(zero())
    norms = []
    for optimizer in (slow, fast):
        params = (getattr(optimizer, "bit16_groups", None) or optimizer.fp16_groups)[0]
        params[0].ds_pipe_replicated = True
        norms.append(float(optimizer.get_grad_norm_direct(optimizer.averaged_gradients[0], params)))
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)


@pytest.mark.parametrize("norm_type", [2, math.inf])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_zeros_norm_of_an_overflow_is_minus_1(
    zero: Callable[..., Any], value: float, norm_type: float
) -> None:
    optimizer = FP16_Optimizer(zero())
    gradient = torch.tensor([1.0, value])
    assert optimizer.get_grad_norm_direct([gradient], [gradient], norm_type) == -1.0


@pytest.mark.parametrize("norm_type", [2, math.inf])
def test_zeros_norm_of_nothing_is_0(zero: Callable[..., Any], norm_type: float) -> None:
    assert FP16_Optimizer(zero()).get_grad_norm_direct([], [], norm_type) == 0.0


def test_zeros_norm_is_taken_in_float32(zero: Callable[..., Any]) -> None:
    gradient = torch.full((100,), 60000.0, dtype=torch.float16)
    norm = FP16_Optimizer(zero()).get_grad_norm_direct([gradient], [gradient])
    # 60000 is 60000 in float16; two processes
    assert float(norm) == pytest.approx(60000.0 * math.sqrt(200.0), rel=1e-6)


def test_before_deepspeed_had_collectives_torchs_are_used(
    zero: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "deepspeed.comm")
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    torchs = Collectives()
    monkeypatch.setattr(torch.distributed, "all_reduce", torchs.all_reduce)
    FP16_Optimizer(zero()).get_grad_norm_direct([torch.ones(2)], [torch.ones(2)])
    assert [group for _, group in torchs.calls] == ["data parallel"]


def test_accelerates_wrapper_is_looked_into(comm: Collectives) -> None:
    inner = named(Zero, ZERO)(comm, True)
    inner.param_groups, inner.defaults = [], {}
    wrapper = DeepSpeedOptimizerWrapper.__new__(DeepSpeedOptimizerWrapper)
    wrapper.optimizer = inner
    assert FP16_Optimizer(wrapper) is wrapper
    assert "get_grad_norm_direct" in vars(inner)
    assert "get_grad_norm_direct" not in vars(wrapper)
