"""Results do not depend on the number of threads."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from ortrain.autodiff import differentiate
from ortrain.errors import GraphError
from ortrain.graph import scatter
from ortrain.graph.build import Builder
from ortrain.program import Program, Role, set_role
from ortrain.runtime.onnxruntime import OnnxRuntimeExecutor
from tests.programs import program

WIDTH, COUNT = 512, 2048


def lookup(op_type: str, rows: int) -> Program:
    """``output = op_type(table, indices)``."""
    table = ir.Value(
        name="table", shape=ir.Shape([rows, WIDTH]), type=ir.TensorType(ir.DataType.FLOAT)
    )
    places = [COUNT] if op_type != "GatherND" else [COUNT, 1]
    indices = ir.Value(
        name="indices", shape=ir.Shape(places), type=ir.TensorType(ir.DataType.INT64)
    )
    set_role(table, Role.PARAMETER)
    set_role(indices, Role.USER_INPUT)
    graph = ir.Graph([indices, table], [], nodes=[], opset_imports={"": 21, "ortrain": 1})
    domain = "ortrain" if op_type == "Embedding" else ""
    with Builder(graph) as op:
        output = op.node(op_type, (table, indices), domain=domain, name="output")
    output.shape = ir.Shape([COUNT, WIDTH])
    graph.outputs.append(set_role(output, Role.USER_OUTPUT))
    return Program(ir.Model(graph, ir_version=10))


@pytest.mark.parametrize("rows", [3, 8192])
@pytest.mark.parametrize("op_type", ["Gather", "GatherND", "Embedding"])
def test_every_repeated_index_is_added_also_with_two_threads(
    op_type: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scatter, "LARGE", 4096)
    executor = OnnxRuntimeExecutor(threads=2)
    compiled = executor.compile(executor.lower(differentiate(lookup(op_type, rows), ["table"])))
    generator = np.random.default_rng(0)
    indices = generator.integers(rows - 3, rows, COUNT)
    upstream = generator.standard_normal((COUNT, WIDTH)).astype(np.float32)
    feeds = {
        "indices": indices.reshape(-1, 1) if op_type == "GatherND" else indices,
        "table": np.zeros((rows, WIDTH), np.float32),
        "output.gradient": upstream,
    }
    expected = np.zeros((rows, WIDTH))
    np.add.at(expected, indices, upstream.astype(np.float64))
    for _ in range(5):  # a race loses additions in most runs, not in all
        results = compiled.run([feeds[name] for name in compiled.input_names])
        gradient = results[compiled.output_names.index("table.gradient")]
        np.testing.assert_allclose(gradient, expected, atol=1e-3)


def scattered(reduction: str) -> Program:
    """``y = ScatterND(table, places, updates)``."""
    shapes = {"table": (4, WIDTH), "places": (COUNT, 1), "updates": (COUNT, WIDTH)}
    return program(
        lambda op, table, places, updates: op.ScatterND(
            table, places, updates, reduction=reduction
        ),
        shapes,
        dtypes={"places": np.int64},
    )


@pytest.mark.parametrize(
    ("reduction", "function"), [("add", np.add), ("max", np.maximum), ("min", np.minimum)]
)
def test_scatter_nd_reduces_every_repeated_index(reduction: str, function: np.ufunc) -> None:
    executor = OnnxRuntimeExecutor(threads=2)
    compiled = executor.compile(executor.lower(scattered(reduction)))
    generator = np.random.default_rng(0)
    places = generator.integers(0, 2, (COUNT, 1))
    updates = generator.standard_normal((COUNT, WIDTH)).astype(np.float32)
    expected = np.zeros((4, WIDTH))
    function.at(expected, places[:, 0], updates)
    for _ in range(5):
        (result,) = compiled.run([np.zeros((4, WIDTH), np.float32), places, updates])
        np.testing.assert_allclose(result, expected, atol=1e-3)


def test_scatter_nd_is_refused_where_repeats_could_be_lost() -> None:
    subject = scattered("add")
    subject.input("places").shape = None
    with pytest.raises(GraphError, match=r"ScatterND with reduction 'add'.*is not known"):
        OnnxRuntimeExecutor(threads=2).lower(subject)
