"""The backend: what ``torch.compile`` hands its graphs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from ortrain.capture.origin import own_failure
from ortrain.config import Options
from ortrain.errors import CaptureError, OrtrainError
from ortrain.exclusive import EXCLUSIVE
from ortrain.frontend.graph import Graph
from ortrain.frontend.original import in_pytorch
from ortrain.module_state.saving import unhooked
from ortrain.uncollected import uncollected


class InPyTorch:
    """A graph that PyTorch runs.

    Attributes:
        reason: why it is no step.
    """

    def __init__(self, module: fx.GraphModule, reason: OrtrainError) -> None:
        self.reason = reason
        self._run = in_pytorch(module)

    def __call__(self, *args: Any) -> Any:
        """The graph's outputs for a call's inputs."""
        return self._run(*args)


def ortrain(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """What Dynamo runs in the place of a graph.

    Args:
        module: the graph.
        inputs: of the call that is being compiled.
        options: fields of :class:`~ortrain.Options`, as ``torch.compile(options=…)`` takes them.

    Returns:
        A function that gives what the graph gives: a :class:`~ortrain.frontend.graph.Graph`, or
        :class:`InPyTorch` where there is none.
    """
    settings = Options(**{"engine": "aten", **(options or {})})
    try:
        # A checkpoint of the user's around the call counts what is saved.
        with EXCLUSIVE, uncollected(), unhooked():
            return Graph(module, inputs, settings)
    except OrtrainError as error:
        return InPyTorch(module, error)
    except Exception as error:
        return InPyTorch(module, CaptureError(**own_failure(error, "making the graph")))
