"""Pins what ``ortrain/pytorch`` uses of PyTorch and onnxruntime that is no trace."""

from __future__ import annotations

import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from ortrain.pytorch import (
    backwards,
    hooks,
    kernels,
    modules,
    operators,
    parametrizations,
    precision,
    processes,
    pytree,
    sessions,
    torchlib,
    version,
)

aten = torch.ops.aten


def test_an_operator_tells_of_itself() -> None:
    assert operators.schema_of(aten.add.Tensor).name == "aten::add"
    assert operators.schema_of(len) is None
    assert operators.is_mutable(aten.add_.Tensor)
    assert not operators.is_mutable(aten.add.Tensor)
    assert operators.overload_of(aten.add.Tensor) == "Tensor"
    assert operators.overload_of(aten.relu.default) == "default"
    assert operators.is_composite(aten.matmul.default)
    assert not operators.is_composite(aten.mm.default)
    assert not operators.is_composite(len)
    assert operators.decomposition_of(aten.addcdiv.default) is not None
    assert operators.has_kernel(aten.mm.default, "AutocastCPU")


def test_functions_in_cpp_are_those_of_python() -> None:
    assert kernels.nn.linear is functional.linear
    x = torch.arange(6.0)
    assert torch.equal(kernels.from_dlpack(kernels.to_dlpack(x)), x)
    assert kernels.memory_of(x) == kernels.memory_of(x[2:]) != kernels.memory_of(x.clone())
    before = kernels.uses_in_cpp(x)
    view = x[1:]
    assert kernels.uses_in_cpp(x) != before
    del view
    with torch.autocast("cpu", torch.bfloat16), kernels.without_autocast_keys():
        assert (x[:, None] @ x[None]).dtype is torch.float32
    assert isinstance(kernels.convolves_narrow(bfloat=True), bool)


def test_settings_of_precision_are_read_and_set() -> None:
    assert precision.KNOWN
    before = precision.precision_of("mkldnn", "matmul")
    precision.set_precision("mkldnn", "matmul", "bf16")
    try:
        assert precision.precision_of("mkldnn", "matmul") == "bf16"
    finally:
        precision.set_precision("mkldnn", "matmul", before)
    assert len(precision.settings_of_kernels()) == 10
    with precision.without_tf32():
        pass


def test_a_session_runs_on_values_by_reference() -> None:
    x = ir.Value(name="x", shape=ir.Shape(["N"]), type=ir.TensorType(ir.DataType.FLOAT))
    node = ir.node("Neg", [x])
    graph = ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 21}, name="negative")
    node.outputs[0].name = "y"
    model = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    given, found = sessions.OrtValueVector(), sessions.OrtValueVector()
    array = torch.arange(3.0).numpy()
    given.push_back(sessions.value_of(array))
    device = sessions.OrtDevice(sessions.OrtDevice.cpu(), sessions.OrtDevice.default_memory(), 0)
    run = sessions.runner_of(session)
    run(onnxruntime.RunOptions(), ["x"], given, ["y"], found, [device])
    assert found[0].numpy().tolist() == [0.0, -1.0, -2.0]


def test_torchlib_emits_nodes() -> None:
    function = torchlib.function_of(aten.acos.default, 21)
    assert function is not None
    assert torchlib.function_of(len, 21) is None
    x = ir.Value(name="x", shape=ir.Shape([3]), type=ir.TensorType(ir.DataType.FLOAT))
    result, nodes, called = torchlib.emitted(function, [x], {}, 21, {})
    assert [node.op_type for node in nodes] == ["Acos"]
    assert (result, called) == (nodes[0].outputs[0], [])


def test_without_torchlib_nothing_is_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchlib, "_EXPORTER", "torch.onnx.gone")
    torchlib._registry.cache_clear()
    torchlib.function_of.cache_clear()
    assert torchlib.function_of(aten.acos.default, 21) is None
    torchlib._registry.cache_clear()
    torchlib.function_of.cache_clear()


def test_hooks_of_tensors_and_modules_are_seen() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert not hooks.has_hooks(leaf)
    handle = leaf.register_hook(lambda g: g)
    late = leaf.register_post_accumulate_grad_hook(lambda t: None)
    assert hooks.has_hooks(leaf)
    assert hooks.has_late_hooks(leaf)
    handle.remove()
    late.remove()
    assert not hooks.has_hooks(leaf)
    assert not hooks.has_late_hooks(leaf)
    hooks.without_empty_table(leaf)
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda *_: None)
    assert len(hooks.forward_hooks_of(layer)) == 1


def test_a_hook_that_comes_later_is_heard_where_the_tensor_is_gone() -> None:
    heard: list[Tensor] = []
    leaf = torch.ones(2, requires_grad=True)
    result = leaf * 2
    table = hooks.heard_even_if_freed(result)
    result.register_hook(heard.append)
    assert len(table) == 1
    loss = result.sum()
    del result
    loss.backward()
    assert len(heard) == 1


def test_children_and_parameters_have_all_their_names() -> None:
    shared = nn.Linear(2, 2)
    both = nn.Sequential(shared, shared)
    both.register_module("none", None)
    assert list(modules.children_of(both)) == ["0", "1", "none"]
    assert list(modules.parameters_of(shared)) == ["weight", "bias"]


class Told(torch.autograd.Function):
    """Says what is asked of the backward that runs."""

    found: tuple[bool, int] = (False, -1)

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        Told.found = backwards.keeps_graph(), backwards.task_of_backward()
        return gradient * 2


def test_a_backward_says_whether_another_is_to_come() -> None:
    loss = Told.apply(torch.ones(2, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    assert Told.found[0]
    first = Told.found[1]
    loss.backward()
    assert not Told.found[0]
    assert Told.found[1] != first
    assert not backwards.profiled()
    assert not backwards.is_traced()


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def test_it_is_known_whether_parametrized_tensors_are_kept() -> None:
    layer = nn.Linear(2, 2)
    parametrize.register_parametrization(layer, "weight", Twice())
    assert not parametrizations.parametrizations_are_kept()
    with parametrize.cached():
        assert parametrizations.parametrizations_are_kept()


def test_one_process_shares_no_store() -> None:
    assert processes.store() is None


def test_writes_are_counted() -> None:
    x = torch.ones(2)
    before = version.count(x)
    x.add_(1)
    assert version.count(x) == before + 1
    with torch.inference_mode():
        inference = torch.ones(2)
    with pytest.raises(RuntimeError):
        version.count(inference)


def test_trees_are_taken_apart() -> None:
    leaves, spec = pytree.tree_flatten({"a": [1, (2,)]})
    assert leaves == [1, 2]
    assert pytree.tree_unflatten([3, 4], spec) == {"a": [3, (4,)]}
    assert [str(path) for path, _ in pytree.tree_flatten_with_path([5])[0]]
