"""Which outputs may take the memory of which inputs."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from ortrain.errors import GraphError
from ortrain.graph.aliasing import check_aliases
from tests.programs import program

SHAPES = {"x": (4, 6), "y": (4, 6), "r": (1,)}


def checked(body, **shapes):
    """Checks that the output ``new`` may lie where the input ``x`` does."""
    check_aliases(program(body, {**SHAPES, **shapes}).graph, {"new": "x"})


def scan(op, x, y, body, **attributes):
    """A ``Scan`` over the rows of two values, of a body that makes one row of them."""
    rows = [ir.Value(name=n, type=x.type, shape=ir.Shape([6])) for n in ("row/x", "row/y")]
    with op.subgraph("row", rows) as inner:
        graph = inner.returning(body(inner, *rows))
    return op.Scan(x, y, body=graph, num_scan_inputs=2, **attributes)


def test_an_elementwise_node_may_write_what_it_reads() -> None:
    checked(lambda op, x, y, r: {"new": op.Sub(x, y * r)})


def test_a_node_that_reads_the_old_value_and_is_no_ancestor_is_named() -> None:
    with pytest.raises(GraphError, match=r"'new' cannot be written where 'x' lies") as caught:
        checked(lambda op, x, y, r: {"new": op.Sub(x, y), "other": op.MatMul(y, op.Transpose(x))})
    assert "Transpose" in caught.value.where
    assert "may run after" in caught.value.because


def test_a_node_that_reads_a_view_of_the_old_value_counts() -> None:
    def body(op, x, y, r):
        view = op.Reshape(x, [-1])
        return {"new": op.Sub(op.Reshape(view, [4, 6]), y), "other": op.Mul(view, r)}

    with pytest.raises(GraphError, match="'x'") as caught:
        checked(body)
    assert "Mul" in caught.value.where


@pytest.mark.parametrize(
    "new",
    [
        lambda op, x, y: op.MatMul(x, op.Transpose(y)),
        lambda op, x, y: op.Transpose(x),
        lambda op, x, y: op.CumSum(x, 0),
    ],
)
def test_a_writer_that_reads_other_positions_is_named(new) -> None:
    with pytest.raises(GraphError, match="while it reads the old one"):
        checked(lambda op, x, y, r: {"new": new(op, x, y)})


def test_a_broadcast_view_of_the_old_value_is_read_at_other_positions() -> None:
    def body(op, x, y, r):
        return {"new": op.Add(op.Reshape(x, [6, 1]), op.Reshape(r, [1, 1]) * op.Reshape(x, [1, 6]))}

    with pytest.raises(GraphError, match="at other positions"):
        checked(body, x=(6,))


def test_a_writer_that_does_not_read_the_old_value_may_be_any() -> None:
    def body(op, x, y, r):
        joined = op.Concat(x, y, axis=0) * r
        first, second = op.Split(joined, [4, 4], axis=0, outputs=2)
        return {"new": first, "other": second}

    checked(body)


def test_what_is_copied_last_is_written_by_what_made_it() -> None:
    def body(op, x, y, r):
        made = op.Mul(y, 2.0)
        return {"new": op.Identity(made), "other": op.Mul(x, r)}

    with pytest.raises(GraphError, match="may run after"):
        checked(body)


def test_rows_of_a_scan_may_be_written_where_they_are_read() -> None:
    checked(lambda op, x, y, r: {"new": scan(op, x, y, lambda inner, x, y: inner.Sub(x, y * r))})


def test_a_scan_that_reads_a_row_after_it_is_written_is_named() -> None:
    def row(inner, x, y):
        return inner.Softmax(inner.Sub(x, y))

    checked(lambda op, x, y, r: {"new": scan(op, x, y, row)})
    with pytest.raises(GraphError, match="while it reads"):
        checked(lambda op, x, y, r: {"new": scan(op, x, y, lambda inner, x, y: inner.Softmax(x))})


@pytest.mark.parametrize(
    "new",
    [
        lambda op, x, y: scan(op, x, y, lambda i, x, y: i.Sub(x, y), scan_output_directions=[1]),
        lambda op, x, y: scan(op, x, x, lambda i, x, y: i.Sub(x, y)),
        lambda op, x, y: scan(op, y, y, lambda i, a, b: i.Sub(a, i.ReduceSum(x, [0], keepdims=0))),
    ],
    ids=["the other way round", "twice", "captured"],
)
def test_a_scan_whose_iterations_meet_the_old_value_of_others_is_named(new) -> None:
    with pytest.raises(GraphError, match="an iteration may read"):
        checked(lambda op, x, y, r: {"new": new(op, x, y)})


def test_a_name_that_is_missing_is_told() -> None:
    graph = program(lambda op, x, y, r: {"new": x - y}, SHAPES).graph
    with pytest.raises(GraphError, match="'gone' may take the memory of 'x', and one is missing"):
        check_aliases(graph, {"gone": "x"})
