"""A model's equal blocks, each compiled for itself: one graph serves them all.

The layers of a transformer are of one class. Their graph is there in the time of one layer, however
many there are; what is around them runs in PyTorch. A call makes one graph at most: blocks of
several kinds get theirs in one call after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from torch import is_grad_enabled, nn

from ortrain.errors import NotServed, OrtrainError
from ortrain.frontend.call import NothingDone, heard
from ortrain.frontend.compiled import OVER_BUDGET, Compiled
from ortrain.pytorch.dynamo import without_conversions
from ortrain.pytorch.routes import is_routed, plainly, route, way_of, without
from ortrain.pytorch.saving import saving_hooks

# Graphs that one call makes; blocks behind these run in PyTorch then, so that no step waits long.
AT_ONCE = 1

_CHECKPOINTED = NotServed(
    "its blocks are within checkpoints, or hooks on saved tensors",
    because="a repetition of a block is in no call of the model, and has to be what it repeats",
    help="none is needed: blocks run in PyTorch, and the whole may be a graph",
)


class Blocks:
    """The blocks of a model on their way to a graph, or not.

    Args:
        blocks: of the model.
        compiled: what makes their graphs.
    """

    def __init__(self, blocks: Sequence[nn.Module], compiled: Compiled) -> None:
        self.blocks, self.compiled = blocks, compiled
        self._ways = [_Way(block, compiled) for block in blocks]
        self._on = False

    @property
    def refused(self) -> OrtrainError | None:
        """Why some have no graph; None where all have, as far as is known."""
        return next((way.refused for way in self._ways if way.refused is not None), None)

    def switch(self, on: bool) -> None:
        """Has the blocks run as graphs from now on, or in PyTorch."""
        if on is self._on:
            return
        for block, way in zip(self.blocks, self._ways, strict=True):
            if on and not is_routed(block):
                route(block, way)
            elif not on and way_of(block) is way:
                route(block, None)
        self._on = on


class _Way:
    """A block's call."""

    def __init__(self, block: nn.Module, compiled: Compiled) -> None:
        self.block, self.compiled = block, compiled
        self.refused: OrtrainError | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As a graph, within a call of the model; a checkpoint's repetition is in none."""
        call = heard()
        if call is None or call.compiled is not self.compiled or self.refused is not None:
            return plainly(self.block, args, kwargs)
        # A checkpoint with reentrance has none at its first run.
        if saving_hooks(False) is not None or is_grad_enabled() is not call.grad:
            call.failed = _CHECKPOINTED
            return plainly(self.block, args, kwargs)
        if len(self.compiled.made) - call.made >= AT_ONCE:
            return plainly(self.block, args, kwargs)
        before = call.module, call.given, call.begun
        call.module, call.given, call.begun = self.block, (args, kwargs), False
        route(self.block, None)  # what Dynamo converts is the block's call
        try:
            forbids = not call.may_convert and self.compiled.is_whole
            with (
                without(call.mode),
                without_conversions(raises=True) if forbids else nullcontext(),
            ):
                return self.compiled(self.block, args, kwargs)
        except NothingDone as nothing:
            why = nothing.why
        finally:
            route(self.block, self)
            call.module, call.given, call.begun = before
        output = plainly(self.block, args, kwargs)
        if why is OVER_BUDGET:
            call.failed = why
        else:
            self.refused = why  # else the call was wrong
        return output
