"""Models whose inputs are strings train and evaluate on a device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortrain.ondevice import CheckpointState, Module, Optimizer
from ortrain.ondevice.artifacts import LossType, OptimType, generate_artifacts
from ortrain.ondevice.running.session import BoundModel
from ortrain.ondevice.running.tensor import CPU

WORDS = ["cat", "dog", "fish"]


def model() -> onnx.ModelProto:
    """Scores of words: each is a row of a table."""
    graph = helper.make_graph(
        [
            helper.make_node(
                "LabelEncoder",
                ["words"],
                ["rows"],
                domain="ai.onnx.ml",
                keys_strings=WORDS,
                values_int64s=[0, 1, 2],
                default_int64=0,
            ),
            helper.make_node("Gather", ["table", "rows"], ["scores"]),
        ],
        "words",
        [helper.make_tensor_value_info("words", TensorProto.STRING, ["n"])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(np.zeros((3, 3), np.float32), "table")],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


@pytest.fixture
def module(tmp_path: Path) -> Module:
    generate_artifacts(
        model(),
        requires_grad=["table"],
        loss=LossType.CrossEntropyLoss,
        optimizer=OptimType.SGD,
        artifact_directory=tmp_path,
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    files = [tmp_path / f"{name}_model.onnx" for name in ("training", "eval", "optimizer")]
    result = Module(files[0], state, files[1])
    result.optimizer = Optimizer(files[2], result)
    return result


@pytest.mark.parametrize("dtype", [np.object_, "U4", "U9"])
def test_a_model_trains_on_strings(module: Module, dtype: object) -> None:
    words, labels = np.array(WORDS, dtype), np.array([2, 0, 1])
    first = float(module(words, labels))
    module.optimizer.step()
    module.lazy_reset_grad()
    assert first == pytest.approx(np.log(3), rel=1e-5)
    assert float(module(words, labels)) < first
    module.eval()
    assert float(module(words[::-1], labels[::-1])) < first


def test_a_result_of_strings_comes_back_as_an_array() -> None:
    graph = helper.make_graph(
        [helper.make_node("Identity", ["words"], ["same"])],
        "same",
        [helper.make_tensor_value_info("words", TensorProto.STRING, ["n"])],
        [helper.make_tensor_value_info("same", TensorProto.STRING, ["n"])],
    )
    proto = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8
    ).SerializeToString()
    session = onnxruntime.InferenceSession(proto, providers=["CPUExecutionProvider"])
    (found,) = BoundModel(session, "model", CPU, {}, {}).run([np.array(WORDS)])
    assert list(found) == WORDS


def test_numbers_for_strings_are_refused_by_name(module: Module) -> None:
    with pytest.raises(TypeError, match="the input 'words' of the training model"):
        module(np.arange(3), np.arange(3))
