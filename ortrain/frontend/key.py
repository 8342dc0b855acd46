"""Graphs that mean the same, by what they are made of: one step serves them all.

Layers of a model that are compiled each for itself, and instances of a class, come to equal graphs.
The text of a graph does not tell: it is the same with and without gradients, of frozen weights, of
transposed tensors and of tensors that share memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ortrain.autodiff.registry import foreign_rules, registered
from ortrain.capture.fx.memory import memory_of
from ortrain.config import Options
from ortrain.pytorch.autocast import active
from ortrain.pytorch.conditions import Symbols
from ortrain.pytorch.sources import is_buffer
from ortrain.pytorch.tracing import number_in
from ortrain.pytorch.version import count

# Of a tensor in a graph, its values tell it; of a larger one, which it is.
_VALUES = 1024


class NoKey(Exception):
    """A graph has something in it that nothing equals."""


class Key:
    """What a graph is found by again.

    Args:
        module: Dynamo's graph.
        real: its inputs.
        options: settings.
        guarded: as of :class:`~ortrain.frontend.graph.Graph`.

    Attributes:
        parts: equal for graphs that are equal.
        symbols: in its sizes.

    Raises:
        NoKey: it has none.
    """

    def __init__(
        self, module: fx.GraphModule, real: Sequence[Any], options: Options, *, guarded: bool
    ) -> None:
        holders = module.graph.find_nodes(op="placeholder")
        fakes = [holder.meta["example_value"] for holder in holders]
        for node in module.graph.nodes:
            value = node.meta.get("example_value")
            if isinstance(value, Tensor | torch.SymInt) and free_unbacked_symbols(value):
                raise NoKey
        self.symbols = Symbols(fakes)
        places: dict[int, int] = {}
        inputs = [
            (*self._value(fake), *_role(holder, value), _place(fake, places))
            for holder, fake, value in zip(holders, fakes, real, strict=True)
        ]
        self.parts = (
            tuple(inputs),
            tuple(self.symbols.ranges()),
            self._graph(module),
            _mode(),
            _rules(),
            repr(options),
            guarded,
        )

    def _value(self, fake: Any) -> tuple[Any, ...]:
        if not isinstance(fake, Tensor):
            return (type(fake).__name__, self.symbols.plain(fake))
        sizes = (*fake.shape, "strides", *fake.stride(), "at", fake.storage_offset())
        number = number_in(fake)  # on which the trace may have conditions as well
        known = () if number is None else ("number", self.symbols.plain(number))
        return (fake.dtype, fake.device, fake.layout, *map(self.symbols.plain, sizes), *known)

    def _graph(self, module: fx.GraphModule) -> tuple[Any, ...]:
        numbers: dict[fx.Node, int] = {}
        rows = []
        for node in module.graph.nodes:
            numbers[node] = len(numbers)
            rows.append((node.op, *self._called(module, node), *self._arguments(node, numbers)))
        return (*rows, module.meta.get("_checkpoint_context_fn"))

    def _called(self, module: fx.GraphModule, node: fx.Node) -> tuple[Any, ...]:
        if node.op in ("placeholder", "output"):
            return ()
        if node.op != "get_attr":
            return (node.target,)
        value = module
        for name in str(node.target).split("."):
            value = getattr(value, name)
        if isinstance(value, fx.GraphModule):
            return self._graph(value)
        if not isinstance(value, Tensor):
            raise NoKey
        small = value.numel() <= _VALUES and value.device.type == "cpu"
        values = repr(value.tolist()) if small else (id(value), count(value))
        return (value.dtype, value.device, tuple(value.shape), value.stride(), values)

    def _arguments(self, node: fx.Node, numbers: dict[fx.Node, int]) -> tuple[Any, ...]:
        if node.op == "placeholder":
            return ()
        return (self._plain(node.args, numbers), self._plain(node.kwargs, numbers))

    def _plain(self, value: Any, numbers: dict[fx.Node, int]) -> Any:
        if isinstance(value, fx.Node):
            return ("node", numbers[value])
        if isinstance(value, tuple | list):
            return (type(value).__name__, *(self._plain(each, numbers) for each in value))
        if isinstance(value, dict):
            return tuple((name, self._plain(each, numbers)) for name, each in value.items())
        if isinstance(value, slice):
            return ("slice", *(self._plain(getattr(value, n), numbers) for n in _SLICE))
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return ("symbol", self.symbols.plain(value))
        if value is None or isinstance(value, _PLAIN):
            return (type(value).__name__, repr(value))
        raise NoKey


_SLICE = ("start", "stop", "step")
_PLAIN = (
    bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format,
    type(...),
)  # fmt: skip


def _role(holder: fx.Node, value: Any) -> tuple[Any, ...]:
    wants = isinstance(value, Tensor) and value.requires_grad
    leaf = isinstance(value, Tensor) and value.is_leaf
    return (isinstance(value, nn.Parameter), is_buffer(holder), wants, leaf)


def _place(fake: Any, places: dict[int, int]) -> int:
    """The number of the memory that an input shows, in the order of the inputs."""
    if not isinstance(fake, Tensor):
        return -1
    return places.setdefault(memory_of(fake), len(places))


def _mode() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        active(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
    )


def _rules() -> tuple[Any, ...]:
    """Gradients that a user has registered."""
    return len(registered()), repr(foreign_rules())


class Table:
    """Graphs that are in use, with what their traces have asked of sizes."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[Any, Any] = WeakValueDictionary()
        self._conditions: WeakKeyDictionary[Any, Sequence[Any]] = WeakKeyDictionary()

    def find(self, key: Key) -> Any:
        """What serves an equal graph; None where nothing does, or that has failed."""
        found = self._known.get(key.parts)
        if found is None or found.has_failed or not key.symbols.hold(self._conditions[found]):
            return None
        return found

    def keep(self, key: Key, made: Any) -> None:
        """Has what serves a graph be found again, as long as something uses it."""
        self._known[key.parts], self._conditions[made] = made, key.symbols.conditions()

    def clear(self) -> None:
        """Has nothing be found again."""
        self._known.clear()
