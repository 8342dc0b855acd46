"""Models that leave training: ONNX files that answer as the model before them did.

What is here needs the extra ``onnx``; ``export_onnx`` needs ``torch`` as well. The names below load
what they need when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortrain.deploy.model_names import MODELS
from ortrain.extras import require
from ortrain.lazy import attributes

require("onnx", __name__)

if TYPE_CHECKING:
    from ortrain.deploy.equivalence.budgets import Budgets
    from ortrain.deploy.equivalence.comparison import compare
    from ortrain.deploy.equivalence.golden_set import GoldenSet
    from ortrain.deploy.equivalence.report import EquivalenceError, EquivalenceReport
    from ortrain.deploy.export import export_onnx
    from ortrain.deploy.model_folder import ModelFolder
    from ortrain.deploy.models import (
        ORTModelForAudioClassification,
        ORTModelForCausalLM,
        ORTModelForCTC,
        ORTModelForFeatureExtraction,
        ORTModelForImageClassification,
        ORTModelForMaskedLM,
        ORTModelForMultipleChoice,
        ORTModelForQuestionAnswering,
        ORTModelForSeq2SeqLM,
        ORTModelForSequenceClassification,
        ORTModelForSpeechSeq2Seq,
        ORTModelForTokenClassification,
    )
    from ortrain.deploy.optimization import AutoOptimizationConfig, OptimizationConfig, ORTOptimizer
    from ortrain.deploy.ort_config import ORTConfig
    from ortrain.deploy.quantization import (
        AutoCalibrationConfig,
        AutoQuantizationConfig,
        CalibrationConfig,
        HalfPrecisionConfig,
        ORTQuantizer,
        QuantizationConfig,
        QuantizationPreprocessor,
        WeightOnlyConfig,
    )

_HOME = {
    "AutoCalibrationConfig": "ortrain.deploy.quantization",
    "AutoOptimizationConfig": "ortrain.deploy.optimization",
    "AutoQuantizationConfig": "ortrain.deploy.quantization",
    "Budgets": "ortrain.deploy.equivalence.budgets",
    "CalibrationConfig": "ortrain.deploy.quantization",
    "EquivalenceError": "ortrain.deploy.equivalence.report",
    "EquivalenceReport": "ortrain.deploy.equivalence.report",
    "GoldenSet": "ortrain.deploy.equivalence.golden_set",
    "HalfPrecisionConfig": "ortrain.deploy.quantization",
    "ModelFolder": "ortrain.deploy.model_folder",
    "ORTConfig": "ortrain.deploy.ort_config",
    "ORTOptimizer": "ortrain.deploy.optimization",
    "ORTQuantizer": "ortrain.deploy.quantization",
    "OptimizationConfig": "ortrain.deploy.optimization",
    "QuantizationConfig": "ortrain.deploy.quantization",
    "QuantizationPreprocessor": "ortrain.deploy.quantization",
    "WeightOnlyConfig": "ortrain.deploy.quantization",
    "compare": "ortrain.deploy.equivalence.comparison",
    "export_onnx": "ortrain.deploy.export",
    **MODELS,
}

__all__ = [
    "AutoCalibrationConfig",
    "AutoOptimizationConfig",
    "AutoQuantizationConfig",
    "Budgets",
    "CalibrationConfig",
    "EquivalenceError",
    "EquivalenceReport",
    "GoldenSet",
    "HalfPrecisionConfig",
    "ModelFolder",
    "ORTConfig",
    "ORTModelForAudioClassification",
    "ORTModelForCTC",
    "ORTModelForCausalLM",
    "ORTModelForFeatureExtraction",
    "ORTModelForImageClassification",
    "ORTModelForMaskedLM",
    "ORTModelForMultipleChoice",
    "ORTModelForQuestionAnswering",
    "ORTModelForSeq2SeqLM",
    "ORTModelForSequenceClassification",
    "ORTModelForSpeechSeq2Seq",
    "ORTModelForTokenClassification",
    "ORTOptimizer",
    "ORTQuantizer",
    "OptimizationConfig",
    "QuantizationConfig",
    "QuantizationPreprocessor",
    "WeightOnlyConfig",
    "compare",
    "export_onnx",
]


__getattr__ = attributes(__name__, _HOME)


def __dir__() -> list[str]:
    return __all__
