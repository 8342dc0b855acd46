"""Kinds of operators in a graph, and what one does to random numbers and to its arguments.

Private: ``torch._ops.OpOverload``, which ``torch.ops.aten.add.Tensor`` is one of, and
``HigherOrderOperator``, which ``torch.ops.higher_order.cond`` is one of; ``_schema`` of an
operator. Without their names the import fails.
"""

from typing import Any

import torch
from torch import _ops

OpOverload = _ops.OpOverload
HigherOrderOperator = _ops.HigherOrderOperator


def is_mutable(operator: Any) -> bool:
    """Whether an operator writes to some of its arguments."""
    schema = getattr(operator, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def draws(operator: Any) -> bool:
    """Whether an operator draws random numbers; no other function is known to."""
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())
