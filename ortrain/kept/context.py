"""What autograd has saved of a call: one of the graph's values between forward and backward."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

from torch import Tensor

from ortrain.kept.premises import Premises


class Context:
    """What autograd has saved of one call.

    Attributes:
        key: of the call.
        outputs: of it, those that depend on the leaves with their history.
        leaves: what gradients are asked for.
        premises: by which it was given some tokens alone; None where it was given all.
    """

    __slots__ = ("key", "leaves", "outputs", "premises")

    requires_grad = False  # as what hands values on asks of each

    def __init__(self, key: str, outputs: list[Tensor], leaves: list[Tensor]) -> None:
        self.key, self.outputs, self.leaves = key, outputs, leaves
        self.premises: Premises | None = None

    def is_neg(self) -> bool:
        """Likewise."""
        return False


class _Replayed(threading.local):
    """Contexts of a forward that is run again, by their calls' keys; None where none is."""

    contexts: dict[str, Context] | None = None


_replayed = _Replayed()


def contexts() -> dict[str, Context] | None:
    """Of a forward that is run again, by their calls' keys; None where none is."""
    return _replayed.contexts


@contextlib.contextmanager
def replayed(values: Iterable[object]) -> Iterator[None]:
    """Inside, a call whose context is among some values is not run: it gives what it gave.

    Raises:
        StateError: inside, where a call without one cannot be run again.
    """
    before = _replayed.contexts
    _replayed.contexts = {v.key: v for v in values if isinstance(v, Context)}
    try:
        yield
    finally:
        _replayed.contexts = before
