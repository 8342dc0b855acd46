"""Ways into nested arguments and outputs, through classes too that do not name their children.

torch.export and the names of a graph's inputs and outputs go by paths of keys. A class may be
registered with `torch.utils._pytree` without any (`flatten_with_keys_fn`), as the outputs of
diffusers are: its children then go by their keys in a dictionary, and else by their numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils import _pytree as pytree


def leaves_with_path(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """The leaves of a tree of containers, each with the keys on the way to it."""
    name_children(tree)
    return pytree.tree_leaves_with_path(tree)


def name_children(tree: Any) -> None:
    """Adds keys to the registration of each class in a tree of containers that has none."""
    kind = pytree._get_node_type(tree)
    node = pytree.SUPPORTED_NODES.get(kind)
    if node is None:
        return
    if node.flatten_with_keys_fn is None:
        pytree.SUPPORTED_NODES[kind] = node._replace(
            flatten_with_keys_fn=_with_keys(node.flatten_fn)
        )
    for child in node.flatten_fn(tree)[0]:
        name_children(child)


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
