"""What an operator writes to, as its schema says; PyTorch's own counts leave out what is data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import fx

from ortrain.pytorch.operators import OpOverload, is_mutable, schema_of

_T = TypeVar("_T")


def written_by(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], kind: type[_T]
) -> Iterator[_T]:
    """The tensors among an operator's arguments that it writes to.

    Args:
        operator: any function; one without a schema writes to none.
        args: of the call.
        kwargs: of the call.
        kind: what stands for a tensor there: ``Tensor``, or the node of a graph.
    """
    schema = schema_of(operator)
    if schema is None or not schema.is_mutable:
        return
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, kind):
                yield each


def written_tensor(node: fx.Node) -> fx.Node:
    """The tensor that an operator in place writes to, and returns."""
    while isinstance(node.target, OpOverload) and isinstance(node.args[0], fx.Node):
        name = schema_of(node.target).name
        if not is_mutable(node.target) or not name.endswith("_") or name.endswith("__"):
            break
        node = node.args[0]
    return node
