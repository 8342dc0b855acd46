"""What two engines are compared on: gradients that outputs receive, tensors rounded otherwise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import onnx_ir as ir
import torch
from torch import nn

from ortrain.program import Program
from ortrain.step.agreement import NARROW

# By so many roundings of its terms two libraries' sums of some hundred products differ: with one, a
# perceptron of 500 ReLUs over 784 inputs was refused for 2 calls of 3000 in which one has tipped.
ACCUMULATED = 8


def cotangent(root: torch.Tensor) -> torch.Tensor:
    """The gradient that an output receives: 1 for a loss, else noise, the same in every dtype.

    It lies in memory as what is computed of the output does, by which PyTorch's gradients go.
    """
    if root.ndim == 0:
        return torch.ones_like(root)
    generator = torch.Generator().manual_seed(root.ndim)
    noise = torch.randn(root.shape, generator=generator, dtype=torch.float32)
    computed = (root.detach() != 0).to(root.dtype)
    return computed.copy_((noise * 16).round_().div_(16))


def precision_of(programs: Sequence[Program]) -> torch.dtype:
    """The narrowest dtype in some programs; float32 where it is wider."""
    graphs = [program.graph for program in programs]
    made = {v.dtype for graph in graphs for node in graph.all_nodes() for v in node.outputs}
    found = made | {v.dtype for graph in graphs for v in graph.inputs}
    narrow = {ir.DataType.BFLOAT16: torch.bfloat16, ir.DataType.FLOAT16: torch.float16}
    return next((own for dtype, own in narrow.items() if dtype in found), torch.float32)


def rounded_like(
    tensor: torch.Tensor, precision: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """A leaf like another, whose numbers another rounding might have made.

    Args:
        tensor: the leaf.
        precision: that its module computes in, where it is narrower than the leaf.
        generator: draws the roundings.
    """
    if not tensor.is_floating_point():
        return tensor
    own, narrow = (torch.finfo(dtype).eps for dtype in (tensor.dtype, precision))
    step = max(own, narrow / 2) if precision in NARROW else ACCUMULATED * own
    with torch.no_grad():
        wide = torch.promote_types(tensor.dtype, torch.float32)
        noise = torch.rand(tensor.shape, generator=generator, dtype=wide).to(tensor.device) * 2 - 1
        other = (tensor * (1 + step * noise)).to(tensor.dtype)
    other = nn.Parameter(other) if isinstance(tensor, nn.Parameter) else other
    return other.requires_grad_(tensor.requires_grad)


def typical(tensors: Sequence[torch.Tensor]) -> float:
    """The median root mean square of some tensors."""
    with torch.no_grad():
        scales = [
            float(torch.linalg.vector_norm(t)) / math.sqrt(t.numel())
            for t in tensors
            if t.is_floating_point() and t.numel()
        ]
    return statistics.median(scales) if scales else 0.0
