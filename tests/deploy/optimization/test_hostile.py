"""Files that onnxruntime runs, and that rewrites of it or of ours would make others of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from ortrain.deploy.model_folder import load_model
from ortrain.deploy.optimization import AutoOptimizationConfig, ORTOptimizer
from ortrain.deploy.optimization.fusions import fuse
from tests.deploy.optimization import exports
from tests.deploy.optimization.graphs import answers, draw, fused, graph, operators

X = "(float[batch,seq,16] x)"
NORM = """m = ReduceMean<axes=[-1]>(x) d = Sub(x, m) s = Pow(d, two) v = ReduceMean<axes=[-1]>(s)
    w = Add(v, epsilon) r = Sqrt(w) n = Div(d, r) g = Mul(n, scale) y = Add(g, offset)"""


def rewritten(model: ir.Model, folder: Path, level: str, **options: Any) -> Path:
    folder.mkdir()
    ir.save(model, folder / "model.onnx", **options)
    config = AutoOptimizationConfig.with_optimization_level(level)
    ORTOptimizer.from_pretrained(folder).optimize(config, folder / "optimized")
    return folder / "optimized" / "model_optimized.onnx"


def run(path: Path, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


RMS = """s = Pow(x, two) v = ReduceMean<axes=[-1]>(s) w = Add(v, epsilon) r = Sqrt(w)
    n = Div(x, r) y = Mul(n, scale)"""


@pytest.mark.parametrize("body", [NORM, RMS], ids=["layer norm", "RMS norm"])
@pytest.mark.parametrize("kind", ["double", "float"])
def test_a_norm_keeps_the_epsilon_that_onnxruntime_does_not_read(
    tmp_path: Path, kind: str, body: str
) -> None:
    weights = "float[16] scale, float[16] offset, float two = {2.0}, float epsilon = {0.5}".replace(
        "float", kind
    )
    before = graph(X.replace("float", kind) + f" => ({kind}[batch,seq,16] y)", body, weights, 17)
    if kind == "float":
        before.graph.inputs.append(before.graph.initializers["epsilon"])  # may be fed
    feeds = {"x": draw(2, 3, 16, dtype=np.float64 if kind == "double" else np.float32)}
    after = rewritten(before, tmp_path / "a", "O2")
    np.testing.assert_allclose(run(after, feeds)[0], answers(before, feeds)[0], atol=1e-6)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("opset", [12, 20])
def test_sizes_of_before_the_inputs_were_open_are_forgotten(
    tmp_path: Path, level: str, opset: int
) -> None:
    body = "p = MatMul(x, w) q = Add(p, b) r = Relu(q) z = MatMul(r, w) y = Add(z, b)"
    before = graph(f"{X} => (float[1,3,16] y)", body, "float[16,16] w, float[16] b", opset)
    for node in before.graph:
        node.outputs[0].shape = ir.Shape([1, 3, 16])
        node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    after = rewritten(before, tmp_path / "a", level)
    for sizes in ((1, 3), (2, 5)):
        feeds = {"x": draw(*sizes, 16)}
        np.testing.assert_allclose(run(after, feeds)[0], answers(before, feeds)[0], atol=1e-4)


BRANCHES = """y = If(c) <
    then_branch = then_graph () => (float[batch,seq,16] a) {
        t = Constant<value_ints=[0, 0, 2, 8]>() k = Reshape(x, t) l = Relu(k) s = Shape(x)
        a = Reshape(l, s) },
    else_branch = else_graph () => (float[batch,seq,16] a) {
        s = Shape(x) z = Constant<value_ints=[-1]>() k = Reshape(x, z) l = Sigmoid(k)
        t = Shape(x) a = Reshape(l, t) }
>"""


def test_two_branches_may_use_one_name_for_two_things() -> None:
    signature = "(float[batch,seq,16] x, bool c) => (float[batch,seq,16] y)"
    before = graph(signature, BRANCHES)
    after, _ = fused(before)
    for chosen in (True, False):
        feeds = {"x": draw(2, 3, 16), "c": np.array(chosen)}
        np.testing.assert_allclose(answers(after, feeds)[0], answers(before, feeds)[0], atol=1e-6)


def test_constants_of_axes_may_lie_beside_the_file(tmp_path: Path) -> None:
    body = "t = Reshape(x, split) u = Transpose<perm=[0,2,1,3]>(t) v = Transpose<perm=[0,2,1,3]>(u)"
    body += " r = Relu(v) y = Reshape(r, join)"
    weights = "int64[4] split = {0,0,4,4}, int64[3] join = {0,0,16}"
    before = graph(f"{X} => (float[batch,seq,16] y)", body, weights)
    after = rewritten(before, tmp_path / "a", "O2", external_data="w", size_threshold_bytes=0)
    assert operators(ir.load(after))["Transpose"] == 0
    feeds = {"x": draw(2, 3, 16)}
    np.testing.assert_array_equal(run(after, feeds)[0], answers(before, feeds)[0])


def test_what_a_body_alone_has_read_goes() -> None:
    body = """p = MatMul(x, w) q = Add(p, b)
        y = If(c) <
            then_branch = then_graph () => (float[batch,seq,16] a) { a = Gelu(q) },
            else_branch = else_graph () => (float[batch,seq,16] e) { e = Relu(q) }
        >"""
    signature = "(float[batch,seq,16] x, bool c) => (float[batch,seq,16] y)"
    before = graph(signature, body, "float[16,16] w, float[16] b")
    after, report = fused(before)
    assert report.fused == {"Sum": 1}
    assert operators(after)["Add"] == 0
    for chosen in (True, False):
        feeds = {"x": draw(2, 3, 16), "c": np.array(chosen)}
        np.testing.assert_allclose(answers(after, feeds)[0], answers(before, feeds)[0], atol=1e-5)


def test_outputs_are_declared_as_they_were(tmp_path: Path) -> None:
    # The last size is wrong, as many a `dynamic_axes` is.
    before = graph(f"{X} => (float[batch,seq,seq] y)", "r = Relu(x) y = Sigmoid(r)")
    after = ir.load(rewritten(before, tmp_path / "a", "O2"))
    (shape,) = (value.shape for value in after.graph.outputs)
    assert [str(dim) for dim in shape or ()] == ["batch", "seq", "seq"]


def test_names_of_what_is_put_in_may_be_those_of_values_that_stay(tmp_path: Path) -> None:
    """Files of our own exporter have them: EuroBERT's became one that no session loaded."""
    _, path = exports.exported("llama", tmp_path / "model.onnx", exporter="ortrain", opset=21)
    before = load_model(path)
    known = {value.name: value for node in before.graph for value in node.outputs}
    after = ir.load(path)
    fuse(after, AutoOptimizationConfig.O2())
    there = [value.name for node in after.graph for value in node.outputs]
    made = [name for name in there if name not in known]
    stay = [n for n in there if n in known and not known[n].is_graph_output()]
    assert len(made) > 10
    for name, new in zip(stay, made, strict=False):
        known[name].name = new
    found = rewritten(before, tmp_path / "renamed", "O2")
    for batch in exports.BATCHES:
        feeds = exports.arrays(batch)
        np.testing.assert_allclose(run(found, feeds)[0], run(path, feeds)[0], atol=1e-5)
