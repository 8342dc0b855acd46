"""``QuantizationConfig``: which numbers of a graph become integers of eight bits, and how."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from onnxruntime.quantization import QuantFormat, QuantType
from onnxruntime.quantization.quant_utils import QuantizationMode
from onnxruntime.quantization.registry import (
    IntegerOpsRegistry,
    QDQRegistry,
    QLinearOpsRegistry,
)

from ortrain.errors import listing
from ortrain.kinds import expect, expect_flag, expect_names

__all__ = [
    "ORTQuantizableOperator",
    "QuantFormat",
    "QuantType",
    "QuantizationConfig",
    "QuantizationMode",
]

_ACTIVATIONS = (QuantType.QUInt8, QuantType.QInt8)


class ORTQuantizableOperator(Enum):
    """Operators of which a quantized form exists, in one format or another."""

    ArgMax = "ArgMax"
    Attention = "Attention"
    AveragePool = "AveragePool"
    BatchNormalization = "BatchNormalization"
    Clip = "Clip"
    Concat = "Concat"
    Conv = "Conv"
    ConvTranspose = "ConvTranspose"
    EmbedLayerNormalization = "EmbedLayerNormalization"
    Flatten = "Flatten"
    FullyConnected = "MatMul"
    Gather = "Gather"
    GatherElements = "GatherElements"
    Gemm = "Gemm"
    GlobalAveragePool = "GlobalAveragePool"
    InstanceNormalization = "InstanceNormalization"
    LayerNormalization = "LayerNormalization"
    LeakyRelu = "LeakyRelu"
    LSTM = "LSTM"
    MaxPool = "MaxPool"
    Mul = "Mul"
    Add = "Add"
    Pad = "Pad"
    Relu = "Relu"
    Reshape = "Reshape"
    Resize = "Resize"
    Sigmoid = "Sigmoid"
    Slice = "Slice"
    Softmax = "Softmax"
    Split = "Split"
    Squeeze = "Squeeze"
    TopK = "TopK"
    Transpose = "Transpose"
    Unsqueeze = "Unsqueeze"
    Where = "Where"


def default_operators(fmt: QuantFormat, mode: QuantizationMode) -> list[str]:
    """The operators that onnxruntime quantizes where none are named.

    Args:
        fmt: the form of the graph.
        mode: whether scales are computed in the graph or known beforehand.
    """
    if mode == QuantizationMode.IntegerOps:
        return sorted(IntegerOpsRegistry)
    return sorted(QDQRegistry if fmt == QuantFormat.QDQ else QLinearOpsRegistry)


@dataclass
class QuantizationConfig:
    """How a graph is quantized to eight bits.

    Attributes:
        is_static: whether ranges of activations come from calibration; else they are found in each
            run.
        format: ``QDQ`` puts pairs of QuantizeLinear and DequantizeLinear around operators, which
            onnxruntime fuses when it loads the file; ``QOperator`` writes quantized operators.
        mode: ``IntegerOps`` for dynamic quantization, ``QLinearOps`` for static.
        activations_dtype: ``QUInt8`` or ``QInt8``; dynamic quantization has ``QUInt8`` alone.
        activations_symmetric: whether the zero of activations is in the middle of their range.
        weights_dtype: ``QUInt8`` or ``QInt8``.
        weights_symmetric: the same of weights.
        per_channel: whether each column of a weight has its own scale.
        reduce_range: whether weights use seven bits, for processors whose sums of two products of
            eight bits overflow sixteen.
        nodes_to_quantize: names of nodes; empty for all.
        nodes_to_exclude: names of nodes that stay as they are.
        operators_to_quantize: operators; empty for all that onnxruntime knows.
        qdq_add_pair_to_weight: whether weights stay floating point behind a pair of their own.
        qdq_dedicated_pair: whether each reader of a value has a pair of its own.
        qdq_op_type_per_channel_support_to_axis: operator → axis of its weight's channels.
    """

    is_static: bool
    format: QuantFormat
    mode: QuantizationMode = QuantizationMode.QLinearOps
    activations_dtype: QuantType = QuantType.QUInt8
    activations_symmetric: bool = False
    weights_dtype: QuantType = QuantType.QInt8
    weights_symmetric: bool = True
    per_channel: bool = False
    reduce_range: bool = False
    nodes_to_quantize: list[str] = field(default_factory=list)
    nodes_to_exclude: list[str] = field(default_factory=list)
    operators_to_quantize: list[str] = field(default_factory=list)
    qdq_add_pair_to_weight: bool = False
    qdq_dedicated_pair: bool = False
    qdq_op_type_per_channel_support_to_axis: dict[str, int] = field(
        default_factory=lambda: {"MatMul": 1}
    )

    def __post_init__(self) -> None:
        for name in (
            "is_static",
            "activations_symmetric",
            "weights_symmetric",
            "per_channel",
            "reduce_range",
            "qdq_add_pair_to_weight",
            "qdq_dedicated_pair",
        ):
            expect_flag(name, getattr(self, name))
        self.format = _member(QuantFormat, "format", self.format)
        self.mode = _member(QuantizationMode, "mode", self.mode)
        self.activations_dtype = _member(QuantType, "activations_dtype", self.activations_dtype)
        self.weights_dtype = _member(QuantType, "weights_dtype", self.weights_dtype)
        for name in ("nodes_to_quantize", "nodes_to_exclude", "operators_to_quantize"):
            value = getattr(self, name)
            if name == "operators_to_quantize" and value is not None:
                value = [v.value if isinstance(v, ORTQuantizableOperator) else v for v in value]
            expect_names(name, value, type(None))
            setattr(self, name, list(value or ()))
        axes = self.qdq_op_type_per_channel_support_to_axis
        expect("qdq_op_type_per_channel_support_to_axis", axes, Mapping, "operator → axis")
        self.qdq_op_type_per_channel_support_to_axis = dict(axes)
        self._check()
        if not self.operators_to_quantize:
            self.operators_to_quantize = default_operators(self.format, self.mode)

    def _check(self) -> None:
        for name in ("activations_dtype", "weights_dtype"):
            if (dtype := getattr(self, name)) not in _ACTIVATIONS:
                raise ValueError(f"{name}={dtype.name}: expected QUInt8 or QInt8")
        if self.is_static:
            if self.mode != QuantizationMode.QLinearOps:
                raise ValueError(
                    "mode=IntegerOps computes ranges in each run: static quantization, whose "
                    "ranges come from calibration, has mode=QLinearOps"
                )
            if (self.activations_dtype, self.weights_dtype) == (QuantType.QInt8, QuantType.QUInt8):
                raise ValueError(
                    "activations_dtype=QInt8 with weights_dtype=QUInt8: onnxruntime has no kernels "
                    "for it; choose weights_dtype=QInt8, or activations_dtype=QUInt8"
                )
            return
        if self.mode != QuantizationMode.IntegerOps:
            raise ValueError(
                "mode=QLinearOps needs ranges from calibration: dynamic quantization has "
                "mode=IntegerOps"
            )
        if self.activations_dtype != QuantType.QUInt8:
            raise ValueError(
                "activations_dtype=QInt8: onnxruntime's DynamicQuantizeLinear has unsigned "
                "integers alone; choose QUInt8, or is_static=True"
            )
        if self.format != QuantFormat.QOperator:
            raise ValueError(
                "format=QDQ needs ranges from calibration: dynamic quantization has "
                "format=QOperator"
            )

    @property
    def use_symmetric_calibration(self) -> bool:
        """Whether calibrated ranges are made symmetric around zero."""
        return self.activations_symmetric and self.weights_symmetric

    def to_dict(self) -> dict[str, Any]:
        """The configuration in plain values; enumerations by name."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {
            name: value.name if isinstance(value, Enum) else _copy(value)
            for name, value in values.items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> QuantizationConfig:
        """The configuration of what :meth:`to_dict` gave; keys that are not of it are left out.

        Raises:
            TypeError: a value is of another type, or one that has no default is missing.
            ValueError: the values do not go together.
        """
        expect("values", values, Mapping, "a mapping")
        names = {f.name for f in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})

    def __str__(self) -> str:
        kind = "static" if self.is_static else "dynamic"
        scheme = f"{_short(self.activations_dtype)}/{_short(self.weights_dtype)}"
        channels = "per channel" if self.per_channel else "per tensor"
        return f"{kind} {self.format.name}, {scheme}, {channels}"


def _short(dtype: QuantType) -> str:
    return "u8" if dtype == QuantType.QUInt8 else "s8"


def _copy(value: Any) -> Any:
    return type(value)(value) if isinstance(value, list | dict) else value


def _member(kind: type[Enum], name: str, value: Any) -> Any:
    """A member of an enumeration, also from its name, as configuration files have it."""
    if isinstance(value, str):
        if value not in kind.__members__:
            known = listing(list(kind.__members__), 20)
            raise ValueError(f"{name}={value!r}: expected one of {known}")
        return kind[value]
    expect(name, value, kind, f"a {kind.__name__}")
    return value
