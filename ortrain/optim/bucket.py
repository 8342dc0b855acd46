"""Parameters that one call of a fused kernel can update, with their gradients and moments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# A step after which every power of a beta below 1 is 0, and with it the bias correction 1. It is
# a whole number in float32 and in int64: the kernels read it as one or the other.
PAST_CORRECTION = 2.0**62


@dataclass
class Bucket:
    """Tensors of one device and dtype, and where asked for of one step; lists of equal length.

    Attributes:
        parameters: what is updated.
        gradients: of the parameters.
        exp_avgs: running means of the gradients.
        exp_avg_sqs: running means of their squares.
        steps: steps done, 0-d float32 tensors.
        step: the number in all of ``steps``; 0 where they were not compared.
    """

    parameters: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_sqs: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    step: int = 0
    _copied: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """Of all tensors but, perhaps, the steps."""
        return self.parameters[0].device

    @property
    def rounds_betas(self) -> bool:
        """Whether the kernel has the betas in float32, as that of torch 2.11 to 2.13 for CUDA."""
        return self.device.type != "cpu" and self.parameters[0].dtype != torch.float64

    def __len__(self) -> int:
        return len(self.parameters)

    def add(self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> None:
        """Takes a parameter in.

        The kernels go through memory from front to back and look at no strides: on CPU, torch 2.13
        mixes up the elements of a gradient with other strides than its parameter, and writes past
        a parameter that has holes. Such tensors are updated as copies.
        """
        layout = state["exp_avg"]
        if parameter.stride() != layout.stride():
            # Either the parameter has holes, or it was given another layout after its moments.
            layout = torch.empty_like(parameter)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = _laid_out_as(layout, state[name])
        own, its_gradient = _laid_out_as(layout, parameter), _laid_out_as(layout, gradient)
        if own is not parameter or its_gradient is not gradient:
            self._copied.append((parameter, own, its_gradient))
        self.parameters.append(own)
        self.gradients.append(its_gradient)
        self.exp_avgs.append(state["exp_avg"])
        self.exp_avg_sqs.append(state["exp_avg_sq"])
        self.steps.append(state["step"])

    def count(self) -> None:
        """Adds one to the steps, before an update."""
        if self.steps[0].is_cpu:
            # A number would be made a tensor once for each step: 0.14 ms instead of 0.04 ms for
            # the 74 parameters of four layers of BERT.
            torch._foreach_add_(self.steps, torch.ones((), device="cpu"), alpha=1.0)
        else:
            torch._foreach_add_(self.steps, 1)
        self.step += 1

    def adam(
        self,
        *,
        lr: float | Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
        decoupled: bool = False,
        bias_correction: bool = True,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        into: list[Tensor] | None = None,
    ) -> None:
        """Updates moments and parameters by torch's kernel, in one pass over memory.

        Args:
            lr: learning rate; a tensor stays on its device.
            betas: decay of the two moments.
            eps: added to the root of the second moment after its bias correction.
            weight_decay: rate.
            decoupled: the decay is taken off the parameter, as AdamW does, rather than added to
                the gradient.
            bias_correction: whether the kernel divides the moments by ``1 - beta ** step``.
            grad_scale: 0-d float32 tensor that gradients are divided by, in place.
            found_inf: 0-d float32 tensor; 1 leaves everything as it is, the steps too.
            into: updated instead of the parameters; tensors with their strides.
        """
        device = self.device
        steps = self.steps
        if not bias_correction:
            steps = [torch.full((), PAST_CORRECTION, device=device)] * len(self)
        if found_inf is not None:
            found_inf = found_inf.to(device, non_blocking=True)
        kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
        written = self.parameters if into is None else into
        kernel(
            written,
            self.gradients,
            self.exp_avgs,
            self.exp_avg_sqs,
            [],
            steps,
            lr=lr.to(device, non_blocking=True) if isinstance(lr, Tensor) else lr,
            beta1=betas[0],
            beta2=betas[1],
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
            grad_scale=None if grad_scale is None else grad_scale.to(device, non_blocking=True),
            found_inf=found_inf,
        )
        # The kernel does not tell autograd that it writes to them: a backward of an earlier forward
        # would silently read weights of now.
        torch.autograd.graph.increment_version(written)
        if found_inf is not None:
            torch._foreach_sub_(self.steps, [found_inf] * len(self))

    def close(self, scaled: bool) -> None:
        """Ends the update: what was updated as a copy goes where it belongs.

        Args:
            scaled: whether the gradients have changed as well.
        """
        for parameter, copy, gradient in self._copied:
            if copy is not parameter:
                parameter.copy_(copy)
            if scaled:
                parameter.grad = gradient.to(parameter.dtype)

    def parts(self, elements: int) -> list[Bucket]:
        """Splits the bucket so that no part has more elements, or only one tensor.

        Args:
            elements: at most so many in a part.
        """
        parts: list[Bucket] = []
        size = 0
        for row in zip(
            self.parameters,
            self.gradients,
            self.exp_avgs,
            self.exp_avg_sqs,
            self.steps,
            strict=True,
        ):
            size += row[0].numel()
            if not parts or size > elements:
                parts.append(Bucket(step=self.step))
                size = row[0].numel()
            last = parts[-1]
            columns = (last.parameters, last.gradients, last.exp_avgs, last.exp_avg_sqs, last.steps)
            for column, tensor in zip(columns, row, strict=True):
                column.append(tensor)
        return parts


def buckets(
    group: Mapping[str, Any],
    state: MutableMapping[Tensor, dict[str, Tensor]],
    *,
    owner: str,
    by_step: bool,
) -> list[Bucket]:
    """The parameters of a group that have a gradient; makes the state of those that have none.

    Args:
        group: of the optimizer.
        state: of the optimizer, by parameter.
        owner: name of the optimizer, for messages.
        by_step: steps are kept on the CPU, and a bucket has parameters of one step.

    Raises:
        RuntimeError: a gradient is sparse.
    """
    found: defaultdict[tuple[torch.device, torch.dtype, int], Bucket] = defaultdict(Bucket)
    for parameter in group["params"]:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout is not torch.strided:
            raise RuntimeError(
                f"{owner} takes no sparse gradients, and the parameter of shape "
                f"{tuple(parameter.shape)} has one; build its nn.Embedding with sparse=False, or "
                "give it to torch.optim.SparseAdam"
            )
        own = state[parameter]
        if not own:
            own["step"] = torch.zeros((), device="cpu" if by_step else parameter.device)
            own["exp_avg"] = torch.zeros_like(parameter)
            own["exp_avg_sq"] = torch.zeros_like(parameter)
        step = int(own["step"].item()) if by_step else 0
        bucket = found[parameter.device, own["exp_avg"].dtype, step]
        bucket.step = step
        bucket.add(parameter, gradient, own)
    return list(found.values())


def _laid_out_as(layout: Tensor, tensor: Tensor) -> Tensor:
    """The tensor itself, or where strides or dtypes differ, a copy of it."""
    if tensor.stride() == layout.stride() and tensor.dtype == layout.dtype:
        return tensor
    return torch.empty_like(layout).copy_(tensor)


__all__ = ["PAST_CORRECTION", "Bucket", "buckets"]
