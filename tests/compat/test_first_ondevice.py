"""On-device training by the calls of ONNX Runtime 1.13."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch import nn

import ortrain.compat  # noqa: F401
from ortrain.compat.onnxblock import TrainingModel, onnx_model
from ortrain.ondevice import CheckpointState, Module, Optimizer, onnxblock


class Classifier(TrainingModel):
    def __init__(self) -> None:
        super().__init__()
        self.loss = onnxblock.loss.CrossEntropyLoss()

    def build(self, output: str) -> Any:
        return self.loss(output), output


def written(folder: Path, linear: nn.Linear) -> None:
    """The artifacts, as the first example writes them: parameters taken apart and put together."""
    weights = {name: p.detach().numpy() for name, p in linear.named_parameters()}
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "weight", "bias"], ["y"], transB=1)],
        "linear",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 3])],
        [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)
    block, optimizer = Classifier(), onnxblock.optim.AdamW()
    with onnx_model(model) as accessor:
        block("y")
        eval_model = accessor.eval_model
    with onnx_model() as accessor:
        optimizer(block.parameters())
        optimizer_model = accessor.model
    trained, frozen = block.parameters()
    onnxblock.save_checkpoint((trained, frozen), folder / "checkpoint.ckpt")
    for name, proto in (("train", model), ("eval", eval_model), ("optimizer", optimizer_model)):
        onnx.save(proto, folder / f"{name}.onnx")


def test_a_script_of_1_13_trains_as_pytorch_does(tmp_path: Path) -> None:
    linear = nn.Linear(4, 3)
    written(tmp_path, linear)
    state = CheckpointState(str(tmp_path / "checkpoint.ckpt"))  # type: ignore[arg-type]
    model: Any = Module(tmp_path / "train.onnx", state, tmp_path / "eval.onnx")
    optimizer = Optimizer(tmp_path / "optimizer.onnx", model)
    truth = torch.optim.AdamW(linear.parameters(), lr=1e-3, eps=1e-6, weight_decay=0.0)
    for _ in range(20):
        x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
        loss, logits = model([x.numpy(), y.numpy().astype(np.int32)])
        optimizer.step()
        model.reset_grad()
        truth.zero_grad()
        output = linear(x)
        expected = nn.functional.cross_entropy(output, y)
        expected.backward()
        truth.step()
        np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
        np.testing.assert_allclose(logits, output.detach().numpy(), rtol=1e-4, atol=1e-6)
    model.eval()
    assert len(model((x.numpy(), y.numpy()))) == 2
    model.save_checkpoint(tmp_path / "after.ckpt")
    after = CheckpointState.load_checkpoint(tmp_path / "after.ckpt").parameters["weight"].data
    np.testing.assert_allclose(after, linear.weight.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_lists_of_another_length_are_refused_as_other_calls_are(tmp_path: Path) -> None:
    written(tmp_path, nn.Linear(4, 3))
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint.ckpt")
    model: Any = Module(tmp_path / "train.onnx", state)
    x = np.zeros((2, 4), np.float32)
    for inputs in ([x], [x, np.zeros(2, np.int32), x]):
        with pytest.raises(TypeError, match="input"):
            model(inputs)
