"""The backward is a graph of the same operators, so it has a gradient as well."""

from __future__ import annotations

import numpy as np
import pytest

from ortrain.autodiff import differentiate
from ortrain.errors import UnsupportedGradient
from ortrain.graph import shapes
from ortrain.program import Role, target_of
from ortrain.testing import check_gradients
from tests.cases import ALL
from tests.programs import run

TRIED = """
    Add-outer Mul-bias Div-outer Pow-both Pow-constant-3.0 Max-broadcast Exp Log Sqrt Sin Erf
    Sigmoid Tanh Elu Softplus Gelu Gelu-tanh Where-broadcast MatMul-weight
    MatMul-batch-broadcast-both MatMul-matrix-vector Gemm-trans01 Einsum-attention ReduceMean-last
    ReduceL2-two-dropped ReduceLogSumExp-last Softmax-axis1 LogSoftmax-axis-1
    CumSum-axis1-exclusive1-reverse0 Reshape-flat Transpose-perm Concat-three Split-sizes
    Slice-middle Slice-step-two Pad-reflect Resize-linear Gather-axis1 GatherElements-axis-last
    ScatterND-add LayerNormalization-no-bias LayerNormalization-frozen-affine
    GroupNormalization-2d RMSNormalization-last Conv-stride Conv-groups Conv-depthwise Conv-stem
    ConvTranspose-stride MaxPool-2x2 MaxPool-overlapping AveragePool-overlapping
    ortrain::CrossEntropy-mean ortrain::CrossEntropy-weight-smoothing-mean
    SoftmaxCrossEntropyLoss-mean ortrain::Embedding ortrain::Dropout ortrain::Attention-float-mask
""".split()
CASES = {case.id: case for case in ALL}


def backward(case, opset):
    """The case's own backward as a program, and what to feed it."""
    forward, feeds = case.build(np.dtype(np.float32), opset)
    outputs = [v.name for v in forward.graph.outputs]
    chosen = None if case.seeds is None else [outputs[i] for i in case.seeds]
    program = differentiate(forward, case.differentiable(feeds), chosen)
    shapes.infer_all(program.model)
    values = run(forward, feeds)
    rng = np.random.default_rng(3)
    for seed in program.inputs(Role.OUTPUT_GRADIENT):
        draw = rng.standard_normal(values[target_of(seed)].shape)
        feeds[seed.name] = draw.astype(np.float32)
    return program, feeds


@pytest.mark.parametrize("name", TRIED)
def test_the_second_derivative_is_right(name):
    case = CASES[name]
    program, feeds = backward(case, case.tried_opsets()[-1])
    gradients = [v.name for v in program.outputs(Role.GRADIENT)]
    floating = [v.name for v in program.inputs(Role.PARAMETER, Role.OUTPUT_GRADIENT)]
    twice = differentiate(program, floating, gradients)
    reached = [target_of(v) for v in twice.graph.outputs[len(program.graph.outputs) :]]
    check_gradients(program, feeds, wrt=reached, outputs=gradients, tolerance="sums")


def test_a_rule_that_cannot_pass_a_second_derivative_on_refuses():
    """The gradient of a batch normalization reads statistics that are outputs of the forward."""
    program, feeds = backward(CASES["ortrain::BatchNorm-outputs-1"], 21)
    assert feeds
    with pytest.raises(UnsupportedGradient, match="a gradient flows into its output 1"):
        differentiate(program, ["input"], ["input.gradient"])
