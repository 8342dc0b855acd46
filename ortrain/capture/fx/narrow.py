"""Kernels that compute in float32 on float16 and bfloat16, with their casts as operators.

Our own translations see to that themselves (:func:`ortrain.graph.rounding.rounding_once`). Left are
normalizations whose weights are of another dtype than what they normalize, as under autocast, for
ONNX's operators take one dtype; and what torchlib translates into several operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ortrain.capture.fx.splice import Emitter, arguments_of

aten = torch.ops.aten

_NARROW = (torch.float16, torch.bfloat16)
_NORMS = {
    aten.layer_norm.default,
    aten.group_norm.default,
    aten.batch_norm.default,
    aten.instance_norm.default,
}
_BY_TORCHLIB = {
    "addcdiv.default", "addcmul.default", "celu.default", "cross.default", "deg2rad.default",
    "elu.default", "glu.default", "hardsigmoid.default", "hardswish.default",
    "instance_norm.default", "leaky_relu.default", "lerp.Scalar", "linalg_cross.default",
    "logit.default", "logsumexp.default", "mish.default", "pow.Scalar", "prod.default",
    "prod.dim_int", "rad2deg.default", "round.decimals", "selu.default", "softplus.default",
    "upsample_bicubic2d.vec", "upsample_bilinear2d.vec", "upsample_trilinear3d.vec",
}  # fmt: skip


def norms_in_float32(module: fx.GraphModule) -> None:
    """Normalizes narrow tensors in float32 where the weights are so."""
    for node in list(module.graph.nodes):
        if node.target in _NORMS and _is_narrow(arguments_of(node)["input"]):
            held = [n for n in node.all_input_nodes if _dtype(n) is torch.float32]
            if held:
                _in_float32(module.graph, node)


def kernels_in_float32(module: fx.GraphModule) -> None:
    """Has float32 in and out of what would be rounded to a narrow dtype several times.

    So would a number of float32 be that meets a narrow tensor: PyTorch takes it as it is, and the
    tensor decides about the dtype.
    """
    for node in list(module.graph.nodes):
        if node.op != "call_function" or not any(map(_is_narrow, node.all_input_nodes)):
            continue
        name = str(node.target).removeprefix("aten.")
        if name in _BY_TORCHLIB or _takes_number_of_float32(node):
            _in_float32(module.graph, node)


def _takes_number_of_float32(node: fx.Node) -> bool:
    """Whether a call of narrow tensors, which returns one, takes a tensor of one float32."""
    pointwise = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in (
        node.target.tags
    )
    numbers = [n for n in node.all_input_nodes if _dtype(n) is torch.float32]
    alone = all(n.meta["val"].ndim == 0 for n in numbers)
    return bool(pointwise and _is_narrow(node) and numbers and alone)


def _in_float32(graph: fx.Graph, node: fx.Node) -> None:
    """Runs a call, which returns one tensor, on float32, and rounds its result."""
    dtype = node.meta["val"].dtype
    with graph.inserting_before(node):
        emit = Emitter(graph, node)
        wide = {
            n: emit(aten.to.dtype, n, torch.float32) for n in node.all_input_nodes if _is_narrow(n)
        }
        args: Any = fx.node.map_arg(node.args, lambda n: wide.get(n, n))
        kwargs: Any = fx.node.map_arg(node.kwargs, lambda n: wide.get(n, n))
        target: Any = node.target
        result = graph.call_function(target, args, kwargs)
        result.meta = {**node.meta, "val": _in_dtype(node.meta["val"], torch.float32)}
        node.replace_all_uses_with(emit(aten.to.dtype, result, dtype))
    graph.erase_node(node)


def _in_dtype(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    mode: Any = torch._guards.detect_fake_mode([value])
    with mode:
        return value.to(dtype)


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def _is_narrow(node: Any) -> bool:
    return isinstance(node, fx.Node) and _dtype(node) in _NARROW
