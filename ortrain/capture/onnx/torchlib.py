"""Which translations of PyTorch's exporter are trusted.

torchlib translates for inference: some of what it makes has another gradient than PyTorch, loses
digits, or is wrong for layouts, sizes or options that a test of outputs does not meet. So a
translation is used only where the sweep (``make sweep``) has seen a graph with it agree with eager
PyTorch, gradients included, in every row of PyTorch's tables that needs it. An operator that is not
listed is taken apart into others, or the module runs in PyTorch.

Numbers are float32 in these translations, be the tensors float64 or not: an attribute of ONNX's can
be nothing else, and a constant is made so and cast. Such calls are taken apart, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ortrain.graph.shapes import fits_float32
from ortrain.pytorch import pytree
from ortrain.pytorch.operators import schema_of

# Overloads of aten; `tests/sweep/test_torchlib.py` compares them with the results of the sweep.
VERIFIED = frozenset({
    "acos.default", "acosh.default", "addbmm.default", "addcdiv.default",
    "addcmul.default", "addmv.default", "addr.default", "argmin.default", "asin.default",
    "asinh.default", "atan.default", "atanh.default", "atleast_1d.default", "atleast_2d.default",
    "atleast_3d.default", "bilinear.default", "bincount.default", "bitwise_left_shift.Tensor",
    "bitwise_right_shift.Tensor", "broadcast_to.default", "constant_pad_nd.default",
    "convolution.default", "cosh.default", "cross.default", "deg2rad.default", "diagonal.default",
    "diagonal_copy.default", "dot.default", "flip.default", "frac.default",
    "glu.default", "hardsigmoid.default", "hardswish.default", "heaviside.default", "histc.default",
    "index_put.default", "instance_norm.default", "isclose.default", "isfinite.default",
    "isinf.default", "isneginf.default", "isposinf.default", "leaky_relu.default", "lerp.Scalar",
    "linalg_cross.default", "linspace.default", "logsumexp.default",
    "masked_scatter.default", "max.default", "min.default", "mish.default", "mv.default",
    "native_group_norm.default", "pixel_shuffle.default", "pixel_unshuffle.default", "pow.Scalar",
    "prelu.default", "rad2deg.default",
    "resolve_conj.default", "resolve_neg.default", "round.decimals",
    "round.default", "sinh.default",
    "softplus.default", "tan.default", "topk.default", "trunc.default", "unfold.default",
    "view_as.default", "view_copy.default",
})  # fmt: skip
# What computes with numbers that are not among its arguments, or in float32.
WITH_NUMBERS = frozenset({
    "deg2rad.default", "hardsigmoid.default", "hardswish.default", "rad2deg.default",
})  # fmt: skip


def is_verified(call: fx.Node) -> bool:
    """Whether torchlib's translation of the operator of a call may be used for it."""
    name = str(call.target).removeprefix("aten.")
    if name not in VERIFIED:
        return False
    return not has_tensor(call, torch.float64) or not (
        name in WITH_NUMBERS or any(map(_is_rounded, _numbers(call)))
    )


def has_tensor(call: fx.Node, dtype: torch.dtype) -> bool:
    """Whether an operator takes or returns a tensor of a dtype."""
    values = [n.meta.get("val") for n in (call, *call.all_input_nodes)]
    tensors = [v for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor)]
    return any(t.dtype == dtype for t in tensors)


def _numbers(call: fx.Node) -> Iterator[Any]:
    """What a call passes, and what its operator takes where nothing is passed."""
    target: Any = call.target
    yield from pytree.tree_leaves((call.args, call.kwargs))
    for argument in schema_of(target).arguments[len(call.args) :]:
        if argument.name not in call.kwargs:
            yield argument.default_value


def _is_rounded(number: Any) -> bool:
    return isinstance(number, float) and number == number and not fits_float32(number)
