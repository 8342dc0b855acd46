"""Activation checkpointing in a trace: which operators a checkpoint of the user's code holds.

``torch.utils.checkpoint`` runs its function as it is while a module is traced, so that the graph
has the function's operators and no trace of the checkpoint. Here every operator inside one is
marked with its number; the cut between forward and backward then keeps nothing of what lies inside,
and computes it again (:func:`ortrain.autodiff.partition.saved_values`).

A reentrant checkpoint, as all were before PyTorch 1.11, is traced as the other kind, with what sets
it apart: it has gradients where one of its arguments has, and of its results only tensors do that
are not nested.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx import traceback
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from ortrain.capture.trace.patched import replaced
from ortrain.exclusive import this_thread

# Of a node's `meta["custom"]`, which torch hands on wherever a graph is traced again.
CHECKPOINT = "ortrain_checkpoint"
_REENTRANT = checkpoint.CheckpointFunction
# The generator, private of torch, that surrounds the call of the function: of 2.14, and before.
_AROUND = next(
    name
    for name in (
        "_checkpoint_without_reentrant_generator_impl",
        "_checkpoint_without_reentrant_generator",
    )
    if hasattr(checkpoint, name)
)


@contextlib.contextmanager
def marked_checkpoints() -> Iterator[None]:
    """Marks the operators of each checkpoint that a trace meets.

    Of checkpoints inside one another, the outermost counts.
    """
    own, number, inside = getattr(checkpoint, _AROUND), 0, False
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
            with traceback.preserve_node_meta(), traceback.annotate({CHECKPOINT: str(number)}):
                yield
        finally:
            inside = False

    with replaced(checkpoint, _AROUND, surround), reentrant_as_the_others():
        yield


@contextlib.contextmanager
def without_checkpoints() -> Iterator[None]:
    """Checkpoints that keep what their function saves, and run it once."""
    own, here = getattr(checkpoint, _AROUND), this_thread()

    def surround(*args: Any, **kwargs: Any) -> Iterator[None]:
        if here():
            yield
        else:
            yield from own(*args, **kwargs)

    with replaced(checkpoint, _AROUND, surround), reentrant_as_the_others():
        yield


@contextlib.contextmanager
def reentrant_as_the_others() -> Iterator[list[str]]:
    """Reentrant checkpoints run as those that are not, with the gradients that they have.

    Yields:
        What will hold the name of each function that was run so.
    """
    own, here = checkpoint.CheckpointFunction, this_thread()
    if (around := vars(own).get("met")) is not None:
        yield around
        return

    class Reentrant(own):  # type: ignore[misc, valid-type]
        met: ClassVar[list[str]] = []

        @staticmethod
        def apply(function: Any, preserve: bool, *args: Any) -> Any:
            if not here():
                return own.apply(function, preserve, *args)
            needed = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
            if not (needed and torch.is_grad_enabled()):
                with torch.no_grad():
                    return function(*args)
            Reentrant.met.append(getattr(function, "__qualname__", type(function).__name__))
            result = checkpoint.checkpoint(
                function, *args, use_reentrant=False, preserve_rng_state=preserve
            )
            if isinstance(result, tuple):
                return tuple(_seen_by_autograd(each) for each in result)
            return _seen_by_autograd(result)

    checkpoint.CheckpointFunction = Reentrant  # type: ignore[misc]
    try:
        yield Reentrant.met
    finally:
        checkpoint.CheckpointFunction = own  # type: ignore[misc]


@contextlib.contextmanager
def reentrant_as_it_is() -> Iterator[list[str]]:
    """Reentrant checkpoints are PyTorch's again, inside of what runs them as the others."""
    before = checkpoint.CheckpointFunction
    checkpoint.CheckpointFunction = _REENTRANT  # type: ignore[misc]
    try:
        yield []
    finally:
        checkpoint.CheckpointFunction = before  # type: ignore[misc]


def _seen_by_autograd(result: Any) -> Any:
    """A result of a function of autograd: a tensor itself; what nests some has no gradients."""
    if isinstance(result, torch.Tensor):
        return result
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)


def checkpoint_of(node: fx.Node) -> str:
    """The number of the checkpoint that a node is in; empty outside of any."""
    mark: str = (node.meta.get("custom") or {}).get(CHECKPOINT, "")
    return mark
