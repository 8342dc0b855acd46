"""ONNX models that are given, and graphs that a function of the script changes."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from ortrain import Options
from ortrain.classic import ORTTrainer
from ortrain.errors import GraphError, InputError, StateError
from tests.classic import models
from tests.classic.test_training import expect_equal

ENGINES = ["onnxruntime", "aten"]


def given(rows: int | str = "rows", optimum: str = "loss") -> onnx.ModelProto:
    """The classifier of `models` with its loss, written by hand, with the same weights."""
    weights = {n: p.detach().numpy() for n, p in models.classifier().named_parameters()}
    nodes = [
        helper.make_node("Gemm", ["x", "hidden.weight", "hidden.bias"], ["a"], transB=1),
        helper.make_node("Tanh", ["a"], ["b"]),
        helper.make_node("LayerNormalization", ["b", "LayerNorm.weight", "LayerNorm.bias"], ["c"]),
        helper.make_node("Gemm", ["c", "output.weight", "output.bias"], ["logits"], transB=1),
        helper.make_node("SoftmaxCrossEntropyLoss", ["logits", "y"], [optimum]),
    ]
    graph = helper.make_graph(
        nodes,
        "classifier",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, 6]),
            helper.make_tensor_value_info("y", TensorProto.INT64, [rows]),
        ],
        [
            helper.make_tensor_value_info(optimum, TensorProto.FLOAT, []),
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, [rows, 4]),
        ],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def trainer_of(model: Any, engine: str = "onnxruntime", **more: Any) -> ORTTrainer:
    more = {"ortrain": Options(engine=engine), **more}  # type: ignore[arg-type]
    return models.second(model, loss_fn=None, **more)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_onnx_model_trains_as_its_module_does(engine: str) -> None:
    plain = models.classifier()
    data = list(models.batches(40))
    trainer = trainer_of(given(), engine, batch={"gradient_accumulation_steps": 4})
    losses = [trainer.train_step(x, y)[0].item() for x, y in data]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    expected = models.train_plain(plain, optimizer, data, 4, lambda _: 0.01)
    assert losses == pytest.approx(expected, abs=1e-5)
    for name, tensor in trainer.state_dict(pytorch_format=True).items():
        parameter = dict(plain.named_parameters())[name].detach()
        torch.testing.assert_close(tensor, parameter, rtol=0, atol=1e-5, msg=name)
    x, y = data[0]
    torch.testing.assert_close(trainer.eval_step(x, y)[1], plain(x), rtol=0, atol=1e-4)


def test_an_onnx_model_of_the_first_generation_trains_and_is_saved(tmp_path: Path) -> None:
    model = given()
    before = model.SerializeToString()
    trainer = models.of_first(model, loss_fn=None, options=Options(engine="onnxruntime"))
    x, y = next(models.batches(1))
    for _ in range(3):
        trainer.train_step(x, y, 0.05)
    loss, _ = trainer.eval_step(x, y)
    trainer.save_as_onnx(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (found,) = session.run(["loss"], {"x": x.numpy(), "y": y.numpy()})
    assert float(found) == pytest.approx(loss.item(), abs=1e-5)
    assert model.SerializeToString() == before


def test_frozen_initializers_of_an_onnx_model_stay_as_they_are() -> None:
    trainer = trainer_of(given(), utils={"frozen_weights": ["output.weight"]})
    before = trainer.state_dict(pytorch_format=True)
    trainer.train_step(*next(models.batches(1)))
    after = trainer.state_dict(pytorch_format=True)
    assert {n for n in before if torch.equal(before[n], after[n])} == {"output.weight"}


def test_a_model_that_torch_has_exported_trains_too() -> None:
    model = models.classifier(models.WithOwnLoss)
    x, y = next(models.batches(1))
    content = io.BytesIO()
    with warnings.catch_warnings(action="ignore"):
        program = torch.onnx.export(
            model, (x, y), dynamo=True, input_names=["x", "y"], output_names=["loss", "logits"]
        )
    assert program is not None
    program.save(content)
    exported = onnx.load_from_string(content.getvalue())
    trainer = trainer_of(exported, batch={"gradient_accumulation_steps": 1})
    plain = models.classifier()
    data = list(models.batches(10))
    losses = [trainer.train_step(x, y)[0].item() for x, y in data]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    expected = models.train_plain(plain, optimizer, data, 1, lambda _: 0.01)
    assert losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"description": {**models.DESCRIPTION, "inputs": [("x", ["n", 6]), ("z", ["n"])]}},
            "x, y",
        ),
        ({"description": {**models.DESCRIPTION, "outputs": [("cost", [], True)]}}, "loss, logits"),
        ({"utils": {"frozen_weights": ["hidden.wait"]}}, "hidden.weight"),
        ({"mixed_precision": {"enabled": True}}, "dtypes that it has"),
    ],
)
def test_what_is_said_wrong_of_an_onnx_model_is_told(change: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        trainer_of(given(), **change)


def test_a_loss_function_beside_an_onnx_model_is_refused() -> None:
    with pytest.raises(InputError, match="which has its loss"):
        models.second(given())  # type: ignore[arg-type]


# -- graphs that a function changes ----------------------------------------------------------------


def halve(model: onnx.ModelProto) -> None:
    """Puts a factor behind the loss."""
    for node in model.graph.node:
        for i, name in enumerate(node.output):
            if name == "loss":
                node.output[i] = "whole_loss"
    factor = numpy_helper.from_array(np.float32(0.5), "factor")
    model.graph.initializer.append(factor)
    model.graph.node.append(helper.make_node("Mul", ["whole_loss", "factor"], ["loss"]))


@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_function_changes_the_graph_that_is_trained(engine: str, returns: bool) -> None:
    seen: list[set[str]] = []

    def change(model: onnx.ModelProto) -> onnx.ModelProto | None:
        seen.append({tensor.name for tensor in model.graph.initializer})
        halve(model)
        return model if returns else None

    ours, plain = models.classifier(), models.classifier()
    trainer = models.of_first(
        ours,
        "SGDOptimizer",
        _extra_postprocess=change,
        options=Options(engine=engine),  # type: ignore[arg-type]
    )
    data = list(models.batches(10))
    losses = [trainer.train_step(x, y, 0.2)[0].item() for x, y in data]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.0)
    expected = models.train_plain(plain, optimizer, data, 1, lambda _: 0.1, None)
    assert losses == pytest.approx([loss / 2 for loss in expected], abs=1e-5)
    expect_equal(ours, plain)
    assert seen[0] >= {n for n, _ in ours.named_parameters()}
    x, y = data[0]
    whole = nn.functional.cross_entropy(plain(x), y).item()
    assert trainer.eval_step(x, y)[0].item() == pytest.approx(whole / 2, abs=1e-5)


def test_the_changed_graph_is_the_one_that_is_saved(tmp_path: Path) -> None:
    model = models.classifier()
    trainer = models.second(model, _internal_use={"extra_postprocess": halve})
    with pytest.raises(StateError, match="before a step"):
        trainer.save_as_onnx(tmp_path / "model.onnx")
    x, y = next(models.batches(1))
    trainer.train_step(x, y)
    trainer.save_as_onnx(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (found,) = session.run(["loss"], {"x": x.numpy(), "y": y.numpy()})
    whole = nn.functional.cross_entropy(model(x), y).item()
    assert float(found) == pytest.approx(whole / 2, abs=1e-5)


def test_dropout_and_running_statistics_stay_in_a_changed_graph() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    description = {
        "inputs": [("input", ["rows", 6]), ("y", ["rows"])],
        "outputs": [("loss", [], True)],
    }
    trainer = models.second(
        model, description=description, _internal_use={"extra_postprocess": lambda m: None}
    )
    x, y = next(models.batches(1, rows=64))
    mean = model[2].running_mean.clone()
    losses = {trainer.train_step(x, y).item() for _ in range(3)}
    assert len(losses) == 3
    assert not torch.equal(model[2].running_mean, mean)
    assert model[2].num_batches_tracked == 3
    assert trainer.eval_step(x, y).item() == trainer.eval_step(x, y).item()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda model: 3, "returns 3"),
        (lambda model: model.graph.output.pop(), "returns ValueInfoProto"),
        (lambda model: [model.graph.output.pop(), None][1], "has removed logits"),
    ],
)
def test_what_a_function_leaves_is_looked_at(change: Any, told: str) -> None:
    trainer = models.second(models.classifier(), _internal_use={"extra_postprocess": change})
    with pytest.raises((InputError, GraphError), match=told):
        trainer.train_step(*next(models.batches(1)))


def test_a_changed_graph_is_not_in_mixed_precision() -> None:
    with pytest.raises(InputError, match="in float32"):
        models.of_first(models.classifier(), use_mixed_precision=True, postprocess_model=halve)
    with pytest.raises(InputError, match="give one"):
        models.of_first(models.classifier(), _extra_postprocess=halve, postprocess_model=halve)


def test_saving_before_a_step_is_told(tmp_path: Path) -> None:
    for trainer in (models.second(models.classifier()), models.of_first(models.classifier())):
        with pytest.raises(StateError, match="before a step"):
            trainer.save_as_onnx(tmp_path / "model.onnx")
    assert not [*tmp_path.iterdir()]


def test_saved_files_have_the_described_sizes_and_the_models_names(tmp_path: Path) -> None:
    model = models.classifier()
    description = {
        "inputs": [("x", [8, 6]), ("y", [8])],
        "outputs": [("loss", [], True), ("logits", [8, 4])],
    }
    for each, first_size in ((models.DESCRIPTION, "rows"), (description, 8)):
        trainer = models.second(model, description=each)
        trainer.train_step(*next(models.batches(1)))
        trainer.save_as_onnx(tmp_path / "model.onnx")
        graph = onnx.load(tmp_path / "model.onnx").graph
        sizes = [d.dim_param or d.dim_value for d in graph.input[0].type.tensor_type.shape.dim]
        assert sizes == [first_size, 6]
        assert {n for n, _ in model.named_parameters()} <= {t.name for t in graph.initializer}
        assert [value.name for value in graph.output] == ["loss", "logits"]
