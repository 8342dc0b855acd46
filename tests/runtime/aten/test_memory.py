"""What a generated function writes over and frees changes no number, and nothing of anyone else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ortrain.runtime.aten import AtenExecutor
from tests.programs import program, run
from tests.runtime.generated import generated


def compiled(subject):
    executor = AtenExecutor()
    return executor.compile(executor.lower(subject))


@pytest.mark.parametrize("seed", range(60))
def test_a_random_program_agrees_with_the_reference_and_leaves_its_inputs(seed):
    subject, feeds = generated(seed)
    runs = compiled(subject)
    given = [torch.from_numpy(feeds[v.name].copy()) for v in subject.graph.inputs]
    results = runs.run_values(list(given))
    for value, result in zip(subject.graph.outputs, results, strict=True):
        expected = run(subject, feeds)[value.name]
        np.testing.assert_allclose(result.numpy(), expected, rtol=1e-4, atol=1e-5)
        assert result.is_contiguous()
    for value, tensor in zip(subject.graph.inputs, given, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), feeds[value.name])
    memory = [t.untyped_storage().data_ptr() for t in (*results, *given)]
    assert len(set(memory)) == len(memory), "nothing that is returned shares memory"


def test_a_chain_of_elementwise_calls_takes_one_tensor():
    def body(op, a):
        return op.Sigmoid(op.Neg(op.Tanh(op.Mul(a, 2.0))))

    source = compiled(program(body, {"a": ("r", 4)})).source
    assert ".tanh_()" in source
    assert ".neg_()" in source
    assert "torch.mul(a, " in source, "the argument is not written into"


def test_what_is_read_again_is_not_written_into():
    def body(op, a):
        half = op.Mul(a, 0.5)
        return op.Add(op.Tanh(half), half)

    source = compiled(program(body, {"a": ("r", 4)})).source
    assert "torch.tanh(" in source


@pytest.mark.parametrize("view", ["Transpose", "Reshape", "Expand"])
def test_memory_that_a_view_reads_later_is_not_written_into(view):
    def body(op, a):
        x = op.Mul(a, 2.0)
        seen = {
            "Transpose": lambda: op.Transpose(x, perm=[1, 0]),
            "Reshape": lambda: op.Reshape(x, [4, 3]),
            "Expand": lambda: op.Expand(op.Unsqueeze(x, [0]), [2, 3, 4]),
        }[view]()
        return {"y": op.Tanh(x), "z": op.Neg(seen)}

    subject = program(body, {"a": (3, 4)})
    feeds = {"a": np.arange(12, dtype=np.float32).reshape(3, 4) / 10}
    results = compiled(subject).run([feeds["a"]])
    for value, result in zip(subject.graph.outputs, results, strict=True):
        np.testing.assert_allclose(result, run(subject, feeds)[value.name], rtol=1e-5)


def test_a_tensor_is_freed_after_its_last_reader():
    def body(op, a):
        return op.ReduceSum(op.MatMul(op.Tanh(a), op.Transpose(op.Tanh(a))), keepdims=0)

    source = compiled(program(body, {"a": ("r", 4)})).source
    lines = source.splitlines()
    product = next(i for i, line in enumerate(lines) if "linear(" in line or "mm(" in line)
    assert any("del" in line for line in lines[product : product + 2])
