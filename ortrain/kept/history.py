"""What autograd knows of how tensors were made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor


def leaves_of(outputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """The leaves that the history of some tensors ends in."""
    yield from (t for t in outputs if t.requires_grad and t.is_leaf)
    stack: list[Any] = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            yield variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
