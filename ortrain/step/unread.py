"""``Unread``: an output that is computed when somebody reads it.

A module returns logits beside its loss, and most scripts read the loss alone. Such an output stands
for its numbers. It knows shape, dtype and device, and autograd knows where it comes from. Whoever
asks for more gets a tensor with the numbers, as PyTorch would have given it. They are made before
weights can change, as the loss's backward begins or an optimizer steps: an output that is still
held by then is computed all the same.

Two seams of PyTorch's lead here. ``__torch_function__`` hears of what Python calls, and
``__torch_dispatch__`` of what C++ does, such as a function of the user's own in autograd.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ortrain.errors import StateError
from ortrain.pytorch import pytree
from ortrain.pytorch.hooks import HOOKS_OF_TENSORS
from ortrain.pytorch.stand_ins import as_they_are, stand_in

_TENSOR: Any = Tensor
# Asks of what stands for an output what it is: no number.
_ABOUT = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf",
                 "grad_fn", "is_cpu", "is_cuda", "is_meta", "is_sparse", "is_quantized")
} | {
    getattr(Tensor, name)
    for name in ("size", "dim", "ndimension", "numel", "nelement", "element_size", "__len__",
                 "is_floating_point", "is_complex", "is_signed")
} | {torch.is_floating_point, torch.is_complex, torch.numel}  # fmt: skip
# Asks for gradients of it, which come along all ways from it, those through the loss among them.
_GRADIENTS = {
    Tensor.register_hook, Tensor.retain_grad, torch.autograd.grad, torch.autograd.backward,
    _TENSOR.grad.__get__, _TENSOR.retains_grad.__get__,
    *HOOKS_OF_TENSORS,
}  # fmt: skip

_LIVE: weakref.WeakSet[Values] = weakref.WeakSet()


class Values:
    """The numbers of a call's outputs, as long as nobody has read them.

    What stands for these outputs holds it, and nothing else does.

    Args:
        compute: gives those of all outputs; raises StateError where they cannot be had any more.
        heard: called once they are read, or are made since they are still held.
    """

    def __init__(self, compute: Callable[[], Sequence[Tensor]], heard: Callable[[], None]) -> None:
        self._compute: Callable[[], Sequence[Tensor]] | None = compute
        self._heard = heard
        self._found: Sequence[Tensor] = ()
        self._lost: StateError | None = None
        _hear_of_steps()
        _LIVE.add(self)

    def of(self, place: int) -> Tensor:
        """The numbers of an output.

        Raises:
            StateError: they cannot be had any more.
        """
        self.make()
        if self._lost is not None:
            raise self._lost
        return self._found[place]

    def make(self) -> None:
        """Computes the numbers, where that has not been done."""
        compute, self._compute = self._compute, None
        if compute is None:
            return
        _LIVE.discard(self)
        self._heard()
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._found = compute()
        except StateError as error:
            self._lost = error


Waiting = tuple[Sequence[int], Values]
"""Places of a call's outputs that nobody may read, and what has their numbers."""


class Unread(Tensor):
    """An output that is computed when somebody reads it."""

    exists = False  # as far as there is one in this process
    _waits: Values
    _place: int
    _plain: Tensor | None

    @staticmethod
    def made(values: Values, place: int, like: Tensor) -> Unread:
        """What stands for an output.

        Args:
            values: of the call.
            place: of the output.
            like: a tensor of its shape, dtype and device.
        """
        found: Unread = stand_in(Unread, like)
        if not Unread.exists:
            # A trace must not take the output for a function of this. By a decorator, Dynamo would
            # be loaded with this file, which takes half a second, also where there is no graph.
            Unread.plain = torch.compiler.disable(Unread.plain)  # type: ignore[method-assign]
        Unread.exists = True
        found._waits, found._place, found._plain = values, place, None
        return found

    def plain(self) -> Tensor:
        """The output as PyTorch gives it."""
        if self._plain is None:
            numbers = self._waits.of(self._place)
            with torch.inference_mode(False), torch.set_grad_enabled(self.grad_fn is not None):
                self._plain = _Read.apply(self, numbers) if self.grad_fn is not None else numbers
        return self._plain

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """What Python calls with it."""
        kwargs = kwargs or {}
        if func in _GRADIENTS or (func in _ABOUT and args[0]._plain is None):
            with as_they_are():
                return func(*args, **kwargs)
        args, kwargs = pytree.tree_map_only(Unread, Unread.plain, (tuple(args), kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """What PyTorch computes with it below autograd."""
        args, kwargs = pytree.tree_map_only(Unread, _numbers, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)


def read(value: Any) -> Any:
    """Arguments of a call as PyTorch would have them."""
    if any(type(leaf) is Unread for leaf in pytree.tree_leaves(value)):
        return pytree.tree_map_only(Unread, Unread.plain, value)
    return value


def _numbers(unread: Unread) -> Tensor:
    return unread.plain().detach()


class _Read(torch.autograd.Function):
    """From what stands for an output to the output."""

    @staticmethod
    def forward(ctx: Any, unread: Unread, numbers: Tensor) -> Tensor:
        """The numbers."""
        return numbers.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """The gradient, as it comes."""
        return gradient, None


@functools.cache
def _hear_of_steps() -> None:
    """Has what is still held be made before an optimizer changes weights."""

    def before(*_: Any) -> None:
        for values in [*_LIVE]:
            values.make()

    register_optimizer_step_pre_hook(before)
