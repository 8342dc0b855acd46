"""Models that blocks make train as PyTorch does."""

from __future__ import annotations

import copy
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

import ortrain
from ortrain.autodiff import registry
from ortrain.errors import GraphError, StateError
from ortrain.ondevice import onnxblock
from ortrain.ondevice.artifacts import generate_artifacts
from ortrain.ondevice.onnxblock import blocks
from tests.ondevice.onnxblock.models import Heads, close, floats
from tests.ondevice.sessions import Arrays, gradients, run, session, tensors_of


class WeightedAverageLoss(onnxblock.Block):
    """0.4 MSE of one output and 0.6 MSE of the other."""

    def __init__(self) -> None:
        self.loss1, self.loss2 = onnxblock.loss.MSELoss(), onnxblock.loss.MSELoss()
        self.w1, self.w2 = blocks.Constant(0.4), blocks.Constant(0.6)
        self.add, self.mul = blocks.Add(), blocks.Mul()

    def build(self, name1: str, name2: str) -> Any:
        return self.add(
            self.mul(self.w1(), self.loss1(name1, target_name="target1")),
            self.mul(self.w2(), self.loss2(name2, target_name="target2")),
        )


def weighted_average(module: nn.Module, batch: Arrays) -> Tensor:
    output1, output2 = module(torch.tensor(batch["input"]))
    first = F.mse_loss(output1, torch.tensor(batch["target1"]))
    return 0.4 * first + 0.6 * F.mse_loss(output2, torch.tensor(batch["target2"]))


def batch(size: int = 5, seed: int = 1) -> Arrays:
    return {
        "input": floats(size, 4, seed=seed),
        "target1": floats(size, 3, seed=seed + 10),
        "target2": floats(size, 2, seed=seed + 20),
    }


class Training(onnxblock.TrainingBlock):
    def __init__(self, loss: onnxblock.Block) -> None:
        super().__init__()
        self.loss = loss

    def build(self, *names: str) -> Any:
        return self.loss(*names)


def saved(block: onnxblock.TrainingBlock, folder: Path) -> tuple[Any, Any]:
    """Sessions of the training and the evaluation model."""
    paths = [folder / "training.onnx", folder / "eval.onnx"]
    for model, path in zip(block.to_model_proto(), paths, strict=True):
        onnx.checker.check_model(model, full_check=True)
        onnx.save(model, path)
    return session(paths[0]), session(paths[1])


# -- training blocks -------------------------------------------------------------------------------


def test_a_training_block_has_the_gradients_of_what_requires_them(tmp_path: Path) -> None:
    heads = Heads()
    block = Training(WeightedAverageLoss())
    for name in ("b.weight", "body.weight", "body.bias"):
        block.requires_grad(name)
    block.requires_grad("a.weight", False)
    block.requires_grad("b.bias")
    block.requires_grad("b.bias", value=False)
    model = heads.as_onnx()
    with onnxblock.base(model) as accessor:
        loss = block("output1", "output2")
        training, evaluation = block.to_model_proto()
        assert accessor.model == training
    trained, frozen = block.parameters()
    assert [tensor.name for tensor in trained] == ["body.weight", "body.bias", "b.weight"]
    assert [tensor.name for tensor in frozen] == ["a.weight", "b.bias"]
    held = tensors_of(heads)
    for tensor in (*trained, *frozen):
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), held[tensor.name])
    assert [value.name for value in training.graph.input] == [
        *("input", "target1", "target2"),
        *("body.weight", "body.bias", "b.weight", "a.weight", "b.bias"),
        *(f"{tensor.name}_grad.accumulation.buffer" for tensor in trained),
        "lazy_reset_grad",
    ]
    assert training.graph.output[0].name == evaluation.graph.output[0].name == loss

    module, evaluator = saved(block, tmp_path)
    found = gradients(module, {**held, **batch()})
    expected = weighted_average(heads, batch())
    expected.backward()
    close(found[loss], expected.detach())
    for tensor in trained:
        close(found[tensor.name], heads.get_parameter(tensor.name).grad)
    close(run(evaluator, {**held, **batch()})[loss], expected.detach())

    # A second run adds to the first.
    buffers = {tensor.name: found[tensor.name] for tensor in trained}
    found = gradients(module, {**held, **batch(7, seed=2)}, buffers)
    weighted_average(heads, batch(7, seed=2)).backward()
    for tensor in trained:
        close(found[tensor.name], heads.get_parameter(tensor.name).grad)


def test_other_names_that_are_returned_are_outputs_of_both_models(tmp_path: Path) -> None:
    class WithOutput(Training):
        def build(self, *names: str) -> Any:
            return self.loss(*names), names[1]

    heads, block = Heads(), WithOutput(WeightedAverageLoss())
    block.requires_grad("body.weight")
    with onnxblock.base(heads.as_onnx()):
        loss, output = block("output1", "output2")
    values = {**tensors_of(heads), **batch()}
    module, evaluator = saved(block, tmp_path)
    for found in (gradients(module, values), run(evaluator, values)):
        assert list(found)[:2] == [loss, output]
        close(found["output2"], heads(torch.tensor(batch()["input"]))[1].detach())


class Net(onnxblock.ForwardBlock):
    """Two layers, from nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = blocks.Linear(4, 8), blocks.Linear(8, 3)
        self.activation = blocks.Sigmoid()

    def build(self, name: str) -> str:
        return self.second(self.activation(self.first(name)))


def test_a_model_from_nothing_trains_as_one_of_pytorch(tmp_path: Path) -> None:
    with onnxblock.empty_base() as accessor:
        value = helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 4])
        accessor.model.graph.input.append(value)
        net = Net()
        (output,) = [net("input")]
        model = net.to_model_proto()

    block = Training(onnxblock.loss.CrossEntropyLoss())
    for tensor in model.graph.initializer:
        block.requires_grad(tensor.name)
    with onnxblock.base(model):
        loss = block(output)
    module, _ = saved(block, tmp_path)
    tensors = {t.name: numpy_helper.to_array(t).copy() for t in block.parameters()[0]}

    module_of_torch = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 3))
    with torch.no_grad():
        own = [tensors[f"linear.{kind}{i}"] for i in ("", "_1") for kind in ("weight", "bias")]
        for parameter, array in zip(module_of_torch.parameters(), own, strict=True):
            parameter.copy_(torch.tensor(array.T))
    optimizer = torch.optim.SGD(module_of_torch.parameters(), 0.5)
    losses = []
    for step in range(20):
        x, labels = floats(6, 4, seed=step % 3), np.arange(6) % 3
        found = gradients(module, {**tensors, "input": x, "labels": labels})
        losses.append(found[loss])
        tensors = {name: array - np.float32(0.5) * found[name] for name, array in tensors.items()}
        expected = F.cross_entropy(module_of_torch(torch.tensor(x)), torch.tensor(labels))
        close(found[loss], expected.detach())
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.05


def test_a_training_block_may_build_all_of_the_model(tmp_path: Path) -> None:
    class All(onnxblock.TrainingBlock):
        def build(self, name: str) -> Any:
            output = blocks.Linear(4, 3)(name)
            for tensor in self.base.graph.initializer:
                self.requires_grad(tensor.name)
            return onnxblock.loss.CrossEntropyLoss([1.0, 2.0, 0.5])(output)

    block = All()
    with onnxblock.empty_base() as accessor:
        value = helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 4])
        accessor.model.graph.input.append(value)
        block("input")
    tensors = {t.name: numpy_helper.to_array(t) for t in block.parameters()[0]}
    assert [*tensors] == ["linear.weight", "linear.bias"]
    values = {"input": floats(5, 4), "labels": np.arange(5) % 3}
    found = gradients(saved(block, tmp_path)[0], {**tensors, **values})
    weight, bias = (torch.tensor(t, requires_grad=True) for t in tensors.values())
    scores = torch.tensor(values["input"]) @ weight + bias
    classes = torch.tensor([1.0, 2.0, 0.5])
    F.cross_entropy(scores, torch.tensor(values["labels"]), classes).backward()
    close(found["linear.weight"], weight.grad)
    close(found["linear.bias"], bias.grad)


def test_a_loss_of_one_element_with_axes_is_trained_on(tmp_path: Path) -> None:
    class Kept(onnxblock.Block):
        def build(self, name: str) -> str:
            return blocks.ReduceMean()(onnxblock.loss.MSELoss(reduction="none")(name))

    heads, block = Heads(), Training(Kept())
    block.requires_grad("a.weight")
    with onnxblock.base(heads.as_onnx()):
        loss = block("output1")
    values = {**tensors_of(heads), "input": floats(5, 4), "target": floats(5, 3, seed=6)}
    found = gradients(saved(block, tmp_path)[0], values)
    expected = F.mse_loss(heads(torch.tensor(values["input"]))[0], torch.tensor(values["target"]))
    expected.backward()
    close(found[loss].squeeze(), expected.detach())
    close(found["a.weight"], heads.a.weight.grad)


def test_running_statistics_stand_beside_the_parameters(tmp_path: Path) -> None:
    text = """
    <ir_version: 8, opset_import: ["" : 15]>
    norm (float[batch,4] input) => (float[batch,4] output) {
        output, m, v = BatchNormalization<training_mode = 1>(input, weight, bias, mean, var)
    }
    """
    model, norm = onnx.parser.parse_model(text), nn.BatchNorm1d(4)
    names = {"weight": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}
    for name, attribute in names.items():
        tensor = getattr(norm, attribute).detach().numpy().copy()
        model.graph.initializer.append(numpy_helper.from_array(tensor, name))
    block = Training(onnxblock.loss.MSELoss())
    block.requires_grad("weight")
    block.requires_grad("bias", False)
    with onnxblock.base(model):
        block("output")
    parameters = block.parameters()
    assert isinstance(parameters, onnxblock.Parameters)
    assert [[t.name for t in each] for each in (*parameters, parameters.buffers)] == [
        ["weight"],
        ["bias"],
        ["mean", "var"],
    ]
    values = {t.name: numpy_helper.to_array(t) for t in sum(parameters, parameters.buffers)}
    values |= {"input": floats(6, 4), "target": floats(6, 4, seed=4)}
    found = gradients(saved(block, tmp_path)[0], values)
    F.mse_loss(norm(torch.tensor(values["input"])), torch.tensor(values["target"])).backward()
    close(found["weight"], norm.weight.grad)
    close(found["mean.updated"], norm.running_mean)
    close(found["var.updated"], norm.running_var)


def test_tensors_beside_the_file_are_read_where_its_path_is_given(tmp_path: Path) -> None:
    heads, path = Heads(), tmp_path / "model.onnx"
    onnx.save(heads.as_onnx(), path, save_as_external_data=True, size_threshold=0)
    block = Training(onnxblock.loss.MSELoss())
    block.requires_grad("a.weight")
    with onnxblock.base(onnx.load(path, load_external_data=False), path):
        block("output1")
    (weight,) = block.parameters()[0]
    np.testing.assert_array_equal(numpy_helper.to_array(weight), heads.a.weight.detach())


def test_operators_of_other_domains_are_trained_by_rules_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))

    @ortrain.gradient("com.microsoft::QuickGelu")
    def quick_gelu(g: Any, input: Any, *, alpha: float = 1.702) -> Any:
        s = g.op.Sigmoid(input * alpha)
        return g.dy * s * (1.0 + alpha * input * (1.0 - s))

    class Quick(onnxblock.Block):
        def build(self, name: str) -> str:
            graph = self.base.graph
            self.base.opset_import.append(helper.make_opsetid("com.microsoft", 1))
            node = helper.make_node("QuickGelu", [name], ["quick"], domain="com.microsoft")
            graph.node.append(node)
            value = helper.make_tensor_value_info("quick", TensorProto.FLOAT, ["batch", 3])
            graph.value_info.append(value)
            return onnxblock.loss.MSELoss()("quick")

    heads, block = Heads(), Training(Quick())
    block.requires_grad("a.weight")
    with onnxblock.base(heads.as_onnx()):
        loss = block("output1")
    values = {**tensors_of(heads), "input": floats(5, 4), "target": floats(5, 3, seed=6)}
    found = gradients(saved(block, tmp_path)[0], values)
    output = heads(torch.tensor(values["input"]))[0]
    expected = F.mse_loss(output * (1.702 * output).sigmoid(), torch.tensor(values["target"]))
    expected.backward()
    close(found[loss], expected.detach())
    close(found["a.weight"], heads.a.weight.grad)


def test_a_model_of_strings_is_trained(tmp_path: Path) -> None:
    class Words(onnxblock.ForwardBlock):
        def __init__(self) -> None:
            super().__init__()
            self.encode = blocks.LabelEncoder(keys_strings=["a", "b"], values_floats=[1.0, 2.0])
            self.linear = blocks.Linear(3, 2, bias=False)

        def build(self, name: str) -> str:
            return self.linear(self.encode(name))

    words = Words()
    with onnxblock.empty_base() as accessor:
        value = helper.make_tensor_value_info("input", TensorProto.STRING, [2, 3])
        accessor.model.graph.input.append(value)
        words("input")
    model = words.to_model_proto()
    (weight,) = map(numpy_helper.to_array, model.graph.initializer)
    generate_artifacts(
        model,
        requires_grad=["linear.weight"],
        loss=onnxblock.loss.CrossEntropyLoss(),
        artifact_directory=tmp_path,
    )
    values = {"input": np.array([["a", "b", "c"], ["b", "b", "a"]]), "labels": np.array([1, 0])}
    found = gradients(
        session(tmp_path / "training_model.onnx"), {**values, "linear.weight": weight}
    )
    wanted = torch.tensor(weight, requires_grad=True)
    x = torch.tensor([[1.0, 2, 0], [2, 2, 1]])
    F.cross_entropy(x @ wanted, torch.tensor([1, 0])).backward()
    close(found["linear.weight"], wanted.grad)


# -- artifacts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["model", "file"])
def test_artifacts_of_a_loss_that_is_a_block(tmp_path: Path, source: str) -> None:
    heads = Heads()
    model, path = heads.as_onnx(), tmp_path / "model.onnx"
    onnx.save(copy.deepcopy(model), path, save_as_external_data=True, size_threshold=0)
    trained = ["body.weight", "body.bias", "a.weight", "b.weight"]
    generate_artifacts(
        path if source == "file" else model,
        requires_grad=trained,
        frozen_params=["a.bias"],
        loss=WeightedAverageLoss(),
        artifact_directory=tmp_path / "artifacts",
        additional_output_names=["output2"],
    )
    values = {**tensors_of(heads), **batch()}
    found = gradients(session(tmp_path / "artifacts" / "training_model.onnx"), values)
    assert list(found)[:2] == ["loss", "output2"]
    expected = weighted_average(heads, batch())
    expected.backward()
    close(found["loss"], expected.detach())
    for name in trained:
        close(found[name], heads.get_parameter(name).grad)
    found = run(session(tmp_path / "artifacts" / "eval_model.onnx"), values)
    assert list(found) == ["loss", "output2"]
    close(found["loss"], expected.detach())


def test_a_block_gets_the_outputs_that_are_named_and_returns_results(tmp_path: Path) -> None:
    class Terms(onnxblock.Block):
        def build(self, scores: str, values: str) -> tuple[str, ...]:
            first = onnxblock.loss.CrossEntropyLoss()(scores)
            second = onnxblock.loss.L1Loss()(values)
            return blocks.Add()(first, second), first, values

    heads = Heads()
    generate_artifacts(
        heads.as_onnx(),
        requires_grad=["body.weight"],
        loss=Terms(),
        loss_input_names=["output2", "output1"],
        additional_output_names=["output1"],
        artifact_directory=tmp_path,
    )
    labels, target = np.array([0, 1, 1]), floats(3, 3)
    values = {**tensors_of(heads), "input": floats(3, 4), "labels": labels, "target": target}
    found = list(run(session(tmp_path / "eval_model.onnx"), values).items())
    output1, output2 = heads(torch.tensor(values["input"]))
    first = F.cross_entropy(output2, torch.tensor(labels)).item()
    second = F.l1_loss(output1, torch.tensor(target)).item()
    close([found[0][1], found[1][1]], [first + second, first])
    assert found[2][0] == "output1"
    assert len(found) == 3


def test_an_output_that_is_the_loss_passes_through(tmp_path: Path) -> None:
    heads = Heads()
    with onnxblock.base(heads.as_onnx()):

        class WithLoss(onnxblock.ForwardBlock):
            def build(self, name: str) -> str:
                return onnxblock.loss.MSELoss()(name)

        block = WithLoss()
        block("output1")
    generate_artifacts(
        block.to_model_proto(),
        requires_grad=["a.bias"],
        loss=blocks.PassThrough(),
        artifact_directory=tmp_path,
    )
    values = {**tensors_of(heads), "input": floats(5, 4), "target": floats(5, 3, seed=6)}
    found = gradients(session(tmp_path / "training_model.onnx"), values)
    expected = F.mse_loss(heads(torch.tensor(values["input"]))[0], torch.tensor(values["target"]))
    expected.backward()
    close(found["a.bias"], heads.a.bias.grad)
    close(next(iter(found.values())), expected.detach())


# -- wrong use -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["to_model_proto", "parameters"])
def test_results_are_asked_for_after_the_call(method: str) -> None:
    with pytest.raises(StateError, match=rf"Training.{method}\(\) before Training was called"):
        getattr(Training(blocks.Neg()), method)()


def wrong(change: Callable[[Training], Any], match: str) -> None:
    block = Training(WeightedAverageLoss())
    change(block)
    with onnxblock.base(Heads().as_onnx()), pytest.raises(GraphError, match=match):
        block("output1", "output2")


def test_a_parameter_that_does_not_exist_is_refused() -> None:
    wrong(lambda block: block.requires_grad("body.wieght"), "no initializer 'body.wieght'")


def test_a_block_without_a_parameter_has_a_loss_and_evaluates(tmp_path: Path) -> None:
    heads = Heads()
    block = Training(WeightedAverageLoss())
    with onnxblock.base(heads.as_onnx()):
        block("output1", "output2")
    training, evaluation = saved(block, tmp_path)
    assert not [o.name for o in training.get_outputs() if "grad" in o.name]
    expected = weighted_average(heads, batch()).item()
    for model in (training, evaluation):
        assert next(iter(run(model, batch()).values())) == pytest.approx(expected, rel=1e-5)


def test_an_input_that_requires_a_gradient_has_it_among_the_results(tmp_path: Path) -> None:
    heads = Heads()
    block = Training(WeightedAverageLoss())
    block.requires_grad("input")
    block.requires_grad("a.weight")
    with onnxblock.base(heads.as_onnx()):
        block("output1", "output2")
    training, evaluation = saved(block, tmp_path)
    assert "input_grad" not in [o.name for o in evaluation.get_outputs()]
    found = gradients(training, {**batch(), **tensors_of(heads)})
    x = torch.tensor(batch()["input"], requires_grad=True)
    inputs = {**batch(), "input": x}
    first = F.mse_loss(heads(x)[0], torch.tensor(inputs["target1"]))
    second = F.mse_loss(heads(x)[1], torch.tensor(inputs["target2"]))
    (0.4 * first + 0.6 * second).backward()
    close(found["input_grad"], x.grad)
    close(found["a.weight"], heads.a.weight.grad)


def test_an_input_alone_can_require_a_gradient(tmp_path: Path) -> None:
    block = Training(WeightedAverageLoss())
    block.requires_grad("input")
    with onnxblock.base(Heads().as_onnx()):
        block("output1", "output2")
    training, _ = saved(block, tmp_path)
    assert [o.name for o in training.get_outputs()][-1] == "input_grad"


def test_an_integer_input_has_no_gradient() -> None:
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["n"], ["x"], to=TensorProto.FLOAT),
            helper.make_node("Mul", ["x", "w"], ["y"]),
        ],
        "counts",
        [helper.make_tensor_value_info("n", TensorProto.INT64, [3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3])],
        [numpy_helper.from_array(np.ones(3, np.float32), "w")],
    )
    block = Training(onnxblock.loss.MSELoss())
    block.requires_grad("n")
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    with onnxblock.base(model), pytest.raises(GraphError, match="input 'n' has no gradient"):
        block("y")


def test_a_loss_of_many_elements_is_refused() -> None:
    block = Training(onnxblock.loss.MSELoss(reduction="none"))
    block.requires_grad("a.weight")
    with onnxblock.base(Heads().as_onnx()), pytest.raises(GraphError, match="float32 scalar"):
        block("output1")


def test_a_block_is_no_loss_of_a_module(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="stacked on an ONNX model"):
        generate_artifacts(Heads(), loss=WeightedAverageLoss(), example_inputs=(torch.zeros(2, 4),))


def test_a_training_block_is_no_loss() -> None:
    block = Training(WeightedAverageLoss())
    block.requires_grad("a.weight")
    with pytest.raises(TypeError, match="loss=Training: a training block makes models of its own"):
        generate_artifacts(Heads().as_onnx(), ["a.weight"], loss=block)


def test_a_model_that_trains_already_is_refused() -> None:
    block = Training(WeightedAverageLoss())
    block.requires_grad("a.weight")
    with onnxblock.base(Heads().as_onnx()):
        block("output1", "output2")
        with pytest.raises(StateError, match="a model that trains already"):
            block("output1", "output2")


def test_a_loss_that_the_opset_does_not_have_is_refused() -> None:
    model = Heads().as_onnx()
    model.opset_import[0].version = 11
    with (
        onnxblock.base(model),
        pytest.raises(GraphError, match=r"CrossEntropyLoss left .*\n.*\n.*is of opset 11"),
    ):
        onnxblock.loss.CrossEntropyLoss()("output1")


def test_outputs_for_a_loss_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="no value 'output3'"):
        generate_artifacts(
            Heads().as_onnx(),
            ["a.bias"],
            loss=onnxblock.loss.MSELoss(),
            loss_input_names=["output3"],
        )
