"""In ZeRO's optimizers `FP16_Optimizer` puts methods that answer as the old ones did."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper
from torch import nn

from ortrain.errors import OrtrainWarning
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


def test_zeros_norm_of_a_large_gradient_is_that_in_float64(zero: Callable[..., Any]) -> None:
    """torch's own norm in float32 is off by 2e-5 here."""
    gradient = torch.randn(1 << 20, dtype=torch.float64).bfloat16()
    norm = FP16_Optimizer(zero()).get_grad_norm_direct([gradient], [gradient])
    expected = float(gradient.double().norm()) * math.sqrt(2.0)  # of two processes
    assert float(norm) == pytest.approx(expected, rel=4e-6)


def test_zeros_fillers_between_gradients_are_of_no_parameter(zero: Callable[..., Any]) -> None:
    slow, fast = zero(), FP16_Optimizer(zero())
    params = (getattr(fast, "bit16_groups", None) or fast.fp16_groups)[0]
    params[1].ds_pipe_replicated = True
    first, second = fast.averaged_gradients[0]
    filler = torch.zeros(5)
    filler._zero_padding = True  # type: ignore[attr-defined]
    norm = fast.get_grad_norm_direct([first, filler, second], params)
    expected = slow.get_grad_norm_direct([first], params[:1])
    assert float(norm) == pytest.approx(float(expected), rel=1e-6)


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


# --- what is not replaced, and says so ------------------------------------------------------------


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"cpu_offload": True}, "with offload_optimizer DeepSpeed checks and measures"),
        (
            {"check_grad_overflow": False, "compute_grad_norm": False},
            "asks neither for overflows nor for the norm",
        ),
    ],
)
def test_methods_that_deepspeed_would_not_call_are_left_with_a_warning(
    zero: Callable[..., Any], attributes: dict[str, bool], reason: str
) -> None:
    optimizer = zero()
    vars(optimizer).update(attributes)
    before = dict(vars(optimizer))
    with pytest.warns(OrtrainWarning, match=f"{reason}.* stays as it is"):
        assert FP16_Optimizer(optimizer) is optimizer
    assert vars(optimizer) == before


@pytest.mark.parametrize("name", ["dp_process_group", "averaged_gradients"])
def test_a_version_without_what_the_methods_read_is_left_alone(
    zero: Callable[..., Any], name: str
) -> None:
    optimizer = zero()
    delattr(optimizer, name)
    with pytest.warns(OrtrainWarning, match=f"DeepSpeed ZeRO has no {name}; its optimizer stays"):
        FP16_Optimizer(optimizer)
    assert "get_grad_norm_direct" not in vars(optimizer)


def test_a_version_with_other_arguments_is_left_alone(comm: Collectives) -> None:
    class Later(Zero):
        def get_grad_norm_direct(self, gradients: Any, params: Any, scale: Any) -> Any:
            """With an argument that none had so far."""

    optimizer = named(Later, ZERO)(comm, True)
    with pytest.warns(OrtrainWarning, match="other arguments in get_grad_norm_direct; its opt"):
        FP16_Optimizer(optimizer)
    assert not {"get_grad_norm_direct", "has_overflow_serial"} & set(vars(optimizer))


@pytest.mark.parametrize(
    ("version", "tried"),
    [("0.13.5", False), ("0.14.5", True), ("0.19.8+cu128", True), ("0.20.0", False)],
)
def test_a_version_that_was_not_tried_is_replaced_with_a_warning(
    zero: Callable[..., Any], version: str, tried: bool
) -> None:
    sys.modules["deepspeed"].__version__ = version
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = FP16_Optimizer(zero())
    expected = f"DeepSpeed {version} is not among those that it was tried with"
    assert [expected in str(each.message) for each in caught] == ([] if tried else [True])
    assert "get_grad_norm_direct" in vars(optimizer)
