"""Layers: products, normalization, activation, dropout, embedding, attention, convolution."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ortrain.capture.onnx.translations.base import (
    Scalar,
    Translator,
    aten,
    refuse,
    symbolic,
    translation,
)
from ortrain.graph import shapes


@translation(aten.linear.default)
def linear(
    op: Translator, input: ir.Value, weight: ir.Value, bias: ir.Value | None = None
) -> ir.Value:
    if shapes.rank(input) == 2 and input.dtype in shapes.FLOATING:
        return op.Gemm(input, weight, bias, transB=1)
    result = op.MatMul(input, op.Transpose(weight, perm=[1, 0]))
    return result if bias is None else op.Add(result, bias)


@translation(aten.matmul.default, aten.mm.default, aten.bmm.default)
def matmul(op: Translator, self: ir.Value, other: ir.Value) -> ir.Value:
    return op.MatMul(self, other)


@translation(aten.einsum.default)
def einsum(
    op: Translator, equation: str, tensors: Sequence[ir.Value], path: Sequence[int] | None = None
) -> ir.Value:
    """With the axes of an ellipsis spelled out, and without axes of size 1 that are broadcast."""
    if any(value.dtype not in shapes.FLOATING for value in tensors):
        raise refuse("einsum of whole numbers")  # whose sums are int64, sometimes
    left, arrow, result = equation.replace(" ", "").partition("->")
    dims = [shapes.dims(value) or () for value in tensors]
    terms = left.split(",")
    counts = [len(d) - len(t) + 3 for t, d in zip(terms, dims, strict=True) if "." in t]
    free = [c for c in string.ascii_letters if c not in equation]
    behind = "".join(free[: max(counts, default=0)])
    terms = [
        t.replace("...", behind[len(behind) - (len(d) - len(t) + 3) :] if "." in t else "")
        for t, d in zip(terms, dims, strict=True)
    ]
    if not arrow:
        letters = "".join(terms)
        once = (c for c in letters if letters.count(c) == 1 and c not in behind)
        result = "..." + "".join(sorted(once))
    result = result.replace("...", behind)
    wide = {
        c for t, d in zip(terms, dims, strict=True) for c, n in zip(t, d, strict=True) if n != 1
    }
    values = []
    for i, (value, known) in enumerate(zip(tensors, dims, strict=True)):
        gone = [k for k, c in enumerate(terms[i]) if known[k] == 1 and c in wide]
        values.append(op.Squeeze(value, gone) if gone else value)
        terms[i] = "".join(c for k, c in enumerate(terms[i]) if k not in gone)
    return op.Einsum(*values, equation=f"{','.join(terms)}->{result}")


@translation(aten.addmm.default, aten.baddbmm.default)
def addmm(
    op: Translator,
    self: ir.Value,
    first: ir.Value,
    second: ir.Value,
    *,
    beta: Scalar = 1,
    alpha: Scalar = 1,
) -> ir.Value:
    if first.dtype in shapes.FLOATING and shapes.rank(first) == 2:
        scales = [_kept(v, first.dtype) for v in (alpha, beta)]
        if None not in scales:
            named = zip(("alpha", "beta"), scales, strict=True)
            scaled = {name: v for name, v in named if v != 1}
            return op.Gemm(first, second, self if beta != 0 else None, **scaled)
    product = op.MatMul(first, second)
    if alpha != 1:
        product = op.Mul(product, alpha)
    if beta == 0:
        return product
    return op.Add(self if beta == 1 else op.Mul(self, beta), product)


def _kept(factor: Scalar, dtype: ir.DataType | None) -> float | None:
    """A factor as an attribute holds it, which is a float32; None if that rounds it."""
    if isinstance(factor, ir.Value):
        return None
    rounded = dtype == ir.DataType.DOUBLE and not shapes.fits_float32(factor)
    return None if rounded else float(factor)


@translation(aten.softmax.int)
def softmax(op: Translator, self: ir.Value, dim: int, dtype: Any = None) -> ir.Value:
    return _along(op, "Softmax", in_dtype(op, self, dtype), dim)


@translation(aten.log_softmax.int)
def log_softmax(op: Translator, self: ir.Value, dim: int, dtype: Any = None) -> ir.Value:
    return _along(op, "LogSoftmax", in_dtype(op, self, dtype), dim)


def _along(op: Translator, op_type: str, value: ir.Value, dim: int) -> ir.Value:
    if shapes.rank(value) == 0:  # torch takes a scalar for a vector of one
        vector = op.node(op_type, (op.Reshape(value, [1]),), axis=0)
        return op.Reshape(vector, op.constant(np.array([], np.int64)))
    return op.node(op_type, (value,), axis=dim)


@translation(aten.log_sigmoid.default)
def log_sigmoid(op: Translator, self: ir.Value) -> ir.Value:
    """``-log(1 + exp(-x))``: the logarithm of a sigmoid loses its last digits near 1."""
    return op.Neg(op.Softplus(op.Neg(self)))


def in_dtype(op: Translator, value: ir.Value, dtype: Any) -> ir.Value:
    return value if dtype is None or dtype == -1 else op.cast(value, ir.DataType(dtype))


@translation(aten.gelu.default)
def gelu(op: Translator, self: ir.Value, *, approximate: str = "none") -> ir.Value:
    if op.opset >= 20 and self.dtype != ir.DataType.DOUBLE:  # its function's numbers are float32
        return op.Gelu(self, approximate=approximate)
    if approximate == "tanh":
        inner = op.Mul(op.Add(self, op.Mul(op.Pow(self, 3.0), 0.044715)), float(np.sqrt(2 / np.pi)))
        factor = op.Tanh(inner)
    else:
        factor = op.Erf(op.Mul(self, float(np.sqrt(0.5))))
    return op.Mul(op.Mul(self, 0.5), op.Add(factor, 1.0))


@translation(aten.elu.default)
def elu(
    op: Translator, self: ir.Value, alpha: float = 1, scale: float = 1, input_scale: float = 1
) -> ir.Value:
    """``scale * x`` above 0; below it ``scale * alpha * (exp(input_scale * x) - 1)``."""
    if scale == input_scale == 1 and self.dtype == ir.DataType.FLOAT:
        return op.Elu(self, alpha=float(alpha))
    above, zero = op.Greater(self, 0.0), op.constant(0, self.dtype)
    # Above 0 the exponential may be infinite, and 0 times that is no gradient.
    curve = op.ours("Expm1", op.Mul(op.Where(above, zero, self), float(input_scale)))
    return op.Where(above, op.Mul(self, float(scale)), op.Mul(curve, float(scale * alpha)))


@translation(aten.celu.default)
def celu(op: Translator, self: ir.Value, alpha: float = 1) -> ir.Value:
    if self.dtype == ir.DataType.FLOAT:
        return op.Celu(self, alpha=float(alpha))
    return elu(op, self, alpha, 1, 1 / alpha)


@translation(aten.selu.default)
def selu(op: Translator, self: ir.Value) -> ir.Value:
    """With the numbers of Klambauer et al., "Self-Normalizing Neural Networks" (2017)."""
    if self.dtype == ir.DataType.FLOAT:
        return op.Selu(self)
    return elu(op, self, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


@translation(aten.relu.default)
def relu(op: Translator, self: ir.Value) -> ir.Value:
    return op.Relu(self)


@translation(aten.silu.default)
def silu(op: Translator, self: ir.Value) -> ir.Value:
    return op.Mul(self, op.Sigmoid(self))


@translation(aten.embedding.default)
def embedding(
    op: Translator,
    weight: ir.Value,
    indices: ir.Value,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> ir.Value:
    if scale_grad_by_freq or sparse:
        kind = "scale_grad_by_freq" if scale_grad_by_freq else "sparse"
        raise refuse(
            f"an embedding with {kind}=True",
            "its gradient is another than the graph's",
            f"leave {kind} off",
        )
    return op.ours("Embedding", weight, indices, padding_idx=int(padding_idx))


@translation(aten._safe_softmax.default)
def safe_softmax(op: Translator, self: ir.Value, dim: int, dtype: Any = None) -> ir.Value:
    """A softmax whose rows of nothing but minus infinity are zero, as in attention."""
    value = in_dtype(op, self, dtype)
    assert value.dtype is not None
    shut = op.constant(-np.inf, value.dtype)
    alive = op.cast(op.ReduceMax(value, [dim], keepdims=1), value.dtype)
    alive = op.Greater(alive, shut)
    whole = op.Where(alive, value, op.constant(0.0, value.dtype))
    return op.Mul(op.Softmax(whole, axis=dim), op.cast(alive, value.dtype))


@translation(aten.scaled_dot_product_attention.default)
def attention(
    op: Translator,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    attn_mask: ir.Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    stream: int = 0,
) -> ir.Value:
    q, k = shapes.dims(query), shapes.dims(key)
    assert q is not None
    assert k is not None
    if scale is None:
        if not isinstance(q[-1], int):
            raise symbolic("attention")
        scale = q[-1] ** -0.5
    if enable_gqa:
        key, value = (_repeat_heads(op, v, q[-3]) for v in (key, value))
    dropping = dropout_p > 0
    return op.ours(
        "Attention",
        query,
        key,
        value,
        attn_mask,
        op.seed() if dropping else None,
        scale=float(scale),
        causal=int(is_causal),
        ratio=float(dropout_p),
        stream=stream,
    )


def _repeat_heads(op: Translator, value: ir.Value, heads: shapes.Dim) -> ir.Value:
    """[B, H / times, S, E] → [B, H, S, E], each head repeated in place."""
    known = shapes.dims(value)
    assert known is not None
    axis = len(known) - 3
    own = known[axis]
    if own == heads:
        return value
    if not isinstance(heads, int) or not isinstance(own, int):
        raise symbolic("grouped attention")
    times = heads // own
    wide = [1] * (len(known) + 1)
    wide[axis + 1] = times
    spread = op.Expand(op.Unsqueeze(value, [axis + 1]), op.constant(np.array(wide, np.int64)))
    result = op.Reshape(spread, [0] * axis + [heads, -1, _static(known[-1])])
    result.shape = ir.Shape((*known[:-3], heads, *known[-2:]))
    return result


def _static(dim: shapes.Dim) -> int:
    if not isinstance(dim, int):
        raise symbolic("grouped attention")
    return dim
