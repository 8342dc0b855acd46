"""Records among arguments and outputs, and tokenizers' dictionaries, as the export sees them.

torch.export takes apart what is registered as a pytree, and a dataclass is not by itself. Those
that a call of the module takes or returns are registered where they are met, field by field and
without running their constructors, as `guards.structure` rebuilds them at every step.
"""

from __future__ import annotations

import contextlib
from collections import UserDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ortrain.guards import user_dict
from ortrain.guards.record import attributes_of, new


@contextlib.contextmanager
def records_registered(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[None]:
    """Registers the records in a call's arguments, and in outputs made while this is open."""
    register((args, kwargs))
    handle = module.register_forward_hook(_register_output)
    try:
        yield
    finally:
        handle.remove()


def _register_output(module: nn.Module, inputs: Any, output: Any) -> None:
    if not torch.compiler.is_dynamo_compiling():  # which traces its way through hooks
        register(output)


def register(tree: Any) -> None:
    """Registers the class of every record and `UserDict` in a tree of containers."""
    _name_children(tree)
    for leaf in pytree.tree_leaves(tree):
        kind = type(leaf)
        is_known = kind in pytree.SUPPORTED_NODES  # another leaf was of it
        if isinstance(leaf, UserDict):
            if not is_known:
                user_dict.register(kind)
            register([*leaf.data.values()])
        elif attributes_of(leaf) is not None:
            if not is_known:
                _register(kind)
            register(leaf)


def _name_children(tree: Any) -> None:
    """Adds keys to the registration of each class in a tree of containers that has none.

    torch.export and the names of a graph's inputs and outputs go by paths of keys. A class may be
    registered with `torch.utils._pytree` without any (`flatten_with_keys_fn`), as the outputs of
    diffusers are: its children then go by their keys in a dictionary, and else by their numbers.
    """
    kind = pytree._get_node_type(tree)
    node = pytree.SUPPORTED_NODES.get(kind)
    if node is None:
        return
    if node.flatten_with_keys_fn is None:
        keyed = _with_keys(node.flatten_fn)
        pytree.SUPPORTED_NODES[kind] = node._replace(flatten_with_keys_fn=keyed)
    for child in node.flatten_fn(tree)[0]:
        _name_children(child)


def _with_keys(flatten: pytree.FlattenFn) -> pytree.FlattenWithKeysFn:
    def flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
        children, context = flatten(value)
        children = [*children]
        entries = [*value.items()] if isinstance(value, Mapping) else []
        keys: list[Any] = [pytree.SequenceKey(index) for index in range(len(children))]
        if [id(child) for child in children] == [id(child) for _, child in entries]:
            keys = [pytree.MappingKey(key) for key, _ in entries]
        return list(zip(keys, children, strict=True)), context

    return flatten_with_keys


def _register(kind: type) -> None:
    def flatten(record: Any) -> tuple[list[Any], tuple[str, ...]]:
        names = attributes_of(record)
        names = tuple(vars(record)) if names is None else names  # of one that has no tensor left
        return [getattr(record, name) for name in names], names

    def flatten_with_keys(record: Any) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        values, names = flatten(record)
        keys = [pytree.GetAttrKey(name) for name in names]
        return list(zip(keys, values, strict=True)), names

    def unflatten(values: Any, names: Any) -> Any:
        record = new(kind)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(record, name, value)
        return record

    pytree.register_pytree_node(kind, flatten, unflatten, flatten_with_keys_fn=flatten_with_keys)
