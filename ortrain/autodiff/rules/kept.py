"""Calls that stay PyTorch's: their gradients are autograd's."""

from __future__ import annotations

import onnx_ir as ir

from ortrain.autodiff.registry import gradient, no_gradient
from ortrain.ops.base import DOMAIN

no_gradient("ortrain::KeptGrad", reason="PyTorch runs the module again for it")


@gradient("ortrain::Kept")
def kept(g, *tensors, key, sizes=0, connected=(), ways=(), needs=(), axes=(), packed=0):
    """what `torch.autograd.grad` gives for the call"""
    wanted, dys = [i for i in connected if g.needs(i)], g.dys
    if not wanted:
        return [None] * len(tensors)
    context = g.output(len(g.node.outputs), ir.DataType.INT64)
    context.shape = ir.Shape([0])  # it is no tensor, and of no size that anybody could ask for
    g.node.attributes["needs"] = ir.AttrInt64s("needs", wanted)
    made = g.op.node("KeptGrad", [context, *dys], domain=DOMAIN, outputs=len(wanted), key=key)
    found = dict(zip(wanted, [made] if len(wanted) == 1 else made, strict=True))
    for i, value in found.items():
        value.type = ir.TensorType(tensors[i].dtype)
        value.shape = tensors[i].shape
    return [found.get(i) for i in range(len(tensors))]
