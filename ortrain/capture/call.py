"""The arguments of an example call: their names, and copies that a trace may have."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ortrain.errors import UnsupportedInput
from ortrain.pytorch import pytree
from ortrain.pytorch.layout import OVERLAPPING, laid, layout_of, without_gaps

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
    """An example call.

    Attributes:
        leaves: in the order of the signature.
        args: positional arguments, tensors replaced by aliases.
        kwargs: keyword arguments in the order of the signature, tensors replaced by aliases.
        example: arguments that the module itself would be traced with; None where it does not say.
    """

    leaves: tuple[Leaf, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    example: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    @property
    def tensors(self) -> list[Leaf]:
        """The tensors in the order of their positions."""
        return sorted((leaf for leaf in self.leaves if leaf.is_tensor), key=_position)

    def growable(self) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
        """Axes of size 1, as (position, axis), that are a batch, and those that are a length.

        Axis 0 is a batch if every tensor has size 1 there. Axis 1 is a length where tokens or
        masks of shape [B, L], or features of shape [B, L, H], have size 1 there.
        """
        ranked = [leaf for leaf in self.tensors if leaf.value.ndim]
        single = bool(ranked) and all(leaf.value.shape[0] == 1 for leaf in ranked)
        batches = {(leaf.position, 0) for leaf in ranked} if single else set()
        lengths = {
            (leaf.position, 1)
            for leaf in ranked
            if leaf.value.ndim == (3 if leaf.value.is_floating_point() else 2)
            and leaf.value.shape[1] == 1
        }
        return batches, lengths

    def grown(self, axes: frozenset[tuple[int, int]]) -> Call:
        """The call with some tensors repeated along axes of size 1."""
        if not axes:
            return self
        taken = {size for leaf in self.tensors for size in leaf.value.shape}
        batch, length = [size for size in range(3, 3 + len(taken) + 2) if size not in taken][:2]
        flat, spec = pytree.tree_flatten((self.args, self.kwargs))
        for i, leaf in enumerate(self.leaves):
            times = [
                {0: batch, 1: length}[axis] if (leaf.position, axis) in axes else 1
                for axis in range(leaf.value.ndim if leaf.is_tensor else 0)
            ]
            if any(t > 1 for t in times):
                order = layout_of(leaf.value)
                longer = leaf.value.detach().repeat(times)
                longer = laid(longer, order) if isinstance(order, tuple) else longer
                flat[i] = longer.requires_grad_(leaf.value.requires_grad)
        args, kwargs = pytree.tree_unflatten(flat, spec)
        return replace(self, args=args, kwargs=kwargs)

    def replaced(self) -> Call:
        """The call with the module's own example in the place of the arguments."""
        assert self.example is not None
        args, kwargs = self.example
        return replace(self, args=args, kwargs=kwargs)


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
    make = getattr(module, "example_for_capture", None)
    example = None if make is None else make(*new_args, **new_kwargs)
    return Call(tuple(leaves), new_args, new_kwargs, example)


def free_name(name: str, used: set[str]) -> str:
    """The name, with underscores appended until it is not used."""
    while name in used:
        name += "_"
    return name


def _position(leaf: Leaf) -> int:
    return leaf.position


def _name(path: tuple[Any, ...], signature: inspect.Signature) -> str:
    outer, first, *rest = path
    head = [str(first.key)] if outer.idx == 1 else _positional_name(first.idx, signature)
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
        if layout_of(value) == OVERLAPPING:
            raise UnsupportedInput(
                f"argument {name!r} is {OVERLAPPING}",
                because="how a result lies in memory then differs from operator to operator",
                help="pass argument.contiguous()",
            )
        # Without gaps no stride is a symbol of its own.
        return without_gaps(value.detach()).requires_grad_(value.requires_grad)
    if isinstance(value, _CONSTANT):
        return value
    raise UnsupportedInput(
        f"argument {name!r} is of type {type(value).__module__}.{type(value).__qualname__}",
        because="a graph takes tensors, and tuples, lists, dicts and registered pytrees of them",
        help="pass its tensors, or register the type with torch.utils._pytree",
    )
