"""What the gradients of the operators that dominate training cost, in nodes.

Each elementwise node is a pass over a large tensor, so a node more is a slower step. Whoever makes
one of these cheaper lowers the number here.
"""

from __future__ import annotations

import numpy as np
import pytest

from ortrain.autodiff import differentiate
from ortrain.graph import shapes
from ortrain.program import Phase, phase_of
from tests.cases import ALL

CASES = {case.id: case for case in ALL}

COST = {
    "Softmax-axis-1": {"Mul": 2, "ReduceSum": 1, "Sub": 1},
    "LogSoftmax-axis-1": {"Exp": 1, "ReduceSum": 1, "Mul": 1, "Sub": 1},
    "LayerNormalization-last": {"Sub": 3, "Mul": 6, "ReduceSum": 2, "ReduceMean": 2},
    "Gelu": {"Mul": 4, "Erf": 1, "HardSigmoid": 1, "Exp": 1, "Div": 1, "Add": 1},
    "Relu": {"Greater": 1, "Where": 1},
    "Sigmoid": {"Mul": 2, "Sub": 1},
    "Tanh": {"Mul": 2, "Sub": 1},
    "MatMul-weight": {"MatMul": 2, "Transpose": 2, "Reshape": 2},
    "MatMul-batched": {"MatMul": 2, "Transpose": 2},
    "Gemm-trans01": {"Gemm": 2, "Mul": 1, "ReduceSum": 1},
    "Add-bias": {"Identity": 1, "ReduceSum": 1},
    "Mul-same": {"Mul": 2},
    "Where-constant": {"Where": 1},
    "Gather-rows": {
        "Add": 1,
        "Concat": 1,
        "Expand": 1,
        "Mul": 1,
        "Reshape": 6,
        "ScatterElements": 1,
        "Slice": 1,
    },
    "ortrain::Embedding": {
        "Add": 1,
        "Concat": 1,
        "Expand": 1,
        "Mul": 1,
        "Reshape": 6,
        "ScatterElements": 1,
        "Slice": 1,
    },
    "ortrain::Dropout": {"ortrain::Dropout": 1},
    "Conv-3x3": {
        "ConvTranspose": 1, "ReduceSum": 1, "Pad": 1, "Transpose": 3, "Slice": 9, "Concat": 1,
        "Reshape": 3, "MatMul": 1,
    },
    "Conv-1x1": {"ConvTranspose": 1, "ReduceSum": 1, "Transpose": 3, "Reshape": 3, "MatMul": 1},
    "AveragePool-2x2": {"ConvTranspose": 1},
}  # fmt: skip


@pytest.fixture
def small(monkeypatch):
    """The cases are of sizes below those from which a gradient is spelled in another way."""
    monkeypatch.setattr("ortrain.graph.scatter.LARGE", 4096)
    monkeypatch.setattr("ortrain.ops.gradients.conv.MOST_TAPS", 64)
    monkeypatch.setattr("ortrain.ops.gradients.pool.MOST_ONES", 1 << 20)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", COST)
def test_a_gradient_costs_no_more_nodes_than_it_did(name):
    case = CASES[name]
    forward, feeds = case.build(np.dtype(np.float32), case.tried_opsets()[-1])
    training = differentiate(forward, case.differentiable(feeds))
    backward = [n for n in training.graph if phase_of(n) is Phase.BACKWARD]
    found = {}
    for node in backward:
        kind = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        found[kind] = found.get(kind, 0) + 1
    assert found == COST[name]


def test_cross_entropy_passes_over_its_logits_three_times():
    """exp, a product and a scatter; the rest is a number a row."""
    case = CASES["ortrain::CrossEntropy-mean"]
    forward, feeds = case.build(np.dtype(np.float32), 21)
    training = differentiate(forward, case.differentiable(feeds))
    size = feeds["logits"].size
    large = [
        node.op_type
        for node in training.graph
        if phase_of(node) is Phase.BACKWARD and shapes.size(node.outputs[0]) == size
    ]
    assert large == ["Exp", "Mul", "ScatterElements"]
