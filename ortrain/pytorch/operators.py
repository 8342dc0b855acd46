"""Kinds of operators in a graph, and what PyTorch knows of one.

Private: ``torch._ops.OpOverload``, which ``torch.ops.aten.add.Tensor`` is one of, its ``_schema``
and ``_can_decompose``; ``HigherOrderOperator``, of which ``torch.ops.higher_order.cond`` is one;
``torch._decomp.decomposition_table``. Without the classes the import fails; without the others an
operator that has no translation is not taken apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import _ops

OpOverload = _ops.OpOverload
HigherOrderOperator = _ops.HigherOrderOperator


def schema_of(operator: Any) -> Any:
    """The arguments, results and name of an operator; None of any other function."""
    return getattr(operator, "_schema", None)


def is_mutable(operator: Any) -> bool:
    """Whether an operator writes to some of its arguments."""
    schema = schema_of(operator)
    return schema is not None and bool(schema.is_mutable)


def draws(operator: Any) -> bool:
    """Whether an operator draws random numbers; no other function is known to."""
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


def overload_of(operator: Any) -> str:
    """The name of an operator among its overloads, such as ``Tensor``."""
    return str(operator.name()).partition(".")[2] or "default"


def is_composite(operator: Any) -> bool:
    """Whether PyTorch itself composes an operator of others."""
    asked = getattr(operator, "_can_decompose", None)
    return asked is not None and bool(asked())


def decomposition_of(operator: Any) -> Callable[..., Any] | None:
    """A function of others that computes what an operator does; None where PyTorch has none."""
    core = _core()
    if operator in core:
        return core[operator]
    known = getattr(torch, "_decomp", None)
    return None if known is None else known.decomposition_table.get(operator)


@functools.cache
def _core() -> Any:
    """PyTorch's table for exports, of which each is made out of all operators there are: 0.16 s."""
    return torch.export.default_decompositions()


def has_kernel(operator: Any, key: str) -> bool:
    """Whether an operator has a kernel for a key of the dispatcher, such as ``AutocastCPU``."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key))
