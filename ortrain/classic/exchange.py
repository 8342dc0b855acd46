"""Gradients of several processes, added up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed

# Of gradients in one message, as DistributedDataParallel has it.
MESSAGE_BYTES = 25 << 20


def add_up(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Replaces each gradient by its sum over all processes of the group.

    Where only some processes have a gradient, as with a layer that not every batch reaches, the
    others count as zeros; where none has one, it stays None.

    Args:
        parameters: the same ones in the same order in every process.
    """
    if not parameters:
        return
    has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
    anywhere = has.to(parameters[0].device)
    distributed.all_reduce(anywhere, distributed.ReduceOp.MAX)
    message: list[torch.Tensor] = []
    for parameter, present in zip(parameters, anywhere.tolist(), strict=True):
        if not present:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        if message and (
            gradient.dtype != message[0].dtype
            or sum(each.nbytes for each in message) + gradient.nbytes > MESSAGE_BYTES
        ):
            _send(message)
            message = []
        message.append(gradient)
    _send(message)


def _send(message: Sequence[torch.Tensor]) -> None:
    if not message:
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in message])
    distributed.all_reduce(flat)
    parts = flat.split([gradient.numel() for gradient in message])
    for gradient, part in zip(message, parts, strict=True):
        gradient.copy_(part.view(gradient.shape))


__all__ = ["add_up"]
