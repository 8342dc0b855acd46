"""``AutoQuantizationConfig``: configurations for kinds of processors.

Presets have the signatures of Optimum's, of which there are two: with ``reduce_range`` and without.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import ParamSpec

from ortrain.deploy.quantization.configuration import (
    QuantFormat,
    QuantizationConfig,
    QuantizationMode,
    QuantType,
)
from ortrain.deploy.quantization.processor import Processor

NAMES = ("arm64", "avx2", "avx512", "avx512_vnni", "ppc64le", "tensorrt", "auto")

_P = ParamSpec("_P")


def _named(
    name: str, preset: Callable[_P, QuantizationConfig], weights: QuantType, about: str
) -> Callable[_P, QuantizationConfig]:
    """A preset under its name, with the signature of another one.

    Args:
        name: its own.
        preset: whose signature it has.
        weights: the integers of weights.
        about: what it is for.
    """

    @functools.wraps(preset)
    def named(*args: _P.args, **kwargs: _P.kwargs) -> QuantizationConfig:
        return dataclasses.replace(preset(*args, **kwargs), weights_dtype=weights)

    named.__name__, named.__doc__ = name, about
    named.__qualname__ = f"AutoQuantizationConfig.{name}"
    return named


def _reducible(
    is_static: bool,
    use_symmetric_activations: bool = False,
    use_symmetric_weights: bool = True,
    per_channel: bool = True,
    reduce_range: bool = False,
    nodes_to_quantize: Sequence[str] | None = None,
    nodes_to_exclude: Sequence[str] | None = None,
    operators_to_quantize: Sequence[str] | None = None,
) -> QuantizationConfig:
    return QuantizationConfig(
        is_static=is_static,
        format=QuantFormat.QDQ if is_static else QuantFormat.QOperator,
        mode=QuantizationMode.QLinearOps if is_static else QuantizationMode.IntegerOps,
        activations_dtype=QuantType.QUInt8,
        activations_symmetric=use_symmetric_activations,
        weights_dtype=QuantType.QInt8,
        weights_symmetric=use_symmetric_weights,
        per_channel=per_channel,
        reduce_range=reduce_range,
        nodes_to_quantize=list(nodes_to_quantize or ()),
        nodes_to_exclude=list(nodes_to_exclude or ()),
        operators_to_quantize=list(operators_to_quantize or ()),
    )


def _whole(
    is_static: bool,
    use_symmetric_activations: bool = False,
    use_symmetric_weights: bool = True,
    per_channel: bool = True,
    nodes_to_quantize: Sequence[str] | None = None,
    nodes_to_exclude: Sequence[str] | None = None,
    operators_to_quantize: Sequence[str] | None = None,
) -> QuantizationConfig:
    return _reducible(
        is_static,
        use_symmetric_activations,
        use_symmetric_weights,
        per_channel,
        False,
        nodes_to_quantize,
        nodes_to_exclude,
        operators_to_quantize,
    )


class AutoQuantizationConfig:
    """Configurations by the instructions of the processor that runs the model."""

    arm64 = staticmethod(
        _named(
            "arm64",
            _whole,
            QuantType.QInt8,
            "For ARM processors of 64 bits: activations u8, weights s8.",
        )
    )
    avx2 = staticmethod(
        _named(
            "avx2",
            _reducible,
            QuantType.QUInt8,
            "For x86 with AVX2: activations and weights u8, whose sums do not overflow there.",
        )
    )
    avx512 = staticmethod(
        _named(
            "avx512",
            _reducible,
            QuantType.QInt8,
            """For x86 with AVX-512 without VNNI: activations u8, weights s8.

            Sums of two products of eight bits can overflow sixteen bits there: compare, and set
            ``reduce_range`` where answers change.
            """,
        )
    )
    avx512_vnni = staticmethod(
        _named(
            "avx512_vnni",
            _whole,
            QuantType.QInt8,
            "For x86 with VNNI, which sums products in 32 bits: activations u8, weights s8.",
        )
    )
    ppc64le = staticmethod(
        _named(
            "ppc64le",
            _whole,
            QuantType.QInt8,
            "For POWER processors: activations u8, weights s8.",
        )
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
