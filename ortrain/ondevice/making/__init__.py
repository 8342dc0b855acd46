"""What artifacts are made by: sources of models, losses, gradients, updates."""

from ortrain.extras import require

require("onnx", __name__)
