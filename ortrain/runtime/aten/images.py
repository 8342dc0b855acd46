"""Images whose channels lie last in memory.

On the CPU oneDNN convolves them as they lie. Where the channels come first it brings image, result
and gradients into blocks of its own and back; forward and backward of 64 to 256 channels of 56 x 56
with windows of one pixel take 2.3 times as long then, those of 3 x 3 1.7 times, and depthwise ones
1.8 to 6 times (one core of a Zen 5, float32). Batch norms and pools gain, too: a maximum over 3 x 3
takes 74 ms of 16 x 64 x 112 x 112 whose channels come first, and 5 ms else.

An order costs a copy where another one begins. So whole regions have one: what convolutions reach
through operators that compute in any order. Where a region begins, the function copies, unless it
is given what already lies so; what leaves the program is copied back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeGuard

import onnx_ir as ir
import torch

from ortrain.graph import shapes
from ortrain.graph.rounding import NARROW, WIDE
from ortrain.graph.shapes import Dim
from ortrain.pytorch.kernels import convolves_narrow

Dims = tuple[Dim, ...] | None

# [N, C, H, W]
RANK = 4
# How many of the first inputs of an operator are images; they give an image of the same order.
# Norms over groups of channels take rows: for channels that lie last PyTorch's kernels are off by
# ten times as much.
_IMAGES = {
    ("", "Conv"): 1,
    ("", "ConvTranspose"): 1,
    ("ortrain", "ConvGradient"): 2,
    ("ortrain", "ConvTransposeGradient"): 2,
    ("", "MaxPool"): 1,
    ("", "AveragePool"): 1,
    ("ortrain", "MaxPool"): 1,
    ("ortrain", "MaxPoolGradient"): 3,
    ("ortrain", "AveragePoolGradient"): 2,
    ("", "BatchNormalization"): 1,
    ("ortrain", "BatchNorm"): 1,
    ("ortrain", "BatchNormGradient"): 2,
    ("ortrain", "BatchNormalizationGradient"): 2,
    ("", "Resize"): 1,
    ("", "Pad"): 1,
    ("", "Slice"): 1,
    ("", "Split"): 1,
}
# Operators of which each tensor of the result's shape, or of one image for all of its batch, is an
# image of its order.
_ELEMENTWISE = {("", name) for name in shapes.ELEMENTWISE - {"PRelu"}} | {
    ("", name)
    for name in """
    Abs Celu Clip Cast Ceil Elu Erf Exp Floor Gelu HardSigmoid HardSwish Identity IsInf IsNaN
    LeakyRelu Log Mish Neg Not Reciprocal Relu Round Selu Sigmoid Sign Softplus Softsign Sqrt Swish
    Tanh ThresholdedRelu
    """.split()
} | {
    ("ortrain", name)
    for name in """
    EluGradient GeluGradient Hardtanh HardtanhGradient HardSwishGradient LeakyReluGradient
    MishGradient Sigmoid SigmoidGradient Silu SiluGradient SoftplusGradient StopGradient
    TanhGradient ThresholdGradient
    """.split()
}  # fmt: skip


def channels_last(graph: ir.Graph, device: torch.device) -> frozenset[ir.Value]:
    """The images of a graph that are to lie with their channels last.

    Args:
        graph: of which shapes are known; graphs inside of it stay as they are.
        device: that it is to run on; off the CPU there are none.
    """
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return frozenset()
    regions = _Regions()
    gaining = []
    for node in graph:
        images = images_of(node)
        if images:
            regions.join(images)
            if _gains(node):
                gaining.append(images[0])
    return regions.with_any_of(gaining)


def images_of(node: ir.Node) -> list[ir.Value]:
    """The images that a node reads and makes in one order; none where it makes its own."""
    key = (node.domain, node.op_type)
    if key in _ELEMENTWISE:
        known = shapes.dims(node.outputs[0])
        given = (*node.inputs, *node.outputs)
        return [v for v in given if _is_image(v) and _is_spread_over(known, shapes.dims(v))]
    if key == ("", "Concat"):
        found: list[ir.Value | None] = [*node.inputs, *node.outputs]
    elif key in _IMAGES:
        made = 2 if node.op_type == "MaxPool" else None if node.op_type == "Split" else 1
        found = [*node.inputs[: _IMAGES[key]], *node.outputs[:made]]
    else:
        return []
    return [v for v in found if _is_image(v)]


def _is_spread_over(known: Dims, own: Dims) -> bool:
    """Whether a shape is another one, or that of one image for all of its batch."""
    if known is None or own is None or len(known) != len(own):
        return False
    return own[1:] == known[1:] and own[0] in (known[0], 1)


def _is_image(value: ir.Value | None) -> TypeGuard[ir.Value]:
    return value is not None and shapes.rank(value) == RANK


def _gains(node: ir.Node) -> bool:
    """Whether a node is a convolution that oneDNN computes, of windows that overlap.

    Patches that tile an image are a product of rows, and 1.2 to 1.7 times as fast where the
    channels come first.
    """
    if node.op_type.removesuffix("Gradient") not in ("Conv", "ConvTranspose"):
        return False
    x, w = node.inputs[-2:] if node.op_type.endswith("Gradient") else node.inputs[:2]
    if x is None or w is None or not _is_served(x.dtype):
        return False
    strides = node.attributes.get("strides")
    steps = [1, 1] if strides is None else list(strides.as_ints())
    window = list((shapes.dims(w) or ())[2:])
    return window != steps or window == [1, 1]


def _is_served(dtype: ir.DataType | None) -> bool:
    """Whether oneDNN convolves a dtype here."""
    if dtype in NARROW:
        return convolves_narrow(dtype is ir.DataType.BFLOAT16)
    return dtype is WIDE


class _Regions:
    """Values of which some have one order: a forest whose roots stand for the regions."""

    def __init__(self) -> None:
        self._parents: dict[ir.Value, ir.Value] = {}

    def join(self, values: Iterable[ir.Value]) -> None:
        """They have one order from now on."""
        first, *rest = (self._root(v) for v in values)
        for root in rest:
            self._parents[root] = first

    def _root(self, value: ir.Value) -> ir.Value:
        parent = self._parents.setdefault(value, value)
        while parent is not self._parents[parent]:
            self._parents[value] = parent = self._parents[parent]
        return parent

    def with_any_of(self, values: Iterable[ir.Value]) -> frozenset[ir.Value]:
        """The regions that hold one of some values."""
        chosen = {self._root(v) for v in values}
        return frozenset(v for v in [*self._parents] if self._root(v) in chosen)
