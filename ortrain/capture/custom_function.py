"""A custom ``torch.autograd.Function`` has a backward that no graph of its forward knows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ortrain.errors import CaptureError


@contextlib.contextmanager
def refused_custom_functions() -> Iterator[None]:
    """Refuses every ``Function.apply`` during a trace, reentrant checkpointing included.

    A trace would record the operators of the forward and drop the backward that was written for
    them: the gradients would be wrong without a word.

    Raises:
        CaptureError: at the first call of one.
    """

    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        raise CaptureError(
            f"the module calls the custom autograd function {cls.__module__}.{cls.__qualname__}",
            because="a captured graph differentiates the operators of its forward and would not "
            "call its backward",
            help="wrap the parts of the model beside it, or, for checkpointing, pass "
            "use_reentrant=False",
        )

    own = torch.autograd.Function.__dict__["apply"]
    torch.autograd.Function.apply = classmethod(refuse)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = own
