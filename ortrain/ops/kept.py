"""``ortrain::Kept`` and ``ortrain::KeptGrad``: a call that stays PyTorch's, and its backward.

What is called is no part of the graph: the node has a key, and :mod:`ortrain.kept` the call. So
there is no body in ONNX, and executors that are not PyTorch leave the node to one that is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from ortrain.errors import ExecutionError
from ortrain.graph.build import Builder
from ortrain.ops.base import operator

NAMES = ("Kept", "KeptGrad")


def is_kept(node: ir.Node) -> bool:
    """Whether a node is a call that stays PyTorch's, or the backward of one."""
    return node.domain == "ortrain" and node.op_type in NAMES


def key_of(node: ir.Node) -> str:
    """The key of such a node."""
    return str(node.attributes["key"].as_string())


def keys_of(graph: ir.Graph) -> list[str]:
    """The keys of the calls in a graph, in its order."""
    return [*dict.fromkeys(key_of(node) for node in graph.all_nodes() if is_kept(node))]


def is_packed(node: ir.Node) -> bool:
    """Whether a node is a call that is given some tokens, by what is known of it."""
    return is_kept(node) and "packed" in node.attributes


def led_to(node: ir.Node, given: Collection[ir.Value]) -> list[ir.Value]:
    """The outputs of such a node that have a gradient where some inputs have one.

    Args:
        node: a Kept.
        given: the values that have one, those that are no inputs of it among them.
    """
    known = node.attributes.get("ways")
    pairs = [] if known is None else list(known.as_ints())
    if not pairs:
        return list(node.outputs)
    places = {
        place for i, place in zip(pairs[::2], pairs[1::2], strict=True) if node.inputs[i] in given
    }
    return [node.outputs[place] for place in sorted(places)]


def labels_of(node: ir.Node) -> list[list[int]]:
    """The labels of the axes of a Kept's inputs and then its outputs; none where none are known."""
    given = node.attributes.get("axes")
    left = [] if given is None else list(given.as_ints())
    if not left or node.op_type != "Kept":
        return []
    found = []
    for value in (*node.inputs, *node.outputs):
        rank = len(value.shape) if value is not None and value.shape is not None else 0
        found.append(left[:rank])
        left = left[rank:]
    return [] if left else found


def _as_captured(node: ir.Node) -> None:
    """Typing: capture knows what the call gives."""


@operator("Kept", outputs=("output", "context"), types=_as_captured)
def kept(
    op: Builder,
    *tensors: ir.Value,
    key: str,
    sizes: int = 0,
    connected: Sequence[int] = (),
    ways: Sequence[int] = (),
    needs: Sequence[int] = (),
    axes: Sequence[int] = (),
    packed: int = 0,
) -> ir.Value:
    """Calls the user's code.

    Args:
        op: the builder.
        tensors: of the call, parameters that it reads, and sizes as int64 scalars.
        key: of the call.
        sizes: how many of the last inputs are sizes.
        connected: places of the inputs that a gradient may reach.
        ways: input, output, … of which the second has a gradient where the first has one; empty
            where that is so of each output and each input.
        needs: places of those whose gradient the backward asks for. With any, the last output is
            the context: what autograd has saved, which is no tensor and for KeptGrad alone.
        axes: the label of each axis of the inputs and then of the outputs, where the call is known
            to treat the places of axes with labels alone; -1 for others.
        packed: whether it is given some of those places, by what is known of it.

    Raises:
        ExecutionError: always, as there is nothing in ONNX for it.
    """
    raise _not_in_onnx(op)


@operator("KeptGrad", types=_as_captured)
def kept_grad(op: Builder, context: ir.Value, *gradients: ir.Value, key: str) -> ir.Value:
    """The gradients of the inputs that a Kept needs them of.

    Args:
        op: the builder.
        context: of the Kept.
        gradients: of its other outputs, where there are any.
        key: of the call.

    Raises:
        ExecutionError: always, as there is nothing in ONNX for it.
    """
    raise _not_in_onnx(op)


def _not_in_onnx(op: Builder) -> ExecutionError:
    return ExecutionError(
        "a call that stays PyTorch's cannot be written in ONNX",
        because="it is the user's own code, which runs in PyTorch alone",
        help='engine="aten" or "onnxruntime" trains with it; for a file, replace it by operators',
    )
