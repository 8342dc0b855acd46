"""Models of old opsets that onnx's own converter does not convert."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from ortrain.ondevice import CheckpointState, LossType, Module, generate_artifacts
from ortrain.ondevice.making.opsets import converted

# Behind the normalized values.
RESULTS = ["new_mean", "new_var", "saved_mean", "saved_var"]


def normalized(opset: int, outputs: list[str], reads: str = "") -> onnx.ModelProto:
    """A product and a batch normalization that trains, as exporters wrote them before opset 14."""
    torch.manual_seed(0)
    weight = torch.randn(4, 3).numpy()
    tensors = {
        "weight": weight,
        "scale": np.linspace(0.5, 1.5, 3, dtype=np.float32),
        "shift": np.zeros(3, np.float32),
        "mean": np.zeros(3, np.float32),
        "var": np.ones(3, np.float32),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["product"]),
        helper.make_node(
            "BatchNormalization",
            ["product", "scale", "shift", "mean", "var"],
            ["y", *outputs],
            momentum=0.9,
            epsilon=1e-5,
        ),
    ]
    results = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])]
    if reads:
        nodes.append(helper.make_node("Identity", [reads], ["seen"]))
        results.append(helper.make_tensor_value_info("seen", TensorProto.FLOAT, [3]))
    graph = helper.make_graph(
        nodes,
        "normalized",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        results,
        [numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def test_a_normalization_that_trains_in_opset_12_trains_as_pytorch_does(tmp_path: Path) -> None:
    model = normalized(12, RESULTS)
    before = model.SerializeToString()
    generate_artifacts(
        model,
        requires_grad=["weight", "scale", "shift"],
        loss=LossType.MSELoss,
        artifact_directory=tmp_path,
    )
    assert model.SerializeToString() == before
    linear, norm = nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor(numpy_helper.to_array(model.graph.initializer[0])).T)
        norm.weight.copy_(torch.linspace(0.5, 1.5, 3))
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    for _ in range(3):
        x, y = torch.randn(6, 4), torch.randn(6, 3)
        loss = nn.functional.mse_loss(norm(linear(x)), y)
        np.testing.assert_allclose(module(x.numpy(), y.numpy()), loss.item(), rtol=1e-5)
    for name, value in (("mean", norm.running_mean), ("var", norm.running_var)):
        assert value is not None
        np.testing.assert_allclose(state.buffers[name].data, value.numpy(), rtol=1e-5, atol=1e-7)


def test_one_that_evaluates_stays_so() -> None:
    node = next(
        node
        for node in converted(normalized(12, []), 18).graph.node
        if node.op_type == "BatchNormalization"
    )
    assert [*node.output] == ["y"]
    assert all(each.name != "training_mode" or not each.i for each in node.attribute)


def test_results_that_nobody_has_had_since_are_refused_where_they_are_read() -> None:
    with pytest.raises(Exception, match="outputs 4 and 5"):
        converted(normalized(12, RESULTS, reads="saved_mean"), 18)
