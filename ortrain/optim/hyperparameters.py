"""What a parameter group may say: torch's rules, for every group and not only for the defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ortrain.kinds import expect_flag, expect_number, expect_pair, refused


def expect_scalar(name: str, value: object) -> None:
    """Raises TypeError where an argument is neither a number nor a tensor of one element."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        expect_number(name, value)


def check_params(params: object) -> None:
    """Raises TypeError where parameters are none; what is in a list of them, torch looks at.

    Args:
        params: parameters, or groups of them.
    """
    hint = "write model.parameters()" if isinstance(params, nn.Module) else ""
    single = isinstance(params, Tensor | str | bytes | nn.Module)
    if single or isinstance(params, type) or not hasattr(params, "__iter__"):
        raise refused("params", params, "parameters, or groups of them", hint)


@contextmanager
def newest(groups: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The group that was added last, to be checked: a refusal takes it out again.

    Args:
        groups: of the optimizer.
    """
    try:
        yield groups[-1]
    except (ValueError, TypeError):
        groups.pop()
        raise


def check_group(group: Mapping[str, Any], owner: str) -> None:
    """Raises where a group of ``owner`` cannot be optimized.

    Args:
        group: parameters and their hyperparameters.
        owner: name of the optimizer, for the message.

    Raises:
        ValueError: a hyperparameter is out of its range; the message has its name and value.
        TypeError: a hyperparameter is of another type, or a parameter not of a floating point one.
    """
    missing = [name for name in ("lr", "betas", "eps", "weight_decay") if name not in group]
    if missing:
        raise ValueError(
            f"{owner} needs {', '.join(missing)} in every parameter group; is this the state dict "
            "of another kind of optimizer?"
        )
    lr, eps, decay = group["lr"], group["eps"], group["weight_decay"]
    expect_number("lr", lr, Tensor, expected="a number or a tensor")
    expect_scalar("eps", eps)
    expect_scalar("weight_decay", decay)
    expect_pair("betas", group["betas"], Tensor)
    expect_flag("bias_correction", group.get("bias_correction", True))
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"Tensor lr must be 1-element, and has shape {tuple(lr.shape)}")
    if not lr >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}")
    if not eps >= 0.0:
        raise ValueError(f"Invalid epsilon value: {eps}")
    for index, beta in enumerate(group["betas"]):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
    if not decay >= 0.0:
        raise ValueError(f"Invalid weight_decay value: {decay}")
    for option in ("amsgrad", "maximize"):
        if group.get(option):
            raise ValueError(f"{owner} has no {option}, and a parameter group asks for it")
    for parameter in group["params"]:
        if not parameter.is_floating_point():
            raise TypeError(
                f"{owner} optimizes floating point parameters, and the one of shape "
                f"{tuple(parameter.shape)} is {parameter.dtype}; train a complex one as "
                "torch.view_as_real(parameter)"
            )


__all__ = ["check_group", "check_params", "expect_scalar", "newest"]
