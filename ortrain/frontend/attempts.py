"""Runs of a graph in PyTorch that leave nothing behind where they raise.

A wrong call raises the module's own error. So the module's code runs once more, and does again what
it does before the error: it has to find everything as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ortrain.frontend.call import NothingDone, heard
from ortrain.pytorch.saving import saving_hooks
from ortrain.pytorch.version import version_of

# Bytes of a tensor that is copied before a run: counters and statistics are hardly larger.
MOST = 1 << 20


class Attempts:
    """Runs of one graph in PyTorch.

    Args:
        run: the graph.
        written: places of the inputs that it writes to; None where its first run is to tell.
    """

    def __init__(self, run: Callable[..., Any], written: Collection[int] | None = None) -> None:
        self.run, self._written = run, None if written is None else {*written}

    def __call__(self, args: Sequence[Any]) -> Any:
        """The graph's outputs for its inputs.

        Raises:
            NothingDone: it raises within a held module's call of which no graph has run.
        """
        call = heard()
        if call is None or call.begun:
            return self.run(*args)
        state, places = torch.get_rng_state(), self._written
        copies = {
            i: args[i].clone()
            for i in (range(len(args)) if places is None else places)
            if _may_be_set_back(args[i])
        }
        versions = {i: version_of(each) for i, each in enumerate(args) if _counts(each)}
        try:
            found = self.run(*args)
        except Exception as error:
            if saving_hooks(False) is not None:
                raise  # a hook's own: checkpointing ends what it computes again so
            if not all(_set_back(args[i], copies.get(i)) for i in _changed(args, versions)):
                raise
            torch.set_rng_state(state)
            raise NothingDone from error
        call.begun = True
        if places is None:
            self._written = _changed(args, versions)
        return found


def _counts(value: Any) -> bool:
    """Whether it is a tensor that counts writes."""
    return isinstance(value, Tensor) and not value.is_inference()


def _changed(args: Sequence[Any], versions: Mapping[int, int]) -> set[int]:
    """Places of what has been written to."""
    return {i for i, version in versions.items() if version_of(args[i]) != version}


def _may_be_set_back(value: Any) -> bool:
    if not _counts(value) or value.requires_grad or isinstance(value, nn.Parameter):
        return False
    return value.layout is torch.strided and value.nbytes <= MOST


def _set_back(tensor: Tensor, copy: Tensor | None) -> bool:
    """Gives a tensor its values of before; False where it cannot have them."""
    if copy is None or tensor.requires_grad or tensor.shape != copy.shape:
        return False
    tensor.copy_(copy)
    return True
