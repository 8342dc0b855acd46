"""Transformers' product of grouped rows, which its experts compute."""

from __future__ import annotations

import onnx_ir as ir
from torch import Tensor

from ortrain.capture.onnx.translations.base import Translator, translation


def grouped_matmul(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Stands in a graph for the operator, which is not there unless transformers is imported."""
    raise AssertionError("is translated, not called")


@translation(grouped_matmul)
def experts(op: Translator, input: ir.Value, weight: ir.Value, offs: ir.Value) -> ir.Value:
    product: ir.Value = op.ours("GroupedMatMul", input, weight, op.cast(offs, ir.DataType.INT64))
    return product
