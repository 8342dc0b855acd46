"""What of a module Dynamo does not look at again once its graphs are made.

Its guards compare attributes, sizes and types. They do not see a hook that comes later, nor a
function that takes another's place in a class: the graph would go on without it. Both are seldom,
and looked for here at each call, in 20 µs for twelve layers of BERT; Dynamo's own guards of hooks
take 600.
"""

from __future__ import annotations

import builtins
import functools
import operator
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from ortrain.pytorch.hooks import parts_of, tables_of
from ortrain.pytorch.modules import children_of, parameters_of

_KINDS = (FunctionType, staticmethod, classmethod, property)


class Watch:
    """The hooks on a module's parts, and the functions of their classes.

    Args:
        module: the module.

    Attributes:
        found: these hooks and functions, in order.
        key: equal where they are the same, as long as ``found`` is there.
        hooked: whether there are hooks.
        names: the global names of its forward.
        classes: of its parts, without those of torch.
        whole_layers: whether PyTorch has kernels for whole layers of it.
        not_followed: what of its code Dynamo does not follow; empty without such a thing.
    """

    def __init__(self, module: nn.Module) -> None:
        parts = [*parts_of(module)]
        self._tables = tables_of(parts)
        self._lengths = [*map(len, self._tables)]
        self._hooks = self._hooks_now()
        self._children = [children for part in parts if (children := children_of(part))]
        self._parts = self._parts_now()
        self._held = [held for part in parts if (held := parameters_of(part))]
        kinds = dict.fromkeys(kind for part in parts for kind in type(part).__mro__[:-1])
        self._members = [
            (vars(kind).get, [n for n, f in vars(kind).items() if _is_code(n, f)]) for kind in kinds
        ]
        forward = getattr(module.forward, "__func__", module.forward)
        self.names = getattr(forward, "__globals__", {"__builtins__": builtins})
        self.classes = [kind for kind in kinds if not kind.__module__.startswith("torch.")]
        self.whole_layers = nn.TransformerEncoderLayer in kinds
        self._encoders = [part for part in parts if isinstance(part, nn.TransformerEncoder)]
        self.not_followed = next(self._not_followed(kinds), "")
        self._functions = self._functions_now()
        self.hooked = bool(self._hooks)
        self.found = [*self._hooks, *self._functions]
        self.key = (len(self._hooks), *map(id, self.found))

    def packs(self) -> bool:
        """Whether an encoder of it may leave out padding."""
        return any(
            getattr(each, "use_nested_tensor", False) and not each.layers[0].training
            for each in self._encoders
        )

    def _not_followed(self, kinds: Iterable[type]) -> Iterator[str]:
        """Reasons against a graph."""
        for kind in kinds:
            if kind is nn.Module:
                continue
            for name, member in vars(kind).items():
                if _keeps(member):
                    yield f"{kind.__name__}.{name} keeps its results, which a graph does not"
                if not isinstance(member, FunctionType):
                    continue
                if "move_to_end" in member.__code__.co_names:
                    yield f"{kind.__name__}.{name} moves entries to an end, which a graph does not"
                module = str(member.__globals__.get("__name__"))
                elsewhere = vars(sys.modules.get(module, sys)) is not member.__globals__
                if elsewhere and member.__globals__ is not self.names:
                    yield f"the names that {kind.__name__}.{name} uses are not those of {module}"

    def holds(self) -> bool:
        """Whether all is as it was."""
        if [*map(len, self._tables)] != self._lengths:
            return False
        if self._hooks and not _same(self._hooks, self._hooks_now()):
            return False
        return _same(self._parts, self._parts_now()) and _same(
            self._functions, self._functions_now()
        )

    def namespaces(self) -> list[dict[str, Any]]:
        """The global names of its forward, and of its classes' files."""
        files = (sys.modules.get(kind.__module__) for kind in self.classes)
        found = [self.names, *(vars(each) for each in files if each is not None)]
        return [*{id(each): each for each in found}.values()]

    def has_its_parameters(self) -> bool:
        """Whether none is a plain tensor, as ``torch.func.functional_call`` sets them.

        They are the module's own for that call alone: what a checkpoint runs once more in the
        backward finds others.
        """
        return Tensor not in {*map(type, chain.from_iterable(map(dict.values, self._held)))}

    def _hooks_now(self) -> list[Any]:
        return [hook for table in self._tables for hook in table.values()]

    def _parts_now(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self._children))]

    def _functions_now(self) -> list[Any]:
        return [*chain.from_iterable(map(get, names) for get, names in self._members)]


def _is_code(name: str, value: Any) -> bool:
    """Whether calls run it. PyTorch itself replaces those two, at its first conversion."""
    return isinstance(value, _KINDS) and name not in ("__init__", "__setstate__")


def _keeps(value: Any) -> bool:
    return type(value) is type(functools.lru_cache(len))


def _same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))
