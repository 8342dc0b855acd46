"""Rewrites of what a graph spells out into onnxruntime's fused operators.

They go by data flow: by what is computed of what, never by a model's name or an exporter's. A
pattern that cannot be shown to compute the same for every input stays, and the report says why.
"""

from __future__ import annotations

import onnx_ir as ir

from ortrain.deploy.optimization.configuration import OptimizationConfig
from ortrain.deploy.optimization.fusions import (
    attention,
    batched,
    demanded,
    gelu,
    layout,
    norms,
    packed,
    rotary,
    skip_norms,
)
from ortrain.deploy.optimization.fusions.fusion import Fusion, Report, run
from ortrain.deploy.optimization.fusions.settled import forget_shapes, settle

_LAYOUT = Fusion(
    "layout", frozenset({("", "Transpose"), ("", "Reshape")}), layout.simplify, lambda _: True
)

FUSIONS = (
    norms.FUSION,
    gelu.FUSION,
    rotary.FUSION,
    batched.FUSION,
    attention.FUSION,
    _LAYOUT,
    demanded.FUSION,
    packed.FUSION,
    skip_norms.FUSION,
    gelu.WITH_BIAS,
    gelu.APPROXIMATION,
)

# Of the standard domain: before it, masks broadcast and softmaxes flatten in other ways.
OLDEST = 13


def fuse(model: ir.Model, config: OptimizationConfig) -> Report:
    """Makes all fusions that a configuration asks for, in place.

    Args:
        model: of any opset; below 13 nothing is fused, and the report says so.
        config: what is asked for.

    Returns:
        What was fused, and what was refused for what reason.
    """
    opset = model.opset_imports.get("", 1)
    if opset < OLDEST:
        forget_shapes(model)  # which onnxruntime's own rewrites would believe
        return Report(refused=[("all", "", f"opset {opset} is older than {OLDEST}")])
    extents = settle(model, infer=not config.disable_shape_inference)
    report = run(model, FUSIONS, config)
    extents.forget()
    return report


__all__ = ["FUSIONS", "OLDEST", "Report", "forget_shapes", "fuse"]
