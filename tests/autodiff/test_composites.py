"""Gradients as one node: what an executor keeps of them, and what becomes of the others."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from ortrain.autodiff import differentiate
from ortrain.autodiff.partition import partition
from ortrain.ops import DOMAIN
from ortrain.program import Phase, Role, phase_of
from ortrain.runtime.onnxruntime.executor import OnnxRuntimeExecutor
from tests.cases import ALL
from tests.programs import program, run

CASES = {case.id: case for case in ALL}
STOCK = OnnxRuntimeExecutor(threads=1)


def every(node):
    return True


def training(case, keep=None, dtype=np.float32):
    subject, feeds = case.build(np.dtype(dtype), case.tried_opsets()[-1])
    outputs = [v.name for v in subject.graph.outputs]
    chosen = None if case.seeds is None else [outputs[i] for i in case.seeds]
    return differentiate(subject, case.differentiable(feeds), chosen, keep=keep), feeds


def backward(subject):
    return [n for n in subject.graph if phase_of(n) is Phase.BACKWARD]


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.id)
def test_an_executor_that_keeps_none_has_the_program_of_the_rules(case):
    kept, _ = training(case, STOCK.keeps)
    assert kept.text() == training(case)[0].text()


KEPT = {
    "Relu": "Threshold", "LeakyRelu": "LeakyRelu", "Elu": "Elu", "Sigmoid": "Sigmoid",
    "Tanh": "Tanh", "Softplus": "Softplus", "HardSwish": "HardSwish", "Mish": "Mish",
    "Gelu": "Gelu", "Softmax-axis-1": "Softmax", "LogSoftmax-axis-1": "LogSoftmax",
    "ortrain::CrossEntropy-mean": "CrossEntropy", "ortrain::Embedding": "Embedding",
    "Gather-axis1": "Gather", "LayerNormalization-last": "LayerNormalization",
    "RMSNormalization-last": "RMSNormalization", "GroupNormalization-2d": "GroupNorm",
    "InstanceNormalization-1d": "GroupNorm", "ortrain::BatchNorm-running": "BatchNorm",
    "BatchNormalization-inference": "BatchNormalization", "Conv-3x3": "Conv",
    "ConvTranspose-stride": "ConvTranspose", "MaxPool-2x2": "MaxPool",
    "AveragePool-overlapping": "AveragePool", "ortrain::Attention-plain": "FlashAttention",
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_a_kept_gradient_is_one_node(name):
    kept, _ = training(CASES[name], every)
    composites = [n.op_type for n in backward(kept) if n.domain == DOMAIN]
    assert composites == [f"{KEPT[name]}Gradient"]


@pytest.mark.parametrize("name", KEPT)
def test_a_kept_gradient_has_the_numbers_of_the_spelled_one(name):
    spelled, feeds = training(CASES[name], dtype=np.float64)
    kept, _ = training(CASES[name], every, np.float64)
    rng = np.random.default_rng(3)
    for seed in spelled.inputs(Role.OUTPUT_GRADIENT):
        output = next(v for v in spelled.graph.outputs if f"{v.name}.gradient" == seed.name)
        feeds[seed.name] = rng.standard_normal(output.shape.numpy() if output.shape else ())
    wanted, results = run(spelled, feeds), run(kept, feeds)
    for gradient in spelled.outputs(Role.GRADIENT):
        np.testing.assert_allclose(
            results[gradient.name], wanted[gradient.name], rtol=1e-7, atol=1e-9
        )


def test_what_is_not_asked_for_is_not_made():
    def body(op, x, scale, bias):
        return op.LayerNormalization(x, scale, bias)

    shapes = {"x": (3, 4), "scale": (4,), "bias": (4,)}
    kept = differentiate(program(body, shapes), ["scale"], keep=every)
    (node,) = [n for n in backward(kept) if n.domain == DOMAIN]
    assert list(node.attributes["needs"].as_ints()) == [0, 1, 0]
    assert [v.is_graph_output() for v in node.outputs] == [False, True, False]


# -- what the backward keeps ---------------------------------------------------------------------


def saved(body, shapes, wrt):
    forward, *_ = partition(differentiate(program(body, shapes), wrt, keep=every))
    return {v.name for v in forward.outputs(Role.SAVED)}


def test_a_pool_keeps_nothing_for_the_shape_of_its_input():
    def body(op, x, w):
        y = op.AveragePool(op.Add(x, w), kernel_shape=[2, 2], strides=[2, 2])
        y.shape = ir.Shape(["batch", 3, 4, 4])
        return y

    assert not saved(body, {"x": ("batch", 3, 8, 8), "w": (3, 1, 1)}, ["w"])


def test_a_frozen_convolution_keeps_no_more_of_its_input_than_sizes():
    def body(op, x, v, w):
        return op.Conv(op.Mul(x, v), w)

    shapes = {"x": ("batch", 3, 8, 8), "v": (3, 1, 1), "w": (4, 3, 3, 3)}
    forward, *_ = partition(differentiate(program(body, shapes), ["v"], keep=every))
    assert {v.producer().op_type for v in forward.outputs(Role.SAVED)} == {"Shape"}


def test_attention_keeps_no_weights():
    def body(op, x, q, k, v):
        inputs = [op.MatMul(x, w) for w in (q, k, v)]
        return op.node("Attention", inputs, domain="ortrain", scale=0.5)

    shapes = {"x": (2, 3, 16, 8), **dict.fromkeys("qkv", (8, 8))}
    forward, *_ = partition(differentiate(program(body, shapes), ["q", "k", "v"], keep=every))
    sizes = {tuple(v.shape) for v in forward.outputs(Role.SAVED)}
    assert sizes == {(2, 3, 16, 8), (2, 3, 16)}


# -- forms ---------------------------------------------------------------------------------------


def forms(body, shapes, wrt=None, **options):
    subject = program(body, shapes, **options)
    wrt = [v.name for v in subject.inputs(Role.PARAMETER)] if wrt is None else wrt
    return differentiate(subject, wrt, keep=every).operators()


def test_a_product_with_the_sigmoid_of_the_other_factor_is_one_operator():
    shapes = {"x": (3, 4), "y": (3, 4)}
    for pair in (lambda op, x: (x, op.Sigmoid(x)), lambda op, x: (op.Sigmoid(x), x)):
        found = forms(lambda op, x, y, pair=pair: op.Add(op.Mul(*pair(op, x)), y), shapes)
        assert found["ortrain::Silu"] == found["ortrain::SiluGradient"] == 1
    assert not forms(lambda op, x, y: op.Mul(x, op.Sigmoid(y)), shapes)["ortrain::Silu"]


def test_places_of_maxima_are_for_those_that_ask_for_none_of_their_own():
    window = {"kernel_shape": [2, 2], "strides": [2, 2]}

    def with_indices(op, x):
        y, index = op.node("MaxPool", (x,), outputs=2, **window)
        return {"y": y, "index": index}

    shapes = {"x": (1, 2, 4, 4)}
    assert forms(lambda op, x: op.MaxPool(x, **window), shapes)["ortrain::MaxPool"] == 1
    assert not forms(with_indices, shapes)["ortrain::MaxPool"]


def test_a_scale_for_each_group_stays_what_it_is():
    shapes = {"x": (2, 4, 3), "scale": (2,), "bias": (2,)}
    found = forms(lambda op, **v: op.GroupNormalization(*v.values(), num_groups=2), shapes,
                  opset=18)  # fmt: skip
    assert not found["ortrain::GroupNorm"]


@pytest.mark.parametrize(
    ("attributes", "wrt"), [({"ratio": 0.5, "stream": 1}, ["q"]), ({}, ["q", "mask"])]
)
def test_attention_with_dropout_or_a_learned_mask_keeps_its_weights(attributes, wrt):
    def body(op, q, k, v, mask, seed):
        inputs = [q, k, v, mask, seed]
        return op.node("Attention", inputs, domain="ortrain", scale=0.5, **attributes)

    shapes = {**dict.fromkeys("qkv", (2, 2, 3, 8)), "mask": (3, 3), "seed": ()}
    found = forms(body, shapes, wrt, dtypes={"seed": np.int64})
    assert not found["ortrain::FlashAttention"]


def test_a_form_that_no_gradient_reaches_stays_what_it_is():
    def body(op, x, w):
        return op.MatMul(op.Mul(x, op.Sigmoid(x)), w)

    assert not forms(body, {"x": (3, 4), "w": (4, 2)}, ["w"])["ortrain::Silu"]


# -- a second derivative -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Gelu", "Softmax-axis1", "LayerNormalization-last", "Conv-stride",
                                  "MaxPool-overlapping", "ortrain::CrossEntropy-mean"])  # fmt: skip
def test_a_second_derivative_goes_through_the_body(name):
    once, feeds = training(CASES[name], every)
    parameters = [v.name for v in once.inputs(Role.PARAMETER)]
    seeds = {v.name: v.shape for v in once.inputs(Role.OUTPUT_GRADIENT)}
    gradients = [v.name for v in once.outputs(Role.GRADIENT)]
    twice = differentiate(once, [*parameters, *seeds], gradients, keep=every)
    spelled = differentiate(training(CASES[name])[0], [*parameters, *seeds], gradients)
    rng = np.random.default_rng(3)
    for value in twice.inputs(Role.OUTPUT_GRADIENT):
        feeds[value.name] = rng.standard_normal(value.shape.numpy()).astype(np.float32)
    wanted, results = run(spelled, feeds), run(twice, feeds)
    for value in spelled.outputs(Role.GRADIENT):
        np.testing.assert_allclose(results[value.name], wanted[value.name], rtol=1e-4, atol=1e-5)
