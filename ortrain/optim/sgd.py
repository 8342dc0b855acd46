"""``SGD``: torch's own, with its fused kernel as the default."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ortrain.kinds import expect_flag, expect_number
from ortrain.optim.hyperparameters import check_params, expect_scalar, newest


class SGD(torch.optim.SGD):
    """``torch.optim.SGD(fused=True)``: the whole update in one pass over memory.

    Formulas, state and state dicts are torch's. Its kernel goes through memory without a look at
    strides: here, a gradient with other strides than its parameter is copied into them first, and a
    parameter with holes is refused.

    Args:
        params: parameters, or groups of them with hyperparameters of their own.
        lr: learning rate; a number or a 0-d tensor.
        momentum: decay of the momentum.
        dampening: share of a gradient that stays out of the momentum.
        weight_decay: rate of L2 regularization.
        nesterov: Nesterov's momentum.

    Raises:
        ValueError: a hyperparameter is out of its range, or a parameter has holes in its memory.
        TypeError: an argument is of another type.
    """

    # torch sets it in the constructor, where copies and pickles lose it.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        check_params(params)
        expect_number("lr", lr, Tensor, expected="a number or a tensor")
        expect_scalar("momentum", momentum)
        expect_scalar("dampening", dampening)
        expect_scalar("weight_decay", weight_decay)
        expect_flag("nesterov", nesterov)
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            fused=True,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters.

        Args:
            param_group: its parameters, and what differs from the defaults.

        Raises:
            ValueError: a parameter has holes in its memory.
        """
        super().add_param_group(param_group)
        with newest(self.param_groups) as group:
            for parameter in group["params"]:
                if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
                    raise ValueError(
                        "SGD updates memory from front to back, and the parameter of shape "
                        f"{tuple(parameter.shape)} is a view with strides {parameter.stride()}; "
                        "give it as a tensor of its own, or use torch.optim.SGD"
                    )

    def _init_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        momentum_buffer_list: list[Tensor | None],
    ) -> bool:
        # Not in a step of our own around torch's: its hooks would run twice.
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None or gradient.layout is not torch.strided:
                continue
            if gradient.stride() != parameter.stride():
                parameter.grad = torch.empty_like(parameter).copy_(gradient)
        sparse = super()._init_group(group, params, grads, momentum_buffer_list)
        # The kernel does not tell autograd that it writes to them.
        torch.autograd.graph.increment_version(params)
        return sparse


__all__ = ["SGD"]
