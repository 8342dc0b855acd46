"""ortrain trains PyTorch and ONNX models through an ordinary ONNX graph, on the stock onnxruntime.

The names below load what they need when they are first used: ``import ortrain`` loads neither torch
nor onnxruntime.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortrain.lazy import attributes

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ortrain.autodiff import differentiate, gradient, no_gradient
    from ortrain.config import DebugOptions, LogLevel, Options
    from ortrain.errors import OrtrainError, OrtrainWarning
    from ortrain.explanation import explain
    from ortrain.frontend.export import Exported, export
    from ortrain.frontend.in_place import compile, report_of
    from ortrain.module import ORTModule
    from ortrain.program import Program, Role
    from ortrain.step.report import Report
    from ortrain.trainer import (
        ORTSeq2SeqTrainer,
        ORTSeq2SeqTrainingArguments,
        ORTTrainer,
        ORTTrainerMixin,
        ORTTrainingArguments,
    )

_HOME = {
    "DebugOptions": "ortrain.config",
    "Exported": "ortrain.frontend.export",
    "LogLevel": "ortrain.config",
    "ORTModule": "ortrain.module",
    "ORTSeq2SeqTrainer": "ortrain.trainer",
    "ORTSeq2SeqTrainingArguments": "ortrain.trainer",
    "ORTTrainer": "ortrain.trainer",
    "ORTTrainerMixin": "ortrain.trainer",
    "ORTTrainingArguments": "ortrain.trainer",
    "Options": "ortrain.config",
    "OrtrainError": "ortrain.errors",
    "OrtrainWarning": "ortrain.errors",
    "Program": "ortrain.program",
    "Report": "ortrain.step.report",
    "Role": "ortrain.program",
    "compile": "ortrain.frontend.in_place",
    "differentiate": "ortrain.autodiff",
    "explain": "ortrain.explanation",
    "export": "ortrain.frontend.export",
    "gradient": "ortrain.autodiff",
    "no_gradient": "ortrain.autodiff",
    "report_of": "ortrain.frontend.in_place",
}

__all__ = [
    "DebugOptions",
    "Exported",
    "LogLevel",
    "ORTModule",
    "ORTSeq2SeqTrainer",
    "ORTSeq2SeqTrainingArguments",
    "ORTTrainer",
    "ORTTrainerMixin",
    "ORTTrainingArguments",
    "Options",
    "OrtrainError",
    "OrtrainWarning",
    "Program",
    "Report",
    "Role",
    "__version__",
    "compile",
    "differentiate",
    "explain",
    "export",
    "gradient",
    "no_gradient",
    "report_of",
]


__getattr__ = attributes(__name__, _HOME)


def __dir__() -> list[str]:
    return __all__
