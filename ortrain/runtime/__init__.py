"""Running programs: executors lower a program to operators they know, compile it, and run it."""

from ortrain.extras import require

require("onnx", __name__)
