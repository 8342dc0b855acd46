"""``Parts``: what of a module runs as graphs where the module as a whole runs in PyTorch.

::

    encoder in PyTorch: its code draws which layers it leaves out
      layers.0 a graph
      layers.1 a graph
      …

The module's code runs as it is written. Where it calls a part, that part's own graph answers, which
is captured, certified and raced against eager like any other. A part that cannot be a graph either
makes way for the parts below it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules import module as global_hooks

from ortrain.module_state.hooks import HOOKS
from ortrain.pytorch.saving import saving_hooks
from ortrain.step.report import Report
from ortrain.step.wrappers import needs_its_own_forward

# Each part is captured by itself, which takes 0.2 s and more.
MOST_PARTS = 64


_Run = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


class Runs(Protocol):
    """What runs the calls of a part: a ``Runner`` of its own."""

    report: Report

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one call."""

    def expect(self, steps: int | None) -> None:
        """Takes it that so many calls with gradients are to come."""


class Parts:
    """Runs a module in PyTorch, and of the modules below it those as graphs that can be.

    While the module runs, another ``forward`` stands in each part, which asks the part's runner.
    No graph ever sees that: while a part runs, and when the module has returned or raised, all are
    as the user has left them. In other threads, in a backward and under hooks on saved tensors
    the parts run in PyTorch too: what checkpointing runs twice must be alike both times.

    Args:
        module: that runs in PyTorch.
        make: the runner of a part, of its name, itself and who hears that it cannot be a graph.
        left: modules of which nothing is to be a graph.

    Attributes:
        reasons: for which the module runs in PyTorch while its parts do not.
        ran_graphs: whether a part has run as a graph in the last call.
        runners: of the parts.
        reports: name → report of each part.
    """

    def __init__(
        self,
        module: nn.Module,
        make: Callable[[str, nn.Module, Callable[[], None]], Runs],
        left: Collection[nn.Module] = (),
    ) -> None:
        self.module, self._make, self._left = module, make, left
        self.reasons: set[str] = set()
        self.ran_graphs = False
        self.reports: dict[str, Report] = {}
        self.runners: dict[nn.Module, Runs] = {}
        self._names: dict[nn.Module, str] = {}
        self._called: set[nn.Module] | None = None
        self._refused: set[nn.Module] = set()
        self._hooked: list[nn.Module] = []  # which but for their hooks were parts
        self._ways: list[_Way] = []
        self._installed: list[_Way] = []
        self._serving = threading.Lock()
        self._thread = 0

    def refresh(self) -> None:
        """Has the next call show which modules are called, if there are others than at the last."""
        if self._names.keys() != {*self.module.modules()}:
            self._called = None
            self._refused.clear()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one call of the module."""
        self.ran_graphs = False
        if _is_aside() or not self._serving.acquire(blocking=False):
            return self.module(*args, **kwargs)
        self._thread = threading.get_ident()
        watched = self._called is None
        _RUNNING.append(self)
        try:
            if not watched and not all(map(_is_hooked, self._hooked)):
                self._choose()
            if watched:
                self._called = set()
                self._install([_Way(module, self._note) for module in self._below(self.module)])
            else:
                self._install(self._ways)
            return self.module(*args, **kwargs)
        except BaseException:
            if watched:
                self._called = None  # it has not shown all
            raise
        finally:
            _RUNNING.remove(self)
            self._remove()
            if watched and self._called is not None:
                self._names = {part: name for name, part in self.module.named_modules()}
                self._choose()
            self._thread = 0
            self._serving.release()

    # -- which modules are parts -----------------------------------------------------------------

    def _split(self, part: nn.Module) -> None:
        """Takes the modules below a part in its place, since it has no graph."""
        self._refused.add(part)
        if self._called is not None:
            self._choose()

    def _choose(self) -> None:
        """Takes as parts the largest modules that are called and were not refused."""
        self._hooked = []
        chosen = dict.fromkeys(self._largest(self.module))
        known, self.runners = self.runners, {}
        for part in [*chosen][:MOST_PARTS]:
            refused = functools.partial(self._split, part)
            self.runners[part] = known.get(part) or self._make(self._names[part], part, refused)
        self._ways = [_Way(part, self._run) for part in self.runners]
        self.reports.clear()
        self.reports.update({self._names[p]: r.report for p, r in self.runners.items()})

    def _largest(self, module: nn.Module) -> Iterator[nn.Module]:
        called = self._called or ()
        for child in self._children(module):
            # What this call has left out the next one may run.
            unused = not any(each in called for each in child.modules())
            if (child in called or (unused and _has_forward(child))) and self._may_be_part(child):
                yield child
            else:
                yield from self._largest(child)

    def _may_be_part(self, module: nn.Module) -> bool:
        """Whether a module has enough to compute, and its call runs nothing but its forward."""
        if module in self._refused or not [*module.children()]:  # a layer is one operator or two
            return False
        if not any(parameter.dim() > 1 for parameter in module.parameters()):
            return False
        if type(module).__call__ is not nn.Module.__call__:
            return False
        if _is_hooked(module):
            self._hooked.append(module)
            return False
        return True

    def _children(self, module: nn.Module) -> Iterator[nn.Module]:
        """The modules in a module that its code calls as PyTorch does, those below aside."""
        for child in module.children():
            own = "forward" in child.__dict__ or child in self._left
            if not own and not needs_its_own_forward(child):
                yield child

    def _below(self, module: nn.Module) -> Iterator[nn.Module]:
        for child in self._children(module):
            yield child
            yield from self._below(child)

    # -- while the module runs -------------------------------------------------------------------

    def _install(self, ways: Iterable[_Way]) -> None:
        self._installed = [way for way in ways if "forward" not in way.module.__dict__]
        for way in self._installed:
            way.module.__dict__["forward"] = way

    def _remove(self) -> None:
        for way in self._installed:
            if way.module.__dict__.get("forward") is way:
                del way.module.__dict__["forward"]
        self._installed = []

    def away(self) -> Callable[[], None]:
        """Takes all stand-ins away for a while, and returns what ends it."""
        taken = [way for way in self._installed if way.module.__dict__.get("forward") is way]
        for way in taken:
            del way.module.__dict__["forward"]

        def back() -> None:
            for way in taken:
                # The module may have returned meanwhile, in another thread.
                if way in self._installed and "forward" not in way.module.__dict__:
                    way.module.__dict__["forward"] = way

        return back

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Notes that a module is called."""
        if self._called is not None and threading.get_ident() == self._thread:
            self._called.add(module)
        return type(module).forward(module, *args, **kwargs)

    def _run(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call of a part, with all modules as the user has left them."""
        runner = self.runners.get(part) if threading.get_ident() == self._thread else None
        if runner is None or _is_aside() or _is_hooked(part):
            return type(part).forward(part, *args, **kwargs)
        self._remove()
        try:
            output = runner(args, kwargs)
            self.ran_graphs |= runner.report.mode == "graph"
            return output
        finally:
            self._install(self._ways)


_RUNNING: list[Parts] = []


@contextlib.contextmanager
def without_stand_ins() -> Iterator[None]:
    """No stand-in is anywhere: for what looks at modules in a backward, which may be in a forward.

    So is that of ``autograd.grad(energy, positions, create_graph=True)`` in a module's own code.
    """
    with contextlib.ExitStack() as stack:
        for parts in [*_RUNNING]:
            stack.callback(parts.away())
        yield


class _Way:
    """Stands in a module's ``forward`` while the module around it runs."""

    def __init__(self, module: nn.Module, run: _Run) -> None:
        functools.update_wrapper(self, module.forward)
        self.module, self._run = module, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.module, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the module runs as that of one that stands alone."""
        copied = memo.get(id(self.module), self.module)
        return functools.partial(type(copied).forward, copied)


def _is_aside() -> bool:
    """Whether a call is none of an ordinary training step.

    Checkpointing runs a forward twice: without gradients or under hooks on what is saved, and then
    in the backward.
    """
    return (
        not torch.is_grad_enabled()
        or torch._C._current_graph_task_id() != -1
        or saving_hooks(False) is not None
    )


def _is_hooked(module: nn.Module) -> bool:
    """Whether a hook sees calls in a module, also one that a graph of the whole would trace."""
    if global_hooks._has_any_global_hook():
        return True
    return any(any(map(each.__dict__.get, HOOKS)) for each in module.modules())


def _has_forward(module: nn.Module) -> bool:
    """Whether a module can be called; a list of modules cannot."""
    return type(module).forward is not nn.Module.forward
