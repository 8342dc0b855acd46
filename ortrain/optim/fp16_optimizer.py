"""``FP16_Optimizer``: few passes over memory for the loss scaling of other libraries."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from ortrain.errors import OrtrainWarning, listing
from ortrain.optim import apex_amp, deepspeed_zero, megatron_lm

AnyOptimizer = TypeVar("AnyOptimizer")

# Wrappers around wrappers: accelerate's around DeepSpeed's is the deepest in use, and one level.
DEEPEST = 8
FAMILIES: dict[str, Callable[..., list[str] | None]] = {
    "DeepSpeed ZeRO": deepspeed_zero.replace,
    "Apex AMP": apex_amp.replace,
    "Megatron-LM": megatron_lm.replace,
}
GROUP_OPTIONS = {
    "get_horizontal_model_parallel_rank": "rank",
    "get_horizontal_model_parallel_group": "group",
    "get_tensor_model_parallel_rank": "rank",
    "get_tensor_model_parallel_group": "group",
}


def FP16_Optimizer(  # noqa: N802 - the name that scripts import
    optimizer: AnyOptimizer, **kwargs: Callable[[], Any] | None
) -> AnyOptimizer:
    """Replaces slow methods of another library's mixed-precision optimizer by faster ones.

    ::

        model, optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, ...)
        optimizer = FP16_Optimizer(optimizer)

    The methods that look for infinities, take norms and unscale gradients go through them one by
    one, in some libraries with a wait for the device after each. Those put in their place handle
    all of them together. Known are

    - ZeRO stages 1 and 2 of DeepSpeed, also inside accelerate's wrapper (`deepspeed_zero`);
    - any optimizer that Apex AMP has initialized (`apex_amp`);
    - the ``FP16_Optimizer`` of Megatron-LM 1.1.5 (`megatron_lm`).

    Args:
        optimizer: changed in place.
        kwargs: for Megatron-LM with model parallelism, functions without arguments:
            ``get_horizontal_model_parallel_rank`` and ``get_horizontal_model_parallel_group``, or
            the same with ``tensor`` for ``horizontal``.

    Returns:
        The optimizer that was given. One in which nothing was replaced comes with an
        `OrtrainWarning`, which is a UserWarning, that says why.

    Raises:
        TypeError: an unknown keyword, or one of rank and group without the other.
    """
    options = _group_options(kwargs)
    layers = list(_layers(optimizer))
    for inner in layers:
        for family, replace in FAMILIES.items():
            takes = options if family == "Megatron-LM" else {}
            remarks = replace(inner, **takes)
            if remarks is None:
                continue
            for remark in remarks:
                _warn(remark)
            if options and not takes:
                _warn(f"{family} knows its own rank and group; those given are for Megatron-LM")
            return optimizer
    foreign = [x for x in layers if not isinstance(x, torch.optim.Optimizer | torch.amp.GradScaler)]
    if foreign:
        kind = type(foreign[0])
        reason = f"{kind.__module__}.{kind.__qualname__} is not an optimizer it knows"
    else:
        reason = (
            "torch.amp.GradScaler and torch's optimizers check and unscale gradients in torch's "
            "own kernels: there is nothing to replace"
        )
    _warn(f"{reason}. It knows those of DeepSpeed ZeRO 1 and 2, Apex AMP and Megatron-LM 1.1.5")
    return optimizer


def _group_options(kwargs: dict[str, Callable[[], Any] | None]) -> dict[str, Callable[[], Any]]:
    if unknown := kwargs.keys() - GROUP_OPTIONS.keys():
        raise TypeError(
            f"FP16_Optimizer has no keyword {listing(sorted(unknown))}; it takes "
            f"{', '.join(GROUP_OPTIONS)}"
        )
    options: dict[str, Callable[[], Any]] = {}
    for name, function in kwargs.items():
        if function is not None:
            if GROUP_OPTIONS[name] in options:
                raise TypeError(f"{name} and its other name are both given to FP16_Optimizer")
            options[GROUP_OPTIONS[name]] = function
    if len(options) == 1:
        raise TypeError(
            "FP16_Optimizer needs both the rank and the group of the model parallel processes: a "
            "norm is either of all of them or of this one alone"
        )
    return options


def _layers(optimizer: object) -> Iterator[Any]:
    """The optimizer, and what it wraps as its ``optimizer``."""
    layer: Any = optimizer
    for _ in range(DEEPEST):
        yield layer
        layer = getattr(layer, "optimizer", None)
        if layer is None:
            return


def _warn(message: str) -> None:
    warnings.warn(f"FP16_Optimizer: {message}", OrtrainWarning, stacklevel=3)


__all__ = ["FP16_Optimizer"]
