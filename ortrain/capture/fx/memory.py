"""Which memory the tensors of an exported graph show."""

from __future__ import annotations

import torch
from torch import fx

from ortrain.pytorch import kernels
from ortrain.pytorch.transforms import unwrapped

# Marks nodes of ours: their ``val`` is borrowed from the tensor whose new value they are.
FRESH = "ortrain.fresh"


def memory(node: fx.Node) -> int | None:
    """What tells whether two nodes show the same memory."""
    value = node.meta.get("val")
    return memory_of(value) if isinstance(value, torch.Tensor) else None


def memory_of(tensor: torch.Tensor) -> int:
    """What tells whether two tensors show the same memory, fake ones among them."""
    return kernels.memory_of(unwrapped(tensor))


def layout(node: fx.Node) -> tuple[str, ...]:
    """Shape, strides and offset, in words: comparing symbolic sizes would add conditions."""
    value = node.meta["val"]
    return (str(tuple(value.shape)), str(value.stride()), str(value.storage_offset()))


def viewed(node: fx.Node) -> fx.Node | None:
    """The argument whose memory a node's result shares; None where it has its own."""
    if node.op != "call_function" or not node.args or FRESH in node.meta:
        return None
    source, own = node.args[0], memory(node)
    if own is None or not isinstance(source, fx.Node) or memory(source) != own:
        return None
    return source
