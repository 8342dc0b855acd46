"""Arithmetic, activations, and selection, element by element."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812

from ortrain.testing import OpCase, between, distinct, flags, normal, positive

f32 = np.float32


NORMAL, PAIR = normal(3, 4), normal(2, 3)


def unary(operator, function, draw=NORMAL, note="", **options):
    """x → y; a PyTorch function with attributes is a lambda that names them."""
    named = function if getattr(function, "__name__", "") == "<lambda>" else lambda x: function(x)
    return OpCase(operator, {"x": draw}, torch=named, note=note, **options)


def binary(operator, function, note="", a=PAIR, b=PAIR, **options):
    return OpCase(
        operator, {"a": a, "b": b}, torch=lambda a, b: function(a, b), note=note, **options
    )


def choose(condition, a, b):
    return torch.where(condition, a, b)


# Every way in which numpy broadcasts two shapes.
BROADCASTS = {
    "same": ((2, 3), (2, 3)),
    "bias": ((2, 3, 4), (4,)),
    "column": ((2, 3), (2, 1)),
    "outer": ((3, 1), (1, 4)),
    "outer-ranks": ((2, 1, 4), (3, 1)),
    "scalar": ((2, 3), ()),
    "ones": ((1, 1), (2, 3)),
    "both-ones": ((1, 3), (1, 3)),
    "leading-one": ((1, 3), (3,)),
}

CASES = [
    *(
        binary("Add", lambda a, b: a + b, note, normal(*a), normal(*b))
        for note, (a, b) in BROADCASTS.items()
    ),
    *(
        binary("Mul", lambda a, b: a * b, note, normal(*a), normal(*b))
        for note, (a, b) in BROADCASTS.items()
    ),
    *(
        unary(name, function, flat=("x",))
        for name, function in (
            ("Ceil", torch.ceil), ("Floor", torch.floor), ("Round", torch.round),
            ("Sign", torch.sign),
        )
    ),
    binary("Sub", lambda a, b: a - b, "column", normal(2, 3), normal(2, 1)),
    binary("Sub", lambda a, b: a - b, "only-b", wrt=("b",)),
    binary("Div", lambda a, b: a / b, "outer", normal(3, 1), positive(1, 4)),
    binary("Div", lambda a, b: a / b, "only-a", normal(2, 3), positive(2, 3), wrt=("a",)),
    binary("Mul", lambda a, b: a * b, "constant", constants=("b",)),
    binary("Pow", torch.pow, "both", positive(2, 3), normal(2, 3)),
    binary("Pow", torch.pow, "broadcast", positive(2, 3), normal(3)),
    binary("Pow", torch.pow, "negative-base", normal(2, 3), np.array([2.0, 3.0, 2.0], f32),
           wrt=("a",)),
    *(
        binary("Pow", torch.pow, f"constant-{n}", positive(2, 3), np.array(n, f32),
               constants=("b",))
        for n in (0.5, 1.0, 2.0, 3.0, -1.5)
    ),
    binary("Pow", torch.pow, "constant-cube-of-negative", normal(2, 3), np.array([3.0], f32),
           constants=("b",)),
    binary("Pow", torch.pow, "integer-exponent", normal(2, 3), np.array(2, np.int64),
           constants=("b",)),
    binary("PRelu", lambda a, b: torch.where(a > 0, a, a * b), "channel",
           normal(2, 3, 2, avoid=(0,)), normal(3, 1)),
    binary("PRelu", lambda a, b: torch.where(a > 0, a, a * b), "one",
           normal(2, 3, avoid=(0,)), normal(1)),
    binary("Mod", lambda a, b: torch.fmod(a, b), "fmod",
           np.array([[5.3, -5.3, 7.1], [2.2, 3.9, -1.7]], f32),
           np.array([[2.0, 3.0, -2.5], [1.5, 2.0, 2.1]], f32), attributes={"fmod": 1}),
    *(
        OpCase(operator, {"a": distinct(2, 3), "b": distinct(2, 3), "c": distinct(2, 3)},
               torch=function, note="three")
        for operator, function in {
            "Max": lambda a, b, c: torch.maximum(torch.maximum(a, b), c),
            "Min": lambda a, b, c: torch.minimum(torch.minimum(a, b), c),
            "Sum": lambda a, b, c: a + b + c,
            "Mean": lambda a, b, c: (a + b + c) / 3,
        }.items()
    ),
    *(
        OpCase(operator, {"a": distinct(3, 1), "b": distinct(1, 4)}, torch=function,
               note="broadcast")
        for operator, function in {
            "Max": lambda a, b: torch.maximum(a, b),
            "Min": lambda a, b: torch.minimum(a, b),
            "Sum": lambda a, b: a + b,
            "Mean": lambda a, b: (a + b) / 2,
        }.items()
    ),
    OpCase("Max", {"a": distinct(2, 3)}, torch=lambda a: a * 1, note="one"),
    OpCase("Sum", {"a": distinct(2, 3)}, torch=lambda a: a * 1, note="one"),
    unary("Sqrt", torch.sqrt, positive(3, 4)),
    unary("Reciprocal", torch.reciprocal, positive(3, 4)),
    unary("Neg", torch.neg),
    unary("Abs", torch.abs, normal(3, 4, avoid=(0,))),
    unary("Exp", torch.exp),
    unary("Log", torch.log, positive(3, 4)),
    unary("Sin", torch.sin),
    unary("Cos", torch.cos),
    unary("Tan", torch.tan, between(-1, 1, 3, 4)),
    unary("Asin", torch.asin, between(-0.9, 0.9, 3, 4)),
    unary("Acos", torch.acos, between(-0.9, 0.9, 3, 4)),
    unary("Atan", torch.atan),
    unary("Sinh", torch.sinh),
    unary("Cosh", torch.cosh),
    unary("Asinh", torch.asinh),
    unary("Acosh", torch.acosh, between(1.2, 3, 3, 4)),
    unary("Atanh", torch.atanh, between(-0.9, 0.9, 3, 4)),
    unary("Erf", torch.erf),
    unary("Sigmoid", torch.sigmoid),
    unary("Tanh", torch.tanh),
    unary("Relu", torch.relu, normal(3, 4, avoid=(0,))),
    unary("LeakyRelu", lambda x, alpha=0.01: F.leaky_relu(x, alpha), normal(3, 4, avoid=(0,))),
    unary("LeakyRelu", lambda x, alpha: F.leaky_relu(x, alpha), normal(3, 4, avoid=(0,)),
          "alpha", attributes={"alpha": 0.3}),
    unary("Elu", lambda x, alpha=1.0: F.elu(x, alpha), normal(3, 4, avoid=(0,))),
    unary("Elu", lambda x, alpha: F.elu(x, alpha), normal(3, 4, avoid=(0,)), "alpha",
          attributes={"alpha": 1.7}),
    unary("Selu", F.selu, normal(3, 4, avoid=(0,)), tolerance="sums"),
    unary("Celu", lambda x, alpha: F.celu(x, alpha), normal(3, 4, avoid=(0,)), "alpha",
          attributes={"alpha": 1.7}),
    unary("Softplus", F.softplus),
    unary("Softplus", lambda x: torch.logaddexp(x, torch.zeros(())), normal(3, 4, scale=20.0),
          "large"),
    unary("Softsign", F.softsign, normal(3, 4, avoid=(0,))),
    unary("HardSigmoid", lambda x, alpha=0.2, beta=0.5: (x * alpha + beta).clamp(0, 1),
          normal(3, 4, scale=3.0, avoid=(-2.5, 2.5)), tolerance="sums"),
    unary("HardSwish", F.hardswish, normal(3, 4, scale=3.0, avoid=(-3, 3)), tolerance="sums"),
    unary("ThresholdedRelu", lambda x, alpha=1.0: torch.where(x > alpha, x, 0),
          normal(3, 4, scale=3.0, avoid=(1,))),
    unary("Shrink", lambda x, lambd, bias: torch.where(
              x < -lambd, x + bias, torch.where(x > lambd, x - bias, 0)),
          normal(3, 4, avoid=(-0.5, 0.5)), attributes={"lambd": 0.5, "bias": 0.25}),
    unary("Mish", F.mish),
    unary("Swish", lambda x, alpha=1.0: x * torch.sigmoid(alpha * x), note="alpha",
          attributes={"alpha": 1.5}),
    unary("Swish", lambda x: F.silu(x)),
    unary("Gelu", lambda x: F.gelu(x), normal(3, 4, scale=2.0)),
    unary("Gelu", lambda x: F.gelu(x, approximate="tanh"), normal(3, 4, scale=2.0), "tanh",
          attributes={"approximate": "tanh"}, tolerance="sums"),
    unary("Gelu", lambda x: F.gelu(x), np.array([-40.0, -9.0, 0.0, 9.0, 40.0], f32), "far"),
    unary("Identity", lambda x: x * 1),
    unary("Cast", lambda x: x.double() * 1, attributes={"to": 11}),
    OpCase("CastLike", {"x": normal(3, 4), "target_type": normal()}, wrt=("x",),
           torch=lambda x: x * 1),
    OpCase("Dropout", {"x": normal(3, 4)}, torch=lambda x: x * 1, note="inference"),
    OpCase("Dropout", {"x": normal(3, 4), "ratio": np.array(0.3, f32),
                       "training_mode": np.array(True)},
           {"seed": 5}, wrt=("x",), constants=("ratio", "training_mode"), note="training",
           runtime="onnxruntime draws other numbers"),
    OpCase("Clip", {"x": normal(3, 4, avoid=(-0.5, 0.7)), "low": np.array(-0.5, f32),
                    "high": np.array(0.7, f32)},
           constants=("low", "high"), torch=lambda x, low, high: x.clamp(low, high)),
    OpCase("Clip", {"x": normal(3, 4, avoid=(-0.5,)), "low": np.array(-0.5, f32)},
           constants=("low",), torch=lambda x, low: x.clamp(low), note="low"),
    OpCase("Clip", {"x": normal(3, 4, avoid=(0.5,)), "low": None, "high": np.array(0.5, f32)},
           constants=("high",), torch=lambda x, high: x.clamp(max=high), note="high"),
    OpCase("Clip", {"x": normal(3, 4)}, torch=lambda x: x * 1, note="nothing"),
    OpCase("Where", {"condition": flags(2, 3), "a": normal(2, 3), "b": normal(2, 3)},
           torch=choose),
    OpCase("Where", {"condition": flags(2, 1, 3), "a": normal(4, 1), "b": normal()},
           torch=choose, note="broadcast"),
    OpCase("Where", {"condition": flags(2, 3), "a": normal(2, 3), "b": np.array(-3.0, f32)},
           torch=choose, constants=("b",), note="constant"),
]  # fmt: skip
