"""Which translations of PyTorch's exporter are trusted.

torchlib translates for inference: some of what it makes has another gradient than PyTorch, loses
digits, or is wrong for layouts, sizes or options that a test of outputs does not meet. So a
translation is used only where the sweep (``make sweep``) has seen a graph with it agree with eager
PyTorch, gradients included, in every row of PyTorch's tables that needs it. An operator that is not
listed is taken apart into others, or the module runs in PyTorch.
"""

from __future__ import annotations

# Overloads of aten; `tests/sweep/test_torchlib.py` compares them with the results of the sweep.
VERIFIED = frozenset({
    "_unsafe_index.Tensor", "acos.default", "acosh.default", "addbmm.default", "addcdiv.default",
    "addcmul.default", "addmv.default", "addr.default", "argmin.default", "asin.default",
    "asinh.default", "atan.default", "atanh.default", "atleast_1d.default", "atleast_2d.default",
    "atleast_3d.default", "bilinear.default", "bincount.default", "bitwise_left_shift.Tensor",
    "bitwise_right_shift.Tensor", "broadcast_to.default", "celu.default", "constant_pad_nd.default",
    "convolution.default", "cosh.default", "cross.default", "deg2rad.default", "diagonal.default",
    "diagonal_copy.default", "div.Tensor_mode", "dot.default", "elu.default", "erfc.default",
    "exp2.default", "expm1.default", "flip.default", "floor_divide.default", "fmod.Tensor",
    "frac.default", "glu.default", "hardsigmoid.default", "hardswish.default", "heaviside.default",
    "histc.default", "index_put.default", "instance_norm.default", "isclose.default",
    "isfinite.default", "isinf.default", "isneginf.default", "isposinf.default",
    "leaky_relu.default", "lerp.Scalar", "linalg_cross.default", "linspace.default",
    "log10.default", "log1p.default", "log2.default", "logit.default", "logsumexp.default",
    "masked_scatter.default", "max.default", "min.default", "mish.default", "mv.default",
    "native_group_norm.default", "pixel_shuffle.default", "pixel_unshuffle.default", "pow.Scalar",
    "prelu.default", "prod.default", "prod.dim_int", "rad2deg.default", "remainder.Scalar",
    "remainder.Tensor", "repeat_interleave.self_int", "resolve_conj.default", "resolve_neg.default",
    "round.decimals", "round.default", "scatter.src", "scatter_add.default", "selu.default",
    "sinh.default", "softplus.default", "sort.default", "tan.default", "topk.default",
    "trunc.default", "unfold.default", "upsample_bicubic2d.vec", "upsample_bilinear2d.vec",
    "upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec",
    "upsample_trilinear3d.vec", "view_as.default", "view_copy.default", "xlogy.Tensor",
})  # fmt: skip


def is_verified(target: object) -> bool:
    """Whether torchlib's translation of an operator of the graph may be used."""
    return str(target).removeprefix("aten.") in VERIFIED
