"""``Compiled``: a held module through Dynamo, and what its graphs have become."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import distributed, fx, nn

from ortrain.config import Options
from ortrain.errors import CaptureError, NotServed, OrtrainError
from ortrain.frontend.aten import (
    check_followed,
    has_reentrant,
    is_narrow,
    squeezes,
)
from ortrain.frontend.backend import InPyTorch, Parts, Served, steps_of
from ortrain.frontend.call import Heard, NothingDone, heard
from ortrain.frontend.graph import Empty, Graph
from ortrain.frontend.proof import Prover
from ortrain.frontend.watch import Watch
from ortrain.pytorch import pytree
from ortrain.pytorch.arrays import ARRAYS, fold_arrays
from ortrain.pytorch.dynamo import (
    MOST,
    Teller,
    as_one_graph,
    breaks,
    converted,
    ends,
    ends_within,
    is_forbidden,
    is_of_conversion,
    is_one_too_many,
    is_running,
    not_followed,
    raised,
    takes_no_symbol,
    with_open_sizes,
)
from ortrain.pytorch.sources import rename
from ortrain.step.overhead import Overhead
from ortrain.step.progress import progress
from ortrain.step.ranges import marked

HELP = "none is needed: such calls run in PyTorch"


ONES_MATTER = NotServed(
    "it drops axes of size one, which no symbol may be then",
    because="some of the call had run by then: the next one is converted anew",
    help=HELP,
)


OVER_BUDGET = CaptureError(
    "what its code depends on changes from call to call",
    because="a graph for each change would take too much of the run",
    help=HELP,
)


LATER = CaptureError(
    "its graphs end within its code",
    because="each of them is traced anew, which takes longer than they are likely to save",
    help=HELP,
)


class OnesMatter(Exception):
    """A graph drops axes of size one, so that no symbol may be one."""


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
        roots: by the modes of calls, places of tensors that they return, from which gradients
            come, once graphs have run.
        compared: the modes of calls whose graphs have been compared with the module.
        wrong: by modes, why graphs are not the module's.
        reentrant: whether there are checkpoints with reentrance in its graphs.
        narrow: whether something in its graphs is computed in 16 bits.
        uncompared: what a comparison of them with the module has raised; empty for nothing.
        wrong: why the graphs are not the module's; None as far as is known.
        again: whether the next call is to be converted anew.
        parted: whether graphs end within the module's code, which PyTorch runs from one to the
            next. It is found out by a first conversion, of which nothing has run.
        doing: what conversions say that they do where they take long; empty for nothing.
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
        self.whole_layers, self.ones_are_sizes = watch.whole_layers, True
        self._tell = weakref.WeakMethod(tell)  # which graphs hold that others use as well
        self.made: list[Served] = []
        self.conversions = 0
        self.fresh = False
        self.doing = self.uncompared = ""
        self._reasons: dict[str, None] = {}
        self.roots: dict[tuple[bool, bool], list[int]] = {}
        self.reentrant = self.narrow = self.again = self.parted = False
        self.compared: set[tuple[bool, bool]] = set()
        self.wrong: dict[tuple[bool, bool], OrtrainError] = {}
        self._told, self._until_it_ends = contextlib.ExitStack(), contextlib.ExitStack()
        self.renew()
        self._breaks: dict[str, int] = {}

    def renew(self) -> None:
        """Begins anew: Dynamo leaves code alone in whose conversion an error was raised."""
        self._run = converted(_called, _backend_of(self), self.watch.names, parted=self.parted)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's call, as graphs where there are some.

        Raises:
            NothingDone: there is none, and the module itself can run the call.
        """
        if _TELLER.begin not in _TELLER.known:
            _TELLER.tell()
        if self.again:
            self.again = self.ones_are_sizes = False
            self.renew()
        before, call, flipped = self.conversions, heard(), False
        ran = 0 if call is None else len(call.ran)
        if call is not None:
            call.converts = True
        try:
            if not (distributed.is_available() and distributed.is_initialized()):
                return self._run(module, args, kwargs)
            with as_one_graph():
                return self._run(module, args, kwargs)
        except NothingDone:
            raise
        except Exception as error:
            if is_forbidden(error):
                raise NothingDone(OVER_BUDGET) from None
            if not is_of_conversion(error):
                if self.conversions != before:
                    self.renew()
                raise
            if what := not_followed(error):
                found = NotServed(f"a graph would be wrong about it: {what}", help=HELP)
                raise NothingDone(found, always=True) from None
            if is_one_too_many(error):
                raise NothingDone(self.refusal()) from None
            # Where a size of one is apart, a symbol is more than one for certain.
            over_ones = self.ones_are_sizes and takes_no_symbol(error)
            if ends_within(error) and not self.parted and not over_ones:
                self.parted = True
                self.renew()
                self._end_for(str(raised(error)).partition("\n")[0])
                if call is not None and not call.may_part():
                    raise NothingDone(LATER) from None
            elif not self.ones_are_sizes or (call is not None and len(call.ran) != ran):
                raise NothingDone(_failed(module, error)) from error
            else:
                self.ones_are_sizes, flipped = False, True
        finally:
            self._until_it_ends.close()
            if call is not None:
                call.converts = False
        try:
            return self(module, args, kwargs)
        except NothingDone:
            self.ones_are_sizes |= flipped
            raise

    def has_begun(self) -> bool:
        """Whether code of the module has run in the call."""
        return is_running(self._run)

    def until_it_ends(self, settings: contextlib.AbstractContextManager[Any]) -> None:
        """Has settings be there until the call ends."""
        self._until_it_ends.enter_context(settings)

    def fails(self, error: BaseException) -> None:
        """Notes why some of the module's code has no graph."""
        what = not_followed(error)
        self._end_for(f"a graph would be wrong about it: {what}" if what else line_of(error))

    def begins(self) -> None:
        """Before a conversion."""
        self.conversions += 1
        self._told.enter_context(progress(self.doing, shown=bool(self.doing)))
        self._told.enter_context(marked("capture"))
        self.overhead.begin("trace")
        if (call := heard()) is not None:
            for leaf in pytree.tree_leaves(call.given):
                with_open_sizes(leaf)
        self._breaks = breaks()

    def ends(self) -> None:
        """Behind it."""
        self.overhead.end()
        self._told.close()
        self.fresh = True
        now = breaks()
        for reason, count in now.items():
            if count != self._breaks.get(reason):
                self._end_for(reason.partition("\n")[0])

    def _end_for(self, reason: str) -> None:
        """Notes why a graph ends, the latest last."""
        self._reasons.pop(reason, None)
        self._reasons[reason] = None

    @property
    def breaks(self) -> tuple[str, ...]:
        """Why graphs end within the module's code."""
        return tuple(self._reasons)

    @property
    def refused(self) -> tuple[str, ...]:
        """Why some of what was captured runs in PyTorch, whole graphs or statements of them."""
        found = [why for made in self.made for why in _reasons_in(made)]
        return tuple(why.what for why in found if not isinstance(why, Empty))

    def take(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """What runs a graph of Dynamo's."""
        if (call := heard()) is not None:
            names = _names_of(call)
            for holder in module.graph.find_nodes(op="placeholder"):
                rename(holder, names)
        if self.ones_are_sizes and squeezes(module):
            if not self.has_begun():
                raise OnesMatter
            self.again = True
            self.made.append(InPyTorch(module, ONES_MATTER))
            return _Shell(self.made[-1])
        if not fold_arrays(module):
            self._end_for(ARRAYS)
            raise ends(ARRAYS, parted=self.parted)
        check_followed(module, packs=self.watch.packs())
        self.reentrant |= has_reentrant(module)
        self.narrow |= is_narrow(module)
        with self.overhead.of("build"), marked("build"):
            made = steps_of(module, inputs, self.options)
        self.made.append(made)
        for graph in graphs_in(made):
            asked = self.options.certificate
            graph.prove = None if asked == "off" else Prover(graph, asked)
            graph.tell = self._told_of()
            if graph.executor.replays is not None:
                graph.executor.replays.took = partial(self.overhead.add, "recording")
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

    @property
    def is_whole(self) -> bool:
        """Whether calls run a graph and nothing else."""
        return not self.parted and all(isinstance(made, Graph) for made in self.made)

    def refusal(self) -> OrtrainError:
        """Why a call has no graph."""
        for made in reversed(self.made):
            if isinstance(made, InPyTorch | Parts) and made.reason is not None:
                return made.reason
        if self.conversions >= MOST:
            return CaptureError(
                "its code depends on what changes from call to call",
                because=f"there are {MOST} graphs of it, and none for this call",
                help=HELP,
            )
        return CaptureError(
            "there is no graph of it",
            because=next(reversed(self._reasons), "")
            or "Dynamo makes none of its code: TORCH_LOGS=graph_breaks says why",
            help=HELP,
        )


def _failed(module: nn.Module, error: Exception) -> CaptureError:
    why = CaptureError(
        f"PyTorch's Dynamo fails to convert {type(module).__name__}",
        because=line_of(error),
        help=HELP,
    )
    why.__cause__ = error
    return why


def line_of(error: BaseException) -> str:
    """Its first line, with its kind."""
    error = raised(error)
    return f"{type(error).__name__}: {error}".partition("\n")[0]


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


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_ours() -> bool:
    """Whether the code that Dynamo converts is that of a held module."""
    return heard() is not None


def graphs_in(made: Served) -> Iterator[Graph]:
    """The steps of a graph."""
    if isinstance(made, Graph):
        yield made
    elif isinstance(made, Parts):
        for part in made.parts:
            yield from graphs_in(part)


def _reasons_in(made: Served) -> Iterator[OrtrainError]:
    """Why PyTorch runs a graph, or statements of it."""
    if isinstance(made, InPyTorch | Parts) and made.reason is not None:
        yield made.reason
    for part in made.parts if isinstance(made, Parts) else ():
        yield from _reasons_in(part)


def _whose() -> Compiled | None:
    call = heard()
    return None if call is None or not call.converts else call.compiled


_TELLER = Teller(_whose)
