"""``ORTQuantizer`` and its configurations: ONNX models in eight, four or sixteen bits.

::

    from ortrain.deploy.quantization import AutoQuantizationConfig, ORTQuantizer

    quantizer = ORTQuantizer.from_pretrained("exported")
    quantizer.quantize(AutoQuantizationConfig.auto(is_static=False), "quantized")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortrain.extras import require
from ortrain.lazy import attributes

require("onnx", __name__)

if TYPE_CHECKING:
    from ortrain.deploy.quantization.calibration_config import (
        AutoCalibrationConfig,
        CalibrationConfig,
        CalibrationMethod,
    )
    from ortrain.deploy.quantization.calibration_data import ORTCalibrationDataReader
    from ortrain.deploy.quantization.calibrator import Calibrator
    from ortrain.deploy.quantization.configuration import (
        ORTQuantizableOperator,
        QuantFormat,
        QuantizationConfig,
        QuantizationMode,
        QuantType,
    )
    from ortrain.deploy.quantization.half_precision import HalfPrecisionConfig
    from ortrain.deploy.quantization.preprocessor import (
        ExcludeGeLUNodes,
        ExcludeLayerNormNodes,
        ExcludeNodeAfter,
        ExcludeNodeFollowedBy,
        IncludeFullyConnectedNodes,
        PreprocessorPass,
        QuantizationPreprocessor,
    )
    from ortrain.deploy.quantization.presets import AutoQuantizationConfig
    from ortrain.deploy.quantization.processor import Processor
    from ortrain.deploy.quantization.quantizer import ORTQuantizer
    from ortrain.deploy.quantization.sensitivity import Sensitivity
    from ortrain.deploy.quantization.tuning.settings import FineTuning
    from ortrain.deploy.quantization.weight_only import WeightOnlyConfig

_PACKAGE = "ortrain.deploy.quantization"
_HOME = {
    "AutoCalibrationConfig": f"{_PACKAGE}.calibration_config",
    "AutoQuantizationConfig": f"{_PACKAGE}.presets",
    "CalibrationConfig": f"{_PACKAGE}.calibration_config",
    "CalibrationMethod": f"{_PACKAGE}.calibration_config",
    "Calibrator": f"{_PACKAGE}.calibrator",
    "ExcludeGeLUNodes": f"{_PACKAGE}.preprocessor",
    "ExcludeLayerNormNodes": f"{_PACKAGE}.preprocessor",
    "ExcludeNodeAfter": f"{_PACKAGE}.preprocessor",
    "ExcludeNodeFollowedBy": f"{_PACKAGE}.preprocessor",
    "FineTuning": f"{_PACKAGE}.tuning.settings",
    "HalfPrecisionConfig": f"{_PACKAGE}.half_precision",
    "IncludeFullyConnectedNodes": f"{_PACKAGE}.preprocessor",
    "ORTCalibrationDataReader": f"{_PACKAGE}.calibration_data",
    "ORTQuantizableOperator": f"{_PACKAGE}.configuration",
    "ORTQuantizer": f"{_PACKAGE}.quantizer",
    "PreprocessorPass": f"{_PACKAGE}.preprocessor",
    "Processor": f"{_PACKAGE}.processor",
    "QuantFormat": f"{_PACKAGE}.configuration",
    "QuantType": f"{_PACKAGE}.configuration",
    "QuantizationConfig": f"{_PACKAGE}.configuration",
    "QuantizationMode": f"{_PACKAGE}.configuration",
    "QuantizationPreprocessor": f"{_PACKAGE}.preprocessor",
    "Sensitivity": f"{_PACKAGE}.sensitivity",
    "WeightOnlyConfig": f"{_PACKAGE}.weight_only",
}

__all__ = [
    "AutoCalibrationConfig",
    "AutoQuantizationConfig",
    "CalibrationConfig",
    "CalibrationMethod",
    "Calibrator",
    "ExcludeGeLUNodes",
    "ExcludeLayerNormNodes",
    "ExcludeNodeAfter",
    "ExcludeNodeFollowedBy",
    "FineTuning",
    "HalfPrecisionConfig",
    "IncludeFullyConnectedNodes",
    "ORTCalibrationDataReader",
    "ORTQuantizableOperator",
    "ORTQuantizer",
    "PreprocessorPass",
    "Processor",
    "QuantFormat",
    "QuantType",
    "QuantizationConfig",
    "QuantizationMode",
    "QuantizationPreprocessor",
    "Sensitivity",
    "WeightOnlyConfig",
]


__getattr__ = attributes(__name__, _HOME)


def __dir__() -> list[str]:
    return __all__
