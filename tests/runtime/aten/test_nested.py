"""Random programs of branches and loops inside one another, over what is around them."""

from __future__ import annotations

import random

import numpy as np
import onnx_ir as ir
import pytest
import torch

from ortrain.graph.scan import scan
from ortrain.runtime.aten import AtenExecutor
from ortrain.runtime.onnxruntime import OnnxRuntimeExecutor
from tests.programs import program
from tests.runtime.aten.test_control import branches, loop
from tests.runtime.generated import COLUMNS, KINDS, ROWS


class Nested:
    """Draws a program of matrices [r, 4].

    Args:
        seed: of the choice.
    """

    def __init__(self, seed):
        self.draw = random.Random(seed)

    def __call__(self, op, a, b, c, flag):
        self.flag = flag
        values = self.extended(op, [a, b, c], depth=0)
        return {f"y{i}": op.Identity(v) for i, v in enumerate(self.draw.sample(values, 4))}

    def extended(self, op, values, depth):
        """The values, and some that are computed of them."""
        values = [*values]
        for _ in range(6 if depth else 10):
            forms = (self.plain, self.branch, self.loop, self.scan)
            form = self.draw.choices(forms, (12, 1, 1, 1) if depth < 3 else (1, 0, 0, 0))[0]
            made = form(op, values, depth + 1)
            for value in made:
                value.type = ir.TensorType(ir.DataType.FLOAT)
                value.shape = ir.Shape([ROWS, COLUMNS])
            values += made
        return values

    def pick(self, values, count):
        """Some of them, the latest more often."""
        return [values[-1 - int(self.draw.random() ** 2 * len(values))] for _ in range(count)]

    def plain(self, op, values, depth):
        return [self.draw.choice(KINDS)(op, *self.pick(values, 2))]

    def result(self, op, values, depth):
        """One value of a function: often a new one, at times one from around it or a constant."""
        if self.draw.random() < 0.2:
            return op.Identity(self.pick(values, 1)[0])
        if self.draw.random() < 0.1:
            rng = np.random.default_rng(self.draw.randrange(9))
            return op.Identity(op.constant(rng.random((ROWS, COLUMNS)).astype(np.float32)))
        return op.Tanh(self.extended(op, values, depth)[-1])

    def branch(self, op, values, depth):
        condition = self.flag if self.draw.random() < 0.5 else op.Not(self.flag)
        sides = [lambda inner: self.result(inner, values, depth)] * 2
        return [branches(op, condition, *sides)]

    def loop(self, op, values, depth):
        def step(inner, number, goes_on, x, y):
            found = self.extended(inner, [*values, x, y], depth)
            states = [self.result(inner, found, depth), self.draw.choice([x, y, found[-1]])]
            return goes_on, *(inner.Identity(state) for state in states)

        return [*loop(op, np.int64(self.draw.randrange(4)), None, self.pick(values, 2), step, 2)]

    def scan(self, op, values, depth):
        rows = op.Concat(*(op.Unsqueeze(v, [0]) for v in self.pick(values, 3)), axis=0)

        def step(inner, states, slices):
            found = self.extended(inner, [*values, *states, *slices], depth)
            results = [self.result(inner, found, depth) for _ in range(2)]
            for value in results:  # onnxruntime asks for them inside of a loop
                value.shape = ir.Shape([ROWS, COLUMNS])
            return results[:1], results[1:]

        backwards = self.draw.random() < 0.5
        states, collected = scan(op, step, self.pick(values, 1), [rows], backwards=backwards)
        return [*states, op.Squeeze(op.Slice(collected[0], [1], [2], [0]), [0])]


@pytest.mark.parametrize("seed", range(16))
def test_a_random_program_of_functions_agrees_and_leaves_what_is_not_its_own(seed):
    rng = np.random.default_rng(seed)
    shapes = {"a": ("r", COLUMNS), "b": ("r", COLUMNS), "c": (ROWS, COLUMNS), "flag": ()}
    feeds = {n: rng.standard_normal((ROWS, COLUMNS)).astype(np.float32) for n in "abc"}
    feeds["flag"] = np.array(seed % 2 == 0)
    subject = program(Nested(seed), shapes, dtypes={"flag": np.bool_})
    stock, ours = OnnxRuntimeExecutor(threads=1), AtenExecutor()
    expected = stock.compile(stock.lower(subject)).run([*feeds.values()])
    compiled = ours.compile(ours.lower(subject))
    for _ in range(2):  # again, with what constants are now
        given = [torch.from_numpy(array.copy()) for array in feeds.values()]
        results = compiled.run_values(list(given))
        for result, wanted in zip(results, expected, strict=True):
            np.testing.assert_allclose(result.numpy(), wanted, rtol=1e-3, atol=1e-4)
        for tensor, array in zip(given, feeds.values(), strict=True):
            np.testing.assert_array_equal(tensor.numpy(), array)
        memory = [t.untyped_storage().data_ptr() for t in (*results, *given)]
        assert len(set(memory)) == len(memory)
