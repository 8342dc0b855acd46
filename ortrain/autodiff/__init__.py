"""Backward is just more ONNX: the gradient of a graph, as a graph of the same operators."""

from ortrain.extras import require

require("onnx", __name__)

from ortrain.autodiff.engine import differentiate
from ortrain.autodiff.registry import Gradient, gradient, no_gradient, status

__all__ = ["Gradient", "differentiate", "gradient", "no_gradient", "status"]
