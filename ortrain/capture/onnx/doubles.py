"""A graph of float64 that would compute with numbers of float32 is refused.

A floating-point attribute of an ONNX operator is a float32, whatever its tensors are, and some
operators are defined by functions with float32 in them. The translations write such operators out
in float64; here it is made sure that none is left: an error of 1e-8 would show nowhere.
"""

from __future__ import annotations

import functools

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import fx

from ortrain.capture.onnx.torchlib import has_tensor
from ortrain.capture.origin import BESIDE, captured_error, operator_name
from ortrain.graph.shapes import fits_float32

# Whose definitions compute in float32: mean and variance, or with the numbers in their functions.
SINGLE = frozenset(
    {"Gelu", "GroupNormalization", "HardSwish", "LayerNormalization", "RMSNormalization"}
)
# Read in training mode alone, which is an operator of ortrain's.
_UNREAD = {("BatchNormalization", "momentum")}


def refuse_rounded(model: ir.Model) -> None:
    """Raises at the first operator on float64 that has a number which float32 rounds.

    Raises:
        CaptureError: naming the operator and its number.
    """
    opset, nodes = model.opset_imports[""], list(model.graph.all_nodes())
    if all(v.dtype != ir.DataType.DOUBLE for node in nodes for v in node.outputs):
        return
    for node in nodes:
        source = node.meta.get("node")  # dtypes inside of a function of torchlib's are not known
        if node.domain or source is None or not has_tensor(source, torch.float64):
            continue
        if number := _narrowed(node, source) or _rounded(node, opset):
            raise captured_error(
                source,
                f"{operator_name(source.target)} of float64 has no exact graph",
                because=f"its {number} would be float32 in ONNX",
                help=f"compute it in float32 or write it out; or {BESIDE}",
            )


def _narrowed(node: ir.Node, source: fx.Node) -> str:
    """What a translation casts to float32, where its operator has nothing to do with that."""
    casts = node.op_type == "Cast" and node.attributes["to"].as_int() == ir.DataType.FLOAT
    return "operands" if casts and not has_tensor(source, torch.float32) else ""


def _rounded(node: ir.Node, opset: int) -> str:
    """What of a node float32 rounds; empty if nothing."""
    if node.op_type in SINGLE:
        return "statistics or numbers"
    given = {
        name: a.as_float()
        for name, a in node.attributes.items()
        if a.type == ir.AttributeType.FLOAT
    }
    for name, value in {**_defaults(node.op_type, opset), **given}.items():
        if (node.op_type, name) not in _UNREAD and not fits_float32(value):
            return name
    return ""


@functools.cache
def _defaults(op_type: str, opset: int) -> dict[str, float]:
    """The floating-point attributes of an operator to which none is given, in decimal."""
    attributes = onnx.defs.get_schema(op_type, opset).attributes.values()
    kind = onnx.AttributeProto.FLOAT
    return {
        a.name: float(str(np.float32(a.default_value.f)))
        for a in attributes
        if a.default_value.type == kind
    }
