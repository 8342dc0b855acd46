"""Results whose gradients the user's program has written itself."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ortrain.capture.onnx import custom_gradient as operators
from ortrain.capture.onnx.translations.base import Translator, translation


@translation(operators.upstream)
def upstream(op: Translator, result: ir.Value, number: int, index: int) -> ir.Value:
    made: ir.Value = op.ours("Upstream", result, number=number, index=index)
    return made


@translation(operators.custom_gradient)
def custom_gradient(
    op: Translator,
    results: Sequence[ir.Value],
    inputs: Sequence[ir.Value],
    gradients: Sequence[ir.Value | None],
    number: int,
) -> tuple[ir.Value, ...]:
    made = op.ours(
        "CustomGradient",
        *results,
        *inputs,
        *gradients,
        outputs=len(results),
        number=number,
        results=len(results),
        inputs=len(inputs),
    )
    return (made,) if len(results) == 1 else tuple(made)
