"""The hooks on modules and tensors.

Private: the tables of hooks that each module has, those of ``torch.nn.modules.module`` that are
for all modules, and those of a tensor. ``torch.nn.Module`` and ``torch.Tensor`` let add hooks, and
list none. Without these names no module is held: a hook that comes later would not be heard in a
graph.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as of_all

_OWN = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL = tuple(f"_global{name}" for name in _OWN)


def parts_of(module: nn.Module) -> Iterator[nn.Module]:
    """The modules of a tree, and those that an ``ORTModule`` among them stands for.

    It shows their children as its own, and not them; hooks may be on either.
    """
    for part in module.modules():
        yield part
        runner = part.__dict__.get("_runner")
        if runner is not None:
            yield runner.module


def tables_of(modules: Iterable[nn.Module]) -> list[dict[int, Any]]:
    """The tables of the hooks on some modules, and of those on all."""
    found = [getattr(of_all, name) for name in _GLOBAL]
    return [*found, *(getattr(each, name) for each in modules for name in _OWN)]


def forward_hooks_of(module: nn.Module) -> dict[int, Any]:
    """The hooks that hear of a module's results."""
    return module._forward_hooks


_TABLE: Any = vars(Tensor.__base__)["_backward_hooks"]
HOOKS_OF_TENSORS: tuple[Any, ...] = (_TABLE.__get__, _TABLE.__set__)
"""How a tensor's table of hooks is read and set, as ``__torch_function__`` hears of it."""


def has_hooks(tensor: Tensor) -> bool:
    """Whether there are hooks on a tensor's gradient."""
    return bool(tensor._backward_hooks)


def has_late_hooks(tensor: Tensor) -> bool:
    """Whether there are hooks behind the accumulation of a tensor's gradient."""
    return bool(tensor._post_accumulate_grad_hooks)


def without_empty_table(tensor: Tensor) -> None:
    """Takes a tensor's table of hooks away where it is empty.

    It is still looked at: 0.5 us a parameter and backward.
    """
    if not tensor._backward_hooks:
        tensor._backward_hooks = None


def heard_even_if_freed(tensor: Tensor) -> OrderedDict[int, Any]:
    """The table of a tensor's hooks, as ``register_hook`` makes it at the first one.

    Later ones are then seen there, also where nobody holds the tensor any more.
    """
    tensor._backward_hooks = table = OrderedDict[int, Any]()
    node: Any = tensor.grad_fn
    node._register_hook_dict(tensor)
    return table


def without_gradient(tensor: Tensor) -> None:
    """Has the hooks of a tensor not run in the backward under way, unless a gradient comes to it.

    A graph is one node of autograd's, which calls the hooks of all that it has been given, also of
    what the outputs with a gradient do not depend on. PyTorch's own nodes are not reached then.
    """
    gradients = tensor._backward_hooks or {}
    for key, heard in gradients.items():
        if not isinstance(heard, _OfGradients):
            gradients[key] = _OfGradients(heard)
    hooks = tensor._post_accumulate_grad_hooks or {}
    for key, hook in hooks.items():
        if not isinstance(hook, _OfAccumulated):
            hooks[key] = hook = _OfAccumulated(hook)
        hook.seen = _state(tensor)


class _OfGradients:
    """A hook on a gradient, which is one."""

    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        self.hook = hook

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else self.hook(gradient)


class _OfAccumulated:
    """A hook behind the accumulation of a gradient, where there was one.

    Attributes:
        seen: the sum of gradients before a backward that may bring none; None for others.
    """

    def __init__(self, hook: Callable[[Tensor], None]) -> None:
        self.hook = hook
        self.seen: tuple[int, int] | None = None

    def __call__(self, leaf: Tensor) -> None:
        seen, self.seen = self.seen, None
        if seen is None or seen != _state(leaf):
            self.hook(leaf)


def _state(leaf: Tensor) -> tuple[int, int]:
    """Equal where no gradient has been accumulated in between."""
    return id(leaf.grad), -1 if leaf.grad is None else leaf.grad._version
