"""Forward operators in the form that gives their gradient what a fused kernel of it asks for.

A kernel of a gradient takes what its forward has left: statistics, places of maxima, a row's
logarithm of a sum. ONNX's operators return none of that. Where an executor keeps the operator that
does, it takes the place of the standard one before the walk, and has a rule of its own::

    y = GroupNormalization(x, w, b)    →    y, mean, inverse = ortrain.GroupNorm(x, w, b)

Where it does not, nothing happens, and the standard operator's rule does without.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

import onnx_ir as ir

from ortrain.autodiff.registry import Keep
from ortrain.graph import shapes
from ortrain.graph.build import Builder
from ortrain.graph.rewire import detach, learn, take_place
from ortrain.graph.walk import reads
from ortrain.ops.base import DOMAIN, OPERATORS, attributes_of
from ortrain.program import Program, origin_of, phase_of, region_of

Reached = Collection[ir.Value]
Form = tuple[str, tuple[ir.Value | None, ...], dict[str, Any]]
"""The operator of ours, its inputs and its attributes."""

_PAIRS: dict[tuple[str, str], Callable[..., Form | None]] = {}


def _instead_of(name: str) -> Callable[[Callable[..., Form | None]], Callable[..., Form | None]]:
    """Registers what may take an operator's place; the function returns None where nothing may."""

    def register(function: Callable[..., Form | None]) -> Callable[..., Form | None]:
        domain, _, op_type = name.rpartition("::")
        _PAIRS[domain, op_type] = function
        return function

    return register


def take_pairs(program: Program, reached: Reached, keep: Keep) -> None:
    """Replaces what has a better form that the executor keeps, where a gradient flows through it.

    Args:
        program: a forward program; changed in place.
        reached: values that depend on what a gradient is asked of.
        keep: says which operators the executor keeps.
    """
    for node in list(program.graph):
        find = _PAIRS.get((node.domain, node.op_type))
        if find is None or not any(v in reached for v in reads(node)):
            continue
        form = find(node, reached, *_inputs(node, find), **attributes_of(node))
        if form is None:
            continue
        name, inputs, attributes = form
        builder = Builder(
            opset=program.opset,
            prefix=node.outputs[0].name or node.op_type,
            phase=phase_of(node),
            origin=origin_of(node),
            region=region_of(node),
        )
        count = len(OPERATORS[name].outputs)
        builder.node(name, inputs, domain=DOMAIN, outputs=count, **attributes)
        (made,) = builder.nodes
        learn(made.outputs[0], node.outputs[0])
        if not keep(made):
            detach(made)
            continue
        program.graph.insert_before(node, made)
        take_place(made.outputs[0], node.outputs[0])
        program.graph.remove(node, safe=True)


def _inputs(node: ir.Node, function: Callable[..., Any]) -> list[ir.Value | None]:
    """All inputs that the function takes, None for those that the node has not."""
    parameters = inspect.signature(function).parameters.values()
    wanted = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][2:]
    return [*node.inputs, *[None] * (len(wanted) - len(node.inputs))]


@_instead_of("Mul")
def _mul(node: ir.Node, reached: Reached, a: ir.Value, b: ir.Value) -> Form | None:
    """That of x and sigmoid(x) is silu(x), whose gradient asks for x alone."""
    for x, s in ((a, b), (b, a)):
        producer = s.producer()
        if producer is not None and producer.op_type == "Sigmoid" and producer.inputs[0] is x:
            return "Silu", (x,), {}
    return None


@_instead_of("GroupNormalization")
def _group_norm(
    node: ir.Node, reached: Reached, x: ir.Value, scale: ir.Value, bias: ir.Value, *,
    num_groups: int, epsilon: float = 1e-5, stash_type: int = 1,
) -> Form | None:  # fmt: skip
    """With its statistics; not as before opset 21, with a scale for each group."""
    channels = (shapes.dims(x) or (None, None))[1]
    if channels is None or shapes.dims(scale) != (channels,) or stash_type != 1:
        return None
    return "GroupNorm", (x, scale, bias), {"num_groups": num_groups, "epsilon": epsilon}


@_instead_of("InstanceNormalization")
def _instance_norm(
    node: ir.Node,
    reached: Reached,
    x: ir.Value,
    scale: ir.Value,
    bias: ir.Value,
    *,
    epsilon: float = 1e-5,
) -> Form | None:
    """Groups of one channel."""
    channels = (shapes.dims(x) or (None, None))[1]
    if not isinstance(channels, int):
        return None
    return "GroupNorm", (x, scale, bias), {"num_groups": channels, "epsilon": epsilon}


@_instead_of("MaxPool")
def _max_pool(
    node: ir.Node, reached: Reached, x: ir.Value, *, kernel_shape: list[int],
    auto_pad: str = "NOTSET", storage_order: int = 0, **window: Any,
) -> Form | None:  # fmt: skip
    """With the places of the maxima; not where somebody reads ONNX's own indices."""
    if auto_pad != "NOTSET" or len(node.outputs) > 1:
        return None
    return "MaxPool", (x,), {"kernel_shape": kernel_shape, **window}


@_instead_of("ortrain::Attention")
def _attention(
    node: ir.Node, reached: Reached, query: ir.Value, key: ir.Value, value: ir.Value,
    mask: ir.Value | None = None, seed: ir.Value | None = None, index: ir.Value | None = None, *,
    scale: float, causal: int = 0, ratio: float = 0.0, stream: int = 0,
) -> Form | None:  # fmt: skip
    """Without dropout, and without a gradient of the mask."""
    if ratio or mask in reached:
        return None
    return "FlashAttention", (query, key, value, mask), {"scale": scale, "causal": causal}
