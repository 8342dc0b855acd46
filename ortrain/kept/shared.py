"""Buffers that a kept call may come to while a graph has them as well.

A graph writes a module's buffers at its end, all at once. Code that runs in between, and reads one
that was written to before, has to find it as it is by then: the graph hands its value on, and it
stands in the buffer's place for as long as the call takes. What the call does to buffers that the
graph or another call has in hand as values would be lost, or come too late. So it is looked at
behind each call, and where a buffer is not as it was, the call of the whole module runs in PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from ortrain.kept.parameter import BUFFERS, Parameter
from ortrain.module_state.holder import same_elements
from ortrain.pytorch.version import version_of


class Handed:
    """Tensors that code is about to be given, with the memory that they show and its writes so far.

    Args:
        tensors: with strides.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        # The memory itself: another one may come to lie where one that nobody holds has lain.
        self._tensors = [(t, version_of(t), t.untyped_storage()) for t in tensors]

    def changed(self) -> list[int]:
        """The places of those that were written to, as far as PyTorch counts, or show other memory.

        Other memory comes of ``tensor.data = other``, which is no write that is counted.
        """
        return [
            i
            for i, (tensor, version, memory) in enumerate(self._tensors)
            if version_of(tensor) != version or tensor.untyped_storage()._cdata != memory._cdata
        ]


class Watched:
    """Tensors that nothing may write to, with what they held.

    Args:
        tensors: that are in the places of buffers.
    """

    def __init__(self, tensors: Iterable[tuple[Parameter, Tensor]]) -> None:
        self._tensors = [(buffer, tensor, version_of(tensor)) for buffer, tensor in tensors]
        self._silent: dict[torch.dtype, list[tuple[Parameter, Tensor]]] = {}
        for buffer, tensor, _ in self._tensors:
            if silent(tensor):
                self._silent.setdefault(tensor.dtype, []).append((buffer, tensor))
        # As one tensor: 40 vectors take 74 us in all, and 190 us one by one.
        self._held = [_joined(vectors) for vectors in self._silent.values()]

    def changed(self) -> str:
        """The name of one that is not as it was; empty where all are."""
        for buffer, tensor, version in self._tensors:
            if not buffer.is_everywhere(tensor) or version_of(tensor) != version:
                return buffer.places[0][1]
        for vectors, held in zip(self._silent.values(), self._held, strict=True):
            if not same_elements(_joined(vectors), held):
                return " or ".join(buffer.places[0][1] for buffer, _ in vectors)
        return ""


def _joined(vectors: Sequence[tuple[Parameter, Tensor]]) -> Tensor:
    return torch.cat([tensor.detach() for _, tensor in vectors])


def silent(tensor: Tensor) -> bool:
    """Whether PyTorch may write to a tensor without counting it.

    Batch and instance norm do so to running statistics, which are vectors.
    """
    return tensor.dim() == 1 and tensor.is_floating_point()


def buffers_of(module: nn.Module) -> list[Parameter]:
    """The buffers of a module and all below it."""
    return Parameter.all_of(module, BUFFERS)


def named(module: nn.Module, names: Iterable[str]) -> list[Parameter]:
    """The buffers of some names, each once."""
    known = dict(module.named_buffers(remove_duplicate=False))
    wanted = {id(known[name]) for name in names if name in known}
    return [buffer for buffer in buffers_of(module) if id(buffer.tensor) in wanted]


def others(buffers: Sequence[Parameter], own: Iterable[Parameter]) -> list[Parameter]:
    """Those of some buffers that are not in places of others."""
    taken = {place_of(buffer) for buffer in own if buffer.registry == BUFFERS}
    return [buffer for buffer in buffers if place_of(buffer) not in taken]


def place_of(buffer: Parameter) -> tuple[int, str]:
    """What tells a buffer from all others, whatever tensor it is."""
    owner, name = buffer.places[0]
    return id(owner), name
