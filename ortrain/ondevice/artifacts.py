"""``generate_artifacts``, under the name by which scripts know it; `making.artifacts` has it."""

from ortrain.extras import require

require("onnx", __name__)

from ortrain.ondevice.making.artifacts import LossType, OptimType, generate_artifacts

__all__ = ["LossType", "OptimType", "generate_artifacts"]
