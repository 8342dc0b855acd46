"""``torch.vmap`` in a trace: what moves a batch's axis is part of the call that does so."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch._functorch import predispatch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from ortrain.capture.trace.patched import replaced

_MOVING = ("_add_batch_dim_impl", "_remove_batch_dim_impl")


@contextlib.contextmanager
def whole_maps() -> Iterator[None]:
    """Records no operators inside of the calls that begin and end a batch.

    They move its axis by operators on tensors that belong to no node, which the graph would have
    for constants, made of nothing.
    """
    with contextlib.ExitStack() as stack:
        for name in _MOVING:
            stack.enter_context(
                replaced(predispatch, name, _unrecorded(getattr(predispatch, name)))
            )
        yield


def _unrecorded(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with disable_proxy_modes_tracing():
            return function(*args)

    return call
