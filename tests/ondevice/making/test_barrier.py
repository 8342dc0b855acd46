"""A fused step: forward, backward and update in one graph, written in place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from ortrain.errors import GraphError
from ortrain.graph.aliasing import check_aliases
from ortrain.graph.build import Builder
from ortrain.ondevice import contract
from ortrain.ondevice.making.barrier import behind
from ortrain.ondevice.optim import SGD, AdamW, Optimizer, Slot, emit, states
from ortrain.program import Phase, Program
from tests.ondevice.making.optim.stepping import listed, run, session

SHAPES = {"first": (5, 8), "second": (8, 3)}


def fused(optimizer: Optimizer, *, barrier: bool = True) -> Program:
    """A perceptron with one hidden layer, whose loss is the mean of its squared outputs.

    ``probe`` reads a parameter and leads to no gradient.
    """
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 18}, name="fused")

    def feed(name, shape, dtype=ir.DataType.FLOAT):
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        graph.inputs.append(value)
        return value

    x = feed("x", (4, 5))
    w1, w2 = (feed(name, shape) for name, shape in SHAPES.items())
    kept = {
        state.name: feed(state.name, state.shape) for state in states(optimizer, listed(SHAPES))
    }
    rate, step = feed("learning_rate", [1]), feed("step", [1], ir.DataType.INT64)
    with Builder(graph, opset=18, prefix="step") as op:
        before = op.MatMul(x, w1)
        hidden = op.Relu(before)
        y = op.MatMul(hidden, w2)
        loss = op.ReduceMean(op.Mul(y, y), keepdims=0)
        probe = op.ReduceSum(w2, keepdims=0)
        dy = y * (2 / 12)
        d_second = op.MatMul(op.Transpose(hidden), dy)
        d_hidden = op.Where(op.Greater(before, 0.0), op.MatMul(dy, op.Transpose(w2)), 0.0)
        d_first = op.MatMul(op.Transpose(x), d_hidden)
        gradients = {"first": d_first, "second": d_second}
    op.phase = Phase.UPDATE
    waited = behind(op, rate, step, [*gradients.values(), loss, probe]) if barrier else rate
    slots = [
        Slot(
            name,
            parameter,
            gradients[name],
            {kind: kept[contract.state(name, kind)] for kind in optimizer.kinds},
        )
        for name, parameter in {"first": w1, "second": w2}.items()
    ]
    loss.name, probe.name = "loss", "probe"
    graph.outputs.extend([loss, probe])
    aliases = emit(op, optimizer, slots, waited, step).add_outputs(graph)
    return Program(ir.Model(graph, ir_version=8), aliases)


def trained(program: Program, *, in_place: bool) -> tuple[list[np.ndarray], list[float]]:
    """The parameters after 50 steps, and their losses."""
    random = np.random.default_rng(0)
    tensors = {
        value.name: random.standard_normal([*value.shape]).astype(np.float32)
        if value.name in (*SHAPES, "x")
        else np.zeros([*value.shape], value.dtype.numpy())
        for value in program.inputs()
    }
    tensors["learning_rate"] = np.array([0.05], np.float32)
    model, losses = session(program), []
    for _ in range(50):
        outputs = run(model, tensors, program.aliases if in_place else {})
        losses.append(float(outputs["loss"]))
        if not in_place:
            tensors |= {n: outputs[o].copy() for o, n in program.aliases.items()}
        tensors["step"] = outputs["step.updated"].copy()
    return [tensors[name] for name in SHAPES], losses


OPTIMIZERS = [AdamW(), AdamW(max_norm=0.1), SGD()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_behind_the_barrier_updates_may_be_in_place_and_without_it_they_may_not(optimizer) -> None:
    program = fused(optimizer)
    check_aliases(program.graph, program.aliases)
    assert {"first.updated", "second.updated"} <= set(program.aliases)
    with pytest.raises(GraphError, match=r"cannot be written where '(first|second)' lies"):
        check_aliases(fused(optimizer, barrier=False).graph, program.aliases)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_in_place_is_the_step(optimizer) -> None:
    program = fused(optimizer)
    (first, second), losses = trained(program, in_place=True)
    expected, expected_losses = trained(program, in_place=False)
    np.testing.assert_array_equal(first, expected[0])
    np.testing.assert_array_equal(second, expected[1])
    assert losses == expected_losses
    assert losses[-1] < losses[0] / 2


def test_the_barrier_survives_the_optimizations_of_onnxruntime(tmp_path: Path) -> None:
    program = fused(AdamW())
    path = tmp_path / "optimized.onnx"
    session(program, optimized=str(path))
    optimized = ir.from_proto(onnx.load(path))
    assert [n.op_type for n in optimized.graph].count("If") == 1
    check_aliases(optimized.graph, program.aliases)


def test_a_gradient_that_is_nan_leaves_the_learning_rate_alone() -> None:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 18}, name="barrier")
    for name, dtype, shape in (
        ("rate", ir.DataType.FLOAT, [1]),
        ("step", ir.DataType.INT64, [1]),
        ("gradient", ir.DataType.FLOAT, [2, 2]),
        ("count", ir.DataType.INT64, []),
    ):
        graph.inputs.append(ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape)))
    rate, step, gradient, count = graph.inputs
    op = Builder(graph, opset=18, prefix="barrier", phase=Phase.UPDATE)
    waited = behind(op, rate, step, [gradient, count])
    waited.name = "waited"
    graph.outputs.append(waited)
    feeds = {
        "rate": np.array([0.5], np.float32),
        "step": np.array([0]),
        "gradient": np.full((2, 2), np.nan, np.float32),
        "count": np.array(3),
    }
    outputs = run(session(Program(ir.Model(graph, ir_version=8))), feeds, {})
    assert outputs["waited"] == 0.5
