"""Scripts for ``onnxblock`` of ONNX Runtime 1.13 make models that train as PyTorch does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn

from ortrain.compat.onnxblock import TrainingModel, onnx_model
from ortrain.errors import GraphError, StateError
from ortrain.ondevice import CheckpointState, Module, Optimizer, onnxblock


class Classifier(TrainingModel):
    def __init__(self) -> None:
        super().__init__()
        self._loss = onnxblock.loss.CrossEntropyLoss()

    def build(self, input_name: str) -> Any:
        return self._loss(input_name)


def network() -> tuple[nn.Module, onnx.ModelProto]:
    """A normalized layer and a second one, in PyTorch and in training mode as ONNX."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    names = {
        name: numpy_helper.from_array(value.detach().numpy().copy(), name)
        for name, value in module.state_dict().items()
        if name != "1.num_batches_tracked"
    }
    nodes = [
        helper.make_node("Gemm", ["input", "0.weight", "0.bias"], ["hidden"], transB=1),
        helper.make_node(
            "BatchNormalization",
            ["hidden", "1.weight", "1.bias", "1.running_mean", "1.running_var"],
            ["normal", "mean", "variance"],
            training_mode=1,
            momentum=0.9,
        ),
        helper.make_node("Relu", ["normal"], ["positive"]),
        helper.make_node("Gemm", ["positive", "3.weight", "3.bias"], ["output"], transB=1),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "network",
        [value("input", onnx.TensorProto.FLOAT, ["batch", 4])],
        [value("output", onnx.TensorProto.FLOAT, ["batch", 3])],
        [*names.values()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=8)
    return module, model


def made(folder: Path, model: onnx.ModelProto, classifier: Classifier) -> tuple[Any, Any]:
    """The model and the optimizer of a script's files."""
    with onnx_model(model) as accessor:
        classifier(model.graph.output[0].name)
        evaluation = accessor.eval_model
    onnx.save(model, folder / "training.onnx")
    onnx.save(evaluation, folder / "evaluation.onnx")
    optimizer = onnxblock.optim.AdamW(clip_grad=None)
    with onnx_model() as accessor:
        optimizer(classifier.parameters())
        onnx.save(accessor.model, folder / "optimizer.onnx")
    onnxblock.save_checkpoint(classifier.parameters(), folder / "checkpoint")
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    trained = Module(folder / "training.onnx", state, folder / "evaluation.onnx")
    return trained, Optimizer(folder / "optimizer.onnx", trained)


def test_a_training_model_trains_all_that_pytorch_does(tmp_path: Path) -> None:
    module, model = network()
    trained, optimizer = made(tmp_path, model, Classifier())
    reference = torch.optim.AdamW(module.parameters(), lr=1e-3)
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    for _ in range(5):
        trained.train()
        loss = float(trained(x.numpy(), y.numpy()))
        optimizer.step()
        trained.lazy_reset_grad()
        expected = nn.functional.cross_entropy(module(x), y)
        reference.zero_grad()
        expected.backward()
        reference.step()
        assert loss == pytest.approx(expected.item(), rel=1e-5)
    trained.eval()
    module.eval()
    expected = nn.functional.cross_entropy(module(x), y).item()
    assert float(trained(x.numpy(), y.numpy())) == pytest.approx(expected, rel=1e-4)


def test_what_is_named_otherwise_is_frozen() -> None:
    _, model = network()
    classifier = Classifier()
    classifier.requires_grad("0.weight", False)
    with onnx_model(model):
        classifier("output")
    trained, frozen = classifier.parameters()
    assert {p.name for p in trained} == {"0.bias", "1.weight", "1.bias", "3.weight", "3.bias"}
    assert [p.name for p in frozen] == ["0.weight"]
    assert np.isfinite(numpy_helper.to_array(frozen[0])).all()


def test_an_error_inside_leaves_the_model_as_it_was() -> None:
    _, model = network()
    before = model.SerializeToString()
    with pytest.raises(GraphError, match="nowhere"), onnx_model(model):
        Classifier()("nowhere")
    assert model.SerializeToString() == before
    with pytest.raises(StateError, match="inside another"), onnx_model(model), onnx_model():
        pass
    with pytest.raises(TypeError, match="ModelProto"), onnx_model("model.onnx"):  # type: ignore[arg-type]
        pass
