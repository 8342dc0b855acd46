"""Packed sequences are refused in a trace: their sizes are the values of a tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

from torch.nn.utils.rnn import PackedSequence

from ortrain.errors import CaptureError
from ortrain.exclusive import this_thread


@contextlib.contextmanager
def no_packed_sequences() -> Iterator[None]:
    """Refuses packed sequences, whether they are arguments or packed on the way.

    Raises:
        CaptureError: a ``PackedSequence`` is made inside.
    """
    own, here = PackedSequence.__new__, this_thread()

    def refused(cls: type[PackedSequence], *args: Any, **kwargs: Any) -> PackedSequence:
        return _refused() if here() else own(cls, *args, **kwargs)

    PackedSequence.__new__ = refused  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        PackedSequence.__new__ = own  # type: ignore[method-assign]


def _refused() -> NoReturn:
    raise CaptureError(
        "a packed sequence cannot be captured",
        because="its sizes follow from the values of a tensor, the lengths",
        help="leave the sequences padded and mask what is past their end, or leave this to eager",
    )
