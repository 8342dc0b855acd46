"""The table of kernels: how each operator is spelled in calls of PyTorch.

A kernel reads like the call that it writes::

    @kernel("Softmax")
    def softmax(t, input, *, axis=-1):
        return t.softmax(input, axis)

Its signature is the operator's ONNX schema: inputs positional, None where an optional one is
absent, and attributes by keyword with ONNX's defaults. ``t`` is the :class:`Writer` of the
function that is being written. A kernel for some forms of its operator says ``when=`` it serves a
node; the others are as if there were none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import onnx_ir as ir

from ortrain.errors import GraphError
from ortrain.program import Program
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
    from ortrain.runtime.aten import kernels  # noqa: F401  (they fill the table)

    if not all(map(holds, (*node.inputs, *node.outputs))):
        return None
    function = KERNELS.get((node.domain, node.op_type))
    condition = None if function is None else _CONDITIONS.get(function)
    return None if condition is not None and not condition(node) else function


def serves(node: ir.Node) -> bool:
    """Whether PyTorch computes a node, those of its sub-graphs included."""
    known = find(node) is not None or (not node.domain and node.op_type in _NO_CALLS)
    return known and all(serves(inner) for graph in _subgraphs(node) for inner in graph)


def missing(program: Program) -> list[str]:
    """The operators of a lowered program that have no kernel, ``domain::`` before foreign ones."""
    nodes = [node for node in program.graph.all_nodes() if not serves(node)]
    return sorted(
        {
            f"{node.domain}::{node.op_type}" if node.domain else node.op_type
            for node in nodes
            if find(node) is None
        }
    )


def _subgraphs(node: ir.Node) -> Iterator[ir.Graph]:
    for attribute in node.attributes.values():
        if attribute.type is ir.AttributeType.GRAPH:
            yield attribute.as_graph()
