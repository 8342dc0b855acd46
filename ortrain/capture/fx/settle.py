"""Sizes that the trace has fixed without fixing an input's.

``x.view(2, -1).squeeze()`` with two rows fixes ``rows // 2 == 1``: a relation, which no symbol can
stand for. The nodes still carry ``rows // 2``, and an operator that treats a 1 apart would take it
for any size.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

from ortrain.pytorch.modes import FakeTensor


def settle(module: fx.GraphModule) -> None:
    """Writes numbers for the sizes that guards have fixed."""
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            node.meta["val"] = _settled(value)
        elif isinstance(value, tuple | list):
            each = [_settled(v) if isinstance(v, FakeTensor) else v for v in value]
            node.meta["val"] = type(value)(each)


def _settled(tensor: FakeTensor) -> torch.Tensor:
    known = list(tensor.shape)
    sizes = [_number(size) for size in known]
    if all(a is b for a, b in zip(sizes, known, strict=True)):
        return tensor
    strides = [_number(stride) for stride in tensor.stride()]
    with tensor.fake_mode:
        return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)


def _number(size: Any) -> Any:
    """The number that a guard says a size is; the size itself where none does."""
    if not isinstance(size, torch.SymInt):
        return size
    expression, environment = size.node.expr, size.node.shape_env
    if expression.is_Symbol:
        return size  # a symbol that is fixed has been replaced
    for guard in environment.guards:
        if isinstance(guard.expr, sympy.Eq):
            left, right = (environment.replace(side) for side in guard.expr.args)
            if expression == left and right.is_Integer:
                return int(right)
    return size
