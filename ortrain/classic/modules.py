"""A model and its loss as one module, which takes and returns what a script describes."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ortrain.classic.description import Descriptions
from ortrain.errors import InputError, listing
from ortrain.pytorch import pytree


class WithLoss(nn.Module):
    """Calls a model, then its loss function on what it returns and the last input.

    Args:
        model: the model; its parameters are shared.
        loss_fn: takes the model's result and the label; None where the model returns its loss.
        descriptions: of the inputs, with the label, and of the outputs, with the loss.
        by_name: whether the model is given its inputs by name, or else in order.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, torch.Tensor], torch.Tensor] | None,
        descriptions: Descriptions,
        by_name: bool,
    ) -> None:
        super().__init__()
        self.model = model
        if isinstance(loss_fn, nn.Module):
            self.loss_fn = loss_fn
        else:
            self.__dict__["loss_fn"] = loss_fn
        self.names, self.results = descriptions.names, descriptions.results
        self.by_name, self.has_label = by_name, loss_fn is not None

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The outputs that are described, as many of them as there are.

        Without the label they are those of the model alone.
        """
        labelled = self.has_label and len(inputs) == len(self.names)
        given = inputs[:-1] if labelled else inputs
        if self.by_name:
            result = self.model(**dict(zip(self.names, given, strict=False)))
        else:
            result = self.model(*given)
        if labelled:
            loss = self.loss_fn(result, inputs[-1])
            return (loss, *tensors_of(result, self.results[1:]))
        return tensors_of(result, self.results[self.has_label :])


class ByName(nn.Module):
    """A module that takes inputs and gives outputs by name.

    Args:
        module: takes the described inputs in order, and returns a tuple of the outputs.
        descriptions: their names.
    """

    def __init__(self, module: nn.Module, descriptions: Descriptions) -> None:
        super().__init__()
        self.module = module
        self.names, self.results = descriptions.names, descriptions.results

    def forward(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """The outputs."""
        outputs = self.module(*(inputs[name] for name in self.names))
        return dict(zip(self.results, outputs, strict=True))


def tensors_of(result: Any, names: Sequence[str]) -> tuple[torch.Tensor, ...]:
    """The tensors of a model's result: those of these names, or else the first ones of them all.

    Args:
        result: a tensor, or anything that holds some.
        names: of the outputs that are described.
    """
    if isinstance(result, Mapping) and all(name in result for name in names):
        return tuple(result[name] for name in names)
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return tuple(leaves[: len(names)])


def takes_names(model: nn.Module, names: Sequence[str], has_label: bool, *, strict: bool) -> bool:
    """Whether a model can be given inputs of these names by name, or else in order.

    Args:
        model: the model.
        names: of the described inputs.
        has_label: the last of them is for a loss function.
        strict: names that ``forward`` does not have are an error, and not just names.

    Raises:
        InputError: ``forward`` takes fewer inputs, needs others, or has other names.
    """
    own = list(names[:-1] if has_label else names)
    try:
        parameters = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):  # a callable written in C
        return False
    kinds = [parameter.kind for parameter in parameters.values()]
    positional = [
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    by_name = [
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    any_number = inspect.Parameter.VAR_POSITIONAL in kinds
    any_name = inspect.Parameter.VAR_KEYWORD in kinds
    needed = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    kind = type(model).__name__
    label = (
        f", and the label {names[-1]!r} goes to the loss function" if has_label and names else ""
    )
    takes = f"forward takes {listing([*parameters], 20) or 'nothing'}{label}"
    strange = [name for name in own if name not in by_name]
    if not strange or any_name:
        if missing := [name for name in needed if name not in own]:
            raise InputError(
                f"{kind} needs {listing(missing)}, which is not described", because=takes
            )
        return True
    if strict and not any_number:
        near = difflib.get_close_matches(strange[0], by_name, 1)
        raise InputError(
            f"{kind} has no input {listing([repr(name) for name in strange])}",
            because=takes,
            help=f"did you mean {near[0]!r}?" if near else "describe inputs by forward's names",
        )
    if len(own) > len(positional) and not any_number:
        raise InputError(f"{len(own)} inputs of {kind} are described", because=takes)
    if len(own) < len([name for name in needed if name in positional]) or [
        name for name in needed if name not in positional
    ]:
        raise InputError(f"only {len(own)} inputs of {kind} are described", because=takes)
    return False


__all__ = ["ByName", "WithLoss", "takes_names", "tensors_of"]
