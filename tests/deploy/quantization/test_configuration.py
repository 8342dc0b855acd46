"""Configurations: their defaults, the presets, what they refuse, which one this processor gets."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

from ortrain.deploy.quantization import (
    AutoCalibrationConfig,
    AutoQuantizationConfig,
    CalibrationConfig,
    CalibrationMethod,
    ORTQuantizableOperator,
    Processor,
    QuantFormat,
    QuantizationConfig,
    QuantizationMode,
    QuantType,
)

U8, S8 = QuantType.QUInt8, QuantType.QInt8


@pytest.mark.parametrize(
    ("preset", "weights"),
    [("arm64", S8), ("avx2", U8), ("avx512", S8), ("avx512_vnni", S8), ("ppc64le", S8)],
)
@pytest.mark.parametrize("is_static", [True, False])
def test_a_preset_has_the_dtypes_of_its_processor(
    preset: str, weights: QuantType, is_static: bool
) -> None:
    config = getattr(AutoQuantizationConfig, preset)(is_static)
    assert (config.activations_dtype, config.weights_dtype) == (U8, weights)
    assert (config.activations_symmetric, config.weights_symmetric) == (False, True)
    assert config.per_channel
    assert not config.reduce_range
    assert config.format == (QuantFormat.QDQ if is_static else QuantFormat.QOperator)
    wanted = QuantizationMode.QLinearOps if is_static else QuantizationMode.IntegerOps
    assert config.mode == wanted
    assert {"MatMul", "Gather"} <= set(config.operators_to_quantize)


def test_tensorrt_is_static_and_symmetric_with_pairs_of_its_own() -> None:
    config = AutoQuantizationConfig.tensorrt()
    assert config.is_static
    assert (config.activations_dtype, config.weights_dtype) == (S8, S8)
    assert config.use_symmetric_calibration
    assert config.qdq_add_pair_to_weight
    assert config.qdq_dedicated_pair


def test_parameters_of_presets_stand_in_the_order_of_optimum() -> None:
    wanted = [
        "is_static",
        "use_symmetric_activations",
        "use_symmetric_weights",
        "per_channel",
        "nodes_to_quantize",
        "nodes_to_exclude",
        "operators_to_quantize",
    ]
    for name in ("arm64", "avx512_vnni", "ppc64le"):
        assert list(inspect.signature(getattr(AutoQuantizationConfig, name)).parameters) == wanted
    for name in ("avx2", "avx512"):
        names = list(inspect.signature(getattr(AutoQuantizationConfig, name)).parameters)
        assert names == [*wanted[:4], "reduce_range", *wanted[4:]]


def test_the_defaults_of_a_configuration_are_those_of_optimum() -> None:
    config = QuantizationConfig(is_static=True, format=QuantFormat.QDQ)
    found = dataclasses.asdict(config)
    del found["operators_to_quantize"]
    assert found == {
        "is_static": True,
        "format": QuantFormat.QDQ,
        "mode": QuantizationMode.QLinearOps,
        "activations_dtype": U8,
        "activations_symmetric": False,
        "weights_dtype": S8,
        "weights_symmetric": True,
        "per_channel": False,
        "reduce_range": False,
        "nodes_to_quantize": [],
        "nodes_to_exclude": [],
        "qdq_add_pair_to_weight": False,
        "qdq_dedicated_pair": False,
        "qdq_op_type_per_channel_support_to_axis": {"MatMul": 1},
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"is_static": False, "format": "QOperator"}, "mode=QLinearOps needs ranges"),
        (
            {"is_static": False, "format": "QOperator", "mode": "IntegerOps"}
            | {"activations_dtype": "QInt8"},
            "activations_dtype=QInt8",
        ),
        ({"is_static": False, "format": "QDQ", "mode": "IntegerOps"}, "format=QDQ needs ranges"),
        ({"is_static": True, "format": "QDQ", "mode": "IntegerOps"}, "mode=IntegerOps computes"),
        (
            {"is_static": True, "format": "QDQ"}
            | {"activations_dtype": "QInt8", "weights_dtype": "QUInt8"},
            "has no kernels",
        ),
        ({"is_static": True, "format": "QQ"}, "format='QQ'"),
        ({"is_static": True, "format": "QDQ", "weights_dtype": "QInt4"}, "weights_dtype=QInt4"),
    ],
)
def test_what_does_not_go_together_is_an_error(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantizationConfig(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"is_static": "yes"}, "is_static='yes'"),
        ({"nodes_to_exclude": "node"}, "nodes_to_exclude='node'"),
        ({"per_channel": 3}, "per_channel=3"),
        ({"format": 1}, "format=1"),
    ],
)
def test_arguments_of_another_kind_are_told_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        QuantizationConfig(**{"is_static": True, "format": QuantFormat.QDQ, **given})


def test_a_configuration_survives_its_plain_values() -> None:
    for config in (
        AutoQuantizationConfig.tensorrt(nodes_to_exclude=["a"]),
        AutoQuantizationConfig.avx2(is_static=False, reduce_range=True),
    ):
        assert QuantizationConfig.from_dict(config.to_dict()) == config


def test_operators_may_be_members_of_the_enumeration() -> None:
    config = AutoQuantizationConfig.avx2(
        is_static=False,
        operators_to_quantize=[ORTQuantizableOperator.FullyConnected],  # type: ignore[list-item]
    )
    assert config.operators_to_quantize == ["MatMul"]


@pytest.mark.parametrize(
    ("machine", "flags", "preset"),
    [
        ("x86_64", {"avx2", "avx512f", "avx512_vnni"}, "avx512_vnni"),
        ("x86_64", {"avx2", "avx_vnni"}, "avx512_vnni"),
        ("x86_64", {"avx2", "avx512f"}, "avx2"),
        ("x86_64", {"avx2"}, "avx2"),
        ("AMD64", set(), "avx2"),
        ("aarch64", set(), "arm64"),
        ("arm64", set(), "arm64"),
        ("ppc64le", set(), "ppc64le"),
        ("riscv64", set(), "avx2"),
    ],
)
def test_auto_takes_the_preset_of_the_processor(machine: str, flags: set[str], preset: str) -> None:
    processor = Processor(machine, frozenset(flags))
    found = AutoQuantizationConfig.auto(processor=processor)
    assert found == getattr(AutoQuantizationConfig, preset)(is_static=False)


def test_this_processor_has_a_preset() -> None:
    assert AutoQuantizationConfig.auto(is_static=True).is_static


def test_methods_of_calibration_have_the_defaults_of_optimum() -> None:
    minmax = AutoCalibrationConfig.minmax()
    assert (minmax.method, minmax.moving_average) == (CalibrationMethod.MinMax, False)
    assert minmax.averaging_constant == 0.01
    entropy = AutoCalibrationConfig.entropy()
    assert (entropy.num_bins, entropy.num_quantized_bins) == (128, 128)
    percentiles = AutoCalibrationConfig.percentiles()
    assert (percentiles.num_bins, percentiles.percentile) == (2048, 99.999)


def test_what_a_dataset_says_of_itself_is_kept() -> None:
    import datasets

    data = datasets.Dataset.from_list([{"a": 1}] * 3, split=datasets.Split.TRAIN)
    config = AutoCalibrationConfig.minmax(data)
    assert (config.dataset_split, config.dataset_num_samples) == ("train", 3)
    assert AutoCalibrationConfig.minmax([1, 2]) == CalibrationConfig(
        moving_average=False, averaging_constant=0.01
    )
