"""``AutoQuantizationConfig``: configurations for kinds of processors."""

from __future__ import annotations

from collections.abc import Sequence

from ortrain.deploy.quantization.configuration import (
    QuantFormat,
    QuantizationConfig,
    QuantizationMode,
    QuantType,
)
from ortrain.deploy.quantization.processor import Processor

NAMES = ("arm64", "avx2", "avx512", "avx512_vnni", "ppc64le", "tensorrt", "auto")


class AutoQuantizationConfig:
    """Configurations by the instructions of the processor that runs the model."""

    @staticmethod
    def arm64(
        is_static: bool,
        use_symmetric_activations: bool = False,
        use_symmetric_weights: bool = True,
        per_channel: bool = True,
        nodes_to_quantize: Sequence[str] | None = None,
        nodes_to_exclude: Sequence[str] | None = None,
        operators_to_quantize: Sequence[str] | None = None,
    ) -> QuantizationConfig:
        """For ARM processors of 64 bits: activations u8, weights s8."""
        return _eight_bits(
            QuantType.QInt8,
            is_static,
            use_symmetric_activations,
            use_symmetric_weights,
            per_channel,
            False,
            nodes_to_quantize,
            nodes_to_exclude,
            operators_to_quantize,
        )

    @staticmethod
    def avx2(
        is_static: bool,
        use_symmetric_activations: bool = False,
        use_symmetric_weights: bool = True,
        per_channel: bool = True,
        reduce_range: bool = False,
        nodes_to_quantize: Sequence[str] | None = None,
        nodes_to_exclude: Sequence[str] | None = None,
        operators_to_quantize: Sequence[str] | None = None,
    ) -> QuantizationConfig:
        """For x86 with AVX2: activations and weights u8, whose sums do not overflow there."""
        return _eight_bits(
            QuantType.QUInt8,
            is_static,
            use_symmetric_activations,
            use_symmetric_weights,
            per_channel,
            reduce_range,
            nodes_to_quantize,
            nodes_to_exclude,
            operators_to_quantize,
        )

    @staticmethod
    def avx512(
        is_static: bool,
        use_symmetric_activations: bool = False,
        use_symmetric_weights: bool = True,
        per_channel: bool = True,
        reduce_range: bool = False,
        nodes_to_quantize: Sequence[str] | None = None,
        nodes_to_exclude: Sequence[str] | None = None,
        operators_to_quantize: Sequence[str] | None = None,
    ) -> QuantizationConfig:
        """For x86 with AVX-512 without VNNI: activations u8, weights s8.

        Sums of two products of eight bits can overflow sixteen bits there: compare, and set
        ``reduce_range`` where answers change.
        """
        return _eight_bits(
            QuantType.QInt8,
            is_static,
            use_symmetric_activations,
            use_symmetric_weights,
            per_channel,
            reduce_range,
            nodes_to_quantize,
            nodes_to_exclude,
            operators_to_quantize,
        )

    @staticmethod
    def avx512_vnni(
        is_static: bool,
        use_symmetric_activations: bool = False,
        use_symmetric_weights: bool = True,
        per_channel: bool = True,
        nodes_to_quantize: Sequence[str] | None = None,
        nodes_to_exclude: Sequence[str] | None = None,
        operators_to_quantize: Sequence[str] | None = None,
    ) -> QuantizationConfig:
        """For x86 with VNNI, which sums products in 32 bits: activations u8, weights s8."""
        return _eight_bits(
            QuantType.QInt8,
            is_static,
            use_symmetric_activations,
            use_symmetric_weights,
            per_channel,
            False,
            nodes_to_quantize,
            nodes_to_exclude,
            operators_to_quantize,
        )

    @staticmethod
    def ppc64le(
        is_static: bool,
        use_symmetric_activations: bool = False,
        use_symmetric_weights: bool = True,
        per_channel: bool = True,
        nodes_to_quantize: Sequence[str] | None = None,
        nodes_to_exclude: Sequence[str] | None = None,
        operators_to_quantize: Sequence[str] | None = None,
    ) -> QuantizationConfig:
        """For POWER processors: activations u8, weights s8."""
        return _eight_bits(
            QuantType.QInt8,
            is_static,
            use_symmetric_activations,
            use_symmetric_weights,
            per_channel,
            False,
            nodes_to_quantize,
            nodes_to_exclude,
            operators_to_quantize,
        )

    @staticmethod
    def tensorrt(
        per_channel: bool = True,
        nodes_to_quantize: Sequence[str] | None = None,
        nodes_to_exclude: Sequence[str] | None = None,
        operators_to_quantize: Sequence[str] | None = None,
    ) -> QuantizationConfig:
        """For TensorRT: static, symmetric s8, weights floating point behind a pair of their own."""
        return QuantizationConfig(
            is_static=True,
            format=QuantFormat.QDQ,
            mode=QuantizationMode.QLinearOps,
            activations_dtype=QuantType.QInt8,
            activations_symmetric=True,
            weights_dtype=QuantType.QInt8,
            weights_symmetric=True,
            per_channel=per_channel,
            nodes_to_quantize=list(nodes_to_quantize or ()),
            nodes_to_exclude=list(nodes_to_exclude or ()),
            operators_to_quantize=list(operators_to_quantize or ()),
            qdq_add_pair_to_weight=True,
            qdq_dedicated_pair=True,
        )

    @staticmethod
    def auto(
        is_static: bool = False,
        use_symmetric_activations: bool = False,
        use_symmetric_weights: bool = True,
        per_channel: bool = True,
        nodes_to_quantize: Sequence[str] | None = None,
        nodes_to_exclude: Sequence[str] | None = None,
        operators_to_quantize: Sequence[str] | None = None,
        *,
        processor: Processor | None = None,
    ) -> QuantizationConfig:
        """The configuration for a processor, by default for the one that runs this.

        Args:
            is_static: as of the configuration.
            use_symmetric_activations: the same.
            use_symmetric_weights: the same.
            per_channel: the same.
            nodes_to_quantize: the same.
            nodes_to_exclude: the same.
            operators_to_quantize: the same.
            processor: the one that the model is going to run on.
        """
        name = (processor or Processor.host()).preset
        preset = getattr(AutoQuantizationConfig, name)
        config: QuantizationConfig = preset(
            is_static,
            use_symmetric_activations,
            use_symmetric_weights,
            per_channel,
            nodes_to_quantize=nodes_to_quantize,
            nodes_to_exclude=nodes_to_exclude,
            operators_to_quantize=operators_to_quantize,
        )
        return config


def _eight_bits(
    weights: QuantType,
    is_static: bool,
    symmetric_activations: bool,
    symmetric_weights: bool,
    per_channel: bool,
    reduce_range: bool,
    nodes_to_quantize: Sequence[str] | None,
    nodes_to_exclude: Sequence[str] | None,
    operators: Sequence[str] | None,
) -> QuantizationConfig:
    return QuantizationConfig(
        is_static=is_static,
        format=QuantFormat.QDQ if is_static else QuantFormat.QOperator,
        mode=QuantizationMode.QLinearOps if is_static else QuantizationMode.IntegerOps,
        activations_dtype=QuantType.QUInt8,
        activations_symmetric=symmetric_activations,
        weights_dtype=weights,
        weights_symmetric=symmetric_weights,
        per_channel=per_channel,
        reduce_range=reduce_range,
        nodes_to_quantize=list(nodes_to_quantize or ()),
        nodes_to_exclude=list(nodes_to_exclude or ()),
        operators_to_quantize=list(operators or ()),
    )
