"""Calls that stay PyTorch's: see :mod:`ortrain.kept`."""

from __future__ import annotations

import ortrain.kept.call
from ortrain.runtime.aten.operands import Host, Tensor
from ortrain.runtime.aten.table import kernel


@kernel("ortrain::Kept")
def kept(t, *tensors, key, sizes=0, connected=(), ways=(), needs=(), axes=(), packed=0, node):
    """``y, context = kept.train([x, …], needs)``; without a backward ``y, = kept.run([x, …])``.

    The context refers to what the call was given and to what it gave.
    """
    first = len(tensors) - sizes
    given = [_passing(t, t.tensor(v)) for v in tensors[:first]]
    given += [t.number(v) if isinstance(v, Host) else v for v in tensors[first:]]
    called = t.keeper("kept", ortrain.kept.call.kept(key))
    context = node.outputs[-1] if needs else None
    run, train = ("run_packed", "train_packed") if packed else ("run", "train")
    if context is None or not (context.uses() or context.is_graph_output()):
        count = len(node.outputs) - bool(needs)
        return (
            *t.call(f"{called.text}.{run}", given, outputs=count, is_tuple=True),
            *[None] * bool(needs),
        )
    *results, saved = t.call(f"{called.text}.{train}", given, [*needs], outputs=len(node.outputs))
    saved.is_context = True
    shared = [v for v in (*given, *results) if isinstance(v, Tensor)]
    saved.roots = saved.roots.union(*(v.roots for v in shared))
    return (*results, saved)


def _passing(t, tensor):
    """The tensor, but of a constant a copy, as the user's code makes it anew for each call.

    What that writes to it, and nobody sees, would stay for the next step.
    """
    return tensor.clone() if tensor.roots & t.lasting else tensor


@kernel("ortrain::KeptGrad")
def kept_grad(t, context, *gradients, key, node):
    """``dx, = kept.backward(context, [dy, None, …])``"""
    arriving = [None if v is None else t.tensor(v) for v in gradients]
    called = t.keeper("kept", ortrain.kept.call.kept(key))
    count = len(node.outputs)
    return t.call(f"{called.text}.backward", context, arriving, outputs=count, is_tuple=True)
