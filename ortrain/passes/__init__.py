"""Rewrites of programs. A pass is one file; what runs when is data: :data:`PIPELINES`."""

from ortrain.passes.pipeline import PIPELINES, Pass, rewrite

__all__ = ["PIPELINES", "Pass", "rewrite"]
