"""Torch's implicit casts, made explicit."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ortrain.capture.fx.splice import from_same_place, new_node
from ortrain.pytorch.operators import OpOverload, schema_of
from ortrain.pytorch.tracing import fake_mode_of

aten = torch.ops.aten

# Element by element: the result's recorded dtype is the one that torch computes in.
_POINTWISE = {
    "add", "sub", "rsub", "mul", "div", "true_divide", "pow", "where", "minimum", "maximum",
    "exp", "log", "sqrt", "rsqrt", "reciprocal", "sigmoid", "tanh", "sin", "cos", "erf", "gelu",
    "silu", "relu", "neg", "cat", "stack", "addcmul", "addcdiv", "lerp", "atan2", "fmod",
    "remainder", "floor_divide", "clamp", "clamp_min", "clamp_max", "log1p", "expm1", "log2",
    "log10", "softplus", "leaky_relu", "elu", "mean", "xlogy", "logaddexp", "__and__", "__or__",
    "__xor__", "bitwise_and", "bitwise_or", "bitwise_xor", "masked_fill", "linear", "square",
    "exp2", "tan", "sinh", "cosh", "asin", "acos", "atan", "asinh", "acosh", "atanh",
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
    "binary_cross_entropy_with_logits", "baddbmm", "addmm", "addr", "einsum", "logaddexp2",
}  # fmt: skip
_COMPARING = {"eq", "ne", "ge", "gt", "le", "lt"}
# Of what they are given, whole numbers are classes.
_OF_CLASSES = {"cross_entropy_loss"}
# Kernels of narrow tensors that take a scalar at the right as it is, and not in their dtype.
_BY_SCALARS = {"mul", "div", "true_divide", "floor_divide"}
_NARROW = {torch.float16, torch.bfloat16}
# Places beside each other have one dtype in ONNX.
_INDEXING = {"index", "index_put"}
_LOGICAL = {"logical_and", "logical_or", "logical_xor", "logical_not"}


def promote(module: fx.GraphModule) -> None:
    """Makes torch's implicit casts explicit, from the dtypes that the export recorded."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        result = node.meta.get("val")
        if node.target.namespace != "aten" or not isinstance(result, torch.Tensor):
            continue
        name = schema_of(node.target).name.removeprefix("aten::")
        tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        if name in _INDEXING:
            listed: Any = node.args[1]
            places = [n for n in listed if n is not None]
            _cast([n for n in places if n.meta["val"].dtype == torch.int32], torch.int64, node)
            continue
        dtype = _common_dtype(node) if name in _COMPARING else result.dtype
        if dtype != torch.bool:
            _bools_as_numbers(node)
        if name in _LOGICAL:
            dtype = torch.bool
        elif name in _OF_CLASSES:
            tensors = [n for n in tensors if n.meta["val"].is_floating_point()]
        elif name not in _COMPARING and name not in _POINTWISE:
            continue
        if name in ("where", "masked_fill"):  # the condition keeps its dtype
            condition = node.args[0] if name == "where" else node.args[1]
            tensors = [n for n in tensors if n is not condition]
        if dtype in _NARROW and isinstance(node.kwargs.get("alpha"), float):
            node.update_kwarg("alpha", float(torch.tensor(node.kwargs["alpha"], dtype=dtype)))
        if name in _BY_SCALARS and _is_by_wider_scalar(node):
            _cast(tensors, torch.float32, node)
            with graph.inserting_after(node):
                rounded = new_node(graph, aten.to.dtype, (node, dtype), node)
            node.replace_all_uses_with(rounded, lambda user, own=rounded: user is not own)
            node.meta["val"] = _in_dtype(result, torch.float32)
            continue
        _cast(tensors, dtype, node)


def _is_by_wider_scalar(node: fx.Node) -> bool:
    """Whether a narrow tensor meets a tensor without dimensions that its dtype would round."""
    left, right = (v.meta["val"] if isinstance(v, fx.Node) else None for v in node.args[:2])
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return False
    return left.dtype in _NARROW and left.ndim > 0 and not right.ndim and right.dtype != left.dtype


def _cast(tensors: list[fx.Node], dtype: torch.dtype, node: fx.Node) -> None:
    """A node's tensors in a dtype."""
    for tensor in tensors:
        known = tensor.meta["val"]
        if known.dtype == dtype:
            continue
        with node.graph.inserting_before(node):
            cast = new_node(node.graph, aten.to.dtype, (tensor, dtype), tensor)
        cast.meta["val"] = _in_dtype(known, dtype)
        from_same_place(cast, node)
        node.replace_input_with(tensor, cast)


def _bools_as_numbers(node: fx.Node) -> None:
    """``x + True`` adds 1: no operator of ONNX adds a bool to a number."""
    schema: Any = node.target
    for i, parameter in enumerate(schema_of(schema).arguments):
        if str(parameter.type) not in ("number", "Optional[number]", "Tensor"):
            continue
        given, named = (node.args[i] if i < len(node.args) else None), parameter.name
        if given is True or given is False:
            node.update_arg(i, int(given))
        elif (given := node.kwargs.get(named)) is True or given is False:
            node.update_kwarg(named, int(given))


def _common_dtype(node: fx.Node) -> torch.dtype:
    left, right = node.args[:2]
    values = [v.meta["val"] if isinstance(v, fx.Node) else v for v in (left, right)]
    return torch.result_type(*(_number(v) for v in values))


def _number(value: Any) -> Any:
    """Symbolic sizes promote as Python integers do."""
    return 2 if isinstance(value, torch.SymInt) else value


def _in_dtype(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    mode = fake_mode_of([value])
    if mode is None:
        return value.to(dtype)
    with mode:
        return value.to(dtype)
