"""What operators write to, among what they are given."""

from __future__ import annotations

from torch import fx

from ortrain.capture.fx.memory import memory
from ortrain.capture.fx.statistics import statistics_of
from ortrain.capture.origin import IN_PYTORCH, captured_error, checkpoint_of
from ortrain.capture.writes import written_by


def writes_of(node: fx.Node) -> list[fx.Node]:
    """The arguments that an operator writes to."""
    return [*written_by(node.target, node.args, node.kwargs, fx.Node)]


def written(graph: fx.Graph) -> set[fx.Node]:
    """Inputs that a graph writes to, themselves or through a view."""
    places = {memory(each) for node in graph.nodes for each in _changed(node)} - {None}
    return {node for node in graph.find_nodes(op="placeholder") if memory(node) in places}


def check_checkpoints(graph: fx.Graph) -> None:
    """Raises where a checkpoint writes to what it has not made: its repetition writes again.

    Raises:
        CaptureError: naming the operator.
    """
    numbers = {node: checkpoint_of(node) for node in graph.nodes}
    if not any(numbers.values()):
        return
    made: dict[int | None, str] = {}
    for node, number in numbers.items():
        made.setdefault(memory(node), number)
        for each in _changed(node) if number else ():
            if made.get(memory(each)) != number:
                raise captured_error(
                    node,
                    "a checkpoint changes a tensor that it has not made",
                    because="PyTorch changes it again where the checkpoint is repeated",
                    help=IN_PYTORCH,
                )


def _changed(node: fx.Node) -> list[fx.Node]:
    return [*writes_of(node), *statistics_of(node)]
