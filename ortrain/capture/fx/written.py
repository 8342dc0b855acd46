"""Arguments of the module that a call which stays PyTorch's changes in place, as its code does.

The graph has a ``copy_`` of what the call leaves there. It writes nothing: the call does that
itself when it runs, and whoever reads the argument behind it reads the call's result::

    %kept = ortrain.kept([%features], [], 0);  %new = getitem(%kept, 0)
    %features.copy_(%new);  %y = relu(%features)      →      %y = relu(%new)

Nobody else may read the argument: what it holds then depends on which runs first.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from ortrain.capture.trace.keeping import keeper
from ortrain.kept.routine import Routine

aten = torch.ops.aten

_SIZES = {aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default}


def is_written_by_call(node: fx.Node, argument: fx.Node) -> bool:
    """Whether a write into an argument is what a call that nobody is before has done already."""
    known = keeper()
    if known is None or node.target is not aten.copy_.default or node.args[0] is not argument:
        return False
    source = node.args[1]
    while isinstance(source, fx.Node) and source.target in (
        operator.getitem,
        aten.detach.default,
    ):
        source = source.args[0]
    if not isinstance(source, fx.Node) or source.target is not torch.ops.ortrain.kept.default:
        return False
    tensors, _, number = source.args
    assert isinstance(tensors, list | tuple)
    assert isinstance(number, int)
    call = known.calls[number]
    if not isinstance(call, Routine) or not any(tensors[i] is argument for i in call.returned):
        return False
    readers = [user for user in argument.users if user is not node and user is not source]
    order = {each: i for i, each in enumerate(node.graph.nodes)}
    return all(
        user.target in _SIZES or order[user] > order[node] or _replaces(user, argument)
        for user in readers
    )


def _replaces(node: fx.Node, argument: fx.Node) -> bool:
    """Whether a node gives another value in the place of an argument's, and reads none of it."""
    return node.target is aten.copy.default and node.args[1] is not argument
