"""The trainers of 2020: ``ORTTrainer`` of both generations, on today's pipeline.

This package has the names of ``onnxruntime.training``; `ortrain.classic.first` has those of
``onnxruntime.capi.ort_trainer``, and `ortrain.classic.supplement` those of the BERT example.
"""

from __future__ import annotations

from ortrain.extras import require

require("torch", __name__)

from ortrain.classic import amp, checkpoint, optim
from ortrain.classic.orttrainer import ORTTrainer, TrainStepInfo
from ortrain.classic.orttrainer_options import ORTTrainerOptions

__all__ = ["ORTTrainer", "ORTTrainerOptions", "TrainStepInfo", "amp", "checkpoint", "optim"]
