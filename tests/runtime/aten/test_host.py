"""Arithmetic of sizes, which a function has as Python ints."""

from __future__ import annotations

import random
import re

import numpy as np
import onnx_ir as ir
import pytest

from ortrain.runtime.aten import AtenExecutor
from tests.programs import program
from tests.runtime.agreement import agrees

INT64, INT32, BOOL = ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL
SIZES = ((2, 3, 5), (1, 1, 1), (4, 1, 7))


def ints(*values):
    return np.array(values, np.int64)


class Expressions:
    """Random shape arithmetic: scalars, rows of a known length, and conditions."""

    def __init__(self, op, x, draw):
        self.op, self.draw = op, draw
        self.rows = {3: [op.Shape(x)], 2: [op.Shape(x, start=-2), op.Shape(x, end=2)]}
        self.rows[1] = [op.Shape(x, start=1, end=2), op.constant(ints(3))]
        self.scalars = [op.Size(x), op.constant(np.int64(2)), op.constant(np.int64(-3))]

    def row(self, length=None):
        """A row, of any length by default."""
        length = length or self.draw.choice([n for n, rows in self.rows.items() if rows])
        return length, self.draw.choice(self.rows[length])

    def keep(self, length, value):
        self.rows.setdefault(length, []).append(value)

    def step(self):
        """One more value."""
        self.draw.choice([
            self.compute, self.compute, self.choose, self.pick, self.pick, self.cut, self.join,
            self.reduce, self.reshape, self.turn, self.convert,
        ])()  # fmt: skip

    def compute(self):
        op, draw = self.op, self.draw
        length, a = self.row()
        b = draw.choice([self.row(length)[1], draw.choice(self.scalars), draw.choice(self.rows[1])])
        kind = draw.choice(["Add", "Sub", "Mul", "Div", "Mod", "Max", "Min", "Neg", "Abs", "rest"])
        if kind in ("Neg", "Abs"):
            self.keep(length, op.node(kind, (a,)))
        elif kind in ("Div", "Mod", "rest"):
            nonzero = op.Where(op.Equal(b, 0), np.int64(7), b)
            options = {"fmod": 1} if kind == "rest" else {}
            self.keep(length, op.node("Mod" if kind == "rest" else kind, (a, nonzero), **options))
        elif kind == "Mul":
            self.keep(length, op.Mod(op.Mul(a, b), np.int64(1009)))
        else:
            self.keep(length, op.node(kind, (a, b)))

    def condition(self, length):
        op, draw = self.op, self.draw
        a, b = self.row(length)[1], draw.choice([self.row(length)[1], draw.choice(self.scalars)])
        kinds = ["Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"]
        first = op.node(draw.choice(kinds), (a, b))
        other = op.node(draw.choice(kinds), (b, a))
        how = draw.choice(["And", "Or", "Xor", "Not", ""])
        if how == "Not":
            return op.Not(first)
        return op.node(how, (first, other)) if how else first

    def choose(self):
        length, a = self.row()
        value = self.op.Where(self.condition(length), a, self.row(length)[1])
        self.keep(length, value)

    def pick(self):
        """By known indices and by computed ones, from either end."""
        op, draw = self.op, self.draw
        length, row = self.row()
        if draw.random() < 0.4:
            count = draw.randint(1, 3)
            places = ints(*(draw.randint(-length, length - 1) for _ in range(count)))
            self.keep(count, op.Gather(row, places))
        elif draw.random() < 0.5:
            self.scalars.append(op.Gather(row, np.int64(draw.randint(-length, length - 1))))
        else:
            place = op.Sub(op.Mod(draw.choice(self.scalars), np.int64(2 * length)), length)
            self.scalars.append(op.Gather(row, op.cast(place, draw.choice([INT64, INT32]))))

    def cut(self):
        length, row = self.row()
        start, end = (self.draw.randint(-length - 1, length + 1) for _ in range(2))
        step = self.draw.choice([1, 1, 2, -1, -2])
        start = max(start, -length) if step < 0 else start
        places = range(length)[start:end:step]
        if places:
            self.keep(len(places), self.op.Slice(row, [start], [end], [0], [step]))

    def join(self):
        (first, a), (second, b) = self.row(), self.row()
        if first + second <= 6:
            self.keep(first + second, self.op.Concat(a, b, axis=self.draw.choice([0, -1])))

    def reduce(self):
        op, draw = self.op, self.draw
        kind = draw.choice(["ReduceSum", "ReduceProd", "ReduceMax", "ReduceMin"])
        _, row = self.row()
        keeps = draw.randint(0, 1)
        total = op.node(kind, (row, *draw.choice([(), ([0],), ([-1],)])), keepdims=keeps)
        total = op.Mod(total, np.int64(1009))
        self.keep(1, total) if keeps else self.scalars.append(total)

    def reshape(self):
        op, draw = self.op, self.draw
        length, row = self.row()
        if draw.random() < 0.5:
            self.keep(1, op.Unsqueeze(draw.choice(self.scalars), [draw.choice([0, -1])]))
        elif length == 1:
            self.scalars.append(
                draw.choice([op.Squeeze(row), op.Squeeze(row, [0]), op.Reshape(row, [])])
            )
        else:
            self.keep(length, op.Reshape(op.Unsqueeze(row, [1]), [-1]))

    def turn(self):
        """Two rows side by side, then one after another: what the gradient of Tile does."""
        op = self.op
        length, a = self.row()
        both = op.Concat(op.Unsqueeze(a, [1]), op.Unsqueeze(self.row(length)[1], [1]), axis=1)
        both = op.Transpose(both, perm=[1, 0]) if self.draw.random() < 0.5 else both
        if length <= 3:
            self.keep(2 * length, op.Reshape(both, [-1]))

    def convert(self):
        op, draw = self.op, self.draw
        length, row = self.row()
        if draw.random() < 0.5:
            self.keep(length, op.cast(op.cast(row, INT32), INT64))
        else:
            self.keep(length, op.cast(self.condition(length), INT64))


@pytest.mark.parametrize("seed", range(60))
def test_sizes_are_computed_in_python_as_in_onnx(seed):
    draw = random.Random(seed)

    def body(op, x):
        made = Expressions(op, x, draw)
        for _ in range(30):
            made.step()
        values = [v for rows in made.rows.values() for v in rows[-3:]] + made.scalars[-3:]
        return {f"y{i}": op.Identity(v) for i, v in enumerate(values)}

    subject = program(body, {"x": ("a", "b", "c")})
    for sizes in SIZES:
        source = agrees(subject, {"x": np.zeros(sizes, np.float32)})
    called = set(re.findall(r"torch\.(\w+)\(", source))
    assert called <= {"tensor"}, source


def source_of(subject):
    executor = AtenExecutor()
    return executor.compile(executor.lower(subject)).source


@pytest.mark.parametrize("a", [-7, 7, -6])
@pytest.mark.parametrize("b", [-2, 2, 3])
def test_whole_division_rounds_towards_zero_and_rests_have_their_signs(a, b):
    def body(op, x):
        size = op.Size(x)  # of 5
        over, under = op.Add(size, np.int64(a - 5)), op.Sub(size, np.int64(5 - b))
        return {"quotient": op.Div(over, under), "rest": op.Mod(over, under),
                "of_the_first": op.Mod(over, under, fmod=1)}  # fmt: skip

    agrees(program(body, {"x": ("n",)}), {"x": np.zeros(5, np.float32)})


def test_what_may_wrap_around_is_left_to_tensors():
    def body(op, x):
        size = op.Size(x)
        far = op.Add(size, np.int64(2**63 - 1))
        narrow = op.Add(op.cast(size, INT32), np.int32(2**31 - 1))
        return {"far": far, "narrow": narrow}

    subject = program(body, {"x": ("n",)})
    assert source_of(subject).count(".add_(") == 2
    agrees(subject, {"x": np.zeros(5, np.float32)})


def test_long_rows_are_tensors():
    def body(op, x):
        return op.Add(op.Range(np.int64(0), np.int64(20), np.int64(1)), op.Size(x))

    subject = program(body, {"x": ("n",)})
    assert "torch.add(" in source_of(subject)
    agrees(subject, {"x": np.zeros(5, np.float32)})


def test_an_expression_that_grows_becomes_a_variable():
    def body(op, x):
        size = op.Size(x)
        for _ in range(12):
            size = op.Mod(op.Mul(size, size), np.int64(1009))
        return size

    subject = program(body, {"x": ("a", "b")})
    assert max(map(len, source_of(subject).splitlines())) < 200
    agrees(subject, {"x": np.zeros((2, 3), np.float32)})


def test_a_size_beside_floats_is_a_number():
    def body(op, x):
        return op.Div(x, op.cast(op.Size(x), ir.DataType.FLOAT))

    subject = program(body, {"x": ("a", 3)})
    assert "torch.tensor" not in source_of(subject)
    agrees(subject, {"x": np.ones((2, 3), np.float32)})


def test_a_size_in_half_precision_is_rounded_as_a_tensor_is():
    def body(op, x):
        return op.Mul(x, op.cast(op.Size(x), ir.DataType.FLOAT16))

    subject = program(body, {"x": (3, "n")}, dtype=np.float16)
    agrees(subject, {"x": np.ones((3, 683), np.float16)})  # 2049, which float16 has not


def test_axes_that_differ_are_known_where_sizes_are():
    """The gradient of a broadcast asks for them at run time where sizes are symbols."""

    def body(op, x, part):
        differs = op.Not(op.Equal(op.Shape(x), op.Shape(part)))
        axes = op.Reshape(op.NonZero(differs), [-1])
        return op.Squeeze(part, axes)

    subject = program(body, {"x": ("a", 4, 3), "part": ("a", 1, 3)})
    assert "nonzero" not in source_of(subject)
    agrees(subject, {"x": np.ones((2, 4, 3), np.float32), "part": np.ones((2, 1, 3), np.float32)})


def test_the_shape_of_a_tensor_of_unknown_rank_is_asked_of_it():
    def body(op, x, shape):
        y = op.Reshape(x, shape)
        return {"sizes": op.Shape(y, start=1), "count": op.Size(y)}

    subject = program(body, {"x": (2, 6), "shape": ("n",)}, dtypes={"shape": np.int64})
    agrees(subject, {"x": np.ones((2, 6), np.float32), "shape": ints(3, 2, 2)})
