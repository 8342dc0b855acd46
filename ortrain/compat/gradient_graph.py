"""Gradients as plain ONNX files, of modules and of models: the stages of the pipeline by old names.

::

    export_gradient_graph(model, loss_fn, example_input, example_labels, "gradients.onnx")
    session = onnxruntime.InferenceSession("gradients.onnx")
    output, loss, *gradients = session.run(None, {"input": x, "labels": y, **parameters})
"""

from __future__ import annotations

from ortrain.extras import require

require("torch", __name__)

import os
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch

from ortrain.capture.onnx.lift import drop_unused_inputs
from ortrain.errors import GraphError, OrtrainWarning, StateError, listing
from ortrain.files.replacing import staged
from ortrain.kinds import expect, expect_path, expect_whole, refused
from ortrain.ondevice import contract
from ortrain.ondevice.making.models import backward
from ortrain.ondevice.making.module_source import from_module
from ortrain.ondevice.making.onnx_source import foreign, from_onnx, read
from ortrain.passes.clean import clean
from ortrain.program import Program, Role, set_role, target_of


def export_gradient_graph(
    model: torch.nn.Module,
    loss_fn: Callable[[Any, Any], Any],
    example_input: torch.Tensor,
    example_labels: torch.Tensor,
    gradient_graph_path: Path | str,
    opset_version: int = 12,
) -> None:
    """Writes a file that computes a module's output, a loss of it, and the loss's gradients.

    Its inputs are ``input``, ``labels``, the parameters by name, and where the module draws random
    numbers ``seed``, int64 []; its outputs are ``output``, ``loss`` and ``<parameter>_grad`` of
    each parameter that requires a gradient. Buffers are constants.

    Args:
        model: a module of one argument, captured in training mode; it is left as it is.
        loss_fn: ``loss_fn(output, labels)``, a scalar.
        example_input: an argument.
        example_labels: labels for it.
        gradient_graph_path: the file to write.
        opset_version: the least that was asked for; the file has 18.

    Raises:
        TypeError: an argument of another kind.
        CaptureError: the module or the loss cannot become one graph.
        GraphError: the loss is no float32 scalar, or depends on no parameter.
        GradientError: a gradient does not exist.
        SaveError: the file could not be written.
    """
    expect("model", model, torch.nn.Module, "a torch.nn.Module")
    if not callable(loss_fn):
        raise refused("loss_fn", loss_fn, "a function of an output and labels")
    expect("example_input", example_input, torch.Tensor, "a tensor")
    expect("example_labels", example_labels, torch.Tensor, "a tensor")
    expect_path("gradient_graph_path", gradient_graph_path, expected="the path of a file")
    expect_whole("opset_version", opset_version)
    if opset_version > contract.OPSET:
        warnings.warn(
            f"opset_version={opset_version}: the file is written at opset {contract.OPSET}",
            OrtrainWarning,
            stacklevel=2,
        )

    def loss(output: Any, example_labels: Any) -> Any:
        return loss_fn(output, example_labels)

    forward = from_module(model, (example_input,), (example_labels,), loss, None)
    program, gradients = backward(forward.training, forward.trainable)
    graph = program.graph
    users = iter(("input", "labels"))
    named = {v.name: next(users) for v in program.inputs(Role.USER_INPUT)}
    _constants(program, forward.tensors)
    inputs = {v.name or "": v for v in graph.inputs}
    order = [*program.inputs(Role.USER_INPUT)]
    order += [inputs[n] for n, _ in model.named_parameters() if n in inputs]
    order += program.inputs(Role.SEED)
    outputs = [*program.outputs(Role.USER_OUTPUT), *program.outputs(Role.LOSS)]
    outputs += [gradients[name] for name in forward.trainable if name in gradients]
    graph.inputs.clear()
    graph.inputs.extend(order)
    graph.outputs.clear()
    graph.outputs.extend(outputs)
    clean(program)
    drop_unused_inputs(program)
    for value in program.inputs(Role.USER_INPUT):
        value.name = named[value.name]
    for value in program.outputs(Role.GRADIENT):
        value.name = f"{target_of(value)}_grad"
    program.name_values()
    target = Path(gradient_graph_path)
    with staged(target.parent, target.name, "ONNX file") as folder:
        program.save(folder / target.name)


class GradientGraphBuilder:
    """Adds the gradients of a loss to an ONNX model.

    Args:
        serialized_model: the model, or as a string the path of its file.
        y_node_arg_names: names of the outputs that the result keeps.
        x_node_arg_names: names of initializers, or of float32 inputs, to differentiate by.
        loss_node_arg_name: name of the output that is the loss, a float32 scalar.
        options: of a session; without meaning here.

    Raises:
        GraphError: the model is not valid, or has no such name.
        FileNotFoundError: there is no such file.
        TypeError: the model is neither bytes nor a path.
    """

    def __init__(
        self,
        serialized_model: bytes | str | os.PathLike[str],
        y_node_arg_names: Collection[str],
        x_node_arg_names: Collection[str],
        loss_node_arg_name: str,
        options: Any = None,
    ) -> None:
        proto = _parsed(serialized_model)
        inputs = {value.name for value in proto.graph.input}
        initializers = {value.name for value in proto.graph.initializer}
        outputs = {value.name for value in proto.graph.output}
        asked = {*x_node_arg_names} - inputs - initializers
        if missing := asked | ({*y_node_arg_names, loss_node_arg_name} - outputs):
            raise GraphError(
                f"the model has no {listing(sorted(missing))}",
                help="gradients are by inputs and initializers, of an output",
            )
        self._weights = sorted({*x_node_arg_names} & initializers)
        self._inputs = sorted({*x_node_arg_names} - initializers)
        self._outputs = [v.name for v in proto.graph.output if v.name in {*y_node_arg_names}]
        self._loss = loss_node_arg_name
        self._proto = proto
        self._program: Program | None = None

    def build(self) -> None:
        """Adds an output ``<name>_grad`` for each of the x.

        Raises:
            GraphError: the loss is no float32 scalar, or depends on none of them.
            GradientError: a gradient does not exist.
        """
        forward = from_onnx(self._proto, self._weights)
        (loss,) = [v for v in forward.training.graph.outputs if v.name == self._loss]
        set_role(loss, Role.LOSS)
        program, gradients = backward(forward.training, self._weights, self._inputs)
        for name, value in gradients.items():
            value.name = f"{name}_grad"
        graph = program.graph
        kept = [*self._outputs, *(f"{name}_grad" for name in (*self._weights, *self._inputs))]
        found = {v.name: v for v in graph.outputs}
        graph.outputs.clear()
        graph.outputs.extend(found[name] for name in kept if name in found)
        _constants(program, forward.tensors, Role.PARAMETER, Role.BUFFER)
        self._program = program

    def get_model(self) -> bytes:
        """The model with its gradients.

        Raises:
            StateError: it is not built.
        """
        if self._program is None:
            raise StateError("the gradient graph is not built", help="call build() before")
        return ir.to_proto(self._program.model).SerializeToString()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the model with its gradients.

        Raises:
            StateError: it is not built.
            SaveError: the file could not be written.
        """
        content, target = self.get_model(), Path(path)
        with staged(target.parent, target.name, "ONNX file") as folder:
            (folder / target.name).write_bytes(content)


def get_optimized_model(
    serialized_model: bytes, graph_entities_that_require_gradients: Collection[str], options: Any
) -> bytes:
    """A model after the passes that run in front of differentiation.

    Args:
        serialized_model: the model.
        graph_entities_that_require_gradients: names of the initializers that stay as they are.
        options: of a session; without meaning here.

    Raises:
        GraphError: the model is not valid, or has no such initializer.
    """
    proto = _parsed(serialized_model)
    initializers = {value.name for value in proto.graph.initializer}
    asked = {*graph_entities_that_require_gradients}
    if missing := asked - initializers - {value.name for value in proto.graph.input}:
        raise GraphError(f"the model has no {listing(sorted(missing))}")
    forward = from_onnx(proto, sorted(asked & initializers))
    program = forward.training
    clean(program)
    _constants(program, forward.tensors, Role.PARAMETER, Role.BUFFER)
    program.name_values()
    return ir.to_proto(program.model).SerializeToString()


def _parsed(content: bytes | str | os.PathLike[str]) -> onnx.ModelProto:
    expect("serialized_model", content, (bytes, str, os.PathLike), "an ONNX model in bytes")
    if not isinstance(content, bytes):
        return read(content)
    proto = onnx.ModelProto()
    with foreign(proto):
        proto.ParseFromString(content)
    return proto


def _constants(program: Program, tensors: dict[str, np.ndarray], *roles: Role) -> None:
    """Makes initializers of inputs: by default of the buffers."""
    graph = program.graph
    for value in program.inputs(*(roles or (Role.BUFFER,))):
        graph.inputs.remove(value)
        value.const_value = ir.tensor(tensors[value.name or ""])
        graph.register_initializer(value)
