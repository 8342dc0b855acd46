"""Buffers that a graph has written to before a call which stays PyTorch's are given to the call.

Its code may read them under any name and on any way. In PyTorch it finds what was written; a graph
writes at its end. So the value is one more input of the call, and stands in the buffer's place
while it runs::

    %mean.mul_(0.9);  %kept = ortrain.kept([%h], [], 0)
        →  %new = mul(%mean, 0.9);  %kept = ortrain.kept([%h, %new], [], 0)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import fx

from ortrain.capture.origin import captured_error
from ortrain.capture.trace.keeping import keeper
from ortrain.kept.call import Kept
from ortrain.kept.parameter import BUFFERS
from ortrain.kept.shared import named, others


def call_of(node: fx.Node) -> Kept | None:
    """The call that a node is; None where it is something else, or sees its arguments alone."""
    known = keeper()
    if known is None or node.target is not torch.ops.ortrain.kept.default:
        return None
    number = node.args[2]
    assert isinstance(number, int)
    call = known.calls[number]
    return call if call.comes_to_more else None


def hand_on(
    node: fx.Node,
    call: Kept,
    buffers: Mapping[str, fx.Node],
    has_gradient: Callable[[fx.Node], bool],
) -> None:
    """Gives a call what buffers hold that were written to before it, where it is not given them.

    Args:
        node: of the call.
        call: what the node calls.
        buffers: the names of those that were written to, each with its value.
        has_gradient: whether a gradient may flow through a value.

    Raises:
        CaptureError: one does through a buffer that the call may read.
    """
    known = keeper()
    assert known is not None
    given, sizes, number = node.args
    assert isinstance(given, list | tuple)
    tensors = [*given]
    if known.module is not None:
        for name, value in buffers.items():
            written = others(named(known.module, [name]), [*call.parameters, *call.buffers])
            if written:
                call.buffers += written
                tensors.append(value)
    first = len(call.arguments.plain)
    held = zip([*call.parameters, *call.buffers], tensors[first:], strict=True)
    for buffer, tensor in held:
        if buffer.registry == BUFFERS and call.grad and has_gradient(tensor):
            raise captured_error(
                node,
                f"{call.site.name} may read {buffer.places[0][1]!r}, a buffer that a gradient "
                "flows through",
                because="autograd follows what was written to it, and a graph hands its value on",
                help="detach what is written to the buffer, or write under torch.no_grad()",
            )
    node.args = (tensors, sizes, number)
