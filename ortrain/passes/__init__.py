"""Rewrites of programs. A pass is one file; what runs when is data: :data:`PIPELINES`."""

from ortrain.extras import require

require("onnx", __name__)

from ortrain.passes.pipeline import PIPELINES, Pass, rewrite

__all__ = ["PIPELINES", "Pass", "rewrite"]
