"""What a graph's outputs have to become to be the module's.

Some outputs are no new tensors: an argument, a parameter, a buffer, or another output. A graph
returns a copy of each. For who only reads, that is the same; but ``output is x`` is another answer
then, and a write to an output is no write to the argument.

Others lie in memory in another order than their axes: what a module has transposed, or computed of
images in ``channels_last``. A graph's outputs are contiguous, and with one of these
``output.transpose(0, 1).view(-1)`` would be an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind, TensorArgument

from ortrain.capture.traced import Traced
from ortrain.pytorch.conditions import with_sizes
from ortrain.pytorch.layout import inverse, laid

# What the symbols of sizes stand for: an axis may be of one in the example alone.
_SOME = 1009, 2


@dataclass(frozen=True)
class Source:
    """What an output is.

    Attributes:
        kind: ``"argument"``, ``"held"`` or ``"output"``, or ``"stored"`` where it is a new tensor.
        index: the place among the tensors of the call, or among the outputs.
        name: of the parameter or buffer.
        axes: from the outermost in memory to the innermost.
    """

    kind: str
    index: int = -1
    name: str = ""
    axes: tuple[int, ...] = ()

    @cached_property
    def back(self) -> tuple[int, ...]:
        """The permutation that undoes ``axes``."""
        return inverse(self.axes)


def views_of(traced: Traced) -> tuple[int, ...]:
    """The user outputs that share memory with another tensor of the module without being it.

    A graph returns a copy of a part of an argument, a parameter, a buffer or another output.

    Args:
        traced: as it was traced.
    """
    nodes = {node.name: node for node in traced.graph.nodes}
    owners: dict[int, fx.Node] = {}
    for node in traced.graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta.get("val"), Tensor):
            owners.setdefault(_memory(node), node)
    found = []
    for i, node in enumerate(_outputs(traced, nodes)):
        if owners.setdefault(_memory(node), node) is not node:
            found.append(i)
    return tuple(found)


def sources_of(traced: Traced, positions: Sequence[int]) -> dict[int, Source]:
    """The user outputs, counted among those that are tensors, that are no new contiguous ones.

    Args:
        traced: as it was traced: later on, writes in place make new tensors.
        positions: of the leaves of the call, in the order of the trace.

    Returns:
        Sources whose indices of arguments are positions.
    """
    nodes = {node.name: node for node in traced.graph.nodes}
    arguments = [s for s in traced.inputs if s.kind is InputKind.USER_INPUT]
    place = {
        spec.arg.name: position
        for spec, position in zip(arguments, positions, strict=True)
        if hasattr(spec.arg, "name")
    }
    held = {
        spec.arg.name: spec.target or ""
        for spec in traced.inputs
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and hasattr(spec.arg, "name")
    }
    outputs = _outputs(traced, nodes)
    found: dict[int, Source] = {}
    for i, node in enumerate(outputs):
        if node.name in place:
            found[i] = Source("argument", index=place[node.name])
        elif node.name in held:
            found[i] = Source("held", name=held[node.name])
        elif (first := outputs.index(node)) < i:
            found[i] = Source("output", index=first)
        elif (axes := _stored(node.meta["val"])) != tuple(range(len(axes))):
            found[i] = Source("stored", axes=axes)
    return found


def instead(
    outputs: Sequence[Tensor],
    sources: Mapping[int, Source],
    arguments: Sequence[Tensor],
    held: Mapping[str, Tensor],
) -> list[Tensor]:
    """The outputs of a graph, with the tensors in their places that the module returns.

    Args:
        outputs: of the graph.
        sources: which of them are what.
        arguments: tensors of the call.
        held: parameters and buffers by name.
    """
    result = list(outputs)
    for i, source in sources.items():
        if source.kind == "argument":
            result[i] = arguments[source.index]
        elif source.kind == "held":
            result[i] = held[source.name]
        elif source.kind == "output":
            result[i] = result[source.index]
        else:
            result[i] = laid(result[i], source.axes, source.back)
    return result


def _outputs(traced: Traced, nodes: Mapping[str, fx.Node]) -> list[fx.Node]:
    """What makes the user outputs that are tensors."""
    return [
        written_by(nodes[spec.arg.name])
        for spec in traced.outputs
        if isinstance(spec.arg, TensorArgument)
    ]


def _memory(node: fx.Node) -> int:
    """What two nodes have in common whose tensors lie in the same memory."""
    tensor: Tensor = node.meta["val"]
    if tensor.layout is not torch.strided:
        return -id(node)
    return tensor.untyped_storage()._cdata


def _stored(tensor: Tensor) -> tuple[int, ...]:
    """The axes of a tensor in the order in which they lie in memory, at any sizes.

    An axis of size 1 stays where it is among the others, and those along which all elements are the
    same come first, so that they part no others. The channel of grey images lies last where its
    stride says so: a convolution reads it.
    """
    if tensor.layout is not torch.strided:
        return tuple(range(tensor.ndim))
    numbers = next(with_sizes([*tensor.shape, *tensor.stride()], _SOME))
    sizes, strides = numbers[: tensor.ndim], [*map(float, numbers[tensor.ndim :])]
    grey = len(sizes) in (4, 5) and sizes[1] == strides[1] == 1
    for axis in reversed(range(len(sizes))):
        if sizes[axis] == 1:
            inner = axis + 1
            strides[axis] = sizes[inner] * strides[inner] if inner < len(sizes) else 1
    if grey:
        strides[1] = 0.5
    return tuple(sorted(range(len(sizes)), key=lambda axis: -(strides[axis] or math.inf)))


def written_by(node: fx.Node) -> fx.Node:
    """The tensor that an operator in place writes to, and returns."""
    while isinstance(node.target, torch._ops.OpOverload) and isinstance(node.args[0], fx.Node):
        name = node.target._schema.name
        if not node.target._schema.is_mutable or not name.endswith("_") or name.endswith("__"):
            break
        node = node.args[0]
    return node
