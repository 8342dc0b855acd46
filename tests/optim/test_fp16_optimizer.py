"""``FP16_Optimizer`` says where it replaces nothing, and refuses what it does not know."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ortrain.errors import OrtrainWarning
from ortrain.optim import FP16_Optimizer, FusedAdam
from tests.optim.stand_ins import Collectives, Megatron, Zero, named

ZERO = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
MEGATRON = "megatron.fp16.fp16.FP16_Optimizer"


def megatron() -> Any:
    return named(Megatron, MEGATRON)()


def test_torchs_optimizers_have_nothing_to_replace_and_a_warning_says_so() -> None:
    optimizer = FusedAdam([nn.Parameter(torch.ones(2))])
    before = dict(vars(optimizer))
    with pytest.warns(OrtrainWarning, match="in torch's own kernels: there is nothing to replace"):
        assert FP16_Optimizer(optimizer) is optimizer
    assert vars(optimizer) == before
    scaler = torch.amp.GradScaler("cpu")
    with pytest.warns(UserWarning, match="nothing to replace"):
        assert FP16_Optimizer(scaler) is scaler


def test_an_unknown_optimizer_comes_back_with_a_warning_that_names_it() -> None:
    class Strange:
        pass

    strange = Strange()
    with pytest.warns(OrtrainWarning, match=r"Strange is not an optimizer it knows.* Megatron"):
        assert FP16_Optimizer(strange) is strange
    looped: Any = SimpleNamespace()
    looped.optimizer = looped
    with pytest.warns(OrtrainWarning, match="SimpleNamespace is not an optimizer"):
        FP16_Optimizer(looped)


def test_what_wraps_an_optimizer_of_torch_is_named_rather_than_that() -> None:
    class Stage3:
        optimizer = FusedAdam([nn.Parameter(torch.ones(2))])

    with pytest.warns(OrtrainWarning, match=r"Stage3 is not an optimizer it knows"):
        FP16_Optimizer(Stage3())


def test_the_warning_points_to_the_call() -> None:
    with pytest.warns(OrtrainWarning) as caught:
        FP16_Optimizer(object())
    assert caught[0].filename == __file__


def test_a_version_without_the_methods_is_left_alone() -> None:
    kind = named(object, ZERO)
    optimizer = kind()
    with pytest.warns(OrtrainWarning, match="DeepSpeed ZeRO has no has_overflow_serial, .* stays"):
        assert FP16_Optimizer(optimizer) is optimizer
    assert not vars(optimizer)


def test_unknown_keywords_are_refused() -> None:
    with pytest.raises(TypeError, match="no keyword static_loss_scale; it takes get_horizontal"):
        FP16_Optimizer(megatron(), static_loss_scale=1.0)  # type: ignore[arg-type]


def test_rank_and_group_go_together() -> None:
    with pytest.raises(TypeError, match="both the rank and the group"):
        FP16_Optimizer(megatron(), get_horizontal_model_parallel_rank=lambda: 0)
    with pytest.raises(TypeError, match="and its other name are both given"):
        FP16_Optimizer(
            megatron(),
            get_horizontal_model_parallel_rank=lambda: 0,
            get_tensor_model_parallel_rank=lambda: 0,
        )


def test_rank_and_group_that_are_not_used_are_not_dropped_in_silence() -> None:
    with pytest.warns(OrtrainWarning, match="those given are for Megatron-LM") as caught:
        FP16_Optimizer(
            named(Zero, ZERO)(Collectives(), True),
            get_horizontal_model_parallel_rank=lambda: 0,
            get_horizontal_model_parallel_group=lambda: None,
        )
    assert caught[0].filename == __file__
