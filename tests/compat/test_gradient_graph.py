"""Files with gradients have those of PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper
from torch import nn

from ortrain.compat.gradient_graph import (
    GradientGraphBuilder,
    export_gradient_graph,
    get_optimized_model,
)
from ortrain.errors import GraphError, OrtrainWarning, SaveError, StateError


def session(content: Any) -> onnxruntime.InferenceSession:
    given = content if isinstance(content, bytes) else str(content)
    return onnxruntime.InferenceSession(given, providers=["CPUExecutionProvider"])


class Labelled(nn.Module):
    """The names of its argument and of its weights are those that the file has for others."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)
        self.frozen.requires_grad_(False)

    def forward(self, labels: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.frozen(labels)).tanh())


CASES = {
    "classes": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), "long"),
    "numbers": (lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8)), "float"),
    "frozen parts, buffers and names": (Labelled, "long"),
}


@pytest.mark.parametrize("name", CASES)
def test_an_exported_graph_has_the_gradients_of_pytorch(name: str, tmp_path: Path) -> None:
    make, kind = CASES[name]
    model = make()
    loss_fn: Any = nn.CrossEntropyLoss() if kind == "long" else nn.functional.mse_loss
    x, path = torch.randn(5, 4), tmp_path / "gradients.onnx"
    buffers = {n: b.clone() for n, b in model.named_buffers()}

    def labels(rows: int) -> torch.Tensor:
        return torch.randint(0, 3, (rows,)) if kind == "long" else torch.randn(rows, 8)

    export_gradient_graph(model, loss_fn, x, labels(5), path)
    for n, b in model.named_buffers():
        assert torch.equal(b, buffers[n])
    runs = session(path)
    parameters = dict(model.named_parameters())
    assert [i.name for i in runs.get_inputs()] == ["input", "labels", *parameters]
    trained = [n for n, p in parameters.items() if p.requires_grad]
    assert [o.name for o in runs.get_outputs()] == [
        "output",
        "loss",
        *(f"{n}_grad" for n in trained),
    ]
    for rows in (5, 9):
        x, y = torch.randn(rows, 4), labels(rows)
        feeds = {"input": x.numpy(), "labels": y.numpy()}
        feeds |= {n: p.detach().numpy() for n, p in parameters.items()}
        found = runs.run(None, feeds)
        model.zero_grad()
        output = model(x)
        loss = loss_fn(output, y)
        loss.backward()
        expected = [output, loss, *(parameters[n].grad for n in trained)]
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_a_file_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError):
        export_gradient_graph(
            nn.Linear(2, 2),
            nn.functional.mse_loss,
            torch.ones(1, 2),
            torch.ones(1, 2),
            tmp_path / "file" / "g.onnx",
        )
    with pytest.warns(OrtrainWarning, match="opset_version=21"):
        export_gradient_graph(
            nn.Linear(2, 2),
            nn.functional.mse_loss,
            torch.ones(1, 2),
            torch.ones(1, 2),
            tmp_path / "g.onnx",
            21,
        )


def model(opset: int = 17) -> onnx.ModelProto:
    """loss = mean((x W + b)^2), with a constant that folds."""
    rng = np.random.default_rng(3)
    weights = [("W", (4, 3)), ("b", (3,))]
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "W"], ["h"]),
            helper.make_node("Identity", ["h"], ["same"]),
            helper.make_node("Add", ["same", "b"], ["y"]),
            helper.make_node("Mul", ["y", "y"], ["square"]),
            helper.make_node("ReduceMean", ["square"], ["loss"], keepdims=0),
        ],
        "model",
        [helper.make_tensor_value_info("x", 1, ["n", 4])],
        [
            helper.make_tensor_value_info("y", 1, ["n", 3]),
            helper.make_tensor_value_info("loss", 1, []),
        ],
        [
            onnx.numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)
            for name, shape in weights
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


@pytest.mark.parametrize("wanted", [{"W"}, {"b", "W"}, {"x"}, {"x", "W", "b"}])
@pytest.mark.parametrize("kept", [{"loss"}, {"y", "loss"}])
def test_a_model_gets_the_gradients_that_are_asked_for(wanted: set[str], kept: set[str]) -> None:
    proto = model()
    builder = GradientGraphBuilder(proto.SerializeToString(), kept, wanted, "loss")
    with pytest.raises(StateError, match="build"):
        builder.get_model()
    builder.build()
    runs = session(builder.get_model())
    x = torch.randn(6, 4, requires_grad=True)
    w, b = (
        torch.tensor(onnx.numpy_helper.to_array(t)).requires_grad_()
        for t in proto.graph.initializer
    )
    y = x @ w + b
    y.square().mean().backward()
    expected = {"y": y, "loss": y.square().mean(), "W_grad": w.grad, "b_grad": b.grad}
    expected["x_grad"] = x.grad
    names = [o.name for o in runs.get_outputs()]
    assert {*names} == kept | {f"{name}_grad" for name in wanted}
    for name, found in zip(names, runs.run(None, {"x": x.detach().numpy()}), strict=True):
        np.testing.assert_allclose(found, expected[name].detach().numpy(), rtol=1e-5, atol=1e-6)


def test_a_string_is_the_path_of_the_model(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model(), path)
    built = []
    for given in (str(path), path, path.read_bytes()):
        builder = GradientGraphBuilder(given, {"loss"}, {"W"}, "loss")
        builder.build()
        built.append(builder.get_model())
    assert built[0] == built[1] == built[2]
    with pytest.raises(FileNotFoundError):
        GradientGraphBuilder(str(tmp_path / "other.onnx"), {"loss"}, {"W"}, "loss")
    with pytest.raises(TypeError, match="serialized_model"):
        GradientGraphBuilder(model(), {"loss"}, {"W"}, "loss")  # type: ignore[arg-type]


def test_names_that_are_not_there_are_named(tmp_path: Path) -> None:
    content = model().SerializeToString()
    for given, told in (
        (({"loss"}, {"V"}, "loss"), "V"),
        (({"z"}, {"W"}, "loss"), "z"),
        (({"loss"}, {"W"}, "cost"), "cost"),
    ):
        with pytest.raises(GraphError, match=f"the model has no {told}"):
            GradientGraphBuilder(content, *given)
    with pytest.raises(GraphError, match="the model has no V"):
        get_optimized_model(content, {"V"}, None)
    with pytest.raises(GraphError):
        GradientGraphBuilder(b"no model", {"loss"}, {"W"}, "loss")


def test_an_optimized_model_computes_the_same_with_less() -> None:
    proto = model()
    content = get_optimized_model(proto.SerializeToString(), {"W"}, None)
    found = onnx.load_from_string(content)
    assert len(found.graph.node) < len(proto.graph.node)
    assert {t.name for t in found.graph.initializer} >= {"W"}
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)}
    for ours, theirs in zip(
        session(content).run(None, feeds),
        session(proto.SerializeToString()).run(None, feeds),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


WRONG: dict[str, Any] = {
    "model": 3,
    "loss_fn": "mse",
    "example_input": [1.0, 2.0],
    "example_labels": None,
    "gradient_graph_path": 7,
    "opset_version": "12",
}


@pytest.mark.parametrize("name", WRONG)
def test_an_argument_of_another_kind_is_told_by_its_name(name: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "model": nn.Linear(2, 2),
        "loss_fn": nn.MSELoss(),
        "example_input": torch.ones(1, 2),
        "example_labels": torch.ones(1, 2),
        "gradient_graph_path": tmp_path / "graph.onnx",
    }
    with pytest.raises(TypeError, match=f"^{name}="):
        export_gradient_graph(**{**given, name: WRONG[name]})
    assert not any(tmp_path.iterdir())
