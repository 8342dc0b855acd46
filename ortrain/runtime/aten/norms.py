"""Norms over a batch of images whose channels lie last.

PyTorch's kernels for them add up each channel in one running float32: of 200,000 numbers mean and
standard deviation are off by 1e-5 of the latter, a hundred times as far as where the channels come
first, and the gradients of the weights by 3e-5. Here a few hundred numbers are added at a time: the
memory of the images [N, C, H, W] is also that of images of p C channels with N H W / p numbers
each, whose statistics are put together as in Chan, Golub and LeVeque, "Updating formulae and a
pairwise algorithm for computing sample variances" (1979). That is one small step more, and no pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

Tensor = torch.Tensor

# Numbers of a channel that are added in a row, at most.
LENGTH = 256
_LAST = torch.channels_last
_aten = torch.ops.aten


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor,
    running_var: Tensor, training: bool, momentum: float, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """As ``aten._native_batch_norm_legit_functional`` in training.

    Args:
        x: [N, C, ...].
        weight: [C], or None.
        bias: [C], or None.
        running_mean: [C].
        running_var: [C].
        training: true.
        momentum: share of the batch in the new running statistics.
        eps: added to the variance.

    Returns:
        The output, the batch's mean and 1 / std [C], and the new running statistics [C].
    """
    if not _is_long(x):
        found: tuple[Tensor, ...] = _aten._native_batch_norm_legit_functional.default(
            x, weight, bias, running_mean, running_var, training, momentum, eps
        )
        return found
    mean, variance = _statistics(x)
    y = _aten.native_batch_norm.default(x, weight, bias, mean, variance, False, momentum, eps)[0]
    count = x.numel() // x.shape[1]
    unbiased = variance * (count / (count - 1))
    running = running_mean.lerp(mean, momentum), running_var.lerp(unbiased, momentum)
    return y, mean, (variance + eps).rsqrt_(), *running


def batch_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, mean: Tensor | None, inverse: Tensor | None, training: bool,
    eps: float, mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """As ``aten.native_batch_norm_backward``: by the batch's mean and 1 / std, or constant ones."""
    backward = _aten.native_batch_norm_backward.default
    statistics = running_mean, running_var, mean, inverse
    if not _is_long(x):
        found: tuple[Tensor | None, ...] = backward(dy, x, weight, *statistics, training, eps, mask)
        return found
    dy, count = dy.contiguous(memory_format=_LAST), x.numel() // x.shape[1]
    of_weight = of_bias = dx = None
    if training or any(mask[1:]):
        parts = _parts(count)
        repeated = (None if v is None else v.repeat(parts) for v in statistics)
        given = _folded(dy, parts), _folded(x, parts), None, *repeated
        _, *of_parts = backward(*given, training, eps, [False, True, True])
        of_weight, of_bias = (v.view(parts, -1).sum(0) for v in of_parts)
    if mask[0] and mean is not None and inverse is not None:
        assert of_weight is not None
        assert of_bias is not None
        dx = _of_training(dy, x, weight, mean, inverse, of_weight / count, of_bias / count)
    elif mask[0]:
        dx = backward(dy, x, weight, *statistics, training, eps, [True, False, False])[0]
    return dx, of_weight if mask[1] else None, of_bias if mask[2] else None


def _of_training(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, inverse: Tensor, slope: Tensor,
    shift: Tensor,
) -> Tensor:  # fmt: skip
    """``weight inverse (dy - shift - slope (x - mean) inverse)``, in two passes.

    PyTorch's kernel would take means of its own for these: slope of dy (x - mean) inverse, and
    shift of dy.
    """
    scale = inverse if weight is None else weight * inverse
    ones = torch.ones_like(mean)
    given = -scale * inverse * slope, -scale * shift, mean, ones
    dx: Tensor = _aten.native_batch_norm.default(x, *given, False, 0.0, 0.0)[0]
    return dx.addcmul_(dy, scale.view(1, -1, 1, 1))


def _is_long(x: Tensor) -> bool:
    """Whether PyTorch would add more numbers in a row than are to be."""
    if x.dtype is not torch.float32 or x.dim() != 4 or x.numel() <= LENGTH * x.shape[1]:
        return False
    return x.is_contiguous(memory_format=_LAST) and not x.is_contiguous()


@cache
def _parts(count: int) -> int:
    """The fewest parts of one size into which so many numbers are to be divided."""
    return next(p for p in range(-(-count // LENGTH), count + 1) if count % p == 0)


def _folded(x: Tensor, parts: int) -> Tensor:
    """A view of all images as one, the channels of each part beside those of the others."""
    width = parts * x.shape[1]
    return x.permute(0, 2, 3, 1).view(-1, width).t().view(1, width, -1, 1)


def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel."""
    parts = _parts(x.numel() // x.shape[1])
    found = _aten.batch_norm_update_stats.default(_folded(x, parts), None, None, 0.0)
    means, variances = (v.view(parts, -1) for v in found)
    mean = means.mean(0)
    return mean, variances.mean(0).add_((means - mean).square_().mean(0))


__all__ = ["batch_norm", "batch_norm_backward"]
