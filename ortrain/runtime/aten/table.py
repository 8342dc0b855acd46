"""The table of kernels: how each operator is spelled in calls of PyTorch.

A kernel reads like the call that it writes::

    @kernel("Softmax")
    def softmax(t, input, *, axis=-1):
        return t.softmax(input, axis)

Its signature is the operator's ONNX schema: inputs positional, None where an optional one is
absent, and attributes by keyword with ONNX's defaults. ``t`` is the :class:`Writer` of the
function that is being written. A kernel for some forms of its operator says ``when=`` it serves a
node; the others are as if there were none. So are nodes with an input or an attribute that its
signature does not have: a later version of ONNX may have given the operator a meaning that the
kernel does not know.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import onnx_ir as ir

from ortrain.errors import GraphError
from ortrain.runtime.aten.dtypes import holds

Kernel = Callable[..., Any]

KERNELS: dict[tuple[str, str], Kernel] = {}
_CONDITIONS: dict[Kernel, Callable[[ir.Node], bool]] = {}

# They have no kernel: constants are read where they are, and sizes are Python numbers.
_NO_CALLS = {"Constant", "Shape", "Size"}


def kernel(
    *operators: str, when: Callable[[ir.Node], bool] | None = None
) -> Callable[[Kernel], Kernel]:
    """Registers the decorated function for operators.

    Args:
        operators: ``"Softmax"``, ``"ortrain::Dropout"``.
        when: tells whether it serves a node; each, by default.
    """

    def register(function: Kernel) -> Kernel:
        for operator in operators:
            domain, _, op_type = operator.rpartition("::")
            if (domain, op_type) in KERNELS:
                raise GraphError(f"there are two kernels for {operator}")
            KERNELS[domain, op_type] = function
        if when is not None:
            _CONDITIONS[function] = when
        return function

    return register


def find(node: ir.Node) -> Kernel | None:
    """The kernel of a node; None where no call of PyTorch computes it."""
    if not all(map(holds, (*node.inputs, *node.outputs))):
        return None
    function = KERNELS.get((node.domain, node.op_type))
    if function is None or not _takes(function, node):
        return None
    condition = _CONDITIONS.get(function)
    return None if condition is not None and not condition(node) else function


def _takes(function: Kernel, node: ir.Node) -> bool:
    """Whether a kernel's signature has each input and each attribute of a node."""
    most, names = _signature(function)
    given = [i for i, value in enumerate(node.inputs) if value is not None]
    return max(given, default=-1) < most and names.issuperset(node.attributes)


@cache
def _signature(function: Kernel) -> tuple[float, frozenset[str]]:
    """How many inputs a kernel takes, and the names of what may be an attribute.

    An input may be one: before opset 18 the axes of a reduction are.
    """
    rest = list(inspect.signature(function).parameters.values())[1:]  # behind the writer
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in rest)
    count = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in rest)
    return float("inf") if takes_any else count, frozenset(p.name for p in rest)


def named(node: ir.Node) -> str:
    """The operator of a node, ``domain::`` before a foreign one."""
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type


def serves(node: ir.Node) -> bool:
    """Whether PyTorch computes a node, those of its sub-graphs included."""
    known = find(node) is not None or (not node.domain and node.op_type in _NO_CALLS)
    return known and all(serves(inner) for graph in _subgraphs(node) for inner in graph)


def _subgraphs(node: ir.Node) -> Iterator[ir.Graph]:
    for attribute in node.attributes.values():
        if attribute.type is ir.AttributeType.GRAPH:
            yield attribute.as_graph()
