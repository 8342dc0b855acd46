"""Functions that raise at large values; no test module, whose assertions pytest rewrites."""

from __future__ import annotations

from torch import Tensor, distributions
from torch.nn import functional as F  # noqa: N812


def plain(x: Tensor) -> Tensor:
    if (x > 50).any():
        raise ValueError("too large")
    return x.square()


def negated(x: Tensor) -> Tensor:
    if not (x < 50).all():
        raise ValueError("too large")
    return x.square()


def several(x: Tensor) -> Tensor:
    if not (x < 50).all() or (x < -50).any():
        raise ValueError("too large")
    return x.square()


def asserted(x: Tensor) -> Tensor:
    assert (x < 50).all(), "too large"
    return x.square()


def otherwise(x: Tensor) -> Tensor:
    if (x < 50).all():
        y = x.square()
    else:
        raise ValueError("too large")
    return y


def nested(x: Tensor, strict: bool = True) -> Tensor:
    if strict and (x > 50).any():
        if (x > 1000).any():
            raise KeyError("far too large")
        raise ValueError("too large")
    return x.square()


def caught(x: Tensor) -> Tensor:
    try:
        if (x > 50).any():
            raise ValueError("too large")
    except ValueError:
        return x.abs()
    return x.square()


def gaussian(x: Tensor) -> Tensor:
    return F.gaussian_nll_loss(x, x + 1, 51 - x)


def normal(x: Tensor) -> Tensor:
    return -distributions.Normal(x, 50.5 - x).log_prob(x + 1)


def bernoulli(x: Tensor) -> Tensor:
    return F.binary_cross_entropy(x.sigmoid() + (x > 50), x.sigmoid().detach())


def indexed(x: Tensor) -> Tensor:
    return F.cross_entropy(x, (x.detach()[:, 0] > 50) * 7)


def indexed_before(x: Tensor) -> Tensor:
    return F.cross_entropy(x, -1 * (x.detach()[:, 0] > 50).long())


def picked(x: Tensor) -> Tensor:
    return F.nll_loss(x, -1 * (x.detach()[:, 0] > 50).long())


def margins(x: Tensor) -> Tensor:
    target = (x.detach() > 50) * 9
    return F.multilabel_margin_loss(x, target)


CHECKED = [plain, negated, several, asserted, otherwise, nested, caught, gaussian, normal,
           bernoulli, indexed, indexed_before, picked, margins]  # fmt: skip
