"""Hooks of modules: which decide what a module computes, and which of these a trace follows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ortrain.module_state.scope import package

HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
# What the hooks of a dictionary above are called with, in dictionaries beside it.
HOOK_FLAGS = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
# Hooks with which transformers collects hidden states and attentions; a capture traces them.
_TRACED_HOOKS = "transformers.utils.output_capturing"
# Hooks of transformers and PEFT that make embeddings require a gradient, so that checkpointing
# with reentrance has something to differentiate. In a graph they do nothing.
_IDLE_HOOKS = {"make_inputs_require_grads", "make_inputs_require_grad"}
_HOOKING = {"transformers", "peft"}
# Hooks that only compute, so that a capture has what they compute: NEFTune's noise on embeddings.
_COMPUTING_HOOKS = {"neftune_post_forward_hook"}
_COMPUTING = {"transformers", "trl"}
# Hooks of PyTorch that compute a weight from parameters and put it into an attribute of the module,
# in front of each of its forwards, which alone reads it. A trace follows them as it does code.
_WEIGHING_HOOKS = (SpectralNorm, WeightNorm)


def weighed_attributes(module: nn.Module) -> set[str]:
    """The attributes of a module that its hooks compute anew at each call: no state of it."""
    hooks = module.__dict__.get("_forward_pre_hooks") or {}
    return {hook.name for hook in hooks.values() if type(hook) in _WEIGHING_HOOKS}


def watched_hooks(hooks: dict[int, Any]) -> Iterator[tuple[int, Any]]:
    """The hooks that decide what a module computes."""
    for number, hook in hooks.items():
        place = getattr(hook, "__module__", None) or ""
        idle = getattr(hook, "__name__", "") in _IDLE_HOOKS and package(place) in _HOOKING
        if not idle and place != _TRACED_HOOKS:
            yield number, hook


def untraced_hooks(hooks: dict[int, Any]) -> Iterator[tuple[int, Any]]:
    """Those of them that a capture does not trace."""
    for number, hook in watched_hooks(hooks):
        place = getattr(hook, "__module__", None) or ""
        named = getattr(hook, "__name__", "") in _COMPUTING_HOOKS
        followed = (named and package(place) in _COMPUTING) or type(hook) in _WEIGHING_HOOKS
        if not followed:
            yield number, hook
