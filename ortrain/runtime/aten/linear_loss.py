"""The loss of a linear layer's logits, which are there for some rows at a time.

Each row's logits become their softmax and then their gradient in the same memory, and what the
gradients of the layer's input and weight need of them is added up before the next rows come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ortrain.runtime.aten.owners import is_alone

_log_softmax = torch.ops.aten._log_softmax.out
_NARROW = (torch.float16, torch.bfloat16)
# Classes whose sums are added at a time where they are no product's own: they stay in a cache.
_CLASSES = 8192


def linear_cross_entropy(
    products: Any,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    *,
    rows: int,
    dtype: torch.dtype,
    ignore_index: int,
    label_smoothing: float,
    mean: bool,
    needs: Sequence[bool],
) -> list[Tensor]:
    """The cross entropy of ``x weightᵀ + bias``, and the gradients of all three.

    On the CPU rows whose target is ignored are left out of all work.

    Args:
        products: multiplies float32: :mod:`~ortrain.runtime.aten.blas` or what has its place.
        x: [N, H].
        weight: [C, H].
        target: [N], int64.
        bias: [C], or None.
        class_weight: [C], or None.
        rows: so many at a time, at most.
        dtype: of the products; softmax, loss and gradients are float32 where that is narrower.
        ignore_index: of targets that take no part.
        label_smoothing: as in ``torch.nn.functional.cross_entropy``.
        mean: whether the loss is divided by the weights of what takes part.
        needs: which of the gradients of x, weight and bias are asked for.

    Returns:
        The loss [], and those of the gradients, for an upstream gradient of 1.

    Raises:
        RuntimeError: a target is no class.
    """
    wide = torch.float32 if dtype in _NARROW else dtype
    class_weight = None if class_weight is None else class_weight.to(wide)
    count, places, takes_part = x.shape[0], None, target.ne(ignore_index)
    if x.device.type == "cpu":
        found = takes_part.nonzero().squeeze(1)
        if found.numel() < count:
            places, x, target = found, x.index_select(0, found), target.index_select(0, found)
    else:  # of a GPU one would have to wait for their number
        target = target.masked_fill(~takes_part, 0)
    mask = None if x.device.type == "cpu" else takes_part
    factors = _Factors(target, mask, class_weight, label_smoothing, weight.shape[0], mean, wide)
    narrow, matrix = x.to(dtype), weight.to(dtype)
    narrow_bias = None if bias is None else bias.to(dtype)
    sums = _Sums(products, x, weight, needs, factors.scale, wide)
    loss = x.new_zeros((), dtype=wide)
    for part in _blocks(x.shape[0], rows):
        block, index = narrow[part], target[part].unsqueeze(1)
        logits = products.linear(block, matrix, narrow_bias).to(wide)
        _log_softmax(logits, -1, False, out=logits)
        loss -= factors.summed(logits, index, part)
        if any(needs):
            factors.turn(logits, index, part)
            sums.add(logits.to(dtype), block, matrix, part)
        del logits  # before there are others
    return [loss / factors.total if mean else loss, *sums.results(count, places)]


def _blocks(count: int, rows: int) -> list[slice]:
    """Rows in as few blocks as can be, of equal size."""
    each = -(-count // max(-(-count // rows), 1))
    return [slice(start, start + each) for start in range(0, count, max(each, 1))]


class _Factors:
    """What the logarithms of each row count for in the loss, and in its gradient.

    Args:
        target: [N].
        takes_part: which rows do; None where all do.
        class_weight: [C], or None.
        smoothing: of the labels.
        classes: their number.
        mean: whether the loss is a mean.
        wide: dtype of the loss.

    Attributes:
        total: of the weights of what takes part.
        scale: what all gradients are still to be multiplied with.
    """

    def __init__(
        self,
        target: Tensor,
        takes_part: Tensor | None,
        class_weight: Tensor | None,
        smoothing: float,
        classes: int,
        mean: bool,
        wide: torch.dtype,
    ) -> None:
        ones = torch.ones(target.shape, dtype=wide, device=target.device)
        share = ones if class_weight is None else class_weight.take(target)
        self._ignored = None if takes_part is None else ~takes_part
        share, ones = self._shown(share), self._shown(ones)
        self.total = share.sum()
        self._class_weight = class_weight
        self._own, self._even = share * (1.0 - smoothing), None
        if smoothing:
            self._even = ones * (smoothing / classes)
        # Where all rows count alike, nothing of the logits' size is multiplied.
        self._alike = takes_part is None and class_weight is None
        self.scale, self._unit = 1.0, None
        if mean and self._alike:
            self.scale = 1.0 / target.numel() if target.numel() else 1.0
        elif mean:
            self._unit = self.total.reciprocal()
        self._all = float(classes) if class_weight is None else class_weight.sum()

    def _shown(self, rows: Tensor) -> Tensor:
        """Zero for what takes no part, even where it is no number."""
        return rows if self._ignored is None else rows.masked_fill(self._ignored, 0.0)

    def _upstream(self, part: slice, rows: Tensor) -> Tensor:
        """The factors of some rows in the gradient."""
        if self._unit is None:
            return rows[part]
        ignored = None if self._ignored is None else self._ignored[part]
        scaled = rows[part] * self._unit  # where nothing takes part, by infinity
        return scaled if ignored is None else scaled.masked_fill_(ignored, 0.0)

    def summed(self, log_prob: Tensor, index: Tensor, part: slice) -> Tensor:
        """The sum over some rows of the logarithms times what they count for."""
        picked = log_prob.gather(1, index).squeeze(1) * self._own[part]
        if self._even is not None:
            weight = self._class_weight
            every = log_prob.sum(1) if weight is None else log_prob.mv(weight)
            picked += every * self._even[part]
        if self._ignored is not None:
            picked.masked_fill_(self._ignored[part], 0.0)
        return picked.sum()

    def turn(self, log_prob: Tensor, index: Tensor, part: slice) -> None:
        """Makes the gradient of some rows' logits of their logarithms, in place.

        With q the target probabilities times weights it is softmax * sum(q) - q.
        """
        own, softmax = self._upstream(part, self._own).unsqueeze(1), log_prob.exp_()
        even = None if self._even is None else self._upstream(part, self._even).unsqueeze(1)
        if not self._alike:
            softmax *= own if even is None else own + even * self._all
        if even is not None:
            weight = self._class_weight
            softmax -= even if weight is None else even * weight
        softmax.scatter_add_(1, index, -own)


class _Sums:
    """The gradients, added up block by block.

    Args:
        products: as of :func:`linear_cross_entropy`.
        x: of all rows that take part.
        weight: [C, H].
        needs: as of :func:`linear_cross_entropy`.
        scale: of all gradients.
        wide: their dtype.
    """

    def __init__(
        self,
        products: Any,
        x: Tensor,
        weight: Tensor,
        needs: Sequence[bool],
        scale: float,
        wide: torch.dtype,
    ) -> None:
        self._products, self._scale, self._wide, self._like = products, scale, wide, weight
        needs_x, self._needs_weight, needs_bias = needs
        self._x = torch.empty_like(x, dtype=wide) if needs_x else None
        self._weight: Tensor | None = None
        self._bias = weight.new_zeros(weight.shape[0], dtype=wide) if needs_bias else None

    def add(self, d_logits: Tensor, x: Tensor, weight: Tensor, part: slice) -> None:
        """Adds what the gradient of some rows' logits brings."""
        if self._x is not None:
            torch.mul(self._products.mm(d_logits, weight), self._scale, out=self._x[part])
        if self._needs_weight and x.dtype is self._wide:
            self._add_product(d_logits, x * self._scale)
        elif self._needs_weight:
            self._add_rounded(d_logits, x)
        if self._bias is not None:
            self._bias.add_(d_logits.sum(0, dtype=self._wide), alpha=self._scale)

    def _add_product(self, d_logits: Tensor, x: Tensor) -> None:
        """Adds the weight's gradient, laid out as the weight is, which may be transposed."""
        total, products = self._weight, self._products
        if total is None and self._like.stride(0) == 1:
            self._weight = products.mm(x.t(), d_logits).t()
        elif total is None:
            self._weight = products.mm(d_logits.t(), x)
        elif products.adds(d_logits.t()[:_CLASSES], x):
            torch.addmm(total, d_logits.t(), x, out=total)
        else:
            for classes in self._parts():
                total[classes].add_(products.mm(d_logits.t()[classes], x))

    def _add_rounded(self, d_logits: Tensor, x: Tensor) -> None:
        """Adds it where products come out in another dtype than sums have."""
        is_first = self._weight is None
        if self._weight is None:
            self._weight = torch.empty_like(self._like, dtype=self._wide)
        for classes in self._parts():
            more = self._products.mm(d_logits.t()[classes], x)
            if is_first:
                self._weight[classes].copy_(more).mul_(self._scale)
            else:
                self._weight[classes].add_(more, alpha=self._scale)

    def _parts(self) -> list[slice]:
        """The classes in parts whose sums stay in a cache; on a GPU all of them."""
        count = self._like.shape[0]
        each = _CLASSES if self._like.device.type == "cpu" else count
        return [slice(start, start + each) for start in range(0, count, each)]

    def results(self, count: int, places: Tensor | None) -> list[Tensor]:
        """Those that were asked for.

        Args:
            count: of all rows.
            places: of those that take part; None where all do.
        """
        if self._x is not None and places is not None:
            x = self._x.new_zeros(count, self._x.shape[1])
            self._x = x.index_copy_(0, places, self._x)
        if self._needs_weight and self._weight is None:
            self._weight = torch.zeros_like(self._like, dtype=self._wide)
        return [each for each in (self._x, self._weight, self._bias) if each is not None]


def scaled(unit: Tensor, upstream: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient for an upstream gradient of 1 times the one that there is.

    On the CPU in its own memory where nobody else has that: the gradient of a large table is 154 MB
    of pages, and the upstream gradient of a loss mostly 1.

    Args:
        unit: any shape; whoever calls has it in a variable.
        upstream: [].
        dtype: of the result.
    """
    if not is_alone(unit, calls=2) or unit.dtype is not dtype or unit.device.type != "cpu":
        return (unit * upstream).to(dtype)
    return unit if upstream.item() == 1.0 else unit.mul_(upstream)
