"""Where a function bends, its gradient is a choice: ours is PyTorch's."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from ortrain.autodiff import differentiate
from tests.programs import program, run

BENDS = np.array([-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0], np.float32)


def gradient(body, x, **shapes):
    training = differentiate(program(body, {"x": x.shape}), ["x"])
    (seed,) = training.inputs()[1:]
    ones = np.ones([int(d) for d in seed.shape], np.float32)
    return run(training, {"x": x, seed.name: ones})["x.gradient"]


def expected(function, x):
    tensor = torch.tensor(x, requires_grad=True)
    function(tensor).sum().backward()
    return tensor.grad.numpy()


def clip(op, x):
    return op.Clip(x, op.constant(np.float32(-0.5)), op.constant(np.float32(0.5)))


ELEMENTWISE = {
    "Relu": (lambda op, x: op.Relu(x), F.relu),
    "Abs": (lambda op, x: op.Abs(x), torch.abs),
    "LeakyRelu": (lambda op, x: op.LeakyRelu(x, alpha=0.25), lambda x: F.leaky_relu(x, 0.25)),
    "Elu": (lambda op, x: op.Elu(x, alpha=0.5), lambda x: F.elu(x, 0.5)),
    "Softsign": (lambda op, x: op.Softsign(x), F.softsign),
    "HardSigmoid": (
        lambda op, x: op.HardSigmoid(x, alpha=0.25, beta=0.5),
        lambda x: F.hardsigmoid(x * 1.5),
    ),
    "Hardtanh": (
        lambda op, x: op.node("Hardtanh", (x,), domain="ortrain", min_val=-0.5, max_val=1.0),
        lambda x: F.hardtanh(x, -0.5, 1.0),
    ),
    "HardSwish": (lambda op, x: op.HardSwish(x), F.hardswish),
    "Clip": (clip, lambda x: x.clamp(-0.5, 0.5)),
    "Pow-2": (lambda op, x: op.Pow(x, 2.0), lambda x: x**2),
    "Pow-0": (lambda op, x: op.Pow(x, 0.0), lambda x: x**0),
    "Max-with-itself": (lambda op, x: op.Max(x, x), lambda x: torch.maximum(x, x)),
    "Min-with-zero": (
        lambda op, x: op.Min(x, op.Mul(x, 0.0)),
        lambda x: torch.minimum(x, x * 0),
    ),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_elementwise_gradient_at_a_bend_is_that_of_pytorch(name):
    body, function = ELEMENTWISE[name]
    np.testing.assert_allclose(gradient(body, BENDS), expected(function, BENDS), atol=1e-6)


def test_a_power_of_zero_with_a_fed_exponent_has_the_gradient_of_pytorch():
    x, exponents = np.zeros(3, np.float32), np.array([0, 1, 2], np.float32)
    subject = program(lambda op, x, n: op.Pow(x, n), {"x": (3,), "n": (3,)})
    feeds = {"x": x, "n": exponents, "y.gradient": np.ones(3, np.float32)}
    result = run(differentiate(subject, ["x"]), feeds)["x.gradient"]
    np.testing.assert_array_equal(result, expected(lambda x: x ** torch.tensor(exponents), x))


@pytest.mark.parametrize("operator", ["ReduceMax", "ReduceMin"])
def test_a_reduction_shares_among_ties(operator):
    x = np.array([[1, 3, 3], [2, 2, 2], [0, 1, 2]], np.float32)
    function = torch.amax if operator == "ReduceMax" else torch.amin
    result = gradient(lambda op, x: op.node(operator, (x, [1]), keepdims=0), x)
    np.testing.assert_allclose(result, expected(lambda x: function(x, 1), x))


def test_a_norm_of_zeros_has_the_gradient_zero():
    x = np.array([[0, 0], [3, 4]], np.float32)
    result = gradient(lambda op, x: op.ReduceL2(x, [1], keepdims=0), x)
    np.testing.assert_allclose(result, expected(lambda x: x.norm(dim=1), x), rtol=1e-6)


TIED = np.array([0, 0, 1, 1, 0, 0, 1, 0, 2, 2, 1, 1, 2, 2, 1, 1], np.float32).reshape(1, 1, 4, 4)


@pytest.mark.parametrize(
    ("window", "stride", "pad"),
    [((2, 2), (2, 2), 0), ((2, 4), (2, 4), 0), ((3, 3), (1, 1), 1), ((3, 3), (2, 2), 1)],
    ids=["tiles", "wide-tiles", "overlapping", "strided"],
)
def test_a_pool_gives_to_the_first_of_equal_maxima(window, stride, pad):
    options = {"kernel_shape": list(window), "strides": list(stride), "pads": [pad] * 4}

    def body(op, x):
        y = op.MaxPool(x, **options)
        size = F.max_pool2d(torch.zeros(1, 1, 4, 4), window, stride, pad).shape
        y.shape = ir.Shape(list(size))
        return y

    result = gradient(body, TIED)
    wanted = expected(lambda x: F.max_pool2d(x, window, stride, pad), TIED)
    np.testing.assert_array_equal(result, wanted)
