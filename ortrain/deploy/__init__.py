"""Models that leave training: ONNX files that answer as the PyTorch model does."""

from ortrain.extras import require

require("torch", __name__)

from ortrain.deploy.export import export_onnx

__all__ = ["export_onnx"]
