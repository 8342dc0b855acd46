"""Artifacts of modules and of ONNX files train as PyTorch does."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import GPT2Config, GPT2LMHeadModel

from ortrain.errors import GraphError, InputError, OrtrainWarning, StateError
from ortrain.ondevice import CheckpointState, Module, losses
from ortrain.ondevice.artifacts import LossType, OptimType, generate_artifacts
from ortrain.ondevice.making.lora import LoRA
from tests.ondevice.sessions import Arrays, gradients, run, session, tensors_of


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3),
        nn.BatchNorm2d(6, momentum=0.3),
        nn.Flatten(),
        nn.Linear(6, 5),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP": (mlp, (6, 10)),
    "CNN": (cnn, (6, 1, 8, 8)),
}


def exported(module: nn.Module, x: Tensor, path: Path, **more: Any) -> Path:
    """The module's file, as an exporter writes it for training."""
    before = {name: value.clone() for name, value in module.state_dict().items()}
    options: dict[str, Any] = {
        "dynamo": False,
        "opset_version": 18,
        "training": torch.onnx.TrainingMode.TRAINING,
        "do_constant_folding": False,
        "input_names": ["input"],
        "output_names": ["output"],
        "dynamic_axes": {"input": {0: "batch"}},
    }
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (x,), path, **{**options, **more})
    module.load_state_dict(before)  # tracing ran it
    return path


def names_of(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


def compared(folder: Path, module: nn.Module, tensors: Arrays, values: Arrays, loss: Any) -> None:
    """Checks loss, gradients and updated buffers of a training model against a backward."""
    found = gradients(session(folder / "training_model.onnx"), {**tensors, **values})
    value = loss(module)
    value.backward()
    close(found["loss"], value.detach())
    for name, parameter in module.named_parameters():
        close(found[name], parameter.grad)
    updated = [name for name in found if name.endswith(".updated")]
    for name in updated:
        close(found[name], module.get_buffer(name.removesuffix(".updated")))
    assert len(updated) >= 2 * sum(isinstance(part, nn.BatchNorm2d) for part in module.modules())


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


# -- where models come from ----------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("source", ["module", "file", "file of opset 15"])
def test_one_run_has_the_loss_and_gradients_of_pytorch(
    tmp_path: Path, name: str, source: str
) -> None:
    make, shape = MODELS[name]
    module, x, labels = make(), torch.randn(shape), torch.randint(0, 5, shape[:1])
    tensors = tensors_of(module)
    if source == "module":
        generate_artifacts(
            module, loss=LossType.CrossEntropyLoss, example_inputs=(x,), artifact_directory=tmp_path
        )
    else:
        opset = {"opset_version": 15} if "15" in source else {}
        generate_artifacts(
            exported(module, x, tmp_path / "model.onnx", **opset),
            requires_grad=names_of(module),
            loss=LossType.CrossEntropyLoss,
            artifact_directory=tmp_path,
        )
    values = {"input": x.numpy(), "labels": labels.numpy()}
    compared(tmp_path, module, tensors, values, lambda m: F.cross_entropy(m(x), labels))

    # Evaluation mode, and another batch size.
    tensors, module = tensors_of(module), module.eval()
    few, values = x[:1], {"input": x[:1].numpy(), "labels": labels[:1].numpy()}
    found = run(session(tmp_path / "eval_model.onnx"), {**tensors, **values})
    close(found["loss"], F.cross_entropy(module(few), labels[:1]).detach())
    assert set(found) == {"loss"}


def test_a_loss_in_python_has_several_terms_outputs_and_targets(tmp_path: Path) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 1)

        def forward(self, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
            hidden = torch.tanh(self.body(x) * scale)
            return {"classes": self.a(hidden), "value": self.b(hidden)}

    def loss(outputs: dict[str, Tensor], labels: Tensor, wanted: Tensor) -> Tensor:
        term = F.cross_entropy(outputs["classes"], labels, label_smoothing=0.1)
        return term + 0.3 * F.huber_loss(outputs["value"], wanted)

    module = Heads()
    x, scale = torch.randn(6, 4), torch.rand(6, 1)
    labels, wanted = torch.randint(0, 3, (6,)), torch.randn(6, 1)
    generate_artifacts(
        module,
        loss=loss,
        example_inputs={"x": x, "scale": scale},
        example_targets=(labels, wanted),
        additional_output_names=["value"],
        artifact_directory=tmp_path,
    )
    model = session(tmp_path / "training_model.onnx")
    assert [v.name for v in model.get_inputs()][:4] == ["x", "scale", "labels", "wanted"]
    assert [v.name for v in model.get_outputs()][:2] == ["loss", "value"]
    named = {"x": x, "scale": scale, "labels": labels, "wanted": wanted}
    values = {name: tensor.numpy() for name, tensor in named.items()}

    def whole(module: nn.Module) -> Tensor:
        return loss(module(x, scale), labels, wanted)

    compared(tmp_path, module, tensors_of(module), values, whole)


def test_a_decoder_is_trained_without_its_cache(tmp_path: Path) -> None:
    sizes = {"vocab_size": 20, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    module = GPT2LMHeadModel(GPT2Config(**sizes, **off, bos_token_id=0, eos_token_id=1))

    def loss(outputs: Any, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs.logits[:, :-1].reshape(-1, 20), labels[:, 1:].reshape(-1))

    ids = torch.randint(2, 20, (3, 6))
    generate_artifacts(
        module,
        loss=loss,
        example_inputs={"input_ids": ids},
        example_targets=(ids,),
        artifact_directory=tmp_path,
    )
    assert module.config.use_cache
    values = {"input_ids": ids.numpy(), "labels": ids.numpy()}
    compared(tmp_path, module, tensors_of(module), values, lambda m: loss(m(ids), ids))


def test_a_module_that_returns_its_loss_needs_no_other(tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            output = self.layer(x)
            return F.mse_loss(output, y), output

    module, x, y = Own(), torch.randn(6, 4), torch.randn(6, 1)
    generate_artifacts(module, example_inputs=(x, y), artifact_directory=tmp_path)
    found = gradients(
        session(tmp_path / "training_model.onnx"),
        {**tensors_of(module), "x": x.numpy(), "y": y.numpy()},
    )
    loss, _ = module(x, y)
    loss.backward()
    close(next(iter(found.values())), loss.detach())
    close(found["layer.weight"], module.layer.weight.grad)


@pytest.mark.parametrize("from_file", [False, True], ids=["module", "file"])
def test_dropout_trains_by_the_seed_and_is_off_in_evaluation(
    tmp_path: Path, from_file: bool
) -> None:
    module = nn.Sequential(nn.Linear(10, 200), nn.Dropout(0.25), nn.Dropout(0.25))
    x = torch.randn(4, 10)
    generate_artifacts(
        exported(module, x, tmp_path / "model.onnx") if from_file else module,
        requires_grad=names_of(module),
        loss=LossType.MSELoss,
        example_inputs=None if from_file else (x,),
        additional_output_names=["output"],
        artifact_directory=tmp_path,
    )
    values = {**tensors_of(module), "input": x.numpy(), "target": np.zeros((4, 200), np.float32)}
    model = session(tmp_path / "training_model.onnx")
    first, again, other = (
        gradients(model, {**values, "seed": np.array([seed])}) for seed in (7, 7, 8)
    )
    np.testing.assert_array_equal(first["output"], again["output"])
    assert (first["output"] != other["output"]).any()
    kept = first["output"] != 0
    assert kept.mean() == pytest.approx(0.75**2, abs=0.07)
    plain = module.eval()(x).detach().numpy()
    np.testing.assert_allclose(first["output"][kept], plain[kept] / 0.75**2, rtol=1e-5)
    np.testing.assert_allclose(  # the same mask in the backward
        first["0.bias"], (2 / plain.size * first["output"] * kept / 0.75**2).sum(0), rtol=1e-5
    )
    found = run(session(tmp_path / "eval_model.onnx"), values)
    close(found["output"], plain)


# -- what is trained, and what is not --------------------------------------------------------------


def test_gradients_accumulate_until_they_are_reset(tmp_path: Path) -> None:
    module, x, labels = mlp(), torch.randn(6, 10), torch.randint(0, 5, (6,))
    generate_artifacts(
        module, loss=LossType.CrossEntropyLoss, example_inputs=(x,), artifact_directory=tmp_path
    )
    values = {**tensors_of(module), "input": x.numpy(), "labels": labels.numpy()}
    model = session(tmp_path / "training_model.onnx")
    once = gradients(model, values)
    twice = gradients(model, values, buffers=once)
    for name in names_of(module):
        np.testing.assert_array_equal(twice[name], 2 * once[name])


def test_frozen_layers_have_no_backward(tmp_path: Path) -> None:
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    x = torch.randn(2, 8)

    def operators(**more: Any) -> int:
        generate_artifacts(
            module,
            loss=LossType.MSELoss,
            example_inputs=(x,),
            artifact_directory=tmp_path,
            **more,
        )
        graph = onnx.load(tmp_path / "training_model.onnx").graph
        return sum(node.op_type in ("MatMul", "Gemm") for node in graph.node)

    # Each layer forward, and its weight; all but the first also the gradient of its input.
    assert operators() == 4 + 4 + 3
    assert operators(requires_grad=["3.weight", "3.bias"]) == 4 + 1
    inputs = [v.name for v in session(tmp_path / "training_model.onnx").get_inputs()]
    assert inputs[2:5] == ["3.weight", "3.bias", "0.weight"]
    assert "0.weight_grad.accumulation.buffer" not in inputs


def test_initializers_of_neither_list_stay_constants(tmp_path: Path) -> None:
    weight = numpy_helper.from_array(np.eye(3, dtype=np.float32), "weight")
    bias = numpy_helper.from_array(np.ones(3, np.float32), "bias")
    offset = numpy_helper.from_array(np.ones(3, np.float32), "offset")
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "weight"], ["product"]),
            helper.make_node("Add", ["product", "bias"], ["moved"]),
            helper.make_node("Add", ["moved", "offset"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
        [weight, bias, offset],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    # Scripts name all parameters and buffers of a module, some of which an exporter leaves out.
    with pytest.warns(OrtrainWarning, match="frozen_params has num_batches_tracked, of which"):
        generate_artifacts(
            model,
            requires_grad=["weight"],
            frozen_params=["bias", "num_batches_tracked"],
            loss=LossType.MSELoss,
            artifact_directory=tmp_path,
            prefix="my_",
        )
    inputs = [v.name for v in session(tmp_path / "my_training_model.onnx").get_inputs()]
    gradient = ["weight_grad.accumulation.buffer", "lazy_reset_grad"]
    assert inputs == ["x", "target", "weight", "bias", *gradient]
    inputs = [v.name for v in session(tmp_path / "my_eval_model.onnx").get_inputs()]
    assert inputs == ["x", "target", "weight", "bias"]


def test_normalization_that_is_frozen_stays_so(tmp_path: Path) -> None:
    module = cnn()
    module[1].eval()
    x, labels = torch.randn(6, 1, 8, 8), torch.randint(0, 5, (6,))
    tensors = tensors_of(module)
    tensors["1.running_mean"][:] = module[1].running_mean[:] = torch.randn(4)
    generate_artifacts(
        module, loss=LossType.CrossEntropyLoss, example_inputs=(x,), artifact_directory=tmp_path
    )
    assert not module[1].training
    assert module[5].training
    found = gradients(
        session(tmp_path / "training_model.onnx"),
        {**tensors, "input": x.numpy(), "labels": labels.numpy()},
    )
    F.cross_entropy(module(x), labels).backward()
    close(found["1.weight"], module[1].weight.grad)
    assert "5.running_mean.updated" in found
    assert "1.running_mean.updated" not in found


def test_a_parameter_without_influence_is_frozen_with_a_warning(tmp_path: Path) -> None:
    module = mlp()
    module.register_parameter("spare", nn.Parameter(torch.ones(3)))
    module.forward = lambda x: nn.Sequential.forward(module, x) + 0 * module.spare.detach().sum()
    with pytest.warns(OrtrainWarning, match="the loss does not depend on spare: frozen"):
        generate_artifacts(
            module,
            loss=LossType.MSELoss,
            example_inputs=(torch.randn(2, 10),),
            artifact_directory=tmp_path,
        )


# -- other forms of the files ----------------------------------------------------------------------


def test_ort_format_computes_the_same(tmp_path: Path) -> None:
    module, x = mlp(), torch.randn(6, 10)
    generate_artifacts(
        module,
        loss=LossType.MSELoss,
        example_inputs=(x,),
        artifact_directory=tmp_path,
        ort_format=True,
    )
    values = {**tensors_of(module), "input": x.numpy(), "target": np.zeros((6, 5), np.float32)}
    plain, ort = (
        gradients(session(tmp_path / f"training_model{suffix}"), values)
        for suffix in (".onnx", ".ort")
    )
    for name, value in plain.items():
        np.testing.assert_allclose(ort[name], value, rtol=1e-6, atol=1e-7)


def test_the_files_are_standard_onnx(tmp_path: Path) -> None:
    generate_artifacts(
        cnn(),
        loss=LossType.CrossEntropyLoss,
        example_inputs=(torch.randn(6, 1, 8, 8),),
        artifact_directory=tmp_path,
    )
    for file in tmp_path.glob("*.onnx"):
        model = onnx.load(file)
        if file.name == "eval_model.onnx":  # an inference model can be cut out of it
            assert "output" in {value.name for value in model.graph.value_info}
        onnx.checker.check_model(model, full_check=True)
        assert [(each.domain, each.version) for each in model.opset_import] == [("", 18)]
        assert not any(node.domain for node in model.graph.node)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"requires_grad": ["0.wieght"]}, GraphError, "has no parameter '0.wieght'"),
        (
            {"requires_grad": [], "optimizer": OptimType.AdamW},
            GraphError,
            "no parameter to train for the optimizer",
        ),
        ({"loss_input_names": ["logits"]}, GraphError, "has no output 'logits'"),
        ({"additional_output_names": ["hidden"]}, GraphError, "has no value 'hidden'"),
        ({"loss": losses.MSELoss("none")}, GraphError, "what is trained on is a float32 scalar"),
        ({"loss": None}, GraphError, "what is trained on is a float32 scalar"),
        ({"loss": 3}, TypeError, "expected a LossType"),
        ({"example_inputs": None}, ValueError, "example_inputs is missing"),
        ({"loss": lambda output: output.sum(), "example_targets": (1,)}, GraphError, "takes 0 arg"),
        ({"example_targets": (1,)}, ValueError, "leave them out"),
        (
            {"lora": LoRA(2, ["*.wieght"])},
            GraphError,
            r"is named \*.wieght(?s:.*)0.weight, 2.weight",
        ),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(
    tmp_path: Path, more: dict[str, Any], error: type[Exception], message: str
) -> None:
    options = {"loss": LossType.MSELoss, "example_inputs": (torch.randn(2, 10),), **more}
    with pytest.raises(error, match=message):
        generate_artifacts(mlp(), artifact_directory=tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"requires_grad": ["0.wieght"]}, r"(?s)no initializer '0.wieght'.*0.weight"),
        ({"frozen_params": ["0.weight"]}, "'0.weight' stands in requires_grad and in frozen"),
        ({"loss_input_names": ["logits"]}, "has no output 'logits'"),
        ({"lora": LoRA(2, "2.*"), "requires_grad": ["0.wieght"]}, "no initializer '0.wieght'"),
    ],
)
def test_a_file_is_refused_with_the_name_that_is_wrong(
    tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    module = mlp()
    file = exported(module, torch.randn(2, 10), tmp_path / "model.onnx")
    options = {"requires_grad": names_of(module), "loss": LossType.MSELoss, **more}
    with pytest.raises(GraphError, match=message):
        generate_artifacts(file, artifact_directory=tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["step", "seed", "learning_rate", "lazy_reset_grad"])
def test_an_input_of_a_name_that_training_needs_is_refused(tmp_path: Path, name: str) -> None:
    file = exported(
        mlp(), torch.randn(2, 10), tmp_path / "model.onnx", input_names=[name], dynamic_axes={}
    )
    options = {"requires_grad": ["0.weight"], "loss": LossType.MSELoss}
    with pytest.raises(GraphError, match=f"the model has an input '{name}'"):
        generate_artifacts(file, artifact_directory=tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_a_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no ONNX model at .*gone\.onnx"):
        generate_artifacts(tmp_path / "gone.onnx", requires_grad=["w"])


# -- adapters --------------------------------------------------------------------------------------


@pytest.mark.parametrize("from_file", [False, True], ids=["module", "file"])
def test_adapters_have_the_gradients_of_pytorch_and_the_base_none(
    tmp_path: Path, from_file: bool
) -> None:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear, a: Tensor, b: Tensor) -> None:
            super().__init__()
            self.base, self.a, self.b = base, nn.Parameter(a), nn.Parameter(b)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + 2 * x @ self.a.T @ self.b.T

    module, x, labels = mlp(), torch.randn(6, 10), torch.randint(0, 5, (6,))
    generate_artifacts(
        exported(module, x, tmp_path / "model.onnx") if from_file else module,
        loss=LossType.CrossEntropyLoss,
        lora=LoRA(rank=3, targets=["*.weight"], alpha=6),
        example_inputs=None if from_file else (x,),
        artifact_directory=tmp_path,
    )
    model = session(tmp_path / "training_model.onnx")
    shapes = {value.name: value.shape for value in model.get_inputs()}
    trained = [name for name in shapes if f"{name}_grad.accumulation.buffer" in shapes]
    assert trained == [f"{i}.lora_{s}.weight" for i in (0, 2) for s in "AB"]
    assert {*names_of(module)} < {*shapes}
    adapters = {name: np.float32(np.random.randn(*shapes[name])) for name in trained}  # noqa: NPY002
    values = {**tensors_of(module), **adapters, "input": x.numpy(), "labels": labels.numpy()}
    found = gradients(model, values)
    for i in (0, 2):
        a, b = (torch.tensor(adapters[f"{i}.lora_{side}.weight"]) for side in "AB")
        module[i] = Adapted(module[i], a, b)
    loss = F.cross_entropy(module(x), labels)
    loss.backward()
    close(found["loss"], loss.detach())
    for i in (0, 2):
        close(found[f"{i}.lora_A.weight"], module[i].a.grad)
        close(found[f"{i}.lora_B.weight"], module[i].b.grad)
    evaluated = run(session(tmp_path / "eval_model.onnx"), values)
    close(evaluated["loss"], loss.detach())


def test_models_of_another_checkpoint_are_told_even_where_names_and_shapes_agree(
    tmp_path: Path,
) -> None:
    for folder, frozen in (("a", ["0.weight", "0.bias"]), ("b", ["2.weight", "2.bias"])):
        module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        generate_artifacts(
            module,
            requires_grad=[name for name in names_of(module) if name not in frozen],
            loss=LossType.MSELoss,
            example_inputs=(torch.randn(2, 4),),
            artifact_directory=tmp_path / folder,
        )
    state = CheckpointState.load_checkpoint(tmp_path / "a" / "checkpoint")
    with pytest.raises(InputError, match="does not belong to this checkpoint"):
        Module(tmp_path / "a" / "training_model.onnx", state, tmp_path / "b" / "eval_model.onnx")


def test_a_nominal_checkpoint_gets_its_parameters_on_the_device(tmp_path: Path) -> None:
    module, x = cnn(), torch.randn(6, 1, 8, 8)
    generate_artifacts(
        module,
        loss=LossType.CrossEntropyLoss,
        example_inputs=(x,),
        artifact_directory=tmp_path,
        nominal_checkpoint=True,
    )
    files = (tmp_path / "training_model.onnx", tmp_path / "eval_model.onnx")
    whole, nominal = (
        Module(files[0], CheckpointState.load_checkpoint(tmp_path / name), files[1])
        for name in ("checkpoint", "nominal_checkpoint")
    )
    values = x.numpy(), torch.randint(0, 5, (6,)).numpy()
    with pytest.raises(StateError, match="load the model parameters"):
        nominal(*values)
    nominal.copy_buffer_to_parameters(whole.get_contiguous_parameters(), trainable_only=False)
    np.testing.assert_array_equal(nominal(*values), whole(*values))


# -- without anything to train ---------------------------------------------------------------------


def test_artifacts_without_trainable_parameters_compute_loss_and_evaluation(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).requires_grad_(
        False
    )
    x, labels = torch.randn(5, 4), torch.randint(0, 3, (5,))
    generate_artifacts(
        module, loss=LossType.CrossEntropyLoss, artifact_directory=tmp_path, example_inputs=(x,)
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    device = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    for mode in (True, False):
        device.train(mode)
        expected = F.cross_entropy(module.train(mode)(x), labels)
        found = device(x.numpy(), labels.numpy())
        loss = found[0] if isinstance(found, tuple) else found
        assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    close(state.buffers["1.running_mean"].data, module[1].running_mean)
    assert not state.trained()
    assert state.parameters["0.weight"].grad is None
    assert not (tmp_path / "optimizer_model.onnx").exists()
