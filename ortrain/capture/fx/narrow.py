"""Kernels that compute in float32 on float16 and bfloat16, with their casts as operators.

Our own translations see to that themselves (:func:`ortrain.graph.rounding.rounding_once`). Left are
normalizations whose weights are of another dtype than what they normalize, as under autocast, for
ONNX's operators take one dtype; what torchlib translates into several operators; and ELU, its
relatives and ``logit``, of which several would round between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ortrain.capture.fx.splice import Emitter, arguments_of
from ortrain.pytorch.tracing import fake_mode_of

aten = torch.ops.aten

_NARROW = (torch.float16, torch.bfloat16)
_NORMS = {
    aten.layer_norm.default,
    aten.group_norm.default,
    aten.batch_norm.default,
    aten.instance_norm.default,
}
_IN_FLOAT32 = {
    "addcdiv.default", "addcmul.default", "celu.default", "cross.default", "deg2rad.default",
    "elu.default", "glu.default", "hardsigmoid.default", "hardswish.default",
    "instance_norm.default", "leaky_relu.default", "lerp.Scalar", "linalg_cross.default",
    "logit.default", "logsumexp.default", "mish.default", "pow.Scalar", "prod.default",
    "prod.dim_int", "rad2deg.default", "round.decimals", "selu.default", "softplus.default",
}  # fmt: skip


def norms_in_float32(module: fx.GraphModule) -> None:
    """Normalizes narrow tensors in float32 where the weights are so."""
    for node in list(module.graph.nodes):
        if node.target in _NORMS and _is_narrow(arguments_of(node)["input"]):
            held = [n for n in node.all_input_nodes if _dtype(n) is torch.float32]
            if held:
                _in_float32(module.graph, node)


def kernels_in_float32(module: fx.GraphModule) -> None:
    """Has float32 in and out of what would be rounded to a narrow dtype several times."""
    for node in list(module.graph.nodes):
        if node.op != "call_function" or not any(map(_is_narrow, node.all_input_nodes)):
            continue
        name = str(node.target).removeprefix("aten.")
        if name in _IN_FLOAT32:
            _in_float32(module.graph, node)


def _in_float32(graph: fx.Graph, node: fx.Node) -> None:
    """Runs a call, which returns one tensor, on float32, and rounds its result.

    A tensor without dimensions is rounded before, as the kernel's operands are.
    """
    dtype = node.meta["val"].dtype
    with graph.inserting_before(node):
        emit = Emitter(graph, node)
        wide = {}
        for each in node.all_input_nodes:
            number = (
                dtype in _NARROW and _dtype(each) not in (None, dtype) and not each.meta["val"].ndim
            )
            if number or _is_narrow(each):
                narrow = emit(aten.to.dtype, each, dtype) if number else each
                wide[each] = emit(aten.to.dtype, narrow, torch.float32)
        args: Any = fx.node.map_arg(node.args, lambda n: wide.get(n, n))
        kwargs: Any = fx.node.map_arg(node.kwargs, lambda n: wide.get(n, n))
        target: Any = node.target
        result = graph.call_function(target, args, kwargs)
        result.meta = {**node.meta, "val": _in_dtype(node.meta["val"], torch.float32)}
        node.replace_all_uses_with(emit(aten.to.dtype, result, dtype))
    graph.erase_node(node)


def _in_dtype(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    mode: Any = fake_mode_of([value])
    with mode:
        return value.to(dtype)


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def _is_narrow(node: Any) -> bool:
    return isinstance(node, fx.Node) and _dtype(node) in _NARROW
