"""Tensors of ``torch.func`` transforms, and which transforms are under way.

Private: ``is_functorch_wrapped_tensor``, ``get_unwrapped``, ``peek_interpreter_stack``,
``get_dynamic_layer_stack_depth`` and ``pop_dynamic_layer_stack_and_undo_to_depth`` of
``torch._C._functorch``, ``_vmap_increment_nesting`` and ``_vmap_decrement_nesting`` of
``torch._functorch.predispatch``, and ``_current_level`` of ``torch.autograd.forward_ad``. Without
the first two the import fails: a tensor of a transform that has ended says that it requires a
gradient, and gives none, and a batch of tensors has no memory of its own. Without the others it
fails, too: a call of ``vmap`` that a failed trace has left under way would change all that the
process computes after it, and tangents would be lost without a word.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch._C import _functorch
from torch._functorch import predispatch
from torch.autograd import forward_ad

is_wrapped: Any = _functorch.is_functorch_wrapped_tensor
"""Whether a tensor belongs to a transform, such as ``torch.func.grad``, be it over or not."""

_get_unwrapped: Any = _functorch.get_unwrapped

transform_around: Any = _functorch.peek_interpreter_stack
"""The innermost transform that is under way; None without one."""

is_batched: Any = _functorch.is_legacy_batchedtensor
"""Whether a tensor is a batch of gradients, of ``autograd.grad(is_grads_batched=True)``."""

OPENS_MAP, CLOSES_MAP = predispatch._vmap_increment_nesting, predispatch._vmap_decrement_nesting
"""What opens a call of ``torch.vmap`` in a graph of Dynamo's, and closes it."""

tangents: Any = partial(getattr, forward_ad, "_current_level")
"""How deeply forward-mode derivatives are nested, from zero; less where none are taken."""


def unwrapped(tensor: Any) -> Any:
    """The tensor that has the numbers of a transform's."""
    while is_wrapped(tensor):
        tensor = _get_unwrapped(tensor)
    return tensor


@contextlib.contextmanager
def left_behind() -> Iterator[None]:
    """Ends the transforms that have begun inside and are still under way."""
    depth = _functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        _functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
