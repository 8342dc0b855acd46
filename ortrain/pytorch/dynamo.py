"""Dynamo's conversions of a module's code, and how it is set up for those that are ours.

Private: all of ``torch._dynamo``, of whose names ``config``, ``callback``, ``maybe_mark_dynamic``,
``error_on_graph_break`` and those of ``exc`` are documented, and ``decorators.skip``,
``utils.counters`` and ``convert_frame``'s logger are not; and ``torch.fx.experimental._config``.
Without ``counters`` and the logger a report does not tell why Dynamo makes no graph; without the
rest, nothing is converted.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import logging
import random
import sys
import sysconfig
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from inspect import signature
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._dynamo import callback, config, error_on_graph_break, maybe_mark_dynamic
from torch._dynamo.decorators import skip
from torch._dynamo.exc import SkipFrame, TorchDynamoException, Unsupported, UserError
from torch._dynamo.utils import counters
from torch.backends import mha
from torch.fx.experimental import _config as sizes

from ortrain.errors import OrtrainWarning
from ortrain.pytorch.recurrent import whole_recurrences

# What it brought: sizes from values, and what a mask selects (PyG, DeBERTa); recurrent layers; a
# counter on a module that moves (two graphs, not eight).
SETTINGS: dict[str, Any] = {
    "capture_scalar_outputs": True,
    "capture_dynamic_output_shape_ops": True,
    "allow_rnn": True,
    "allow_unspec_int_on_nn_module": True,
    "trace_numpy": True,  # without it, in-place operators run while code is traced
}
_sizes: Any = sizes

# Graphs of one module, after which Dynamo makes no further one.
MOST = 64

_numbers = itertools.count()

# Of whatever converts: Dynamo itself, and the symbols of its sizes.
_FOLDERS = (str(Path(config.__file__ or "").parent), str(Path(sizes.__file__ or "").parent))
# Whose cached functions give what they gave: a library's, Python's own and ours.
_OURS = str(Path(__file__).parents[1])
_INSTALLED = (*{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}, _OURS)


class Hears(Protocol):
    """Whoever has a call in which conversions may begin.

    Attributes:
        guards_hooks: whether graphs are for modules with these hooks alone.
        whole_layers: whether PyTorch has kernels for whole layers of its module.
        ones_are_sizes: whether a size of one is like others, and no reason for another graph.
        parted: whether graphs may end within the code; else that is an error, of which
            :func:`ends_within` knows.
    """

    guards_hooks: bool
    whole_layers: bool
    ones_are_sizes: bool
    parted: bool

    def has_begun(self) -> bool:
        """Whether code of the call has run, so that it cannot begin again."""
        ...

    def until_it_ends(self, settings: contextlib.AbstractContextManager[Any]) -> None:
        """Has settings be there until the call ends."""
        ...

    def fails(self, error: BaseException) -> None:
        """Hears why some of its code has no graph, and has run as it is."""
        ...

    def begins(self) -> None:
        """Before a conversion."""
        ...

    def ends(self) -> None:
        """Behind it."""
        ...


class _Here(threading.local):
    hears: Hears | None = None
    settings: contextlib.ExitStack | None = None


_here = _Here()


class Teller:
    """Has conversions run with our settings where they are somebody's, and be told to them.

    Args:
        whose: the conversion that this thread begins is; None for nobody of ours.

    Attributes:
        begin: what Dynamo calls before a conversion.
        known: all that it calls then, which ``torch.compiler.reset`` forgets.
    """

    def __init__(self, whose: Callable[[], Hears | None]) -> None:
        self._whose, self.begin = whose, self._begin
        self.known = callback.callback_handler.start_callbacks

    def tell(self) -> None:
        """Tells Dynamo."""
        callback.on_compile_start(self.begin)
        callback.on_compile_end(self._end)
        logging.getLogger(f"{torch._dynamo.__name__}.convert_frame").addFilter(self._unless_ours)
        logging.getLogger(torch._guards.__name__).addFilter(self._unless_converting)

    def _begin(self, _: Any) -> None:
        if _here.settings is not None or (hears := self._whose()) is None:
            return
        _here.hears, _here.settings = hears, (stack := contextlib.ExitStack())
        stack.enter_context(
            settings(
                hooks=hears.guards_hooks,
                whole_layers=hears.whole_layers,
                ones_are_sizes=hears.ones_are_sizes,
                parted=hears.parted,
            )
        )
        if hears.has_begun():
            # The code runs as it is: what the call has done, an exchange with other processes above
            # all, it would do again. Dynamo asks for it once the conversion has ended.
            hears.until_it_ends(config.patch(suppress_errors=True))
        hears.begins()

    def _end(self, _: Any) -> None:
        stack, hears = _here.settings, _here.hears
        _here.settings = _here.hears = None
        if stack is not None and hears is not None:
            stack.close()
            hears.ends()

    def _unless_converting(self, _: logging.LogRecord) -> bool:
        """Whether to print a guard that cannot be made: such a conversion fails, which is told."""
        return self._whose() is None

    def _unless_ours(self, record: logging.LogRecord) -> bool:
        """Whether to print a failed conversion; the report tells of those that are somebody's."""
        if (hears := self._whose()) is None or not record.exc_info or record.exc_info[1] is None:
            return True
        hears.fails(record.exc_info[1])
        return False


@contextlib.contextmanager
def settings(
    *, hooks: bool, whole_layers: bool, ones_are_sizes: bool, parted: bool, once: bool = False
) -> Iterator[None]:
    """How Dynamo converts inside.

    Args:
        hooks: whether graphs are for modules with the hooks that they have now alone.
        whole_layers: whether PyTorch has kernels for whole layers of the module.
        ones_are_sizes: whether a size of one is like others, and no reason for another graph.
        parted: whether graphs may end within the code; else that is an error, of which
            :func:`ends_within` knows.
        once: whether there is one graph, for a file: numbers are constants in it, and two sizes
            are the same only where the code asks for it.
    """
    quiet = config.ignore_logging_functions | _told_once()
    own: dict[str, Any] = {**SETTINGS, "skip_nnmodule_hook_guards": not hooks}
    if once:
        own |= {"specialize_float": True, "allow_unspec_int_on_nn_module": False}
    with contextlib.ExitStack() as stack:
        stack.enter_context(config.patch(**own, ignore_logging_functions=quiet))
        if whole_layers:
            # Of a layer's kernel, which only inference has, a graph has no operator.
            stack.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
            mha.set_fastpath_enabled(False)
        stack.enter_context(whole_recurrences())
        if not parted:
            stack.enter_context(error_on_graph_break(True))
        if ones_are_sizes:
            stack.enter_context(_sizes.patch(backed_size_oblivious=True))
        if once:
            stack.enter_context(_sizes.patch(use_duck_shape=False))
        # They are of Dynamo's own doing: it looks at the gradient of each tensor that is given.
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        warnings.simplefilter("default", OrtrainWarning)  # no error here, where a graph is made
        yield


def _told_once() -> set[Any]:
    """What libraries have added to loggers that says each thing once; it need break no graph."""
    return {f for name, f in vars(logging.Logger).items() if name.endswith("_once")}


class NotFollowed(Exception):
    """Code depends on something that Dynamo does not follow: a graph would be wrong."""


class Ends(Exception):
    """A backend takes no graph of code; one of what the code calls may do."""


def ends(why: str, *, parted: bool) -> Exception:
    """What a backend raises that leaves code to PyTorch, and takes graphs of what it calls.

    Args:
        why: the reason.
        parted: whether graphs may end within the code; else the conversion is an error, of which
            :func:`ends_within` knows.
    """
    return SkipFrame(why) if parted else Ends(why)


# What Dynamo has read of a call's arguments, of which it does not see what becomes of it.
_NOT_FOLLOWED = {
    random.Random: "a generator of Python's of its own, whose state a graph does not move",
    collections.deque: "a deque of a bounded length, from which a graph drops nothing",
    type(functools.lru_cache(len)): "a function with a cache, which a graph does not look into",
}


def _expect_followed(entries: Sequence[Any]) -> list[bool]:
    """Looks at all that a conversion has read, as a filter of its guards.

    Raises:
        NotFollowed: there is something among it that a graph would be wrong about.
    """
    for entry in entries:
        kind = type(entry.value)
        if kind in _NOT_FOLLOWED and not _is_harmless(entry.value):
            raise NotFollowed(f"{entry.name} is {_NOT_FOLLOWED[kind]}")
    return [not entry.name.endswith(_FASTPATH) for entry in entries]


# Ours while a graph is made, and the user's when it runs: either way it is what both compute.
_FASTPATH = "._is_fastpath_enabled"


def _is_harmless(value: Any) -> bool:
    """Whether Dynamo follows this one, or what it does not follow changes nothing."""
    if isinstance(value, collections.deque):
        return value.maxlen is None
    if isinstance(value, random.Random):
        return value is random.random.__self__  # type: ignore[attr-defined]
    inner = getattr(value, "__wrapped__", None)
    return isinstance(inner, FunctionType) and inner.__code__.co_filename.startswith(_INSTALLED)


def converted(
    function: Callable[..., Any],
    backend: Callable[..., Any],
    names: dict[str, Any],
    *,
    parted: bool = False,
) -> Callable[..., Any]:
    """A function whose graphs a backend runs: it has none in common with others of the same code.

    Args:
        function: of Python, which uses no global names. Its code is copied under a name of its own,
            by which Dynamo remembers what has changed from call to call, and what it keeps goes
            with the copy.
        backend: takes Dynamo's graphs.
        names: the global names of what it calls. Dynamo reads those of the code that it begins with
            where they are, and others by what ``sys.modules`` has under their module's name.
        parted: whether the function runs as it is, and what it calls is converted.
    """
    assert isinstance(function, FunctionType)
    name = f"{function.__name__}_{next(_numbers)}"
    code = function.__code__.replace(co_name=name)
    own = FunctionType(code, names, name, function.__defaults__, function.__closure__)
    known = signature(torch.compile).parameters  # torch 2.11 has neither
    apart = {"recompile_limit": MOST, "isolate_recompiles": True}
    options: Any = {name: value for name, value in apart.items() if name in known}
    looks: Any = {"guard_filter_fn": _expect_followed}
    if parted:
        skip(own)
    made: Callable[..., Any] = torch.compile(own, backend=backend, options=looks, **options)
    return made


def is_running(run: Callable[..., Any]) -> bool:
    """Whether this thread is inside of a function that :func:`converted` has given."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != run.__name__:
        frame = frame.f_back
    return frame is not None


def with_open_sizes(value: Any, axes: Iterable[int] | None = None) -> None:
    """Has the sizes of a tensor be symbols in the conversion that begins, where they can be.

    A size of one may be there to be broadcast, which no symbol that may be larger is.

    Args:
        value: a tensor; others have no sizes.
        axes: of it; all by default.
    """
    if isinstance(value, Tensor) and value.layout is torch.strided:
        for axis in range(value.dim()) if axes is None else axes:
            if value.shape[axis] != 1:
                maybe_mark_dynamic(value, axis)


def as_one_graph() -> contextlib.AbstractContextManager[Any]:
    """DistributedDataParallel does not cut graphs at its buckets inside: steps do that better."""
    found: contextlib.AbstractContextManager[Any] = config.patch(optimize_ddp=False)
    return found


def without_conversions(*, raises: bool = False) -> contextlib.AbstractContextManager[Any]:
    """Code that has no graph for its values runs as it is inside.

    Args:
        raises: whether it is an error instead, before any of it has run (:func:`is_forbidden`).
    """
    found: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance(
        _FORBIDDEN if raises else "eager_on_recompile"
    )
    return found


def is_forbidden(error: Exception) -> bool:
    """Whether a conversion would have been needed that must not be."""
    return type(error) is RuntimeError and f"'{_FORBIDDEN}'" in str(error)


_FORBIDDEN = "fail_on_recompile"


# What Dynamo adds to an error that code raises while it is traced, on fakes for tensors.
_WHILE_TRACED = "\n\nfrom user code:\n"


def is_of_conversion(error: Exception) -> bool:
    """Whether Dynamo has raised an error, and none of the code that it converts."""
    if isinstance(error, TorchDynamoException | NotFollowed) or _WHILE_TRACED in str(error):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(_FOLDERS)


def raised(error: BaseException) -> BaseException:
    """What a backend has raised, if Dynamo has made an error of its own of it; else the error."""
    found: BaseException = getattr(error, "inner_exception", error)
    return found


def ends_within(error: Exception) -> bool:
    """Whether a graph would end within code whose graphs may not be parted."""
    return isinstance(raised(error), Unsupported | UserError | Ends)


def takes_no_symbol(error: Exception) -> bool:
    """Whether an operator is given what depends on a symbolic size, and takes a number alone."""
    return isinstance(error, Unsupported) and "not Sym" in str(error)


def is_one_too_many(error: Exception) -> bool:
    """Whether Dynamo makes no further graph of code, of which it has made so many."""
    return isinstance(error, Unsupported) and "recompile limit" in str(error)


def not_followed(error: BaseException) -> str:
    """What a conversion was given up for that Dynamo does not follow; empty where it was not."""
    _, name, what = str(error).partition(f"{NotFollowed.__name__}: ")
    return what.partition("\n")[0] if name else ""


def breaks() -> dict[str, int]:
    """How often Dynamo has ended a graph, by its reasons."""
    return dict(counters["graph_break"])
