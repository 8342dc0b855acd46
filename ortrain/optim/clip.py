"""Norms of many tensors in one pass over them, and clipping by them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from types import GeneratorType
from typing import Literal

import torch
from torch import Tensor

from ortrain.kinds import expect, expect_flag, expect_number, refused
from ortrain.optim.hyperparameters import expect_scalar

# Elements from which on a norm is taken by rows, and those of a row.
LARGE, ROW = 2**17, 2**12


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float | Literal["inf"] = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales gradients so that their norm, over all of them, is at most ``max_norm``.

    Same results as ``torch.nn.utils.clip_grad_norm_``, bit for bit, with less work: where the norm
    is known without waiting for a device, which on CPU it is, gradients that need no scaling are
    only read. That halves the time. DTensors are not served.

    Args:
        parameters: whose ``grad`` is scaled in place; those without one are left out.
        max_norm: upper bound of the norm.
        norm_type: p of the p-norm, or ``inf``.
        error_if_nonfinite: raise where the norm is NaN or infinite; otherwise every gradient
            becomes NaN, or 0, respectively.

    Returns:
        The norm before, 0-d, on the first gradient's device.

    Raises:
        RuntimeError: the norm is not finite, and ``error_if_nonfinite``.
        TypeError: an argument is of another type.
    """
    hint = "write model.parameters()" if isinstance(parameters, torch.nn.Module) else ""
    expect("parameters", parameters, Iterable, "tensors, or one", hint)
    expect_scalar("max_norm", max_norm)
    if isinstance(norm_type, str) and norm_type == "inf":  # as torch has it, too
        norm_type = math.inf
    expect_number("norm_type", norm_type)
    expect_flag("error_if_nonfinite", error_if_nonfinite)
    exhausted = isinstance(parameters, GeneratorType)
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if exhausted and not parameters:
        warnings.warn("the generator of parameters is empty: nothing is clipped", stacklevel=3)
    for parameter in parameters:
        if not isinstance(parameter, Tensor):
            raise refused("parameters", parameter, "tensors")
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    # Summed by rows, a norm would not be torch's to the bit.
    norm = total_norm if norm_type == math.inf else torch.nn.utils.get_total_norm
    total = norm(gradients, norm_type, error_if_nonfinite)
    # On CPU the norm can be looked at, anywhere else that would wait for the device.
    if not total.is_cpu or not float(max_norm) / (total + 1e-6) >= 1.0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total


def total_norm(
    tensors: Sequence[Tensor], norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """The norm of all elements of all tensors, in one pass, by all threads.

    Args:
        tensors: of any shapes, dtypes and devices.
        norm_type: p of the p-norm, or ``inf``.
        error_if_nonfinite: raise where the norm is NaN or infinite.

    Returns:
        0-d, on the first tensor's device; 0 for no tensors.

    Raises:
        RuntimeError: the norm is not finite, and ``error_if_nonfinite``.
    """
    if norm_type == math.inf:
        tensors = largest(tensors)
    elif norm_type == 2:
        tensors = [by_rows(tensor) for tensor in tensors]
    return torch.nn.utils.get_total_norm(tensors, norm_type, error_if_nonfinite)


def by_rows(tensor: Tensor) -> Tensor:
    """A tensor of the same 2-norm: what is large, on CPU, becomes the norms of rows of it.

    torch 2.13 sums a norm on CPU in one thread, one element after the other: 24 M normally
    distributed ones come out wrong by 1e-3. By rows it takes all threads, and the error is 1e-7.

    Args:
        tensor: of any shape, dtype and device; small ones, those in low precision and those with
            strides of their own are returned as they are.
    """
    if (
        not tensor.is_cpu
        or tensor.numel() < LARGE
        or tensor.dtype not in (torch.float32, torch.float64)
        or not tensor.is_contiguous()
    ):
        return tensor
    rows, rest = tensor.view(-1).tensor_split([tensor.numel() // ROW * ROW])
    norms = torch.linalg.vector_norm(rows.view(-1, ROW), dim=1)
    return torch.cat([norms, torch.linalg.vector_norm(rest).view(1)])


def largest(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The largest magnitude in each tensor that is not empty, 0-d; NaN where a NaN is.

    Args:
        tensors: of any shapes, dtypes and devices.
    """
    tensors = [tensor for tensor in tensors if tensor.numel()]
    elsewhere = [tensor for tensor in tensors if not tensor.is_cpu]
    norms = iter(torch._foreach_norm(elsewhere, math.inf) if elsewhere else ())
    return [_largest_on_cpu(tensor) if tensor.is_cpu else next(norms) for tensor in tensors]


def _largest_on_cpu(tensor: Tensor) -> Tensor:
    # The infinity norm of torch 2.13 takes 70 ms for 52 M elements, aminmax 6 ms.
    low, high = torch.aminmax(tensor)
    return torch.maximum(-low, high)


def any_nonfinite(tensors: Sequence[Tensor]) -> Tensor:
    """Whether a NaN or an infinity is among the elements, in one pass that only reads.

    Args:
        tensors: at least one, of any shapes, dtypes and devices.

    Returns:
        0-d bool, on the first tensor's device; nothing waits for the device.
    """
    device = tensors[0].device
    extremes = [value.to(device, torch.float64) for value in largest(tensors)]
    if not extremes:
        return torch.zeros((), dtype=torch.bool, device=device)
    return torch.stack(extremes).isfinite().all().logical_not()


__all__ = ["any_nonfinite", "by_rows", "clip_grad_norm_", "largest", "total_norm"]
