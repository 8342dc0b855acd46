"""The backend: what ``torch.compile`` hands its graphs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from ortrain.capture.origin import own_failure
from ortrain.config import Options
from ortrain.errors import CaptureError, NotServed, OrtrainError
from ortrain.exclusive import EXCLUSIVE
from ortrain.frontend.attempts import Attempts
from ortrain.frontend.call import draws_of, heard
from ortrain.frontend.graph import Graph
from ortrain.frontend.key import Key, NoKey, Table
from ortrain.frontend.original import Code, in_pytorch
from ortrain.frontend.parts import LEAST, asked_for, divided, is_pytorchs, responsible
from ortrain.pytorch.saving import unhooked
from ortrain.uncollected import lasting

_KNOWN = Table()
_ASKED = NotServed("keep_in_torch names it", help="none is needed")
_ALL = NotServed(
    "keep_in_torch leaves nothing to a graph",
    because=f"a part of fewer than {LEAST} operations is slower as one",
    help="none is needed",
)


class InPyTorch:
    """A graph, or a part of one, that PyTorch runs.

    Attributes:
        reason: why it is no step; None for a part that another part's reason is about.
    """

    def __init__(self, module: fx.GraphModule, reason: OrtrainError | None) -> None:
        self.reason, self.has_failed = reason, False
        self._run = Attempts(in_pytorch(module))

    def __call__(self, *args: Any) -> Any:
        """The graph's outputs for a call's inputs."""
        with draws_of(heard()):
            return self._run(args)


class Parts:
    """A graph of which PyTorch runs some statements.

    Attributes:
        reason: why the first of them is no step.
        parts: in the order in which they run.
    """

    def __init__(
        self, module: fx.GraphModule, real: Sequence[Any], options: Options, reason: OrtrainError
    ) -> None:
        self.reason = reason
        self.parts: list[Served] = []
        given = dict(zip(module.graph.find_nodes(op="placeholder"), real, strict=True))
        for node in module.graph.find_nodes(op="call_module"):
            part = getattr(module, str(node.target))
            if is_pytorchs(part):
                served: Served = InPyTorch(part, None)
            else:
                holders = part.graph.find_nodes(op="placeholder")
                inputs = [
                    _known(holder.meta["example_value"], given.get(arg))
                    for arg, holder in zip(node.args, holders, strict=True)
                ]
                rest = replace(options, keep_in_torch=())
                served = _served(part, inputs, rest, guarded=False)
            self.parts.append(served)
            delattr(module, str(node.target))
            setattr(module, str(node.target), served)
        self._run = Attempts(Code(module))

    @property
    def has_failed(self) -> bool:
        """Whether a part has."""
        return any(part.has_failed for part in self.parts)

    def __call__(self, *args: Any) -> Any:
        """The graph's outputs for a call's inputs."""
        return self._run(args)


Served = Graph | Parts | InPyTorch


def _known(fake: Any, real: Any) -> Any:
    """An input of a part: the real one, where what PyTorch runs before has not given it a past."""
    if real is None or (isinstance(real, Tensor) and real.requires_grad != fake.requires_grad):
        return fake
    return real


def ortrain(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """What Dynamo runs in the place of a graph.

    Args:
        module: the graph.
        inputs: of the call that is being compiled.
        options: fields of :class:`~ortrain.Options`, as ``torch.compile(options=…)`` takes them.

    Returns:
        A function that gives what the graph gives: a :class:`~ortrain.frontend.graph.Graph`,
        :class:`Parts`, or :class:`InPyTorch` where no statement is a step.
    """
    return steps_of(module, inputs, Options(**{"engine": "aten", **(options or {})}))


def steps_of(module: fx.GraphModule, inputs: Sequence[Any], options: Options) -> Served:
    """What runs a graph of Dynamo's.

    Args:
        module: the graph.
        inputs: of the call that is being compiled.
        options: settings.
    """
    # A checkpoint of the user's around the call counts what is saved.
    with EXCLUSIVE, lasting(), unhooked():
        return _served(module, inputs, options, guarded=True)


def _served(
    module: fx.GraphModule, real: Sequence[Any], options: Options, *, guarded: bool
) -> Served:
    try:
        key = Key(module, real, options, guarded=guarded)
    except NoKey:
        return _made(module, real, options, guarded=guarded)
    found: Served | None = _KNOWN.find(key)
    if found is None:
        found = _made(module, real, options, guarded=guarded)
        if not isinstance(found, InPyTorch):  # its reason tells the place, which is a module's own
            _KNOWN.keep(key, found)
    return found


def _made(
    module: fx.GraphModule, real: Sequence[Any], options: Options, *, guarded: bool
) -> Served:
    kept = asked_for(module, options.keep_in_torch)
    reason: OrtrainError = _ASKED
    if not kept:
        try:
            return Graph(module, real, options, guarded=guarded)
        except OrtrainError as error:
            reason = error
        except Exception as error:
            reason = CaptureError(**own_failure(error, "making the graph"))
            reason.__cause__ = error
    try:
        parts = divided(module, kept or responsible(module, reason))
        if parts is not None:
            served = Parts(parts, real, options, reason)
            if any(not isinstance(part, InPyTorch) for part in served.parts):
                return served
    except Exception as error:
        reason = CaptureError(**own_failure(error, "parting the graph"))
        reason.__cause__ = error
    return InPyTorch(module, _ALL if reason is _ASKED else reason)
