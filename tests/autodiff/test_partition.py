"""Cutting a training program: the parts together compute what the whole does."""

from __future__ import annotations

import numpy as np
import pytest

from ortrain.autodiff import differentiate
from ortrain.autodiff.partition import partition
from ortrain.program import Role
from tests.programs import program, run


def network(op, x, w, v):
    """Two layers with heads, views and an activation in between."""
    hidden = op.Gelu(op.MatMul(x, w))
    heads = op.Transpose(op.Reshape(hidden, [0, 0, 2, 2]), perm=[0, 2, 1, 3])
    scores = op.Softmax(op.MatMul(heads, op.Transpose(heads, perm=[0, 1, 3, 2])))
    mixed = op.Transpose(op.MatMul(scores, heads), perm=[0, 2, 1, 3])
    return op.MatMul(op.Reshape(mixed, [0, 0, 4]), v)


SHAPES = {"x": ("batch", 3, 5), "w": (5, 4), "v": (4, 2)}


def feeds():
    generator = np.random.default_rng(0)
    sizes = {"x": (2, 3, 5), "w": (5, 4), "v": (4, 2), "y.gradient": (2, 3, 2)}
    return {name: generator.standard_normal(s).astype(np.float32) for name, s in sizes.items()}


@pytest.mark.parametrize("pieces", [1, 2, 3, 100])
def test_the_parts_together_compute_what_the_whole_does(pieces):
    whole = differentiate(program(network, SHAPES), ["x", "w", "v"])
    expected, known = run(whole, feeds()), feeds()
    parts = partition(whole, pieces)
    assert len(parts) == 1 + pieces or pieces == 100
    for part in parts:
        known |= run(part, {value.name: known[value.name] for value in part.graph.inputs})
    for value in whole.graph.outputs:
        np.testing.assert_allclose(known[value.name], expected[value.name], rtol=1e-6)


def saved(body, shapes, wrt):
    """Operators that made what the forward saves."""
    forward, *_ = partition(differentiate(program(body, shapes), wrt))
    return sorted(v.producer().op_type for v in forward.outputs(Role.SAVED))


def test_what_is_cheap_is_computed_again():
    def body(op, x, w):
        return op.MatMul(op.Gelu(op.MatMul(x, w)), w)

    assert saved(body, {"x": (3, 4), "w": (4, 4)}, ["w"]) == ["MatMul"]


def test_of_a_view_the_source_is_saved():
    """A view that is an output of a program is copied."""

    def body(op, x, w):
        return op.Softmax(op.Reshape(op.MatMul(x, w), [2, 6])) * op.Reshape(op.Exp(x), [2, 6])

    assert saved(body, {"x": (3, 4), "w": (4, 4)}, ["x", "w"]) == ["Exp", "Softmax"]
