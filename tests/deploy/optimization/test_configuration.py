"""Which rewrites the levels stand for, and which configurations are none."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from ortrain import OrtrainWarning
from ortrain.deploy.optimization import AutoOptimizationConfig, OptimizationConfig

ON = {"disable_packed_kv", "disable_group_norm_fusion", "disable_embed_layer_norm_fusion"}


def test_the_defaults() -> None:
    config = OptimizationConfig()
    assert config.optimization_level == 1
    assert config.enable_transformers_specific_optimizations
    others = {f.name for f in fields(config)} - {
        "optimization_level", "enable_transformers_specific_optimizations"
    }  # fmt: skip
    assert {name for name in others if getattr(config, name)} == ON
    assert len(others) == 25


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("O1", (1, False, False, False, False)),
        ("O2", (2, True, False, False, False)),
        ("O3", (2, True, True, False, False)),
        ("O4", (2, True, True, True, True)),
    ],
)
def test_the_levels(level: str, expected: tuple[Any, ...]) -> None:
    gpu = {"for_gpu": True} if level == "O4" else {}
    config = AutoOptimizationConfig.with_optimization_level(level, **gpu)
    found = (
        config.optimization_level,
        config.enable_transformers_specific_optimizations,
        config.enable_gelu_approximation,
        config.fp16,
        config.optimize_for_gpu,
    )
    assert found == expected
    assert getattr(AutoOptimizationConfig, level)() == config


def test_other_fields_take_precedence() -> None:
    config = AutoOptimizationConfig.O2(for_gpu=True, disable_gelu_fusion=True, fp16=True)
    assert (config.optimize_for_gpu, config.disable_gelu_fusion, config.fp16) == (True, True, True)
    config = AutoOptimizationConfig.O3(enable_gelu_approximation=False)
    assert config == AutoOptimizationConfig.O2()


def test_float16_is_for_a_gpu() -> None:
    with pytest.warns(OrtrainWarning, match="optimize_for_gpu is set"):
        config = AutoOptimizationConfig.with_optimization_level("O4")
    assert config.optimize_for_gpu


@pytest.mark.parametrize("name", ["use_mask_index", "no_attention_mask", "use_raw_attention_mask"])
def test_a_mask_is_never_dropped(name: str) -> None:
    with pytest.warns(OrtrainWarning, match=name):
        OptimizationConfig(**{name: True})


@pytest.mark.parametrize("level", [3, -1, 98])
def test_there_are_no_other_levels(level: int) -> None:
    with pytest.raises(ValueError, match=f"optimization_level={level}"):
        OptimizationConfig(optimization_level=level)
    with pytest.raises(ValueError, match="O5"):
        AutoOptimizationConfig.with_optimization_level("O5")


def test_wrong_kinds_are_told_by_name() -> None:
    with pytest.raises(TypeError, match="optimization_level"):
        OptimizationConfig(optimization_level="2")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="disable_gelu_fusion"):
        OptimizationConfig(disable_gelu_fusion="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="optimization_level"):
        AutoOptimizationConfig.with_optimization_level(2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="fuse_everything"):
        AutoOptimizationConfig.O2(fuse_everything=True)


def test_it_goes_through_json() -> None:
    config = AutoOptimizationConfig.O3(disable_rotary_embeddings=True)
    assert OptimizationConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ValueError, match="no field x"):
        OptimizationConfig.from_dict({"x": 1})
