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


def differences(op, x, w, v):
    """Gradients of which each is made of another one: of a difference, and of biases in a row."""
    return op.Abs(op.Sub(op.Add(op.Sub(x, w), v), op.Tanh(w)))


def differences_in_regions(op, x, w, v):
    for region in ("1", "2"):
        op.region = region
        x = differences(op, x, w, v)
    op.region = ""
    return x


@pytest.mark.parametrize("network", [differences, differences_in_regions])
@pytest.mark.parametrize("pieces", [1, 2, 3, 4, 100])
def test_a_gradient_that_a_later_piece_reads_is_the_users_own(network, pieces):
    """A hook may write to it before that piece runs."""
    generator = np.random.default_rng(0)
    names = ["x", "w", "v"]
    known = {
        n: generator.standard_normal((3, 4)).astype(np.float32) for n in (*names, "y.gradient")
    }
    whole = differentiate(program(network, dict.fromkeys(names, (3, 4))), names)
    before = whole.text()
    expected = run(whole, known)
    for part in partition(whole, pieces):
        given = {value.name for value in part.outputs(Role.GRADIENT)}
        made = run(part, {value.name: known[value.name] for value in part.graph.inputs})
        for name, value in made.items():
            if name in expected:
                np.testing.assert_allclose(value, expected[name], rtol=1e-6)
        known |= {n: np.full_like(v, np.nan) if n in given else v for n, v in made.items()}
    assert expected.keys() <= known.keys()
    assert whole.text() == before


def in_regions(op, x, w):
    """Three layers, of which the last two are checkpointed, and an end outside of them."""
    for region in ("", "1", "2"):
        op.region = region
        x = op.Softmax(op.MatMul(op.Sigmoid(op.MatMul(x, w)), w))
    op.region = ""
    return op.Tanh(x)


IN_REGIONS = {"x": ("batch", 4), "w": (4, 4)}


def test_of_a_checkpointed_region_its_input_alone_is_kept():
    forward, *backward = partition(differentiate(program(in_regions, IN_REGIONS), ["w"]))
    kept = [v.producer().op_type for v in forward.outputs(Role.SAVED)]
    # Of the first layer, which is in none, what its rules read; of the others what they pass on.
    assert kept == ["Sigmoid", "Softmax", "Softmax", "Softmax"]
    assert [[v.name for v in part.outputs(Role.GRADIENT)] for part in backward] == [
        [],
        [],
        ["w.gradient"],
    ]


def test_what_depends_on_no_gradient_runs_where_it_is_read():
    """What a rule prepares from saved values, such as a transposed operand, is not carried."""
    _, *backward = partition(differentiate(program(in_regions, IN_REGIONS), ["w"]))
    carried = [v.producer().op_type for part in backward for v in part.outputs(Role.SAVED)]
    assert carried == ["Sub", "MatMul", "Add"]  # the gradients of y's and of a region's input, w's


def test_regions_that_run_again_compute_what_the_whole_does():
    whole = differentiate(program(in_regions, IN_REGIONS), ["w"])
    generator = np.random.default_rng(0)
    sizes = {"x": (3, 4), "w": (4, 4), "y.gradient": (3, 4)}
    known = {n: generator.standard_normal(s).astype(np.float32) for n, s in sizes.items()}
    expected = run(whole, known)
    for part in partition(whole):
        known |= run(part, {value.name: known[value.name] for value in part.graph.inputs})
    for value in whole.graph.outputs:
        np.testing.assert_allclose(known[value.name], expected[value.name], rtol=1e-5)


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
