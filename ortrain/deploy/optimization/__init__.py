"""ONNX files that run faster, and answer as before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortrain.extras import require
from ortrain.lazy import attributes

require("onnx", __name__)

if TYPE_CHECKING:
    from ortrain.deploy.optimization.configuration import AutoOptimizationConfig, OptimizationConfig
    from ortrain.deploy.optimization.fusions import Report
    from ortrain.deploy.optimization.optimizer import ORTOptimizer

_HOME = {
    "AutoOptimizationConfig": "ortrain.deploy.optimization.configuration",
    "OptimizationConfig": "ortrain.deploy.optimization.configuration",
    "ORTOptimizer": "ortrain.deploy.optimization.optimizer",
    "Report": "ortrain.deploy.optimization.fusions",
}

__all__ = ["AutoOptimizationConfig", "ORTOptimizer", "OptimizationConfig", "Report"]


__getattr__ = attributes(__name__, _HOME)


def __dir__() -> list[str]:
    return __all__
