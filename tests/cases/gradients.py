"""Composites of gradients, and the forward operators that leave what they ask for.

Their own gradient is a second derivative, through the body.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812

from ortrain.testing import OpCase, distinct, integers, normal, positive
from tests.cases.composite import attention as weighted

X, Y = normal(4, 6, avoid=(0,)), normal(3, 2, 2, 2)


def of(function):
    """The gradient of a function of one tensor, by PyTorch."""

    def gradient(dy, x):
        x = x if x.requires_grad else x.detach().requires_grad_()
        (dx,) = torch.autograd.grad(function(x), x, dy, create_graph=True)
        return dx

    return gradient


def activation(name, function, note="", wrt=None, **attributes):
    return OpCase(
        f"ortrain::{name}Gradient", {"dy": normal(4, 6), "x": X}, attributes, note=note,
        torch=of(function), wrt=wrt,
    )  # fmt: skip


def by_result(name, function, **attributes):
    return OpCase(
        f"ortrain::{name}Gradient", {"dy": normal(4, 6), "result": normal(4, 6)}, attributes,
        torch=function, tolerance="sums",
    )  # fmt: skip


def norm(name, inputs, outputs, note="", **attributes):
    return OpCase(
        f"ortrain::{name}Gradient", inputs, attributes, outputs=outputs, tolerance="sums",
        note=note, symbolic=False, batch=True,
        wrt=[name for name, source in inputs.items() if name != "bias" and source is not None],
    )  # fmt: skip


def row(shape=(3, 4), weight=(4,)):
    """A normalization over the last axis: its input's gradient, its input and its parameters."""
    return {"dy": normal(*shape), "x": normal(*shape), "scale": normal(*weight)}


def statistics(*shape):
    return {"mean": normal(*shape), "inverse": positive(*shape)}


def window(name, inputs, note="", outputs=1, **attributes):
    return OpCase(
        f"ortrain::{name}Gradient", inputs, attributes, outputs=outputs, tolerance="sums",
        note=note, symbolic=False, batch=True,
    )  # fmt: skip


ELU = np.array([-2.0, -1.0, -0.5, 0.25])
STEPS = {"strides": [2, 1], "dilations": [1, 2], "pads": [1, 0, 1, 0], "kernel_shape": [3, 2]}
TARGET = np.array([1, -100, 3])
# Of windows of 2 x 2 over planes of 4 x 4: the places of their maxima.
PLACES = np.array([0, 3, 9, 14, 5, 2, 8, 11]).reshape(1, 2, 2, 2)


def cross_entropy(note, rows=(), **attributes):
    return OpCase(
        "ortrain::CrossEntropyGradient",
        {"dloss": normal(*rows), "log_prob": normal(3, 5), "target": TARGET}, attributes,
        wrt=("dloss", "log_prob"), tolerance="sums", note=note,
    )  # fmt: skip


ATTENTION = ("query", "key", "value")
SEEN = np.arange(15).reshape(1, 1, 3, 5) > 4  # the first query sees nothing


def attention(note, mask=None, keys=5, **attributes):
    """Forward and gradient of attention that keeps the logarithms of sums."""
    inputs = {name: normal(2, 2, 3 if name == "query" else keys, 8) for name in ATTENTION}
    options = {"attributes": {"scale": 0.3, **attributes}, "tolerance": "sums", "note": note}
    results = {"output": normal(2, 2, 3, 8), "logsumexp": positive(2, 2, 3)}
    return (
        OpCase("ortrain::FlashAttention", {**inputs, "mask": mask}, seeds=(0,), symbolic=False,
               torch=weighted, wrt=ATTENTION, **options),
        OpCase("ortrain::FlashAttentionGradient",
               {"dy": normal(2, 2, 3, 8), **inputs, **results, "mask": mask}, outputs=3,
               wrt=("dy", *ATTENTION, *results), symbolic=False, **options),
    )  # fmt: skip


CASES = [
    activation("Threshold", torch.relu, wrt=("dy",), steep=1),
    activation("Threshold", lambda x: F.threshold(x, 0.5, 0.0), "product", ("dy",), threshold=0.5,
               steep=0),
    activation("LeakyRelu", lambda x: F.leaky_relu(x, 0.25), wrt=("dy",), alpha=0.25),
    OpCase("ortrain::EluGradient", {"dy": normal(4), "x": ELU, "result": np.expm1(ELU)},
           {"alpha": 0.5}, wrt=("dy",),
           torch=lambda dy, x, result: torch.where(x > 0, dy, dy * (result + 0.5))),
    activation("Hardtanh", F.hardtanh, wrt=("dy",), steep=1),
    activation("Hardtanh", lambda x: F.hardtanh(x, -0.25, 0.5), "product", ("dy",),
               min_val=-0.25, max_val=0.5, steep=0),
    activation("Softplus", F.softplus),
    activation("HardSwish", F.hardswish),
    activation("Silu", F.silu),
    activation("Mish", F.mish),
    activation("Gelu", F.gelu),
    activation("Gelu", lambda x: F.gelu(x, approximate="tanh"), "tanh", approximate="tanh"),
    OpCase("ortrain::Hardtanh", {"x": normal(4, 6)}, {"min_val": -0.25, "max_val": 0.5},
           torch=lambda x, min_val, max_val: F.hardtanh(x, min_val, max_val)),
    OpCase("ortrain::Silu", {"x": normal(4, 6)}, torch=lambda x: F.silu(x)),
    by_result("Sigmoid", lambda dy, result: dy * result * (1 - result)),
    by_result("Tanh", lambda dy, result: dy * (1 - result * result)),
    by_result("Softmax", axis=0,
              function=lambda dy, result: result * (dy - (dy * result).sum(0, keepdim=True))),
    OpCase("ortrain::LinearCrossEntropyGradient", {"dloss": normal(), "unit": normal(4, 3)},
           torch=lambda dloss, unit: dloss * unit),
    by_result("LogSoftmax", axis=-1,
              function=lambda dy, result: dy - result.exp() * dy.sum(-1, keepdim=True)),
    cross_entropy("mean"),
    cross_entropy("sum", reduction="sum"),
    cross_entropy("none", rows=(3,), reduction="none"),
    cross_entropy("smoothing", label_smoothing=0.1),
    OpCase("ortrain::EmbeddingGradient",
           {"dy": normal(2, 4, 3), "weight": normal(5, 3), "indices": integers(5, 2, 4)},
           {"padding_idx": 1}, wrt=("dy",), tolerance="sums"),
    *(
        OpCase("ortrain::GatherGradient",
               {"dy": normal(*dy), "data": normal(*data),
                "indices": integers(3, *places, low=-3)},
               {"axis": axis}, wrt=("dy",), tolerance="sums", note=note)
        for note, axis, data, places, dy in (
            ("rows", 0, (3, 4), (2,), (2, 4)),
            ("scalars", 0, (3,), (2, 2), (2, 2)),
            ("columns", 1, (2, 3, 4), (2, 2), (2, 2, 2, 4)),
            ("one", 1, (2, 3, 4), (), (2, 4)),
        )
    ),
    norm("LayerNormalization", {**row(), "bias": normal(4), **statistics(3, 1)}, 3, axis=-1),
    norm("LayerNormalization", {**row((2, 3, 4), (3, 4)), "bias": normal(3, 4),
                                **statistics(2, 1, 1)}, 3, "axis1", axis=1),
    norm("LayerNormalization", {**row(), "bias": normal(4)}, 3, "no-statistics", axis=-1),
    norm("RMSNormalization", row(), 2, axis=-1, epsilon=0.01),
    OpCase("ortrain::GroupNorm", {"x": normal(2, 4, 3), "scale": normal(4), "bias": normal(4)},
           {"num_groups": 2, "epsilon": 1e-3}, seeds=(0,), tolerance="sums",
           torch=lambda x, scale, bias: F.group_norm(x, 2, scale, bias, 1e-3)),
    norm("GroupNorm", {**row((2, 4, 3)), **statistics(2, 2)}, 3, num_groups=2),
    norm("BatchNorm", {"dy": Y, "input": Y, "weight": positive(2), "mean": normal(2),
                       "inverse_std": positive(2)}, 3),
    norm("BatchNorm", {"dy": Y, "input": Y, "weight": None, "mean": normal(2),
                       "inverse_std": positive(2)}, 3, "no-weight"),
    norm("BatchNormalization", {"dy": Y, "x": Y, "scale": normal(2), "mean": normal(2),
                                "var": positive(2)}, 3, epsilon=1e-3, needs=[1, 1, 1, 0, 0]),
    norm("BatchNormalization", {"dy": Y, "x": Y, "scale": normal(2), "mean": normal(2),
                                "var": positive(2)}, 5, "of-statistics", epsilon=1e-3),
    window("Conv", {"dy": normal(2, 3, 3, 4), "x": normal(2, 2, 5, 6), "w": normal(3, 2, 3, 2)},
           outputs=3, **STEPS),
    window("Conv", {"dy": normal(2, 4, 3, 4), "x": normal(2, 4, 5, 6), "w": normal(4, 2, 3, 2)},
           "groups", outputs=3, **STEPS, group=2),
    window("Conv", {"dy": normal(1, 3, 6), "x": normal(1, 2, 8), "w": normal(3, 2, 5)},
           "uneven-pads", outputs=3, strides=[1], dilations=[1], pads=[2, 0], kernel_shape=[5]),
    window("Conv", {"dy": normal(1, 3, 3), "x": normal(1, 2, 70), "w": normal(3, 2, 66)},
           "of-many-taps", outputs=3, strides=[2], dilations=[1], pads=[0, 0], kernel_shape=[66]),
    window("Conv", {"dy": normal(1, 3, 4), "x": normal(1, 2, 5), "w": normal(3, 2, 3)},
           "step-by-step", outputs=3, strides=[1], dilations=[1], pads=[1, 0], kernel_shape=[3]),
    window("Conv", {"dy": normal(1, 4, 4), "x": normal(1, 2, 5), "w": normal(4, 1, 3)},
           "groups-step-by-step", outputs=3, strides=[1], dilations=[1], pads=[1, 0],
           kernel_shape=[3], group=2),
    window("Conv", {"dy": normal(1, 4, 3), "x": normal(1, 2, 70), "w": normal(4, 1, 66)},
           "groups-of-many-taps", outputs=3, strides=[2], dilations=[1], pads=[0, 0],
           kernel_shape=[66], group=2),
    window("ConvTranspose",
           {"dy": normal(2, 3, 5, 6), "x": normal(2, 2, 3, 4), "w": normal(2, 3, 3, 2)},
           outputs=3, **STEPS, output_padding=[0, 0], group=1),
    window("ConvTranspose",
           {"dy": normal(1, 3, 8), "x": normal(1, 2, 4), "w": normal(2, 3, 3)}, "uneven-pads",
           outputs=3, strides=[2], dilations=[1], pads=[2, 0], kernel_shape=[3],
           output_padding=[1]),
    window("ConvTranspose",
           {"dy": normal(1, 3, 69), "x": normal(1, 2, 3), "w": normal(2, 3, 65)}, "of-many-taps",
           outputs=3, strides=[2], dilations=[1], pads=[0, 0], kernel_shape=[65],
           output_padding=[0]),
    OpCase("ortrain::MaxPool", {"x": distinct(1, 2, 5, 6)},
           {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 0]}, tolerance="sums",
           torch=lambda x: F.max_pool2d(x, (3, 2), (2, 1), (1, 0)), symbolic=False, batch=True),
    OpCase("ortrain::MaxPoolGradient",
           {"dy": normal(1, 2, 2, 2), "x": normal(1, 2, 4, 4), "places": PLACES},
           {"kernel_shape": [2, 2], "strides": [2, 2]}, wrt=("dy",), tolerance="sums"),
    OpCase("ortrain::AveragePoolGradient", {"dy": normal(1, 2, 3, 5), "x": normal(1, 2, 5, 6)},
           {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 0], "dilations": [1, 1]},
           wrt=("dy",), tolerance="sums", symbolic=False, batch=True),
    *attention("plain"),
    *attention("causal", keys=3, causal=1),
    *attention("float-mask", normal(3, 5)),
    *attention("keys-mask", normal(2, 1, 1, 5)),
    *attention("bool-mask-empty-row", SEEN),
]  # fmt: skip
