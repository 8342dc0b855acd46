"""Models for inference: a value of the evaluation model, what it needs, and the weights of now."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnx.numpy_helper import from_array, to_array

from ortrain.errors import InputError, SaveError
from ortrain.ondevice.running import inference
from tests.ondevice import artifacts
from tests.ondevice.eager import load

FLOAT, BOOL, INT64 = TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT64
W = np.arange(6, dtype=np.float32).reshape(2, 3)


def _open(model: bytes) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])


def _info(name: str, dtype: int, shape: Sequence[int | str | None] | None = None) -> Any:
    return helper.make_tensor_value_info(name, dtype, shape)


def _model(
    nodes: list[Any], inputs: list[Any], outputs: list[str], *weights: Any, **more: Any
) -> onnx.ModelProto:
    """A model whose outputs have no types, as ONNX allows inside of onnxruntime."""
    graph = helper.make_graph(
        nodes, "graph", inputs, [onnx.ValueInfoProto(name=name) for name in outputs], list(weights)
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, **more)


def _exported(
    model: onnx.ModelProto,
    outputs: list[str],
    folder: Path,
    weights: dict[str, np.ndarray] | None = None,
) -> onnx.ModelProto:
    """The model for inference, which the checker of onnx takes."""
    path = folder / "inference.onnx"
    inference.export(model.SerializeToString(), weights or {}, outputs, path, _open)
    found = onnx.load(path)
    onnx.checker.check_model(found, full_check=True)
    return found


def _run(model: onnx.ModelProto, outputs: list[str], feeds: dict[str, Any]) -> list[np.ndarray]:
    names = {i.name for i in model.graph.input}
    session = _open(model.SerializeToString())
    return session.run(outputs, {name: value for name, value in feeds.items() if name in names})


def _names(protos: Any) -> list[str]:
    return [proto.name for proto in protos]


# -- of a module ---------------------------------------------------------------------------------


def test_the_model_gives_what_evaluation_gives_with_the_weights_of_now(
    adamw: Path, tmp_path: Path
) -> None:
    state, module, optimizer = load(adamw)
    module(*artifacts.batch(4))
    optimizer.step()
    module.export_model_for_inferencing(tmp_path / "model.onnx", ["logits"])
    model = onnx.load(tmp_path / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert _names(model.graph.input) == ["x"]
    weights = {w.name: to_array(w) for w in model.graph.initializer}
    assert {*weights} >= {*artifacts.SHAPES, *artifacts.BUFFERS}
    for name, item in (*state.parameters, *state.buffers):
        np.testing.assert_array_equal(weights[name], item.data)
    assert "SoftmaxCrossEntropyLoss" not in [node.op_type for node in model.graph.node]
    x, labels = artifacts.batch(7)
    expected = module.eval()(x, labels)[1]
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], expected)


@pytest.mark.parametrize("from_bytes", [False, True])
def test_every_value_of_the_graph_can_be_exported(
    adamw: Path, tmp_path: Path, from_bytes: bool
) -> None:
    state, _, _ = load(adamw)
    file = adamw / "eval_model.onnx"
    model = onnx.load(file)
    tensors = {name: item.data for name, item in (*state.parameters, *state.buffers)}
    values = [name for node in model.graph.node for name in node.output]
    model.graph.ClearField("output")
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in values)
    x, labels = artifacts.batch(5)
    feeds = {"x": x, "labels": labels}
    expected = dict(zip(values, _run(model, values, feeds | tensors), strict=True))
    uri = file.read_bytes() if from_bytes else file
    for name in values:
        inference.export(uri, tensors, [name], tmp_path / "model.onnx", _open)
        found = onnx.load(tmp_path / "model.onnx")
        onnx.checker.check_model(found, full_check=True)
        np.testing.assert_allclose(
            _run(found, [name], feeds)[0], expected[name], rtol=1e-6, err_msg=name
        )


def test_outputs_keep_the_order_they_are_named_in(adamw: Path, tmp_path: Path) -> None:
    _, module, _ = load(adamw)
    for names in (["logits", "loss"], ["loss", "active", "logits"]):
        module.export_model_for_inferencing(tmp_path / "model.onnx", names)
        assert _names(onnx.load(tmp_path / "model.onnx").graph.output) == names


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (["logit"], InputError, r"eval_model\.onnx has no value logit\n.*such as loss, logits"),
        ([], ValueError, "must name values, each once"),
        (["loss", "loss"], ValueError, "must name values, each once"),
    ],
)
def test_wrong_names_are_refused(
    adamw: Path, tmp_path: Path, names: list[str], error: type[Exception], message: str
) -> None:
    _, module, _ = load(adamw)
    with pytest.raises(error, match=message):
        module.export_model_for_inferencing(tmp_path / "model.onnx", names)
    assert not list(tmp_path.iterdir())


def test_a_failed_export_leaves_the_old_file(
    adamw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError("No space left on device")

    _, module, _ = load(adamw)
    file = tmp_path / "model.onnx"
    file.write_bytes(b"old")
    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(SaveError, match="cannot save the model for inference"):
        module.export_model_for_inferencing(file, ["logits"])
    assert [(path, path.read_bytes()) for path in tmp_path.iterdir()] == [(file, b"old")]


def test_a_model_beyond_what_a_file_holds_is_refused(
    adamw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, module, _ = load(adamw)
    monkeypatch.setattr(inference, "LIMIT", 500)
    with pytest.raises(InputError, match=r"would have \d+ bytes\n.*2 GB at most"):
        module.export_model_for_inferencing(tmp_path / "model.onnx", ["logits"])
    assert not list(tmp_path.iterdir())


# -- graphs --------------------------------------------------------------------------------------


def test_what_is_not_needed_is_left_out(tmp_path: Path) -> None:
    model = _model(
        [
            helper.make_node("MatMul", ["x", "w"], ["y"], "product"),
            helper.make_node("Add", ["y", "b"], ["z"]),
            helper.make_node("Mul", ["z", "other"], ["unwanted"]),
            helper.make_node("Neg", ["w"], ["too"]),
        ],
        [_info("x", FLOAT, ["n", 2]), _info("w", FLOAT, [2, 3]), _info("other", FLOAT, [3])],
        ["unwanted", "too"],
        from_array(np.ones(3, np.float32), "b"),
        from_array(np.ones(3, np.float32), "c"),
    )
    model.graph.value_info.append(_info("y", FLOAT, ["n", 3]))
    model.graph.value_info.append(_info("too", FLOAT, [2, 3]))
    found = _exported(model, ["z"], tmp_path, {"w": W, "v": W})
    assert _names(found.graph.input) == ["x"]
    assert sorted(_names(found.graph.initializer)) == ["b", "w"]
    assert _names(found.graph.value_info) == ["y"]
    assert [node.op_type for node in found.graph.node] == ["MatMul", "Add"]
    assert found.graph.node[0].name == "product"
    x = np.float32([[1, 2]])
    np.testing.assert_array_equal(_run(found, ["z"], {"x": x})[0], x @ W + 1)


@pytest.mark.parametrize("named", ["x", "w", "b"])
def test_an_input_or_a_weight_may_be_an_output(tmp_path: Path, named: str) -> None:
    model = _model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [_info("x", FLOAT, ["n", 2]), _info("w", FLOAT, [2, 3])],
        ["y"],
        from_array(np.ones(3, np.float32), "b"),
    )
    found = _exported(model, [named, "y"], tmp_path, {"w": W})
    feeds = {"x": np.float32([[1, 2]]), "w": W, "b": np.ones(3)}
    np.testing.assert_array_equal(_run(found, [named], feeds)[0], feeds[named])


def _branch(name: str, *nodes: Any, outputs: Sequence[str], inputs: Sequence[Any] = ()) -> Any:
    return helper.make_graph(
        list(nodes), name, list(inputs), [onnx.ValueInfoProto(name=o) for o in outputs]
    )


def _typed(graph: Any, dtype: int) -> Any:
    for output in graph.output:
        output.CopyFrom(_info(output.name, dtype))
    return graph


def test_what_sub_graphs_read_is_kept(tmp_path: Path) -> None:
    # In the branch a loop, whose body reads `deep` and `w` from around the branch.
    body = _branch(
        "body",
        helper.make_node("Add", ["carried", "deep"], ["more"]),
        helper.make_node("MatMul", ["more", "w"], ["out"]),
        helper.make_node("Identity", ["going"], ["goes"]),
        outputs=["goes", "more", "out"],
        inputs=[_info("i", INT64, []), _info("going", BOOL, []), _info("carried", FLOAT, [1, 2])],
    )
    for output, dtype in zip(body.output, (BOOL, FLOAT, FLOAT), strict=True):
        output.CopyFrom(_info(output.name, dtype))
    then = _branch(
        "then",
        helper.make_node("Loop", ["times", "", "start"], ["last", "all"], body=body),
        helper.make_node("ReduceSum", ["all"], ["sum"], keepdims=0),
        outputs=["sum"],
    )
    other = _branch(
        "else", helper.make_node("ReduceSum", ["start"], ["s"], keepdims=0), outputs=["s"]
    )
    model = _model(
        [
            helper.make_node("Neg", ["x"], ["start"]),
            helper.make_node("Exp", ["x"], ["deep"]),
            helper.make_node("Sin", ["x"], ["unread"]),
            helper.make_node(
                "If",
                ["c"],
                ["y"],
                then_branch=_typed(then, FLOAT),
                else_branch=_typed(other, FLOAT),
            ),
        ],
        [
            _info("x", FLOAT, [1, 2]),
            _info("c", BOOL, []),
            _info("w", FLOAT, [2, 3]),
            _info("v", FLOAT, [2, 3]),
        ],
        ["y", "unread"],
        from_array(np.array(3), "times"),
    )
    found = _exported(model, ["y"], tmp_path, {"w": W, "v": W})
    assert [node.op_type for node in found.graph.node] == ["Neg", "Exp", "If"]
    assert sorted(_names(found.graph.initializer)) == ["times", "w"]
    x = np.float32([[0.5, -1]])
    rows = [(-x + k * np.exp(x)) @ W for k in (1, 2, 3)]
    for condition, expected in ((True, np.sum(rows)), (False, -x.sum())):
        feeds = {"x": x, "c": np.array(condition)}
        np.testing.assert_allclose(_run(found, ["y"], feeds)[0], expected, rtol=1e-6)


def test_names_that_a_sub_graph_makes_itself_keep_nothing(tmp_path: Path) -> None:
    then = _branch("then", helper.make_node("Neg", ["x"], ["own"]), outputs=["own"])
    other = _branch("else", helper.make_node("Abs", ["x"], ["its"]), outputs=["its"])
    model = _model(
        [
            helper.make_node("Exp", ["x"], ["e"]),
            helper.make_node(
                "If",
                ["c"],
                ["y"],
                then_branch=_typed(then, FLOAT),
                else_branch=_typed(other, FLOAT),
            ),
        ],
        [_info("x", FLOAT, [2]), _info("c", BOOL, [])],
        ["y", "e"],
    )
    assert _names(_exported(model, ["y"], tmp_path).graph.input) == ["x", "c"]
    assert [n.op_type for n in onnx.load(tmp_path / "inference.onnx").graph.node] == ["If"]


def test_an_output_that_is_left_out_keeps_no_node(tmp_path: Path) -> None:
    model = _model(
        [
            helper.make_node("Dropout", ["x"], ["y", ""]),
            helper.make_node("Clip", ["x", "", "high"], ["z"]),
        ],
        [_info("x", FLOAT, [2])],
        ["y", "z"],
        from_array(np.float32(1), "high"),
    )
    found = _exported(model, ["z"], tmp_path)
    assert [node.op_type for node in found.graph.node] == ["Clip"]


def test_functions_come_along(tmp_path: Path) -> None:
    twice = helper.make_function(
        "local",
        "Twice",
        ["a"],
        ["b"],
        [helper.make_node("Add", ["a", "a"], ["b"])],
        [helper.make_opsetid("", 18)],
    )
    model = _model(
        [helper.make_node("Twice", ["x"], ["y"], domain="local")],
        [_info("x", FLOAT, [3])],
        ["y"],
        functions=[twice],
    )
    found = _exported(model, ["y"], tmp_path)
    assert _names(found.functions) == ["Twice"]
    np.testing.assert_array_equal(_run(found, ["y"], {"x": np.float32([1, 2, 3])})[0], [2, 4, 6])


def test_sparse_weights_come_along(tmp_path: Path) -> None:
    model = _model([helper.make_node("Add", ["x", "s"], ["y"])], [_info("x", FLOAT, [3])], ["y"])
    for name in ("s", "unread"):
        values, places = from_array(np.float32([5]), name), from_array(np.array([1]), "")
        model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [3]))
    path = tmp_path / "inference.onnx"
    inference.export(model.SerializeToString(), {}, ["y"], path, _open)
    found = onnx.load(path)
    assert [sparse.values.name for sparse in found.graph.sparse_initializer] == ["s"]
    np.testing.assert_array_equal(_run(found, ["y"], {"x": np.float32([1, 2, 3])})[0], [1, 7, 3])


def test_weights_of_every_dtype_and_shape_come_through(tmp_path: Path) -> None:
    kinds = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
    dtypes = [np.dtype(kind) for kind in (*kinds, "float16", "float32", "float64")]
    weights = {f"w{i}": np.arange(6).reshape(2, 3).astype(d) for i, d in enumerate(dtypes)}
    weights |= {"scalar": np.array(2.5), "none": np.zeros((0, 3), np.int64)}
    weights["strided"] = np.arange(12, dtype=np.int64).reshape(3, 4).T[::2]
    inputs = [
        _info(name, helper.np_dtype_to_tensor_dtype(w.dtype), w.shape)
        for name, w in weights.items()
    ]
    nodes = [helper.make_node("Identity", [name], [f"{name}.out"]) for name in weights]
    outputs = [f"{name}.out" for name in weights]
    found = _exported(_model(nodes, inputs, outputs), outputs, tmp_path, weights)
    assert not found.graph.input
    for name, value in zip(weights, _run(found, outputs, {}), strict=True):
        assert (value.dtype, value.shape) == (weights[name].dtype, weights[name].shape)
        np.testing.assert_array_equal(value, weights[name])


def test_outputs_without_types_get_those_that_onnxruntime_finds(tmp_path: Path) -> None:
    model = _model(
        [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Shape", ["x"], ["s"])],
        [_info("x", FLOAT, ["n", None, 3])],
        ["y"],
    )
    y, s = _exported(model, ["y", "s"], tmp_path).graph.output
    assert (y.type.tensor_type.elem_type, s.type.tensor_type.elem_type) == (FLOAT, INT64)
    dims = y.type.tensor_type.shape.dim
    assert (dims[0].dim_param, dims[1].WhichOneof("value"), dims[2].dim_value) == ("n", None, 3)
    assert s.type.tensor_type.shape.dim[0].dim_value == 3


def test_weights_in_other_files_are_refused(tmp_path: Path) -> None:
    for in_constant in (False, True):
        tensor = from_array(np.ones(300, np.float32), "w")
        nodes = [helper.make_node("Add", ["x", "w"], ["y"])]
        if in_constant:
            nodes.insert(0, helper.make_node("Constant", [], ["w"], value=tensor))
        weights = [] if in_constant else [tensor]
        model = _model(nodes, [_info("x", FLOAT, [300])], ["y"], *weights)
        path = tmp_path / f"model{in_constant}.onnx"
        onnx.save(model, path, save_as_external_data=True, size_threshold=0, convert_attribute=True)
        with pytest.raises(InputError, match="it keeps the tensor 'w' in another file"):
            inference.export(path, {}, ["y"], tmp_path / "out.onnx", _open)
        assert not (tmp_path / "out.onnx").exists()


def test_a_model_in_ort_format_is_refused(adamw: Path, tmp_path: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "model.ort")
    options.add_session_config_entry("session.save_model_format", "ORT")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    onnxruntime.InferenceSession(adamw / "eval_model.onnx", options)
    with pytest.raises(InputError, match=r"model\.ort apart\n.*it is in ORT format"):
        inference.export(tmp_path / "model.ort", {}, ["logits"], tmp_path / "out.onnx", _open)
