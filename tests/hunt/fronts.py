"""The ways to a graph that a script is run by, and what became of its calls on each."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import fx, nn
from torch._dynamo import config
from torch.fx.experimental import _config as sizes

from ortrain import Options, ORTModule
from ortrain.frontend.backend import InPyTorch, Parts, ortrain
from ortrain.frontend.original import in_pytorch


@dataclasses.dataclass
class Counts:
    """What became of the calls of a script, by all of its wrapped modules.

    Attributes:
        graph: calls that ran as a graph, or in part as one.
        eager: calls that ran in PyTorch.
        reasons: why, one of each module or graph.
        copies: outputs that share memory with others in PyTorch, and not here, or the other way.
        graphs: of Dynamo's that are steps.
        parted: that are steps in part.
        pytorchs: that PyTorch runs whole.
    """

    graph: int = 0
    eager: int = 0
    reasons: list[str] = dataclasses.field(default_factory=list)
    copies: int = 0
    graphs: int = 0
    parted: int = 0
    pytorchs: int = 0


class Front(Protocol):
    """A way to a graph."""

    def wrap(self, module: nn.Module) -> nn.Module:
        """What a script calls in the place of a module."""
        ...

    def around(self) -> contextlib.AbstractContextManager[None]:
        """What has to be around a script."""
        ...

    def counts(self, last: nn.Module) -> Counts:
        """What became of the calls, those of the last module of a script among them."""
        ...

    def plain(self) -> Front | None:
        """The same way with nothing of ours on it; None where that is eager."""
        ...


class Wrapped:
    """``ORTModule``.

    Args:
        options: of each.
        steps_to_come: what each is told of.
    """

    def __init__(self, options: Options, steps_to_come: int | None = None) -> None:
        self.options, self.steps_to_come = options, steps_to_come
        self.made: list[nn.Module] = []

    def wrap(self, module: nn.Module) -> nn.Module:
        """A wrapper."""
        made = ORTModule(module, options=self.options)
        if self.steps_to_come is not None:
            made.steps_to_come = self.steps_to_come
        self.made.append(made)
        return made

    def around(self) -> contextlib.AbstractContextManager[None]:
        """Nothing."""
        return contextlib.nullcontext()

    def counts(self, last: nn.Module) -> Counts:
        """By the reports of the wrappers."""
        counts = Counts()
        for model in {id(each): each for each in (*self.made, last)}.values():
            if not isinstance(model, ORTModule):
                continue
            counts.graph += model.report.graph_calls
            counts.eager += model.report.eager_calls
            if model.report.eager_calls:
                counts.reasons.append(plainly(model.report.reason))
        return counts

    def plain(self) -> None:
        """Eager."""


# Of Dynamo, without which it makes more graphs than it needs, or raises.
SETTINGS = {
    "allow_rnn": True,
    "capture_scalar_outputs": True,
    "capture_dynamic_output_shape_ops": True,
    "allow_unspec_int_on_nn_module": True,
    "recompile_limit": 64,
    "accumulated_recompile_limit": 1000,
    "skip_nnmodule_hook_guards": False,
}


class Compiled:
    """``module.compile`` with the backend.

    Args:
        engine: of steps; None for Dynamo's graphs in PyTorch.
        settings: of Dynamo; without, as it comes.
    """

    def __init__(self, engine: str | None, settings: dict[str, Any] | None = None) -> None:
        self.engine, self.settings = engine, settings or {}
        self.found = Counts()
        self.ran = False

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module itself, which calls what is compiled."""
        if not isinstance(module._compiled_call_impl, _Counted):
            module.compile(backend=self._backend)
            module._compiled_call_impl = _Counted(module._compiled_call_impl, self)
        return module

    def _backend(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if self.engine is None:
            return in_pytorch(module)
        made = ortrain(module, inputs, options={"engine": self.engine})
        if isinstance(made, InPyTorch):
            self.found.pytorchs += 1
        elif isinstance(made, Parts):
            self.found.parted += 1
        else:
            self.found.graphs += 1
        self._note(made)
        return self._counted(made)

    def _note(self, made: Any) -> None:
        if isinstance(made, Parts | InPyTorch) and made.reason is not None:
            self.found.reasons.append(plainly(str(made.reason)))
        for part in made.parts if isinstance(made, Parts) else ():
            self._note(part)

    def _counted(self, made: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(made, InPyTorch):
            return made

        def run(*args: Any) -> Any:
            self.ran = True
            return made(*args)

        return run

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Dynamo with its settings, and with nothing of another script."""
        torch._dynamo.reset()
        with config.patch(**self.settings):
            if self.settings:
                with sizes.patch(backed_size_oblivious=True):
                    yield
            else:
                yield

    def counts(self, last: nn.Module) -> Counts:
        """By what ran inside of each call."""
        return self.found

    def plain(self) -> Front | None:
        """Dynamo's graphs in PyTorch."""
        return Compiled(None, self.settings) if self.engine is not None else None


class _Counted:
    """A compiled call."""

    def __init__(self, call: Callable[..., Any], front: Compiled) -> None:
        self.call, self.front = call, front

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.front.ran = False
        try:
            return self.call(*args, **kwargs)
        finally:
            found = self.front.found
            found.graph += self.front.ran
            found.eager += not self.front.ran


def plainly(reason: str) -> str:
    """A reason without what differs from program to program."""
    if not reason:
        return "none: the last call ran as a graph"
    text = re.sub(r"`[^`]*`|'[^']*'|\"[^\"]*\"", "…", reason.split("\n")[0])
    return re.sub(r"[-+]?\d[\d.e+-]*", "N", text)[:160]
