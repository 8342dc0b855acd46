"""Programs cut into regions of several executors compute what one executor computes."""

from __future__ import annotations

import numpy as np
import pytest

from ortrain.errors import ExecutionError
from ortrain.runtime.aten import AtenExecutor
from ortrain.runtime.onnxruntime import OnnxRuntimeExecutor
from ortrain.runtime.reference import ReferenceExecutor
from ortrain.runtime.regions import RegionsExecutor
from tests.programs import program, run
from tests.runtime.generated import generated


class Claiming:
    """An executor that claims some operators only."""

    def __init__(self, executor, operators):
        self.executor, self.operators = executor, operators

    def __getattr__(self, name):
        return getattr(self.executor, name)

    def claims(self, node):
        return node.op_type in self.operators and self.executor.claims(node)


MIXES = {
    "products": [Claiming(OnnxRuntimeExecutor(threads=1), {"MatMul"}), AtenExecutor()],
    "sums": [
        Claiming(AtenExecutor(), {"Add", "Neg", "ReduceMean"}),
        OnnxRuntimeExecutor(threads=1),
    ],
    "three": [
        Claiming(ReferenceExecutor(), {"Tanh", "Expand"}),
        Claiming(AtenExecutor(), {"Mul", "Transpose", "Identity"}),
        OnnxRuntimeExecutor(threads=1),
    ],
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("seed", range(12))
def test_a_mix_agrees_with_the_reference(mix, seed):
    subject, feeds = generated(seed)
    executor = RegionsExecutor(MIXES[mix])
    before = {name: array.copy() for name, array in feeds.items()}
    compiled = executor.compile(executor.lower(subject))
    results = compiled.run([feeds[v.name] for v in subject.graph.inputs])
    for value, result in zip(subject.graph.outputs, results, strict=True):
        np.testing.assert_allclose(result, run(subject, feeds)[value.name], rtol=1e-4, atol=1e-5)
    for name, array in feeds.items():
        np.testing.assert_array_equal(array, before[name])


def test_a_region_is_as_large_as_it_can_be():
    def body(op, a, b):
        return op.Add(op.MatMul(op.Tanh(a), b), op.MatMul(op.Neg(a), b))

    executor = RegionsExecutor(
        [Claiming(OnnxRuntimeExecutor(threads=1), {"MatMul"}), AtenExecutor()]
    )
    subject = program(body, {"a": (3, 3), "b": (3, 3)})
    compiled = executor.compile(executor.lower(subject))
    assert [stage.engine for stage in compiled.stages] == ["aten", "onnxruntime", "aten"]


def test_a_node_that_nobody_runs_is_named():
    subject = program(lambda op, a: op.node("Unheard", (a,), domain="test"), {"a": (3,)})
    executor = RegionsExecutor([AtenExecutor(), OnnxRuntimeExecutor(threads=1)])
    with pytest.raises(ExecutionError, match="neither aten nor onnxruntime runs 'Unheard'"):
        executor.lower(subject)
