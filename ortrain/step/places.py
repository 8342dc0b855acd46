"""Where a program's tensors lie in a call, and how its outputs make up the module's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ortrain.capture.export import Captured
from ortrain.capture.returned import Source
from ortrain.guards.handed import Changes, Handed
from ortrain.guards.structure import FlatCall, OutputStructure, flatten_call
from ortrain.program import Program, Role


def distinct(flat: FlatCall) -> tuple[dict[int, int], tuple[Any, ...], dict[str, Any]]:
    """The call with a tensor object of its own at each place where one stands.

    Returns:
        Position in torch's flattening of the call → place among ``flat.tensors``, and the
        arguments. Capture flattens a call in torch's order, the hot path in its own; where a tensor
        is passed twice, the objects alone do not tell which is which.
    """
    leaves, spec = pytree.tree_flatten(flat.traced)
    own = [_alias(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(own, spec)
    places = {id(tensor): i for i, tensor in enumerate(flatten_call(args, kwargs).tensors)}
    return {p: places[id(leaf)] for p, leaf in enumerate(own) if id(leaf) in places}, args, kwargs


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        return tensor  # which capture refuses by name
    detached = tensor.clone() if tensor.is_inference() else tensor.detach()
    return detached.requires_grad_(tensor.requires_grad)


def structure_of(captured: Captured) -> tuple[OutputStructure, bool, Changes | None]:
    """How the program's outputs make up the module's, from stand-ins in their places.

    Returns:
        The structure, whether they come in its order, and what of them goes to the arguments.
    """
    count = len(captured.program.outputs(Role.USER_OUTPUT, Role.LOSS))
    tensors = [torch.empty(()) for _ in range(count)]
    output = captured.rebuild(tensors)
    changes = output.changes if isinstance(output, Handed) else None
    found, structure = OutputStructure.from_output(output)
    order = [next(i for i, t in enumerate(tensors) if t is f) for f in found]
    ordered = order == list(range(count))
    if not ordered:
        rebuild = structure.rebuild
        structure.rebuild = lambda outputs: rebuild([outputs[i] for i in order])
    return structure, ordered, changes


def placed(
    source: Source, place: Mapping[int, int], module: nn.Module, tensors: Mapping[str, torch.Tensor]
) -> Source:
    """A source with an argument's place in the call, or the first of the names of what is held."""
    if source.kind == "argument":
        return replace(source, index=place[source.index])
    if source.kind == "held":
        parameters = dict(module.named_parameters(remove_duplicate=False))
        every = parameters | dict(module.named_buffers(remove_duplicate=False))
        held = every[source.name]
        return replace(source, name=next(n for n, t in tensors.items() if t is held))
    return source


def device_of(flat: FlatCall, tensors: Mapping[str, torch.Tensor]) -> torch.device:
    """That a call and its module are on."""
    first = next(iter((*tensors.values(), *flat.tensors)), None)
    return torch.device("cpu") if first is None else first.device


def axes_of(program: Program, positions: Sequence[int]) -> list[tuple[str, int, int]]:
    """A place for each symbolic dimension of a program, among the tensors of a call."""
    places: dict[str, tuple[int, int]] = {}
    for value, position in zip(program.inputs(Role.USER_INPUT), positions, strict=True):
        for axis, dim in enumerate(value.shape or ()):
            if not isinstance(dim, int) and dim.value is not None:
                places.setdefault(dim.value, (position, axis))
    return [(symbol, *place) for symbol, place in places.items()]
