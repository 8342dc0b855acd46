"""ortrain's own operators."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812

from ortrain.testing import OpCase, flags, integers, normal, positive

SEED = np.array(1234567890123, np.int64)
# Tokens of two rows of three, and what each of them may be.
PLACES, RESTS = np.array([1, 2, 5], np.int64), {"rows": (4,), "numbers": (), "matrices": (2, 4)}


def unpacked(data, places, sizes):
    whole = torch.zeros(int(sizes.prod()), *data.shape[2:], dtype=data.dtype)
    return whole.index_copy(0, places, data[0]).reshape(*sizes.tolist(), *data.shape[2:])


def attention(query, key, value, mask=None, scale=1.0, causal=0):
    scores = scale * query @ key.transpose(-1, -2)
    if causal:
        keep = torch.ones(scores.shape[-2:]).tril().bool()
        scores = scores.masked_fill(~keep, -math.inf)
    elif mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    return torch.softmax(scores, -1).nan_to_num(0.0) @ value


def attend(note, inputs, torch=attention, **attributes):
    """Attention, and the form of it that leaves its weights for the gradient."""
    inputs = {"query": normal(2, 2, 3, 4), "key": normal(2, 2, 5, 4), "value": normal(2, 2, 5, 3),
              **inputs}  # fmt: skip
    given = (inputs, {"scale": 0.5, **attributes})
    options = {"torch": torch, "tolerance": "sums", "note": note}
    return (
        OpCase("ortrain::Attention", *given, **options),
        OpCase("ortrain::NarrowAttention", *given, outputs=2, seeds=(0,), **options),
    )


def kept_attention(note, outputs=3, **more):
    """The gradient of the latter."""
    return OpCase(
        "ortrain::NarrowAttentionGradient",
        {"dy": normal(2, 2, 3, 3), "query": normal(2, 2, 3, 4), "key": normal(2, 2, 5, 4),
         "value": normal(2, 2, 5, 3), "weights": positive(2, 2, 3, 5), **more},
        {"scale": 0.5, "needs": [int(place < outputs) for place in range(4)]}, outputs=outputs,
        wrt=("dy", "query", "key", "value", "weights"), tolerance="sums", note=note,
        symbolic=False,
    )  # fmt: skip


def mask(*shape):
    """Every query sees the first key, so that no row is empty."""

    def draw(rng):
        result = flags(*shape)(rng)
        result[..., 0] = True
        return result

    return draw


def grouped(input, weight, ends):
    starts = [0, *ends.tolist()[:-1]]
    parts = zip(starts, ends.tolist(), weight, strict=True)
    return torch.cat([input[a:b] @ w for a, b, w in parts])


def batch_norm(input, weight=None, bias=None, eps=1e-5):
    return F.batch_norm(input, None, None, weight, bias, True, 0.1, eps)


def standard_attention(query, key, value, mask=None, is_causal=0, scale=None):
    repeats = query.shape[1] // key.shape[1]
    key, value = (v.repeat_interleave(repeats, 1) for v in (key, value))
    return attention(query, key, value, mask, scale or 1 / math.sqrt(query.shape[-1]), is_causal)


def attend_standard(note, inputs, torch=standard_attention, symbolic=True, **attributes):
    return OpCase(
        "Attention",
        {"query": normal(2, 2, 3, 4), "key": normal(2, 2, 3, 4), "value": normal(2, 2, 3, 5),
         **inputs},
        attributes, torch=torch, tolerance="sums", note=note, opsets=(23,), symbolic=symbolic,
    )  # fmt: skip


# PyTorch divides by a scale as a product with its inverse: powers of two round alike in both.
STEPS = np.array([[0.25, 0.5, 1.0]])


def fake_quantize(x, scale, zero, low, high):
    if scale.numel() == 1:
        return torch.fake_quantize_per_tensor_affine(x, scale.item(), int(zero.item()), low, high)
    return torch.fake_quantize_per_channel_affine(
        x, scale.flatten().float(), zero.flatten().int(), 1, low, high
    )


class Learnt(torch.autograd.Function):
    """The same with a range that is learnt.

    PyTorch has it in float32 alone. There its slope at each number is exact, by a gradient of one
    at that number; they are multiplied and summed in the case's own precision.
    """

    @staticmethod
    def forward(ctx, x, scale, zero, low, high):
        ctx.save_for_backward(x, scale, zero)
        ctx.ends = low, high
        return Learnt.single(x, scale, zero, low, high).to(x.dtype)

    @staticmethod
    def single(x, scale, zero, low, high):
        given = [value.float() for value in (x, scale.flatten(), zero.flatten())]
        if scale.numel() == 1:
            return torch._fake_quantize_learnable_per_tensor_affine(*given, low, high, 1.0)
        return torch._fake_quantize_learnable_per_channel_affine(*given, 1, low, high, 1.0)

    @staticmethod
    def backward(ctx, dy):
        held = [value.detach().float().requires_grad_() for value in ctx.saved_tensors]
        totals = [torch.zeros_like(value) for value in ctx.saved_tensors]
        for one, size in zip(torch.eye(dy.numel()), dy.flatten(), strict=True):
            with torch.enable_grad():
                y = Learnt.single(*held, *ctx.ends)
            slopes = torch.autograd.grad(y, held, one.reshape(dy.shape))
            for total, slope in zip(totals, slopes, strict=True):
                total += slope.to(total.dtype) * size
        return *totals, None, None


def learnt(x, scale, zero, low, high):
    return Learnt.apply(x, scale, zero, low, high)


def fake(note, inputs, low, high, wrt=("x",), torch=fake_quantize):
    return OpCase(
        "ortrain::FakeQuantize", {"x": normal(5, 3, scale=4.0), **inputs},
        {"low": low, "high": high}, wrt=wrt, torch=torch, estimate=True, note=note,
    )  # fmt: skip


def learnt_fake(note, inputs, low, high):
    return fake(f"learnt-{note}", inputs, low, high, ("x", "scale", "zero"), learnt)


CASES = [
    fake("signed", {"scale": np.array(0.0625), "zero": np.array(0.0)}, -64, 64),
    fake("unsigned", {"scale": np.array(0.03125), "zero": np.array(100.0)}, 0, 255),
    fake("channels", {"scale": STEPS, "zero": np.array([[0.0, 3.0, -2.0]])}, -8, 7),
    learnt_fake("signed", {"scale": np.array(0.0625), "zero": np.array(0.0)}, -64, 64),
    learnt_fake("unsigned", {"scale": np.array(0.015625), "zero": np.array(100.0)}, 0, 255),
    learnt_fake("channels", {"scale": STEPS, "zero": np.array([[0.0, 3.0, -2.0]])}, -8, 7),
    attend_standard("plain", {}),
    attend_standard("scale", {}, scale=0.25),
    attend_standard("causal", {}, is_causal=1),
    attend_standard("bool-mask", {"mask": mask(3, 3)}),
    attend_standard("float-mask", {"mask": normal(3, 3)}),
    attend_standard("grouped-heads", {"query": normal(2, 4, 3, 4)}),
    attend_standard(
        "3d", {"query": normal(2, 3, 8), "key": normal(2, 5, 8), "value": normal(2, 5, 6)},
        # onnx's own shape inference gives the symbolic form a wrong last dimension
        symbolic=False, torch=None, q_num_heads=2, kv_num_heads=2,
    ),
    OpCase("SwiGLU", {"a": normal(2, 3), "b": normal(2, 3)}, {"alpha": 1.5}, opsets=(28,),
           torch=lambda a, b, alpha: a * torch.sigmoid(alpha * a) * b,
           runtime="onnxruntime has not reached the opset"),
    *(
        OpCase("RotaryEmbedding",
               {"x": normal(2, 2, 3, 4), "cos": normal(2, 3, 2), "sin": normal(2, 3, 2)},
               {"interleaved": interleaved}, tolerance="sums", note=f"interleaved{interleaved}")
        for interleaved in (0, 1)
    ),
    OpCase("ortrain::Sigmoid", {"x": normal(4, 6)}, torch=lambda x: torch.sigmoid(x)),
    OpCase("ortrain::Xlogy", {"x": normal(4, 6), "other": positive(4, 6)},
           torch=lambda x, other: torch.xlogy(x, other)),
    OpCase("ortrain::Log1p", {"x": positive(4, 6)}, torch=lambda x: torch.log1p(x)),
    OpCase("ortrain::Expm1", {"x": normal(4, 6)}, torch=lambda x: torch.expm1(x)),
    OpCase("ortrain::Embedding", {"weight": normal(5, 3), "indices": integers(5, 2, 4)},
           torch=lambda weight, indices: F.embedding(indices, weight), tolerance="sums"),
    *(
        OpCase("ortrain::Pack", {"data": normal(2, 3, *rest), "places": PLACES}, note=note,
               torch=lambda data, places: data.flatten(0, 1)[places].unsqueeze(0))
        for note, rest in RESTS.items()
    ),
    *(
        OpCase("ortrain::Unpack",
               {"data": normal(1, 3, *rest), "places": PLACES, "sizes": np.array([2, 3])},
               constants=("sizes",) if note == "rows" else (), torch=unpacked, note=note)
        for note, rest in RESTS.items()
    ),
    OpCase("ortrain::Dropout", {"x": normal(4, 6), "seed": SEED}, {"ratio": 0.4, "stream": 3}),
    OpCase("ortrain::Dropout", {"x": normal(2, 3, 4), "seed": SEED}, {"ratio": 0.4, "stream": 0},
           note="3d"),
    OpCase("ortrain::Dropout", {"x": normal(24), "seed": SEED}, {"ratio": 0.4, "stream": 0},
           note="1d"),
    OpCase("ortrain::Dropout",
           {"x": normal(3, 6), "seed": SEED, "index": np.array([0, 2, 5])},
           {"ratio": 0.4, "stream": 3}, note="index"),
    OpCase("ortrain::Dropout", {"x": normal(2, 3), "seed": SEED}, {"ratio": 0.0, "stream": 3},
           note="none"),
    OpCase("ortrain::Dropout", {"x": normal(2, 3), "seed": SEED}, {"ratio": 1.0, "stream": 3},
           note="all", flat=("x",)),
    *(
        OpCase("ortrain::GroupedMatMul",
               {"input": normal(7, 3), "weight": normal(4, 3, 2), "ends": np.array(ends)},
               torch=grouped, tolerance="sums", note=note, symbolic=False)
        for note, ends in (("full", [2, 3, 5, 7]), ("empty-groups", [0, 4, 4, 7]))
    ),
    *attend("plain", {}),
    *attend("causal", {"key": normal(2, 2, 3, 4), "value": normal(2, 2, 3, 3)}, causal=1),
    *attend("bool-mask", {"mask": mask(2, 1, 3, 5)}),
    *attend("bool-mask-keys", {"mask": mask(2, 1, 1, 5)}),
    *attend("bool-mask-empty-row", {"mask": np.arange(15).reshape(3, 5) > 4}),
    *attend("float-mask", {"mask": normal(2, 1, 3, 5)}),
    *attend("dropout", {"mask": None, "seed": SEED}, torch=None, ratio=0.3, stream=1),
    *attend("3d", {"query": normal(2, 3, 4), "key": normal(2, 5, 4), "value": normal(2, 5, 3)}),
    kept_attention("plain"),
    kept_attention("float-mask", outputs=4, mask=normal(2, 1, 3, 5)),
    kept_attention("bool-mask-empty-row", mask=np.arange(15).reshape(3, 5) > 4),
    *attend("shared-keys", {"key": normal(1, 2, 5, 4), "value": normal(1, 2, 5, 3)}),
    *(
        OpCase("ortrain::BatchNorm",
               {"input": normal(3, 2, 2, 2), "weight": positive(2), "bias": normal(2)},
               {"eps": 1e-3}, outputs=count, seeds=(0,), torch=batch_norm, tolerance="sums",
               note=f"outputs-{count}")
        for count in (1, 5)
    ),
    OpCase("ortrain::BatchNorm", {"input": normal(5, 3)}, torch=batch_norm, tolerance="sums",
           note="2d-no-affine"),
    OpCase("ortrain::BatchNorm",
           {"input": normal(3, 2, 4), "weight": positive(2), "bias": normal(2),
            "running_mean": normal(2), "running_var": positive(2)},
           wrt=("input", "weight", "bias"), outputs=5, seeds=(0,), torch=batch_norm,
           tolerance="sums", note="running"),
]  # fmt: skip
