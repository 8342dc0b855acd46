"""The clean-up removes what computes nothing, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ortrain.passes.clean import clean
from ortrain.program import PHASE, Phase, Program, Role, role_of, set_role
from tests.programs import program, run

FLOATS = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)


def cleaned(body: Any, shapes: dict[str, Any], feeds: dict[str, Any] | None = None, **kw: Any):
    """The program after cleaning, which computes the same and does not change once more."""
    subject = program(body, shapes, **kw)
    feeds = feeds if feeds is not None else dict.fromkeys(shapes, FLOATS)
    before = run(subject.clone(), feeds)
    names = [v.name for v in subject.graph.inputs], [v.name for v in subject.graph.outputs]
    roles = [role_of(v) for v in (*subject.graph.inputs, *subject.graph.outputs)]
    clean(subject)
    assert (
        [v.name for v in subject.graph.inputs],
        [v.name for v in subject.graph.outputs],
    ) == names
    assert [role_of(v) for v in (*subject.graph.inputs, *subject.graph.outputs)] == roles
    after = run(subject.clone(), feeds)
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value)
    assert not clean(subject), "a second run must find nothing"
    return subject


def signature_of(subject: Program) -> list[list[Any]]:
    sides = (subject.graph.inputs, subject.graph.outputs)
    return [[(value.name, role_of(value)) for value in side] for side in sides]


def operators(subject: Program) -> dict[str, int]:
    return dict(subject.operators())


NOTHING: dict[str, Any] = {
    "identity": lambda op, x: op.Relu(op.Identity(x)),
    "cast to its own type": lambda op, x: op.Relu(op.Cast(x, to=int(ir.DataType.FLOAT))),
    "cast like": lambda op, x: op.Relu(op.CastLike(x, x)),
    "reshape to the same shape": lambda op, x: op.Relu(op.Reshape(x, [3, 4])),
    "two reshapes": lambda op, x: op.Relu(op.Reshape(op.Reshape(x, [2, 6]), [3, 4])),
    "expand to the same shape": lambda op, x: op.Relu(op.Expand(x, np.array([3, 4]))),
    "pad by nothing": lambda op, x: op.Relu(op.Pad(x, [0, 0, 0, 0])),
    "two transposes": lambda op, x: op.Relu(
        op.Transpose(op.Transpose(x, perm=[1, 0]), perm=[1, 0])
    ),
    "squeeze of unsqueeze": lambda op, x: op.Relu(op.Squeeze(op.Unsqueeze(x, [1]), [1])),
    "add zero": lambda op, x: op.Relu(op.Add(x, 0.0)),
    "multiply by one": lambda op, x: op.Relu(op.Mul(1.0, x)),
    "concat of one": lambda op, x: op.Relu(op.Concat(x, axis=0)),
}


@pytest.mark.parametrize("body", NOTHING.values(), ids=NOTHING)
def test_nodes_that_do_nothing_go(body: Any) -> None:
    assert operators(cleaned(body, {"x": [3, 4]})) == {"Relu": 1}


SOMETHING: dict[str, Any] = {
    "cast to another type": lambda op, x: op.Cast(x, to=int(ir.DataType.DOUBLE)),
    "reshape": lambda op, x: op.Reshape(x, [4, 3]),
    "expand": lambda op, x: op.Expand(x, np.array([2, 3, 4])),
    "slice that turns around": lambda op, x: op.Slice(x, [-1], [-(2**31)], [0], [-1]),
    "add zeros of another shape": lambda op, x: op.Add(x, np.zeros((2, 3, 4), np.float32)),
    "transpose": lambda op, x: op.Transpose(x, perm=[1, 0]),
    "unsqueeze elsewhere": lambda op, x: op.Unsqueeze(op.Squeeze(op.Unsqueeze(x, [0]), [0]), [1]),
}


@pytest.mark.parametrize("body", SOMETHING.values(), ids=SOMETHING)
def test_nodes_that_do_something_stay(body: Any) -> None:
    assert len(cleaned(body, {"x": [3, 4]}).graph) == 1


def test_shape_arithmetic_becomes_constants() -> None:
    def body(op: Any, x: ir.Value) -> ir.Value:
        rows = op.Squeeze(op.Shape(x, start=0, end=1), [0])
        target = op.Concat(op.Unsqueeze(rows, [0]), [2, 2], axis=0)
        result = op.Reshape(x, target)
        result.shape = ir.Shape(["n", 2, 2])
        return result

    subject = cleaned(body, {"x": ["n", 4]})
    assert operators(subject) == {"Reshape": 1}
    (target,) = subject.graph.initializers.values()
    assert target.const_value is not None
    assert target.const_value.numpy().tolist() == [0, 2, 2]


def test_sizes_are_read_from_one_input() -> None:
    def body(op: Any, x: ir.Value, y: ir.Value) -> dict[str, ir.Value]:
        first = op.Shape(op.Relu(x))
        return {"a": op.Expand(1.0, op.Shape(op.Exp(y))), "b": op.Expand(2.0, first)}

    subject = cleaned(body, {"x": ["n", "m"], "y": ["n", "m"]})
    assert "Relu" not in operators(subject)
    assert "Exp" not in operators(subject)
    sources = {node.inputs[0] for node in subject.graph if node.op_type == "Shape"}
    assert len(sources) == 1


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
def test_a_forward_reads_no_size_from_a_gradient_that_comes_after_it(phase: Phase) -> None:
    def body(op: Any, x: ir.Value, dy: ir.Value) -> dict[str, ir.Value]:
        y = op.MatMul(x, x)
        y.shape = ir.Shape(["m", "m"])  # of which no other input tells the size
        return {"y": y, "rows": op.Shape(y, start=0, end=1)}

    subject = program(body, {"x": ["n", "n"], "dy": ["m", "m"]})
    set_role(subject.input("dy"), Role.OUTPUT_GRADIENT, "y")
    subject.graph[1].metadata_props[PHASE] = phase.value
    assert clean(subject) is (phase is Phase.BACKWARD)
    (read,) = [node.inputs[0] for node in subject.graph if node.op_type == "Shape"]
    assert read is not None
    assert read.name == ("dy" if phase is Phase.BACKWARD else "y")


def test_constants_are_folded_and_inputs_are_not() -> None:
    def body(op: Any, x: ir.Value) -> ir.Value:
        angle = op.Mul(op.Cast(op.Range(np.int64(0), np.int64(4), np.int64(1)), to=1), 2.0)
        return op.Mul(x, op.Cos(angle))

    assert operators(cleaned(body, {"x": [3, 4]})) == {"Mul": 1}


@pytest.mark.filterwarnings("error")
def test_infinite_constants_are_folded_without_a_word() -> None:
    def body(op: Any, x: ir.Value) -> ir.Value:
        logarithm = op.Log(np.array([0.0, 1.0, 2.0, 4.0], np.float32))
        return op.Max(x, op.Sub(logarithm, op.Exp(np.array(1000.0, np.float32))))

    assert operators(cleaned(body, {"x": [3, 4]})) == {"Max": 1}


def test_whole_numbers_are_divided_towards_zero_and_without_rounding() -> None:
    largest = np.iinfo(np.int64).max
    dividends = np.array([7, -7, 7, -7, -8, largest])
    divisors = np.array([2, 2, -2, -2, 4, 1])

    def body(op: Any, x: ir.Value) -> ir.Value:
        return op.Add(x, op.Div(dividends, divisors))

    feeds = {"x": np.zeros(6, np.int64)}
    subject = cleaned(body, {"x": [6]}, feeds, dtype=np.int64)
    assert operators(subject) == {"Add": 1}
    np.testing.assert_array_equal(run(subject, feeds)["y"], [3, -3, -3, 3, -2, largest])


def test_a_division_by_zero_is_left_to_the_runtime() -> None:
    subject = program(
        lambda op, x: op.Add(x, op.Div(np.int64(1), np.int64(0))), {"x": [3]}, dtype=np.int64
    )
    clean(subject)
    assert operators(subject) == {"Add": 1, "Div": 1}


def test_large_constants_are_left_to_the_runtime() -> None:
    subject = cleaned(
        lambda op, x: op.Add(
            x, op.Expand(op.constant(1.0, np.float32), np.array([200, 300, 1, 1]))
        ),
        {"x": [3, 4]},
    )
    assert sum(v.const_value.nbytes for v in subject.graph.initializers.values()) < 1000


def test_equal_nodes_are_one() -> None:
    subject = cleaned(lambda op, x: op.Add(op.Exp(x), op.Exp(x)), {"x": [3, 4]})
    assert operators(subject) == {"Exp": 1, "Add": 1}


def test_nodes_of_different_phases_are_not_merged() -> None:
    subject = program(lambda op, x: op.Add(op.Exp(x), op.Exp(x)), {"x": [3, 4]})
    subject.graph[1].metadata_props[PHASE] = Phase.BACKWARD.value
    assert not clean(subject)
    assert operators(subject)["Exp"] == 2


def test_random_nodes_are_not_merged() -> None:
    subject = program(
        lambda op, x: op.Add(op.RandomUniformLike(x), op.RandomUniformLike(x)), {"x": [3, 4]}
    )
    assert not clean(subject)


def test_expanded_mask_is_broadcast_by_its_readers() -> None:
    def body(op: Any, x: ir.Value, row: ir.Value) -> ir.Value:
        return op.Add(x, op.Expand(row, np.array([3, 4])))

    subject = cleaned(body, {"x": [3, 4], "row": [4]}, {"x": FLOATS, "row": FLOATS[0]})
    assert operators(subject) == {"Add": 1}


def test_output_that_is_an_input_keeps_its_identity() -> None:
    subject = cleaned(lambda op, x: {"y": op.Identity(x)}, {"x": [3, 4]})
    assert operators(subject) == {"Identity": 1}


def test_what_nothing_reads_goes_and_inputs_stay() -> None:
    def body(op: Any, x: ir.Value, unused: ir.Value) -> ir.Value:
        op.Exp(unused)
        return op.Relu(x)

    subject = program(body, {"x": [3, 4], "unused": [2]})
    assert clean(subject)
    assert operators(subject) == {"Relu": 1}
    assert [v.name for v in subject.inputs(Role.PARAMETER)] == ["x", "unused"]
