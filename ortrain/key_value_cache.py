"""Key-value caches of transformers' decoders.

Neither training nor a plain forward needs them, but a decoder returns one wherever it is not told
otherwise. A trace knows tuples, lists and dicts; so a cache is taken apart where the traced forward
ends, and made anew, an object of the same class with the same attributes, from what the graph
returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from ortrain.pytorch import pytree

_FILE = "transformers.cache_utils"


def is_cache(value: object) -> bool:
    """Whether it is a cache of transformers, or a layer of one."""
    return any(kind.__module__ == _FILE for kind in type(value).__mro__[:-1])


@dataclass
class Count:
    """A number that follows from the input's size, as a graph returns it: int64, 0-dim."""

    tensor: torch.Tensor


@dataclass
class _Opened:
    """A cache in parts that torch.export can tell apart.

    Attributes:
        kind: class of the cache.
        names: of all its attributes.
        tensors: values of those that hold tensors, each by its name.
        others: the other attributes, which are the same at every call.
    """

    kind: type
    names: tuple[str, ...]
    tensors: dict[str, Any]
    others: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, cache: object) -> _Opened:
        tensors: dict[str, Any] = {}
        others: list[tuple[str, Any]] = []
        for name, value in vars(cache).items():
            if isinstance(value, torch.SymInt):  # a sliding window counts the tokens
                value = Count(torch.scalar_tensor(cast(Any, value), dtype=torch.int64))
            parts = opened(value)
            leaves = pytree.tree_leaves(parts)
            if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
                tensors[name] = parts
            else:
                others.append((name, value))
        return cls(type(cache), tuple(vars(cache)), tensors, tuple(others))

    def closed(self) -> object:
        """A cache of these parts."""
        values = {**dict(self.others), **{n: closed(parts) for n, parts in self.tensors.items()}}
        cache: Any = object.__new__(self.kind)
        cache.__dict__.update({name: values[name] for name in self.names})
        return cache


def _flatten(opened: _Opened) -> tuple[list[Any], Any]:
    context = opened.kind, opened.names, tuple(opened.tensors), opened.others
    return list(opened.tensors.values()), context


def _flatten_with_keys(opened: _Opened) -> tuple[list[tuple[Any, Any]], Any]:
    parts, context = _flatten(opened)
    return [(pytree.GetAttrKey(n), p) for n, p in zip(opened.tensors, parts, strict=True)], context


def _unflatten(parts: Iterable[Any], context: Any) -> _Opened:
    kind, names, held, others = context
    return _Opened(kind, names, dict(zip(held, parts, strict=True)), others)


pytree.register_pytree_node(
    Count,
    lambda count: ([count.tensor], None),
    lambda parts, _: Count(*parts),
    serialized_type_name=f"{__name__}.Count",
    flatten_with_keys_fn=lambda count: ([(pytree.GetAttrKey("count"), count.tensor)], None),
)
pytree.register_pytree_node(
    _Opened,
    _flatten,
    _unflatten,
    serialized_type_name=f"{__name__}._Opened",
    flatten_with_keys_fn=_flatten_with_keys,
)


def opened(output: Any) -> Any:
    """The same output with its caches in parts."""
    return pytree.tree_map(
        lambda leaf: _Opened.of(leaf) if is_cache(leaf) else leaf, output, is_leaf=is_cache
    )


def closed(output: Any) -> Any:
    """The same output with caches made of their parts, in which a number is a ``Count`` yet."""
    return pytree.tree_map(
        lambda leaf: leaf.closed() if isinstance(leaf, _Opened) else leaf,
        output,
        is_leaf=lambda leaf: isinstance(leaf, _Opened),
    )


@contextmanager
def opened_caches(module: nn.Module) -> Iterator[None]:
    """A forward that is traced inside returns its caches in parts."""
    handle = module.register_forward_hook(lambda module, args, output: opened(output))
    try:
        yield
    finally:
        handle.remove()


def caching_configs(module: nn.Module) -> list[Any]:
    """The configs that ask for a cache; the decoder of an encoder-decoder has one of its own."""
    configs: dict[int, Any] = {}
    for part in module.modules():
        config = getattr(part, "config", None)
        if getattr(config, "use_cache", False) is True:
            configs[id(config)] = config
    return list(configs.values())


@contextmanager
def without_cache(module: nn.Module) -> Iterator[None]:
    """No caches meanwhile."""
    configs = caching_configs(module)
    for config in configs:
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs:
            config.use_cache = True
