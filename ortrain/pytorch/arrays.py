"""NumPy in a graph of Dynamo's, which computes with tensors what NumPy computes with arrays.

Tensors round otherwise, so PyTorch runs the code of such a graph. A number that NumPy computes of
constants, such as ``numpy.sqrt(64)``, is computed by NumPy here, and may scale a tensor.

Private: ``torch._dynamo.utils.numpy_to_tensor_wrapper`` and its kin around functions of
``torch._numpy``, and ``meta["grapharg"]`` of a placeholder for an array. What serves without them
is ``trace_numpy=False`` once operators in place are not run while code is traced.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch._dynamo import utils

# Why a graph is not taken.
ARRAYS = "it computes with arrays of NumPy, which round otherwise than a graph"

_COMPUTES = (
    utils.numpy_to_tensor_wrapper,
    utils.numpy_method_wrapper,
    utils.numpy_operator_wrapper,
)
_SCALED = {
    function
    for name in ("add", "mul", "sub", "truediv")
    for function in (getattr(operator, name), getattr(operator, f"i{name}"))
}


def fold_arrays(graph: fx.GraphModule) -> bool:
    """Has NumPy compute what a graph computes with it of constants alone, if it is a number.

    Args:
        graph: Dynamo's; it is changed in place.

    Returns:
        whether it computes nothing else with NumPy.
    """
    for node in graph.graph.find_nodes(op="placeholder"):
        if _is_array(node) and not all(_scales(user, node) for user in node.users):
            return False
    for node in graph.graph.nodes:
        if node.op != "call_function" or not _is_of_numpy(node.target):
            continue
        number = _number(node)
        if number is None or not all(_scales(user, node) for user in node.users):
            return False
        for user in tuple(node.users):
            user.args = tuple(number if each is node else each for each in user.args)
        graph.graph.erase_node(node)
    return True


def _is_of_numpy(target: Any) -> bool:
    return isinstance(target, _COMPUTES) or target is utils.numpy_attr_wrapper


def _number(node: fx.Node) -> float | None:
    """What a function of constants gives, if it is a number."""
    function = _function_of(node.target)
    if function is None or node.all_input_nodes:
        return None
    try:
        value = function(*node.args, **node.kwargs)
    except (TypeError, ValueError):
        return None
    return value.item() if isinstance(value, np.floating | np.integer) else None


def _function_of(target: Any) -> Callable[..., Any] | None:
    """NumPy's own function, if PyTorch's in its place has the same name at the same place."""
    if not isinstance(target, utils.numpy_to_tensor_wrapper):
        return None
    name = target.f.__name__
    ours: Any = getattr(torch._numpy, name, None)
    function: Any = getattr(np, name, None)
    return function if ours is target.f and callable(function) else None


def _is_array(placeholder: fx.Node) -> bool:
    given = placeholder.meta.get("grapharg")
    return all(getattr(given, name, False) for name in ("pass_arg_as_tensor", "is_tensor"))


def _scales(user: fx.Node, number: fx.Node) -> bool:
    """Whether a number scales a tensor, whose type the result has."""
    value = number.meta.get("example_value")
    if not isinstance(value, Tensor) or value.dim():
        return False
    others = [each.meta.get("example_value") for each in user.all_input_nodes if each is not number]
    return user.target in _SCALED and any(
        isinstance(each, Tensor) and each.dim() > 0 and each.is_floating_point() for each in others
    )
