"""Random programs: elementwise operators, views, products and sums in any order over few values."""

from __future__ import annotations

import random

import numpy as np

from ortrain.graph import shapes
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


# -- many operators ------------------------------------------------------------------------------

BATCH, WIDTH = 2, 4  # of the tensors [BATCH, ROWS, WIDTH] that every operator below takes and gives


def many_operators(seed: int, length: int = 12, symbols: bool = True):
    """A program of [BATCH, ROWS, WIDTH] over views, choices, norms, reductions and products.

    Sizes are known or symbols, as the seed has it; so are two of the inputs broadcast.

    Args:
        seed: of the choice.
        length: how many operators it has.
        symbols: whether sizes may be symbols.
    """
    draw = random.Random(seed)

    def body(op, a, b, row, column):
        values = [a, b, op.Add(a, row), op.Mul(b, column)]
        for _ in range(length):
            # What was made last is read more often: chains are what is written over.
            x, y = (draw.choice(values[-3:] if draw.random() < 0.6 else values) for _ in "xy")
            values.append(draw.choice(OPERATORS)(op, x, y, draw))
        chosen = draw.sample(values, 4)
        return {f"y{i}": op.Identity(v) for i, v in enumerate(chosen)}

    rng = np.random.default_rng(seed)
    whole = (BATCH, ROWS, WIDTH)
    sizes = {"a": whole, "b": whole, "row": (WIDTH,), "column": (ROWS, 1)}
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in sizes.items()}
    if symbols and draw.random() < 0.5:
        sizes |= {"a": ("n", "m", WIDTH), "b": ("n", "m", WIDTH), "column": ("m", 1)}
    subject = program(body, sizes)
    shapes.infer_all(subject.model)
    return subject, feeds


def _rows_of(op, x, y, draw):
    """A view of two rows, and the rest, put together in another order."""
    first, rest = op.Slice(x, [0], [1], [1]), op.Slice(x, [1], [1 << 30], [1])
    parts = [rest, op.Tanh(first) if draw.random() < 0.5 else first]
    return op.Concat(*parts, axis=1)


def _halves(op, x, y, draw):
    left, right = op.Split(x, axis=-1, num_outputs=2, outputs=2)
    return op.Concat(op.Mul(right, 0.5), op.Neg(left), axis=-1)


def _chosen(op, x, y, draw):
    condition = op.Greater(x, draw.choice([0.0, 0.3]))
    return op.Where(condition, *((x, y) if draw.random() < 0.5 else (y, 0.25)))


def _normed(op, x, y, draw):
    mean = op.ReduceMean(x, [-1], keepdims=1)
    centred = op.Sub(x, mean)
    variance = op.ReduceMean(op.Mul(centred, centred), [-1], keepdims=1)
    return op.Div(centred, op.Sqrt(op.Add(variance, 1e-2)))


def _weighed(op, x, y, draw):
    scores = op.MatMul(x, op.Transpose(y, perm=[0, 2, 1]))
    return op.MatMul(op.Softmax(op.Mul(scores, 0.5), axis=-1), y)


def _flat(op, x, y, draw):
    rows = op.Reshape(x, [-1, WIDTH])
    inside = op.Reshape(op.Sigmoid(rows) if draw.random() < 0.5 else rows, op.shape(x))
    return op.Mul(inside, op.Tanh(y))


def _gathered(op, x, y, draw):
    places = np.array(draw.sample(range(WIDTH), WIDTH), np.int64)
    return op.Gather(x, places, axis=2) + y * 0.1


def _summed_over(op, x, y, draw):
    axis = draw.choice([0, 1, 2])
    total = op.ReduceSum(x, [axis], keepdims=1)
    return op.Mul(op.Expand(op.Mul(total, 0.2), op.shape(y)), op.Sigmoid(y))


def _turned_within(op, x, y, draw):
    turned = op.Transpose(op.Exp(op.Neg(op.Abs(x))), perm=[0, 2, 1])
    return op.Sub(op.Transpose(turned, perm=[0, 2, 1]), y)


def _unary(op, x, y, draw):
    name = draw.choice(
        ["Tanh", "Sigmoid", "Neg", "Relu", "Abs", "Erf", "Sin", "Cos", "Floor", "Gelu", "Softplus"]
    )
    return op.node(name, (x,))


def _binary(op, x, y, draw):
    name = draw.choice(["Add", "Sub", "Mul", "Add", "Max", "Min"])
    pair = op.node(name, (x, y))
    return op.Clip(pair, -3.0, 3.0) if draw.random() < 0.3 else pair


def _padded(op, x, y, draw):
    wide, begin = op.Mul(op.Pad(x, [0, 0, 1, 0, 0, 1]), 0.5), draw.choice([0, 1, 2])
    return op.Slice(wide, [begin], [begin + WIDTH], [2])


def _once_and_again(op, x, y, draw):
    """Read by two, of which one is a view that is read later."""
    half = op.Mul(x, 0.5)
    seen = op.Unsqueeze(half, [0])
    return op.Add(op.Squeeze(op.Tanh(seen), [0]), op.Mul(half, y))


OPERATORS = (
    _rows_of, _halves, _chosen, _normed, _weighed, _flat, _gathered, _summed_over, _turned_within,
    _unary, _unary, _unary, _binary, _binary, _binary, _padded, _once_and_again,
)  # fmt: skip
