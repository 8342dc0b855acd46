"""ortrain's own operators. Those without a rule here differentiate through their body."""

from __future__ import annotations

from ortrain.autodiff.registry import gradient, no_gradient
from ortrain.ops.attention import inside
from ortrain.ops.fake_quantize import whole
from ortrain.ops.grouped_matmul import groups, matrices
from ortrain.ops.tokens import sizes_of

no_gradient("ortrain::StopGradient", reason="the user's program cut the gradient here")
for _kind in ("Bits", "Uniform", "Normal", "Exponential", "Bernoulli"):
    no_gradient(f"ortrain::Random{_kind}", reason="drawn from the seed")


@gradient("ortrain::Dropout")
def dropout(g, x, seed, index=None, *, ratio, stream):
    """dx = the same dropout of dy: the hash draws the same mask again, so none is saved"""
    return g.op.node("Dropout", (g.dy, seed, index), domain="ortrain", ratio=ratio, stream=stream)


@gradient("ortrain::Sigmoid")
def sigmoid(g, x):
    """dx = dy y (1 - y)"""
    return g.dy * (g.y * (1.0 - g.y))


@gradient("ortrain::Log1p")
def log1p(g, x):
    """dx = dy / (1 + x)"""
    return g.dy / (x + 1.0)


@gradient("ortrain::Expm1")
def expm1(g, x):
    """dx = dy exp(x)"""
    return g.dy * g.op.Exp(x)


@gradient("ortrain::Xlogy", broadcast=True)
def xlogy(g, x, other):
    """dx = dy log(other), 0 where x is 0 and the other not positive; dother = dy x / other"""
    op = g.op
    dead = op.And(op.Equal(x, 0.0), op.LessOrEqual(other, 0.0))
    return op.Where(dead, 0.0, g.dy * op.Log(other)), g.dy * x / other


@gradient("ortrain::GroupedMatMul")
def grouped_matmul(g, input, weight, ends):
    """of each group: dx = dy wᵀ, dw = xᵀ dy"""
    op = g.op
    dys = groups(op, g.dy, weight, ends)
    dx = dw = None
    if g.needs(0):
        dx = [
            op.MatMul(dy, op.Transpose(w, perm=[1, 0]))
            for dy, w in zip(dys, matrices(op, weight), strict=True)
        ]
        dx = dx[0] if len(dx) == 1 else op.Concat(*dx, axis=0)
    if g.needs(1):
        xs = groups(op, input, weight, ends)
        dw = [op.MatMul(op.Transpose(x, perm=[1, 0]), dy) for x, dy in zip(xs, dys, strict=True)]
        dw = [op.Unsqueeze(each, [0]) for each in dw]
        dw = dw[0] if len(dw) == 1 else op.Concat(*dw, axis=0)
    return dx, dw, None


@gradient("ortrain::FakeQuantize", broadcast=True)
def fake_quantize(g, x, scale, zero, *, low, high):
    """dx = dy in the range, 0 outside; dscale = dy (integer - zero - x / scale in it)

    There dzero is 0, and -dy scale outside: straight through the rounding, and for the ends of the
    range what is cut off there.

    An estimate, the derivative being 0: Bengio et al. 2013 (arXiv:1308.3432); of the scale Esser et
    al. 2020 (arXiv:1902.08153), of the zero Bhalgat et al. 2020 (arXiv:2004.09576).
    """
    op = g.op
    integer = whole(op, x, scale, zero)
    inside = op.And(op.GreaterOrEqual(integer, low), op.LessOrEqual(integer, high))
    d_scale = d_zero = None
    if g.needs(1):
        held = op.Clip(integer, low, high) - zero
        d_scale = g.dy * (held - op.Where(inside, x / scale, 0.0))
    if g.needs(2):
        d_zero = op.Where(inside, 0.0, -(g.dy * scale))
    return g.dy_where(inside) if g.needs(0) else None, d_scale, d_zero


@gradient("ortrain::Embedding")
def embedding(g, weight, indices, *, padding_idx=-1):
    """d weight = zeros, with dy added at the indices; none at padding_idx"""
    return g.composite("EmbeddingGradient", g.dy, g.like(weight), indices, padding_idx=padding_idx)


@gradient("ortrain::Pack")
def pack(g, data, places):
    """d data = zeros, with dy at the places"""
    back = g.composite("Unpack", g.dy, places, sizes_of(g.op, data))
    back.shape = data.shape
    return back


@gradient("ortrain::Unpack")
def unpack(g, data, places, sizes):
    """d data = dy at the places"""
    return g.composite("Pack", g.dy, places)


@gradient("ortrain::BatchNorm")
def batch_norm(
    g, x, weight=None, bias=None, running_mean=None, running_var=None, *, momentum=0.1, eps=1e-5
):
    """with n = (x - mean) / std: dx = weight / std * (dy - mean(dy) - n * mean(dy * n))"""
    g.rank(x)
    needs = [g.needs(0), weight is not None, bias is not None]
    return g.composite("BatchNormGradient", g.dy, x, weight, g.output(1), g.output(2), needs=needs)


@gradient("ortrain::Silu")
def silu(g, x):
    """with s = sigmoid(x): dx = dy * s * (1 + x * (1 - s))"""
    return g.composite("SiluGradient", g.dy, x)


@gradient("ortrain::FlashAttention")
def flash_attention(g, query, key, value, mask=None, *, scale, causal=0):
    """with p = exp(s - logsumexp), ds = scale * p * (dy vᵀ - sum(dy * y)): ds k, dsᵀ q and pᵀ dy"""
    if mask is not None and g.needs(3):
        g.unsupported("its mask requires a gradient")
    return g.composite(
        "FlashAttentionGradient", g.dy, query, key, value, g.y, g.output(1, inside(query)), mask,
        scale=scale, causal=causal,
    )  # fmt: skip


@gradient("ortrain::NarrowAttention")
def narrow_attention(
    g, query, key, value, mask=None, seed=None, index=None, *, scale, causal=0, ratio=0.0, stream=0
):  # fmt: skip
    """with d = dy vᵀ dropped, ds = w * (d - sum(w * d)): scale ds k, scale dsᵀ q, wᵀ dy, ds"""
    return g.composite(
        "NarrowAttentionGradient", g.dy, query, key, value, g.output(1), mask, seed, index,
        scale=scale, ratio=ratio, stream=stream, needs=list(map(g.needs, range(4))),
    )  # fmt: skip
