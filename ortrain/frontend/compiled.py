"""``Compiled``: a held module through Dynamo, and what its graphs have become."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx, nn
from torch.utils import _pytree as pytree

from ortrain.config import Options
from ortrain.errors import CaptureError, OrtrainError
from ortrain.frontend.backend import InPyTorch, Parts, Served, steps_of
from ortrain.frontend.call import Heard, heard
from ortrain.frontend.graph import Graph
from ortrain.frontend.proof import Prover
from ortrain.frontend.watch import Watch
from ortrain.pytorch.dynamo import Teller, breaks, converted, with_open_sizes
from ortrain.pytorch.sources import rename
from ortrain.step.overhead import Overhead


def _called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module(*args, **kwargs)


class Compiled:
    """A module through Dynamo.

    Args:
        options: settings.
        watch: what it was converted with.
        overhead: of its calls.
        tell: hears of backwards that PyTorch has answered, since a graph's failed.

    Attributes:
        made: what its graphs have become, in their order.
        conversions: of code of the module.
        fresh: whether some have been made since it was last asked.
        ones_are_sizes: whether a size of one is like others. What is broadcast may be one in one
            call and many in the next, which a symbol cannot be.
    """

    def __init__(
        self,
        options: Options,
        watch: Watch,
        overhead: Overhead,
        tell: Callable[[OrtrainError | None], None],
    ) -> None:
        self.options, self.watch, self.overhead = options, watch, overhead
        self.guards_hooks = watch.hooked  # a break has layers share code, and not all have hooks
        self.ones_are_sizes = True
        self._tell = weakref.WeakMethod(tell)  # which graphs hold that others use as well
        self.made: list[Served] = []
        self.conversions = 0
        self.fresh = False
        self.why = ""
        self._run = converted(_called, _backend_of(self))
        self._breaks: dict[str, int] = {}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's call, as graphs where there are some."""
        if _TELLER.begin not in _TELLER.known:
            _TELLER.tell()
        return self._run(module, args, kwargs)

    def begins(self) -> None:
        """Before a conversion."""
        self.conversions += 1
        self.overhead.begin("trace")
        if (call := heard()) is not None:
            with_open_sizes(pytree.tree_leaves(call.given))
        self._breaks = breaks()

    def ends(self) -> None:
        """Behind it."""
        self.overhead.end()
        self.fresh = True
        now = breaks()
        for reason, count in now.items():
            if count != self._breaks.get(reason):
                self.why = reason.partition("\n")[0]

    def take(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """What runs a graph of Dynamo's."""
        if (call := heard()) is not None:
            names = _names_of(call)
            for holder in module.graph.find_nodes(op="placeholder"):
                rename(holder, names)
        with self.overhead.of("build"):
            made = steps_of(module, inputs, self.options)
        self.made.append(made)
        for graph in graphs_in(made):
            asked = self.options.certificate
            graph.prove = None if asked == "off" else Prover(graph, asked)
            graph.tell = self._told_of()
        return _Shell(made)

    def _told_of(self) -> Callable[[OrtrainError | None], None]:
        found = self._tell

        def tell(error: OrtrainError | None) -> None:
            if (listener := found()) is not None:
                listener(error)

        return tell

    @property
    def graphs(self) -> list[Graph]:
        """Those that are steps, once each."""
        found = (graph for made in self.made for graph in graphs_in(made))
        return [*{id(graph): graph for graph in found}.values()]

    def refusal(self) -> OrtrainError:
        """Why a call has no graph."""
        for made in reversed(self.made):
            if isinstance(made, InPyTorch | Parts) and made.reason is not None:
                return made.reason
        return CaptureError(
            "there is no graph of it",
            because=self.why or "Dynamo makes none of its code: TORCH_LOGS=graph_breaks says why",
            help="none is needed: such calls run in PyTorch",
        )


class _Shell:
    """What Dynamo calls, and keeps when the module has gone: it holds no graph."""

    def __init__(self, made: Served) -> None:
        self._made = weakref.ref(made)

    def __call__(self, *args: Any) -> Any:
        """The graph's outputs."""
        made = self._made()
        assert made is not None, "its code is gone with it"
        return made(*args)


def _backend_of(compiled: Compiled) -> Callable[..., Any]:
    """What Dynamo holds for ever, which holds nothing itself."""
    owner = weakref.ref(compiled)

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        found = owner()
        assert found is not None, "its code is gone with it"
        return found.take(module, inputs)

    return backend


def _names_of(call: Heard) -> dict[str, str]:
    """The names by which a user knows what :func:`_called` is given."""
    found = {"module": "", "kwargs": ""}
    with contextlib.suppress(TypeError, ValueError):  # some callables written in C have no names
        named = inspect.signature(call.module.forward).parameters
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        positional = [name for name, each in named.items() if each.kind in kinds]
        found |= {f"args.{i}": name for i, name in enumerate(positional)}
    return found


def graphs_in(made: Served) -> Iterator[Graph]:
    """The steps of a graph."""
    if isinstance(made, Graph):
        yield made
    elif isinstance(made, Parts):
        for part in made.parts:
            yield from graphs_in(part)


def _whose() -> Compiled | None:
    call = heard()
    return None if call is None else call.compiled


_TELLER = Teller(_whose)
