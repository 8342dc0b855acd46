"""The random numbers of a running function: ``ortrain::Random…``, bit for bit.

In place, and in the order of operations of :mod:`ortrain.ops.random`, which has the maths.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ortrain.ops.random import (
    EXPONENTIAL_FAR,
    EXPONENTIAL_NEAR,
    NEAR,
    NORMAL_FAR,
    NORMAL_NEAR,
    Rational,
)
from ortrain.runtime.aten import hash
from ortrain.runtime.aten.hash import Seed


def bits(sizes: Sequence[int], seed: Seed, stream: int, device: torch.device) -> torch.Tensor:
    """Whole numbers from 0 to 2^32 - 1, as int64."""
    return hash.bits(sizes, seed, stream, device).to(torch.int64).bitwise_and_(0xFFFFFFFF)


def uniform(
    sizes: Sequence[int], seed: Seed, stream: int, digits: int, device: torch.device
) -> torch.Tensor:
    """Numbers in [0, 1), of so many binary digits, as float32."""
    k = hash.bits(sizes, seed, stream, device)
    first = k.bitwise_right_shift_(32 - digits).bitwise_and_(2**digits - 1)
    return first.to(torch.float32).mul_(2.0**-digits)


def normal(sizes: Sequence[int], seed: Seed, stream: int, device: torch.device) -> torch.Tensor:
    """Numbers of mean 0 and variance 1, as float32."""
    k = hash.bits(sizes, seed, stream, device)
    steps = k & 0x7FFFFFFF
    q = _middle_(steps.to(torch.float32))
    near = _quotient(q * q, NORMAL_NEAR).mul_(q)
    far = _quotient(_root(_middle_((0x7FFFFFFF - steps).to(torch.float32))), NORMAL_FAR)
    sign = k.bitwise_right_shift_(31).bitwise_or_(1)
    return torch.where(steps < NEAR, near, far).mul_(sign.to(torch.float32))


def exponential(
    sizes: Sequence[int], seed: Seed, stream: int, device: torch.device
) -> torch.Tensor:
    """Numbers of rate 1, as float32."""
    k = hash.bits(sizes, seed, stream, device)
    v = _middle_(_unsigned(~k))
    near = _quotient(v, EXPONENTIAL_NEAR).mul_(v)
    u = _root(_middle_(_unsigned(k)))
    far = _quotient(u, EXPONENTIAL_FAR).mul_(u)
    return torch.where(k >= 0, far, near)


def _unsigned(k: torch.Tensor) -> torch.Tensor:
    return k.view(torch.uint32).to(torch.float32)


def _middle_(count: torch.Tensor) -> torch.Tensor:
    return count.add_(0.5).mul_(2.0**-32)


def _root(p: torch.Tensor) -> torch.Tensor:
    """One minus the sixteenth root.

    In float64, rounded at each step: of MKL's roots of float32, one in 150 is not the nearest one.
    """
    for _ in range(4):
        p = p.to(torch.float64).sqrt_().to(torch.float32)
    return 1.0 - p


def _quotient(x: torch.Tensor, rational: Rational) -> torch.Tensor:
    above, below = (_polynomial(x, coefficients) for coefficients in rational)
    return above.div_(below)


def _polynomial(x: torch.Tensor, coefficients: Sequence[float]) -> torch.Tensor:
    *rest, highest = coefficients
    result = (x * highest).add_(rest[-1])
    for coefficient in reversed(rest[:-1]):
        result.mul_(x).add_(coefficient)
    return result
