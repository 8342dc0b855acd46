"""What a graph costs at given sizes, without another walk of it."""

from __future__ import annotations

import onnx_ir as ir

from ortrain.graph.cost import Multiplications
from tests.programs import program


def test_products_count_by_their_inner_size_and_all_else_by_elements() -> None:
    def body(op, x, w, k):  # type: ignore[no-untyped-def]
        hidden = op.MatMul(x, w)
        scores = op.MatMul(hidden, k)
        return op.Relu(scores)

    shapes = {"x": ["b", "l", 4], "w": [4, 8], "k": ["b", 8, "s"]}
    cost = Multiplications(program(body, shapes).graph)
    for b, length, s in ((1, 1, 1), (2, 3, 5), (7, 1, 9)):
        expected = b * length * 8 * 4 + b * length * s * 8 + b * length * s
        assert cost({"b": b, "l": length, "s": s}) == expected


def test_an_unknown_size_counts_as_one() -> None:
    cost = Multiplications(program(lambda op, x: op.Relu(x), {"x": ["b", 3]}).graph)
    assert (cost({}), cost({"b": 4})) == (3, 12)


def test_a_convolution_counts_its_kernel() -> None:
    def body(op, x, w):  # type: ignore[no-untyped-def]
        y = op.Conv(x, w)
        y.shape = ir.Shape(["b", 5, 4, 4])
        return y

    cost = Multiplications(program(body, {"x": ["b", 2, 6, 6], "w": [5, 2, 3, 3]}).graph)
    assert cost({"b": 3}) == 3 * 5 * 4 * 4 * 2 * 3 * 3


def test_a_recurrent_layer_counts_both_products_of_every_step() -> None:
    def body(op, x, w, r):  # type: ignore[no-untyped-def]
        return op.LSTM(x, w, r)

    subject = program(body, {"x": ["t", "b", 3], "w": [1, 20, 3], "r": [1, 20, 5]})
    assert Multiplications(subject.graph)({"t": 7, "b": 2}) == 7 * 2 * 20 * (3 + 5)
