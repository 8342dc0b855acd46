"""Gradients accumulated by an ``If``."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from ortrain.errors import GraphError
from ortrain.graph.aliasing import check_aliases
from ortrain.ondevice import contract
from ortrain.ondevice.making.accumulate import accumulate
from ortrain.program import Program
from tests.ondevice.making.optim.stepping import run, session
from tests.programs import program

SHAPES = {"a": (3, 4), "b": ()}


def accumulating(*, late_reader: bool = False) -> tuple[Program, dict[str, str]]:
    """Twice each input is its gradient; and which output may take which buffer's memory."""
    buffers = {contract.accumulation_buffer(name): shape for name, shape in SHAPES.items()}

    def body(op, lazy_reset_grad, **values):
        gradients = {name: op.Mul(values[name], 2.0) for name in SHAPES}
        sums = accumulate(
            op,
            gradients,
            {name: values[contract.accumulation_buffer(name)] for name in SHAPES},
            lazy_reset_grad,
        )
        outputs = {value.name: value for value in sums.values()}
        if late_reader:
            outputs["late"] = op.Neg(values[contract.accumulation_buffer("a")])
        return outputs

    made = program(
        body,
        {"lazy_reset_grad": (1,), **SHAPES, **buffers},
        opset=18,
        dtypes={"lazy_reset_grad": np.bool_},
    )
    made.graph.opset_imports.pop("ortrain")
    names = [contract.accumulation_out(name) for name in SHAPES]
    return made, dict(zip(names, buffers, strict=True))


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "not in place"])
def test_gradients_are_added_until_they_are_forgotten_and_stale_buffers_are_not_read(
    in_place: bool,
) -> None:
    made, aliases = accumulating()
    check_aliases(made.graph, aliases)
    model = session(made)
    tensors = {
        name: np.full(shape, np.nan, np.float32)
        for name, shape in zip(aliases.values(), SHAPES.values(), strict=True)
    }
    for run_number, forget, expected in ((1, True, 2), (2, False, 6), (3, False, 12), (4, True, 8)):
        tensors |= {n: np.full(s, run_number, np.float32) for n, s in SHAPES.items()}
        tensors["lazy_reset_grad"] = np.array([forget])
        outputs = run(model, tensors, aliases if in_place else {})
        if not in_place:
            tensors |= {aliases[name]: value.copy() for name, value in outputs.items()}
        for buffer, shape in zip(aliases.values(), SHAPES.values(), strict=True):
            np.testing.assert_array_equal(tensors[buffer], np.full(shape, expected))


def test_all_gradients_are_in_one_if() -> None:
    made, _ = accumulating()
    assert made.operators()["If"] == 1


def test_a_later_reader_of_a_buffer_is_named() -> None:
    made, aliases = accumulating(late_reader=True)
    with pytest.raises(GraphError, match=r"'a_grad.accumulation.out' cannot be written"):
        check_aliases(made.graph, aliases)


def test_without_gradients_nothing_is_emitted() -> None:
    value = ir.Value(name="x")
    assert accumulate(None, {}, {}, value) == {}  # type: ignore[arg-type]
