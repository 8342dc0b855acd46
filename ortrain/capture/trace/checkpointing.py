"""Activation checkpointing in a trace: which operators a checkpoint of the user's code holds.

``torch.utils.checkpoint`` runs its function as it is while a module is traced, so that the graph
has the function's operators and no trace of the checkpoint. Here every operator inside one is
marked with its number; the cut between forward and backward then keeps nothing of what lies inside,
and computes it again (:func:`ortrain.autodiff.partition.saved_values`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import fx
from torch.fx import traceback
from torch.utils import checkpoint

from ortrain.exclusive import this_thread

# Of a node's `meta["custom"]`, which torch hands on wherever a graph is traced again.
_KEY = "ortrain_checkpoint"


@contextlib.contextmanager
def marked_checkpoints() -> Iterator[None]:
    """Marks the operators of each checkpoint that a trace meets.

    Of checkpoints inside one another, the outermost counts. Private of torch is
    ``torch.utils.checkpoint._checkpoint_without_reentrant_generator``, which surrounds the call.
    """
    own, number, inside = checkpoint._checkpoint_without_reentrant_generator, 0, False
    here = this_thread()

    def surround(*args: Any, **kwargs: Any) -> Iterator[None]:
        nonlocal number, inside
        if not here():
            yield from own(*args, **kwargs)
            return
        if inside:
            yield
            return
        number += 1
        inside = True
        try:
            with traceback.preserve_node_meta(), traceback.annotate({_KEY: str(number)}):
                yield
        finally:
            inside = False

    checkpoint._checkpoint_without_reentrant_generator = surround
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator = own


@contextlib.contextmanager
def without_checkpoints() -> Iterator[None]:
    """Checkpoints that keep what their function saves, and run it once."""
    own, here = checkpoint._checkpoint_without_reentrant_generator, this_thread()

    def surround(*args: Any, **kwargs: Any) -> Iterator[None]:
        if here():
            yield
        else:
            yield from own(*args, **kwargs)

    checkpoint._checkpoint_without_reentrant_generator = surround
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator = own


def checkpoint_of(node: fx.Node) -> str:
    """The number of the checkpoint that a node is in; empty outside of any."""
    mark: str = (node.meta.get("custom") or {}).get(_KEY, "")
    return mark
