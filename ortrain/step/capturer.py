"""``Capturer``: captures a module, and finds what of it stays PyTorch's in its graphs."""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
from torch import is_grad_enabled, nn

from ortrain.cache import Cache
from ortrain.capture.export import Captured, capture
from ortrain.capture.onnx.translations.base import SymbolicSize
from ortrain.capture.trace.keeping import Keeper, keeping
from ortrain.capture.trace.refusal import Refusal
from ortrain.capture.trace.rehearsal import settled
from ortrain.config import Options
from ortrain.errors import CaptureError, NotServed, OrtrainError, UnsupportedInput
from ortrain.graph.rounding import PRODUCTS
from ortrain.step.kept import (
    ASKED,
    MOST_REFUSED,
    Search,
    named_modules,
    still_there,
    with_refused,
)


class Capturer:
    """Captures one module; what a capture refuses stays PyTorch's where the rest can be a graph.

    Args:
        module: the module.
        options: settings.
        cache: of captured programs.

    Attributes:
        kept: sub-modules that stay PyTorch's in graphs, by name, each with the reason.
        routines: functions and methods that do, each with the reason.
        numbers: in whose place there are buffers while the module is traced.
    """

    def __init__(self, module: nn.Module, options: Options, cache: Cache) -> None:
        self.module, self.options, self.cache = module, options, cache
        self.routines: dict[FunctionType, str] = {}
        self.numbers: frozenset[tuple[int, str]] = frozenset()
        self._keep(named_modules(module, options.keep_in_torch))

    def capture(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        exact: bool,
        still: bool,
        waits: bool,
        uncompared: Sequence[torch.Tensor] = (),
    ) -> Captured:
        """A capture, in which what it refuses stays PyTorch's: the innermost functions around it.

        Where there are none that can be nodes, the innermost sub-modules are. With ``waits`` a call
        that only makes what the next ones find is refused, and the next one is captured whole.

        A graph that leaves all products to PyTorch saves nothing: unless they were asked for, it is
        as if nothing could be kept.

        Raises:
            CaptureError: the whole is refused, or too much of it.
        """

        def attempt(keep: Keeper | None) -> Captured:
            return capture(
                self.module,
                args,
                kwargs,
                opset=self.options.opset,
                exact=exact,
                # Images are of one size, mostly; once they are not, of any.
                still=still,
                branches=True,
                cache=self.cache,
                keep=keep,
                uncompared=uncompared,
            )

        there = still_there(self.module, self.kept, self._kept_objects)
        self._keep({name: why for name, why in self.kept.items() if name in there})
        before, routines = self.kept, dict(self.routines)
        search = Search()
        while True:
            keep = self.keeper()
            try:
                captured = attempt(keep)
                break
            except CaptureError as error:
                if waits:
                    waits = False
                    with keeping(keep):
                        error.settles = settled(self.module, args, kwargs, error)
                    if error.settles:
                        raise  # the next call has all of it in its graph
                search.failed(self.module, error, keep)
                for function in search.useless:
                    self.routines.pop(function, None)
                if not self._keeps_more(search):
                    self._keep(before)
                    self.routines = routines
                    drawn = isinstance(error, Refusal) and error.drawn
                    told = error if drawn else search.first
                    raise told from told.__cause__
        if all(call.site.because is ASKED for call in captured.kept):
            return captured
        if too_much := self._held_by_parts():
            self._keep(before)
            self.routines = routines
            raise search.first if search.begun else CaptureError(f"{too_much} is no graph")
        if any(node.op_type in PRODUCTS for node in captured.program.graph):
            return captured
        self._keep({name: why for name, why in before.items() if why is ASKED})
        self.routines = {}
        return attempt(Keeper(functions=False, operators=False, modules=dict(self.kept)))

    def _held_by_parts(self) -> str:
        """A sub-module that would be PyTorch's where its parts can have graphs of most weights.

        They lie in modules that are made of others, below it. Empty where it is not so.
        """
        serves = self.options.parts and self.options.memory_budget is None and is_grad_enabled()
        refused = [name for name, why in self.kept.items() if why is not ASKED]
        if not serves or not refused:
            return ""
        inside: set[torch.Tensor] = set()
        for name in refused:
            for part in [*self.module.get_submodule(name).modules()][1:]:
                if type(part).forward is not torch.nn.Module.forward and [*part.children()]:
                    inside.update(part.parameters())
        weights = [(p.numel(), p in inside) for p in self.module.parameters() if p.dim() > 1]
        most = 2 * sum(n for n, held in weights if held) > sum(n for n, _ in weights)
        return refused[0] if most else ""

    def _keeps_more(self, search: Search) -> bool:
        """Takes it that something more stays PyTorch's: a function, else a sub-module."""
        error = search.last
        refused = sum(why is not ASKED for why in self.kept.values()) + len(self.routines)
        if refused == MOST_REFUSED or not self.may_keep(error, search):
            return False
        function = search.next(self.routines)
        if function is not None:
            self.routines[function] = error.what
        else:
            self._keep(with_refused(self.module, self.kept, error))
        return True

    def may_keep(self, error: OrtrainError, search: Search | None = None) -> bool:
        """Whether what an error is about may stay PyTorch's, and the rest become a graph."""
        if (
            self.keeper() is None
            or not isinstance(error, CaptureError)
            or isinstance(error, NotServed | UnsupportedInput | SymbolicSize)
            or (isinstance(error, Refusal) and error.drawn)
        ):
            return False
        if search is None:
            search = Search()
            search.failed(self.module, error, None)
        found = search.next(self.routines) is not None
        return found or with_refused(self.module, self.kept, error) != self.kept

    def keeper(self) -> Keeper | None:
        """What stays PyTorch's in a graph; None where no engine has a place for it."""
        if "reference" in (self.options.engine, self.options.inference):
            return None
        there = still_there(self.module, self.kept, self._kept_objects)
        modules = {name: why for name, why in self.kept.items() if name in there}
        return Keeper(
            functions=self.options.custom_autograd,
            modules=modules,
            routines=dict(self.routines),
            numbers=self.numbers,
        )

    def live(self) -> tuple[nn.Module, ...]:
        """The sub-modules that stay PyTorch's."""
        there = still_there(self.module, self.kept, self._kept_objects)
        return tuple([self.module.get_submodule(name) for name in self.kept if name in there])

    def _keep(self, kept: dict[str, str]) -> None:
        """Takes it that these sub-modules stay PyTorch's."""
        self.kept = kept
        self._kept_objects = {name: self.module.get_submodule(name) for name in kept}
