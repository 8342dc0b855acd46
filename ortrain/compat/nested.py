"""Nested inputs and outputs as a list of tensors and what puts them together again."""

from __future__ import annotations

from ortrain.extras import require

require("torch", __name__)

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ortrain.pytorch import pytree

PrimitiveType = bool | int | str | float | None
ORTModelInputOutputType = (
    torch.Tensor | PrimitiveType | Sequence[Any] | Mapping[str, Any]  # to any depth
)


@dataclass(frozen=True)
class ORTModelInputOutputSchemaType:
    """A structure without its tensors.

    Attributes:
        structure: how values nest.
        constants: place among them → value, of what is no tensor.
        tensors: how many tensors there are.
    """

    structure: pytree.TreeSpec
    constants: dict[int, Any]
    tensors: int


def extract_data_and_schema(
    data: Any, constant_as_tensor: bool = False, device: torch.device | None = None
) -> tuple[list[torch.Tensor], ORTModelInputOutputSchemaType]:
    """The tensors of a structure, in order, and the structure without them.

    Args:
        data: tensors and constants in tuples, lists and dicts, to any depth.
        constant_as_tensor: numbers and booleans become tensors [] among them.
        device: of these tensors.

    Raises:
        TypeError: ``constant_as_tensor`` without a device.
    """
    if constant_as_tensor and device is None:
        raise TypeError("constant_as_tensor=True needs the device of the tensors: device=…")
    leaves, structure = pytree.tree_flatten(data)
    tensors, constants = [], {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        elif constant_as_tensor and isinstance(leaf, bool | int | float):
            tensors.append(torch.tensor(leaf, device=device))
        else:
            constants[place] = leaf
    return tensors, ORTModelInputOutputSchemaType(structure, constants, len(tensors))


def unflatten_data_using_schema(
    data: Sequence[torch.Tensor], schema: ORTModelInputOutputSchemaType
) -> Any:
    """The structure with these tensors in it.

    Raises:
        ValueError: it takes another number of tensors.
    """
    if len(data) != schema.tensors:
        raise ValueError(f"the structure has {schema.tensors} tensors, {len(data)} were given")
    values, places = iter(data), range(schema.tensors + len(schema.constants))
    leaves = [schema.constants[p] if p in schema.constants else next(values) for p in places]
    return pytree.tree_unflatten(leaves, schema.structure)
