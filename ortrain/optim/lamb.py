"""``Lamb``: Adam's direction, with a step as long as the parameter's norm says."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ortrain.kinds import NONE, expect_number
from ortrain.optim.bucket import Bucket, buckets
from ortrain.optim.clip import by_rows, total_norm
from ortrain.optim.closure import loss_of
from ortrain.optim.hyperparameters import check_group, check_params, newest

# Elements that are updated together on CPU, so that the direction of small parameters stays in the
# cache; a larger parameter goes alone. Elsewhere a bucket is one part, for few launches.
PART = 2**20


class Lamb(torch.optim.Optimizer):
    """LAMB as ONNX Runtime Training had it: You et al. 2019, arXiv:1904.00962.

    With the gradient g divided by ``max(1, |all gradients| / max_norm_clip)``, and c1, c2 as in
    `FusedAdam` (both 1 without bias correction)::

        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g^2
        r = m / c1 / (sqrt(v / c2) + eps) + decay p
        p = p - lr clamp(|p| / |r|, ratio_min, ratio_max) r

    The ratio is 1 where either norm is 0. The norm of the gradients is taken over all groups, and
    the gradients hold the divided values afterwards. Parameters are of any floating point type;
    moments have the parameter's.

    One pass of torch's Adam kernel makes the moments and r; two passes read the norms, one updates.
    r needs memory: of the largest parameter on CPU, which stays allocated (a third of the time
    would otherwise go into fresh pages), and of a bucket elsewhere.

    Args:
        params: parameters, or groups of them with hyperparameters of their own.
        lr: learning rate; a number or a 0-d tensor.
        betas: decay of the two moments.
        eps: added to the denominator.
        weight_decay: rate.
        ratio_min: lower bound of the ratio.
        ratio_max: upper bound of the ratio.
        max_norm_clip: norm of the gradients from which on they are divided; None to leave them.
        bias_correction: whether c1 and c2 are used.

    Raises:
        ValueError: a hyperparameter is out of its range.
        TypeError: a parameter is complex or of an integer type.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        ratio_min: float = -math.inf,
        ratio_max: float = math.inf,
        max_norm_clip: float | None = 1.0,
        bias_correction: bool = False,
    ) -> None:
        check_params(params)
        self._scratch: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "ratio_min": ratio_min,
            "ratio_max": ratio_max,
            "max_norm_clip": max_norm_clip,
            "bias_correction": bias_correction,
            "fused": True,  # torch then loads steps onto the parameter's device
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters.

        Args:
            param_group: its parameters, and what differs from the defaults.

        Raises:
            ValueError: a hyperparameter is out of its range.
            TypeError: a parameter is complex or of an integer type.
        """
        super().add_param_group(param_group)
        with newest(self.param_groups) as group:
            check_group(group, "Lamb")
            clip, low, high = (group[k] for k in ("max_norm_clip", "ratio_min", "ratio_max"))
            expect_number("max_norm_clip", clip, NONE, expected="a number or None")
            expect_number("ratio_min", low)
            expect_number("ratio_max", high)
            if clip is not None and not clip > 0.0:
                raise ValueError(f"Invalid max_norm_clip value: {clip}; None switches it off")
            if not low <= high:
                raise ValueError(f"Invalid ratio_min value: {low}, above ratio_max: {high}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient.

        Args:
            closure: computes the loss anew.

        Returns:
            What the closure returns.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        loss = loss_of(closure)
        # All gradients are looked at before any parameter changes.
        rows = [(g, buckets(g, self.state, owner="Lamb", by_step=False)) for g in self.param_groups]
        norm = None
        if any(group["max_norm_clip"] is not None for group, _ in rows):
            gradients = [g for _, found in rows for bucket in found for g in bucket.gradients]
            norm = total_norm(gradients)
        for group, found in rows:
            divisor = _divisor(norm, group["max_norm_clip"])
            for bucket in found:
                bucket.count()
                parts = bucket.parts(PART) if bucket.device.type == "cpu" else [bucket]
                for part in parts:
                    self._update(part, group, divisor)
                bucket.close(scaled=divisor is not None)
        return loss

    def _update(self, bucket: Bucket, group: dict[str, Any], divisor: Tensor | None) -> None:
        directions = self._decayed(bucket, group["weight_decay"])
        bucket.adam(
            lr=-1.0,
            betas=(float(group["betas"][0]), float(group["betas"][1])),
            eps=group["eps"],
            bias_correction=group["bias_correction"],
            grad_scale=divisor,
            into=directions,
        )
        lengths = torch.stack(_norms(bucket.parameters)), torch.stack(_norms(directions))
        ratios = (lengths[0] / lengths[1]).clamp(group["ratio_min"], group["ratio_max"])
        ratios = torch.where((lengths[0] != 0) & (lengths[1] != 0), ratios, 1.0)
        lr = group["lr"]
        factors = ratios * -(lr.to(ratios.device) if isinstance(lr, Tensor) else lr)
        advance = advance_on_host if factors.is_cpu else advance_on_device
        advance(bucket.parameters, directions, factors)

    def _decayed(self, bucket: Bucket, decay: float) -> list[Tensor]:
        """``decay p`` for every parameter, in its strides: where the kernel adds the direction."""
        parameters = bucket.parameters
        if bucket.device.type != "cpu":
            return list(torch._foreach_mul(parameters, decay))
        sizes = [parameter.numel() for parameter in parameters]
        key = (bucket.device, parameters[0].dtype)
        if key not in self._scratch or self._scratch[key].numel() < sum(sizes):
            self._scratch[key] = torch.empty(sum(sizes), dtype=key[1], device=key[0])
        rows = zip(self._scratch[key][: sum(sizes)].split(sizes), parameters, strict=True)
        views = [row.as_strided(p.size(), p.stride(), row.storage_offset()) for row, p in rows]
        for parameter, view in zip(parameters, views, strict=True):
            torch.mul(parameter, decay, out=view)
        return views

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes over a copy's or a state dict's groups and state."""
        super().__setstate__(state)
        self._scratch = {}


def advance_on_host(
    parameters: Sequence[Tensor], directions: Sequence[Tensor], factors: Tensor
) -> None:
    """Adds ``factors[i]`` times the direction to parameter i, where factors can be looked at."""
    for parameter, direction, factor in zip(parameters, directions, factors.tolist(), strict=True):
        parameter.add_(direction, alpha=factor)


def advance_on_device(
    parameters: Sequence[Tensor], directions: Sequence[Tensor], factors: Tensor
) -> None:
    """Adds ``factors[i]`` times the direction to parameter i, without waiting for the factors."""
    own_dtype = factors.to(parameters[0].dtype)
    torch._foreach_addcmul_(list(parameters), list(directions), list(own_dtype.unbind()))


def _divisor(norm: Tensor | None, clip: float | None) -> Tensor | None:
    """What gradients are divided by; None where it is known to be 1."""
    if norm is None or clip is None:
        return None
    divisor = norm.float() / clip
    return None if norm.is_cpu and divisor <= 1.0 else divisor.clamp(min=1.0)


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    low = tensors[0].dtype in (torch.float16, torch.bfloat16)
    rows = [by_rows(tensor) for tensor in tensors]
    return list(torch._foreach_norm(rows, 2, dtype=torch.float32 if low else None))


__all__ = ["PART", "Lamb"]
