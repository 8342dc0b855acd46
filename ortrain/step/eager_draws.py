"""Eager steps that draw what a graph draws: a seeded run does not depend on when a graph runs.

A ``TorchFunctionMode`` hears of PyTorch's functions. Those that draw give the numbers of the call's
next streams. What PyTorch runs once more in a backward has no such mode around it, so inside of
checkpoints, and where gradients are switched off within a call, PyTorch draws its own. It does so
as well where the module has evaluated layers that compute something else under a mode.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ortrain.pytorch.hooks import parts_of
from ortrain.pytorch.modes import EagerMode, makes_numbers
from ortrain.pytorch.saving import saving_hooks
from ortrain.step.seeds import Seeds

_NAMES = {
    functional: "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout rrelu "
    "rrelu_ gumbel_softmax multi_head_attention_forward scaled_dot_product_attention",
    torch: "dropout dropout_ alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ "
    "feature_alpha_dropout feature_alpha_dropout_ native_dropout rrelu rrelu_ bernoulli normal "
    "rand rand_like randn randn_like randint randint_like randperm lstm gru rnn_tanh rnn_relu",
    Tensor: "bernoulli bernoulli_ normal_ uniform_ exponential_ geometric_ cauchy_ log_normal_ "
    "random_",
}
_DRAW = {
    getattr(owner, name)
    for owner, names in _NAMES.items()
    for name in names.split()
    if hasattr(owner, name)
}

# Of functions that draw with a chance: its place and name, and those of whether they do at all.
_CHANCES: dict[Any, tuple[int, str, int, str]] = {
    **{
        getattr(functional, name): (1, "p", 2, "training")
        for name in "dropout dropout1d dropout2d dropout3d alpha_dropout "
        "feature_alpha_dropout".split()
    },
    functional.scaled_dot_product_attention: (4, "dropout_p", -1, ""),
    functional.multi_head_attention_forward: (10, "dropout_p", 13, "training"),
    torch.dropout: (1, "p", 2, "train"),
    torch.lstm: (5, "dropout", 6, "train"),
    torch.gru: (5, "dropout", 6, "train"),
}


def _draws_nothing(function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function is known to draw nothing, as a dropout in evaluation."""
    found = _CHANCES.get(function)
    if found is None:
        return False
    place, name, switch, training = found
    if training and not (args[switch] if len(args) > switch else kwargs.get(training, True)):
        return True
    default = 0.0 if function is functional.scaled_dot_product_attention else 0.5
    return not (args[place] if len(args) > place else kwargs.get(name, default))


# Evaluated, they use a kernel for the whole layer, which gives zeros for padding. Under a mode they
# do not.
_ASKING = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


def as_graphs(module: nn.Module, seeds: Seeds) -> AbstractContextManager[Any]:
    """:class:`AsGraphs` for a call of a module; nothing where a part of it would see the mode."""
    seen = any(isinstance(part, _ASKING) and not part.training for part in parts_of(module))
    return nullcontext() if seen else AsGraphs(seeds)


class AsGraphs(TorchFunctionMode):
    """Around an eager call, whose draws are those of graphs.

    Args:
        seeds: of the call.

    Attributes:
        ends_a_graph: whether a function was called at which Dynamo ends its graphs.
    """

    def __init__(self, seeds: Seeds) -> None:
        super().__init__()
        self.ends_a_graph = False
        self._draws = _Draws(seeds)
        self._grad = torch.is_grad_enabled()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls the function, with the numbers of a graph where it draws."""
        kwargs = kwargs or {}
        if (out := kwargs.get("out")) is not None:
            self.ends_a_graph |= isinstance(out, Tensor) and not out.is_contiguous()
        if (
            function not in _DRAW
            or torch.is_grad_enabled() != self._grad
            or saving_hooks(False)
            or _draws_nothing(function, args, kwargs)
        ):
            return function(*args, **kwargs)
        with self._draws:
            return function(*args, **kwargs)


class _Draws(EagerMode):
    """Gives each operator that draws the numbers of the next stream."""

    def __init__(self, seeds: Seeds) -> None:
        super().__init__()
        self._seeds = seeds

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        from ortrain.capture.onnx.replay import is_replayed, replay  # which loads onnx

        kwargs = kwargs or {}
        if is_replayed(operator) and makes_numbers():  # a fake is no seed
            seed, stream = self._seeds.next()
            result = replay(operator, args, kwargs, seed=seed, stream=stream)
            if result is not NotImplemented:
                self._seeds.drawn += 1
                return result
        return operator(*args, **kwargs)
