"""Operators of a traced graph for results whose gradients the user's program has written itself.

In the graph of ATen operators these gradients are computed behind the results, of ``upstream`` in
the place of what will arrive (:mod:`ortrain.ops.custom_gradient`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("ortrain", "FRAGMENT")
_LIBRARY.define("upstream(Tensor result, int number, int index) -> Tensor")
_LIBRARY.define(
    "custom_gradient(Tensor[] results, Tensor[] inputs, Tensor?[] gradients, int number)"
    " -> Tensor[]"
)


def _upstream(result: Tensor, number: int, index: int) -> Tensor:
    return torch.zeros_like(result)


def _custom_gradient(
    results: Sequence[Tensor],
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    number: int,
) -> list[Tensor]:
    return [result.clone() for result in results]


for _name, _function in (("upstream", _upstream), ("custom_gradient", _custom_gradient)):
    torch.library.impl(f"ortrain::{_name}", "CompositeExplicitAutograd", _function)
    torch.library.register_fake(f"ortrain::{_name}", _function)

upstream: Any = torch.ops.ortrain.upstream.default
custom_gradient: Any = torch.ops.ortrain.custom_gradient.default
