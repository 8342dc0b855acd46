"""Numbers among a call's arguments: constants of a graph, or inputs where they change.

A graph is captured for the values of all arguments that are no tensors. A weight that grows from
step to step would need a graph a step, so a number that is seen with a second value becomes an
input: where the module gets ``0.25``, the graph gets a tensor of no dimensions, which PyTorch
promotes as it does the number. Code that branches on the number cannot be traced so; there each
value has a graph of its own, for as many values as a bound allows.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ortrain.guards.structure import FlatCall, Path, flatten_call, leaves_of_call

# Values of one number that get graphs of their own where the code branches on it.
MOST_VALUES = 8
_LARGEST = 2**63 - 1


class WithNumbers(FlatCall):
    """A call of which some numbers are inputs.

    Its ``tensors`` hold them, each as a tensor without dimensions, and its ``key`` says so. Its
    ``args`` and ``kwargs`` are those that the module gets.

    Attributes:
        traced: positional and keyword arguments with tensors in the place of these numbers.
        paths: where the numbers stand.
        wide: whether floats are float64.
    """

    traced: Any = None
    paths: frozenset[Path] = frozenset()
    wide: bool = False

    def rebuilt(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatCall:
        """Another call with the same numbers as inputs."""
        return with_numbers(args, kwargs, self.paths, self.wide)


def with_numbers(
    args: tuple[Any, ...], kwargs: dict[str, Any], paths: frozenset[Path], wide: bool
) -> WithNumbers:
    """The call whose numbers at some places are inputs."""
    tree: Any = {"args": args, "kwargs": kwargs}
    for path in paths:
        tree = _replaced(tree, path, wide)
    tensors, key, *_ = flatten_call(tree["args"], tree["kwargs"])
    call = tuple.__new__(WithNumbers, (tensors, (*key, "numbers", paths), args, kwargs))
    call.traced, call.paths, call.wide = (tree["args"], tree["kwargs"]), paths, wide
    return call


def _replaced(tree: Any, path: Path, wide: bool) -> Any:
    """The tree with a tensor at the end of a path."""
    if not path:
        return number(tree, wide)
    first: Any = path[0]
    if isinstance(tree, dict):
        return {**tree, first: _replaced(tree[first], path[1:], wide)}
    items = list(tree)
    items[first] = _replaced(items[first], path[1:], wide)
    return type(tree)(items)


def is_number(value: Any) -> bool:
    """Whether a value can be an input of a graph: a float, or an int that fits into 64 bits."""
    return type(value) is float or (type(value) is int and abs(value) <= _LARGEST)


def number(value: int | float, wide: bool) -> torch.Tensor:
    """A number as an input of a graph.

    Args:
        value: it.
        wide: whether floats are float64.
    """
    if isinstance(value, int):
        return torch.tensor(value, dtype=torch.int64)
    return torch.tensor(value, dtype=torch.float64 if wide else torch.get_default_dtype())


@dataclass
class Seen:
    """What is known of the calls that differ in numbers only.

    Attributes:
        values: of the numbers, in the first such call.
        moving: the numbers that are inputs.
        fixed: whether the module's code branches on them.
        keys: of the forms of these calls.
    """

    values: dict[Path, int | float]
    moving: frozenset[Path] = frozenset()
    fixed: bool = False
    keys: set[Hashable] = field(default_factory=set)


class Numbers:
    """Tells of each call which of its numbers are inputs of its graph.

    Args:
        tensors: of the module, whose dtypes decide that of floats.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.wide = any(tensor.dtype == torch.float64 for tensor in tensors.values())
        self.seen: dict[Hashable, Seen] = {}

    def take(self, flat: FlatCall, modes: Hashable) -> tuple[FlatCall, Seen | None]:
        """The call as its graph gets it, and what is known of its like.

        Args:
            flat: the call, with all numbers constants.
            modes: whatever else distinguishes calls.
        """
        numbers = {
            path: leaf for path, leaf in leaves_of_call(flat.args, flat.kwargs) if is_number(leaf)
        }
        if not numbers:
            return flat, None
        like = (tuple(map(_without_value, flat.key)), modes)
        seen = self.seen.setdefault(like, Seen(numbers))
        if seen.fixed:
            return flat, seen
        before = seen.values
        moved = {p for p, n in numbers.items() if n != before[p] and _plain(flat, p)}
        seen.moving |= moved
        if not seen.moving:
            return flat, seen
        wide = self.wide or any(t.dtype == torch.float64 for t in flat.tensors)
        return with_numbers(flat.args, flat.kwargs, seen.moving, wide), seen


def _without_value(part: Hashable) -> Hashable:
    """A part of a call's key, of a number its type alone."""
    if isinstance(part, tuple) and len(part) == 2 and part[0] in (int, float):
        return part[0]
    return part


def _plain(flat: FlatCall, path: Path) -> bool:
    """Whether a tensor can be put there: all containers on the way are plain ones."""
    node: Any = {"args": flat.args, "kwargs": flat.kwargs}
    for step in path:
        if type(node) not in (tuple, list, dict):
            return False
        node = node[step]
    return True
