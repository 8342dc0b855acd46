"""A sum over what repeats a number is a multiple of it, as exact as the number."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from ortrain.graph.broadcast import unbroadcast
from tests.programs import program

ROWS, TOKENS, WIDTH = 3, 1000, 4
WHOLE = [ROWS, TOKENS, WIDTH]
# Name → shape of the gradient before it is repeated, and of the value that was broadcast.
REPEATED = {
    "a bias before a mean over tokens": ([ROWS, 1, WIDTH], [WIDTH]),
    "a bias before a mean of everything": ([1, 1, 1], [WIDTH]),
    "a bias that has the rank already": ([ROWS, 1, WIDTH], [1, 1, WIDTH]),
    "a scale of each row": ([ROWS, 1, WIDTH], [ROWS, 1, 1]),
    "a number": ([1, 1, 1], [1]),
    "of each row a number of its own": ([1, TOKENS, 1], [TOKENS, 1]),
}
SIZES = {"known": WHOLE, "symbolic": ["rows", "tokens", WIDTH]}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(("before", "value"), REPEATED.values(), ids=REPEATED)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_sum_of_repeated_numbers_is_rounded_as_one_of_each(
    dtype: str, before: list[int], value: list[int], sizes: list[int | str]
) -> None:
    numbers = np.random.default_rng(0).normal(size=before).astype(dtype)
    found = _summed(numbers, value, sizes)
    terms = np.broadcast_to(numbers, WHOLE).astype(np.longdouble)
    lead = 3 - len(value)
    over = tuple(i for i in range(3) if i < lead or value[i - lead] == 1 != WHOLE[i])
    exact, scale = (x.sum(over, keepdims=True).reshape(value) for x in (terms, np.abs(terms)))
    assert found.dtype == dtype
    assert found.shape == exact.shape
    assert np.all(np.abs(found - exact) <= 4 * np.finfo(dtype).eps * scale)


def test_16_bits_add_up_what_they_cannot_count() -> None:
    numbers = np.full([1, 1, 1], 2.0**-10, np.float16)
    assert _summed(numbers, [1], [1, 70_000, 1], [1, 70_000, 1]) < np.inf


@pytest.mark.parametrize("tokens", [0, "tokens"])
def test_the_sum_of_no_infinite_numbers_is_zero(tokens: int | str) -> None:
    numbers = np.full([2, 1, 3], np.inf, np.float32)
    assert np.all(_summed(numbers, [3], [2, tokens, 3], [2, 0, 3]) == 0)


def test_a_symbol_may_be_the_size_of_what_is_repeated() -> None:
    numbers = np.ones([1, 1, 3], np.float32)
    found = _summed(numbers, [3], ["rows", "tokens", 3], [5, 7, 3], before=["some", 1, 3])
    assert np.all(found == 5 * 7)


def _summed(
    numbers: np.ndarray,
    value: list[int],
    sizes: list[int | str],
    whole: list[int] = WHOLE,
    before: list[int | str] | None = None,
) -> np.ndarray:
    """On onnxruntime, numbers repeated to the whole and summed to the shape of a value.

    What is known of the numbers' shape is, unless told, what is known of the whole's.
    """
    if before is None:
        pairs = zip(numbers.shape, sizes, strict=True)
        before = [size if once != 1 else 1 for once, size in pairs]

    def body(op, numbers, value, like):
        wide = op.Expand(numbers, op.Shape(like))
        wide.shape = ir.Shape(sizes)
        return unbroadcast(op, wide, value, like)

    feeds = {"numbers": numbers, "value": np.zeros(value), "like": np.zeros(whole)}
    feeds = {name: array.astype(numbers.dtype) for name, array in feeds.items()}
    inputs = {"numbers": before, "value": value, "like": sizes}
    subject = program(body, inputs, dtype=numbers.dtype)
    proto = ir.to_proto(subject.model)
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (found,) = session.run(None, feeds)
    return found
