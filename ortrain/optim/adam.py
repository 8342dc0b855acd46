"""``FusedAdam``: three kinds of Adam, each in one pass over memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ortrain.kinds import expect_flag, expect_whole
from ortrain.optim.adam_mode import AdamWMode, kernel_terms
from ortrain.optim.bucket import Bucket, buckets
from ortrain.optim.clip import total_norm
from ortrain.optim.closure import loss_of
from ortrain.optim.hyperparameters import check_group, check_params, newest

# Elements whose decay is in memory at a time, where it takes passes of its own.
PART = 2**24


class FusedAdam(torch.optim.Optimizer):
    """Adam as of ONNX Runtime Training's optimizer of that name, on torch's fused kernels.

    With the gradient g, the step t from 1 on, and c1 = 1 - beta1^t, c2 = 1 - beta2^t (both 1
    without bias correction), every mode keeps ::

        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g^2

    and updates a parameter p by ::

        ADAM_L2_REGULARIZATION   g = g + decay p, before m and v
                                 p = p - lr sqrt(c2) / c1 m / (sqrt(v) + eps)
        ADAMW_TRANSFORMERS       p = p - lr sqrt(c2) / c1 m / (sqrt(v) + eps)
                                 p = p - lr decay p
        ADAMW_TORCH              p = p - lr decay p
                                 p = p - lr / c1 m / (sqrt(v / c2) + eps)

    The second is the AdamW of transformers, the third ``torch.optim.AdamW``; as eps is added before
    or after the bias correction, they differ even without weight decay. Kingma and Ba 2014
    (arXiv:1412.6980), Loshchilov and Hutter 2017 (arXiv:1711.05101).

    Parameters are float32, bfloat16, float16 or float64, of any mixture of devices; moments have
    the parameter's dtype, and the arithmetic of low precision is torch's. A state dict of
    ``torch.optim.AdamW`` or ``Adam`` can be loaded, and one of FusedAdam by them; so can one of the
    original, which kept the step in the parameter group. With ``torch.amp.GradScaler``, the kernel
    divides by the scale itself; on CUDA, only ADAMW_TORCH does so without waiting for the device.

    Args:
        params: parameters, or groups of them with hyperparameters of their own.
        lr: learning rate; a number or a 0-d tensor.
        bias_correction: whether c1 and c2 are used.
        betas: decay of the two moments.
        eps: added to the denominator.
        adam_w_mode: one of the three.
        weight_decay: rate.
        set_grad_none: what `zero_grad` does unless told otherwise.

    Raises:
        ValueError: a hyperparameter is out of its range.
        TypeError: a parameter is complex or of an integer type.
    """

    # torch.amp.GradScaler leaves grad_scale and found_inf to such an optimizer, as attributes.
    _step_supports_amp_scaling = True
    grad_scale: Tensor

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        adam_w_mode: AdamWMode | int = AdamWMode.ADAMW_TRANSFORMERS,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        check_params(params)
        expect_whole("adam_w_mode", adam_w_mode, expected="an AdamWMode")
        expect_flag("set_grad_none", set_grad_none)
        if adam_w_mode not in [*AdamWMode]:
            raise ValueError(f"adam_w_mode: {adam_w_mode} is not a valid AdamWMode, 0 to 2")
        self._adam_w_mode = AdamWMode(adam_w_mode)
        self._set_grad_none = set_grad_none
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            **self._read_by_torch(),
        }
        super().__init__(params, defaults)

    def _read_by_torch(self) -> dict[str, Any]:
        """What ``torch.optim.AdamW`` looks for in a group that it loads."""
        decoupled = self._adam_w_mode != AdamWMode.ADAM_L2_REGULARIZATION
        return {
            "amsgrad": False,
            "maximize": False,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": True,
            "decoupled_weight_decay": decoupled,
        }

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
            check_group(group, "FusedAdam")

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Frees the gradients, or fills them with zeros.

        Args:
            set_to_none: whether to free them; by default, what ``set_grad_none`` says.
        """
        super().zero_grad(self._set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient.

        Args:
            closure: computes the loss anew.

        Returns:
            What the closure returns.

        Raises:
            RuntimeError: a gradient is sparse, or a CUDA graph is being recorded in one of the
                first two modes, whose steps are counted on the host.
        """
        loss = loss_of(closure)
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        in_torch_mode = self._adam_w_mode == AdamWMode.ADAMW_TORCH
        if not in_torch_mode:
            if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"FusedAdam in mode {self._adam_w_mode.name} counts steps on the host, and a "
                    "CUDA graph would repeat the first one for ever; use AdamWMode.ADAMW_TORCH"
                )
            if found_inf is not None and found_inf.item():
                return loss
            found_inf = None
        for group in self.param_groups:
            by_step = group["bias_correction"] and not in_torch_mode
            for bucket in buckets(group, self.state, owner="FusedAdam", by_step=by_step):
                bucket.count()
                self._update(bucket, group, grad_scale, found_inf)
                bucket.close(scaled=grad_scale is not None)
        return loss

    def _update(
        self,
        bucket: Bucket,
        group: dict[str, Any],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        terms = kernel_terms(
            self._adam_w_mode, group, bucket.step, rounds_betas=bucket.rounds_betas
        )
        bucket.adam(
            lr=terms.lr,
            betas=terms.betas,
            eps=terms.eps,
            weight_decay=terms.weight_decay,
            decoupled=terms.decoupled,
            bias_correction=terms.bias_correction,
            grad_scale=grad_scale,
            found_inf=found_inf,
        )
        if terms.taken_off is not None:
            # Multiplied by 1 - lr decay in float32, which rounds a decay of 1e-5 by up to 0.3 %,
            # parameters were 7e-6 of their way off after 1000 steps; so they are 7e-7.
            for part in bucket.parts(PART):
                shares = torch._foreach_mul(part.parameters, terms.taken_off)
                torch._foreach_sub_(part.parameters, shares)

    def clip_and_step(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clips the gradients by their norm and updates the parameters.

        As `clip_grad_norm_` followed by `step`, but the kernel scales the gradients that it reads
        anyway. They hold the scaled values afterwards, equal to those but for rounding; on CPU, the
        norm of 131 072 elements and more is taken by all threads, and more exactly than torch does.
        Not for gradients that a ``torch.amp.GradScaler`` has scaled: unscale those, clip them, then
        ``scaler.step``.

        Args:
            max_norm: upper bound of the norm over all groups.
            norm_type: p of the p-norm, or ``inf``.
            error_if_nonfinite: raise where the norm is NaN or infinite, before anything changes.

        Returns:
            The norm before, 0-d.

        Raises:
            RuntimeError: the norm is not finite, and ``error_if_nonfinite``; a gradient is sparse.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        with torch.no_grad():
            norm = total_norm(gradients, norm_type, error_if_nonfinite)
            divisor = (norm.float() + 1e-6) / float(max_norm)
            if not (norm.is_cpu and divisor <= 1.0):
                self.grad_scale = divisor.clamp(min=1.0)
        try:
            self.step()
        finally:
            self.__dict__.pop("grad_scale", None)
        return norm

    # -- copies and state dicts --------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        own = {"_adam_w_mode": self._adam_w_mode, "_set_grad_none": self._set_grad_none}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes over a copy's or a state dict's groups and state.

        Raises:
            ValueError: they ask for what FusedAdam does not do, or have moments without a step.
        """
        for group in state["param_groups"]:
            check_group(group, "FusedAdam")
        super().__setstate__(state)
        in_torch_mode = self._adam_w_mode == AdamWMode.ADAMW_TORCH
        for group in self.param_groups:
            group.setdefault("bias_correction", self.defaults["bias_correction"])
            group.update(self._read_by_torch())
            # The original has one step for a group, and only once it has made one.
            groups_step = group.pop("step", None)
            on_host = group["bias_correction"] and not in_torch_mode
            for parameter in group["params"]:
                own = self.state.get(parameter)
                if not own:
                    continue
                step = own.get("step", groups_step)
                if step is None:
                    raise ValueError("the state of a parameter has no step, and its group neither")
                device = torch.device("cpu") if on_host else parameter.device
                own["step"] = torch.as_tensor(step, dtype=torch.float32, device=device)


__all__ = ["AdamWMode", "FusedAdam"]
