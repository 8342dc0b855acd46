"""Random programs: elementwise operators, views, products and sums in any order over few values."""

from __future__ import annotations

import random

import numpy as np

from tests.programs import program

ROWS, COLUMNS = 3, 4


def generated(seed: int, length: int = 25):
    """A program of matrices [r, 4], and the arrays to feed it.

    Args:
        seed: of the choice.
        length: how many operators it has.
    """
    draw = random.Random(seed)

    def body(op, a, b, c):
        values = [a, b, c]
        for _ in range(length):
            x, y = draw.choice(values), draw.choice(values)
            kind = draw.choice(KINDS)
            values.append(kind(op, x, y))
        chosen = draw.sample(values, 4)
        # An output may be an input, another output, or a view of either.
        return {f"y{i}": op.Identity(v) for i, v in enumerate(chosen)}

    rng = np.random.default_rng(seed)
    shapes = {"a": ("r", COLUMNS), "b": ("r", COLUMNS), "c": (ROWS, COLUMNS)}
    feeds = {name: rng.standard_normal((ROWS, COLUMNS)).astype(np.float32) for name in shapes}
    return program(body, shapes), feeds


def _turned(op, x, y):
    """Through a transpose and back, so that the sum reads a view."""
    return op.Transpose(op.Add(op.Transpose(x, perm=[1, 0]), op.Transpose(y, perm=[1, 0])))


def _reshaped(op, x, y):
    return op.Reshape(op.Neg(op.Reshape(x, [-1])), [-1, COLUMNS])


def _product(op, x, y):
    return op.MatMul(x, op.MatMul(op.Transpose(y, perm=[1, 0]), op.Tanh(y))) * 0.1


def _spread(op, x, y):
    """A row stands for all: it must not be written into."""
    row = op.Expand(op.ReduceMean(x, [0], keepdims=1), op.shape(y))
    return op.Add(row, y)


def _shared(op, x, y):
    return op.Add(op.Mul(x, 0.5), op.Mul(x, y))


KINDS = (
    lambda op, x, y: op.Add(x, y),
    lambda op, x, y: op.Sub(x, y),
    lambda op, x, y: op.Mul(x, op.Tanh(y)),
    lambda op, x, y: op.Tanh(x),
    lambda op, x, y: op.Sigmoid(x),
    lambda op, x, y: op.Neg(x),
    lambda op, x, y: op.Transpose(op.Transpose(x, perm=[1, 0]), perm=[1, 0]),
    _turned,
    _reshaped,
    _product,
    _spread,
    _shared,
)
