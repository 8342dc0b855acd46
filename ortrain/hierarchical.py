"""``HierarchicalORTModule``: the largest parts of a module as graphs, the rest in PyTorch."""

from __future__ import annotations

from ortrain.extras import require

require("torch", __name__)

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ortrain.autodiff import differentiate
from ortrain.config import DebugOptions, Options
from ortrain.errors import OrtrainError
from ortrain.frontend.export import export
from ortrain.module import ORTModule, autocast_of
from ortrain.program import Role
from ortrain.pytorch.modules import children_of

_Call = tuple[tuple[Any, ...], dict[str, Any]]


class HierarchicalORTModule(ORTModule):
    """Trains a module of which not everything becomes a graph.

    The first call runs in PyTorch and shows what each sub-module is called with. Then the module is
    tried as a whole, where that fails its sub-modules, and so on down: each one that can be
    captured and differentiated is an ORTModule from then on, in the module itself. What is left,
    and what is used in other ways than by calling it, stays in PyTorch.

    Args:
        module: the module to train; its sub-modules are replaced, not its weights or their names.
        debug_options: as ORTModule's, of all parts.
        options: as ORTModule's, of all parts.

    Raises:
        TypeError: as ORTModule.
    """

    def __init__(
        self,
        module: nn.Module,
        debug_options: DebugOptions | None = None,
        *,
        options: Options | None = None,
    ) -> None:
        super().__init__(module, debug_options, options=options)
        self.__dict__["_never_called"].detach()
        self.__dict__["_parts"] = None
        self.__dict__["_whole"] = False
        self.__dict__["_reasons"] = {}

    @property
    def parts(self) -> dict[str, ORTModule]:
        """Name → part that is an ORTModule; the module itself has an empty name."""
        return dict(self.__dict__["_parts"] or {})

    @property
    def reasons(self) -> dict[str, str]:
        """Name → why a sub-module that was tried is none."""
        return dict(self.__dict__["_reasons"])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module; same arguments, same results."""
        if self.__dict__["_whole"]:
            return super().forward(*args, **kwargs)
        with autocast_of(self.options, self.module, args, kwargs):
            if self.__dict__["_parts"] is not None:
                return self.module(*args, **kwargs)
            calls: dict[nn.Module, _Call] = {}
            hooks = [
                m.register_forward_pre_hook(_noting(calls), with_kwargs=True)
                for m in _outside(self.module)
            ]
            try:
                result = self.module(*args, **kwargs)
            finally:
                for hook in hooks:
                    hook.remove()
            self._divide(calls)
            return result

    def extra_repr(self) -> str:
        """The module's class, and how many of its parts are graphs."""
        return f"{type(self.module).__name__}, {len(self.parts)} parts as graphs"

    def _divide(self, calls: dict[nn.Module, _Call]) -> None:
        """Finds the parts, and puts an ORTModule in the place of each."""
        own = self.__dict__
        own["_parts"] = {}
        made: dict[nn.Module, ORTModule] = {}

        def visit(parent: nn.Module | None, name: str, module: nn.Module, path: str) -> None:
            if isinstance(module, ORTModule):
                own["_parts"][path] = module
                return
            if module in made:
                assert parent is not None
                parent.register_module(name, made[module])
                return
            if module in calls:
                reason = _obstacle(module, calls[module], self.options)
                if reason is None:
                    part: ORTModule = self
                    if parent is None:
                        own["_whole"] = True
                    else:
                        part = ORTModule(module, self._debug_options, options=self.options)
                        # The gradients of the first call are no sign that it is passed by.
                        part.__dict__["_never_called"].detach()
                        parent.register_module(name, part)
                    made[module] = own["_parts"][path] = part
                    return
                own["_reasons"][path] = reason
            for child_name, child in list(children_of(module).items()):
                if child is not None and _worth_it(child):
                    visit(module, child_name, child, f"{path}.{child_name}".lstrip("."))

        visit(None, "", self.module, "")


def _outside(module: nn.Module) -> Iterator[nn.Module]:
    """The module and those below it, as far as no ORTModule is around them."""
    if not isinstance(module, ORTModule):
        yield module
        for child in module.children():
            yield from _outside(child)


def _noting(calls: dict[nn.Module, _Call]) -> Any:
    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(module, (args, kwargs))

    return note


def _worth_it(module: nn.Module) -> bool:
    """Whether a part has something to compute; an activation by itself is one operator."""
    return bool(children_of(module)) or any(True for _ in module.parameters())


def _obstacle(module: nn.Module, call: _Call, options: Options) -> str | None:
    """Why a module cannot train as a graph on such a call; None where it can."""
    try:
        program = export(module, *call, opset=options.opset).program
        wrt = [v.name or "" for v in program.inputs(Role.PARAMETER) if _trains(module, v.name)]
        if wrt and torch.is_grad_enabled():
            differentiate(program, wrt)
    except OrtrainError as error:
        return f"{error.what}: {error.because}" if error.because else error.what
    return None


def _trains(module: nn.Module, name: str | None) -> bool:
    return module.get_parameter(name or "").requires_grad
