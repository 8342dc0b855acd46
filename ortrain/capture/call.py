"""The arguments of an example call: their names, and copies that the export may trace."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ortrain.errors import UnsupportedInput

_CONSTANT = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout,
             torch.memory_format)  # fmt: skip


@dataclass(frozen=True)
class Leaf:
    """One leaf of ``(args, kwargs)``.

    Attributes:
        position: in ``torch.utils._pytree.tree_leaves((args, kwargs))`` of the call as it came.
        name: the forward parameter that it belongs to, and the way into it: ``past.0.1``.
        value: a tensor, or what is fixed in the graph.
    """

    position: int
    name: str
    value: Any

    @property
    def is_tensor(self) -> bool:
        """Whether the leaf is a tensor."""
        return isinstance(self.value, torch.Tensor)


@dataclass(frozen=True)
class Call:
    """An example call, ready for export.

    Attributes:
        leaves: in the order in which the export numbers its inputs.
        args: positional arguments, tensors replaced by aliases.
        kwargs: keyword arguments in the order of the signature, tensors replaced by aliases.
    """

    leaves: tuple[Leaf, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[Leaf]:
        """The tensors in the order of their positions."""
        return sorted((leaf for leaf in self.leaves if leaf.is_tensor), key=lambda l: l.position)

    def dynamic_shapes(self, dims: dict[int, dict[int, Any]]) -> Any:
        """What ``torch.export`` takes: for each leaf, by position, its symbolic axes."""
        spec = pytree.tree_structure((self.args, self.kwargs))
        args, kwargs = pytree.tree_unflatten(
            [dims.get(leaf.position) for leaf in self.leaves], spec
        )
        return (*args, *kwargs.values()) if args else kwargs


def example_call(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    taken: Iterable[str] = (),
) -> Call:
    """Takes an example call apart.

    Args:
        module: what is called.
        args: positional arguments.
        kwargs: keyword arguments.
        taken: names that no input may have (those of parameters and buffers).

    Raises:
        UnsupportedInput: a leaf is neither a plain tensor nor a constant.
    """
    signature = inspect.signature(module.forward)
    order = {name: i for i, name in enumerate(signature.parameters)}
    sorted_kwargs = dict(sorted(kwargs.items(), key=lambda item: order.get(item[0], len(order))))
    original, _ = pytree.tree_flatten_with_path((args, kwargs))
    positions = {path: position for position, (path, _) in enumerate(original)}
    flat, spec = pytree.tree_flatten_with_path((args, sorted_kwargs))
    used = set(taken)
    leaves, copies = [], []
    for path, value in flat:
        name = free_name(_name(path, signature), used)
        used.add(name)
        leaves.append(Leaf(positions[path], name, value))
        copies.append(_alias(name, value))
    new_args, new_kwargs = pytree.tree_unflatten(copies, spec)
    return Call(tuple(leaves), new_args, new_kwargs)


def free_name(name: str, used: set[str]) -> str:
    """The name, with underscores appended until it is not used."""
    while name in used:
        name += "_"
    return name


def _name(path: tuple[Any, ...], signature: inspect.Signature) -> str:
    outer, first, *rest = path
    if outer.idx == 1:
        head = [str(first.key)]
    else:
        head = _positional_name(first.idx, signature)
    return ".".join([*head, *(step_name(step) for step in rest)])


def _positional_name(index: int, signature: inspect.Signature) -> list[str]:
    for i, parameter in enumerate(signature.parameters.values()):
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            return [parameter.name, str(index - i)]
        if i == index:
            return [parameter.name]
    return [f"input_{index}"]  # too many arguments; the call itself will say so


def step_name(step: Any) -> str:
    """One step of a pytree path: an index, a key or an attribute's name."""
    for attribute in ("idx", "key", "name"):
        if hasattr(step, attribute):
            return str(getattr(step, attribute))
    return str(step)


def _alias(name: str, value: Any) -> Any:
    """A tensor object of its own over the same memory.

    A tensor that is passed twice would otherwise be one input to the trace, and the graph would
    read one argument where the module reads two.
    """
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided:
            raise UnsupportedInput(
                f"argument {name!r} is a {type(value).__name__} of layout {value.layout}",
                because="a graph takes ordinary strided tensors",
            )
        return value.detach().requires_grad_(value.requires_grad)
    if isinstance(value, _CONSTANT):
        return value
    raise UnsupportedInput(
        f"argument {name!r} is of type {type(value).__module__}.{type(value).__qualname__}",
        because="a graph takes tensors, and tuples, lists, dicts and registered pytrees of them",
        help="pass its tensors, or register the type with torch.utils._pytree",
    )
