"""Buffers in whose place a forward puts other tensors.

Of ``self.mean = 0.9 * self.mean + 0.1 * x.mean(0)``, where ``mean`` is a buffer, torch.export
records that the buffer is written to only in the module that is traced itself (and not where it
gets what was an argument or a buffer): in its children it forgets the write, and Dynamo forgets all
of them.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ortrain.capture.trace.refusal import keeping
from ortrain.module_state.untouched import kind_of

Buffers = list[tuple[str, nn.Module, dict[str, Tensor | None]]]


@contextlib.contextmanager
def assignments_as_writes(module: nn.Module) -> Iterator[None]:
    """Writes what a traced forward assigns into the buffers, at its end.

    Args:
        module: whose forward is traced inside.

    Raises:
        Refusal: that is not the same: what is assigned requires a gradient, or it or the old tensor
            is seen elsewhere too.
    """

    def end(before: Buffers, output: Any) -> None:
        held = Counter(id(t) for _, _, buffers in before for t in buffers.values())
        seen = {id(leaf) for leaf in pytree.tree_leaves(output)}
        replaced = [*_replaced(before)]
        given = Counter(id(new) for *_, new in replaced)
        for path, _, _, old, new in replaced:
            elsewhere = held[id(old)] > 1 or id(old) in seen or given[id(new)] > 1
            if new.requires_grad or elsewhere:
                raise keeping([path])
        # All are read before any is written: one may be in the place of another.
        values = [new.clone() if id(new) in held else new for *_, new in replaced]
        for (_, owner, name, old, _), value in zip(replaced, values, strict=True):
            if kind_of(value) == kind_of(old):  # another shape or dtype is refused as such
                old.copy_(value)
                owner._buffers[name] = old

    with _around(module, end):
        yield


@contextlib.contextmanager
def assignments(module: nn.Module) -> Iterator[list[str]]:
    """Collects the paths of the buffers that a forward assigns."""
    found: list[str] = []
    with _around(module, lambda before, _: found.extend(r[0] for r in _replaced(before))):
        yield found


@contextlib.contextmanager
def _around(module: nn.Module, end: Callable[[Buffers, Any], None]) -> Iterator[None]:
    """Calls back at the end of a forward, with the buffers as they were at its beginning."""
    begun: list[Buffers] = []

    def begin(*_: object) -> None:
        begun.append([(path, m, dict(m._buffers)) for path, m in module.named_modules()])

    handles = [
        module.register_forward_pre_hook(begin),
        module.register_forward_hook(lambda _, __, output: end(begun.pop(), output)),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _replaced(before: Buffers) -> Iterator[tuple[str, nn.Module, str, Tensor, Tensor]]:
    """Path, module and name of each buffer that another tensor stands for now, and the two."""
    for path, owner, buffers in before:
        for name, old in buffers.items():
            new = owner._buffers.get(name)
            if old is not None and new is not None and new is not old:
                yield f"{path}.{name}" if path else name, owner, name, old, new
