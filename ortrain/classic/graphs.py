"""Modules whose forward is an ONNX model: one that was given, or that a function has changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import nn

from ortrain.classic.description import Descriptions
from ortrain.classic.modules import ByName, WithLoss
from ortrain.classic.names import unknown
from ortrain.config import EXECUTORS, Options
from ortrain.errors import GraphError, InputError, StateError, listing
from ortrain.files.replacing import staged
from ortrain.frontend.export import export
from ortrain.graph import shapes
from ortrain.kinds import shown
from ortrain.ondevice.making.onnx_source import foreign, from_onnx
from ortrain.ops import expand
from ortrain.program import Program, Role, role_of, set_role, target_of
from ortrain.runtime import engines
from ortrain.step.autograd import Step
from ortrain.step.build import build

Postprocess = Callable[[onnx.ModelProto], Any]
_HELD = (Role.PARAMETER, Role.BUFFER)


class Made(NamedTuple):
    """A program, and whether a call may use it.

    Attributes:
        program: of a forward.
        accepts: whether it holds for the shapes of these inputs.
    """

    program: Program
    accepts: Callable[[Sequence[torch.Tensor]], bool]


class GraphModule(nn.Module):
    """Runs programs under autograd, one for each mode.

    Args:
        held: weights and buffers by name; those that may be trained are parameters.
        descriptions: of inputs and outputs.
        options: of the pipeline: the engine.
        make: the program of a mode, made of a call's inputs.
        proto: the ONNX model as it was given; None where a module was captured.
    """

    def __init__(
        self,
        held: Mapping[str, torch.Tensor],
        descriptions: Descriptions,
        options: Options,
        make: Callable[[bool, tuple[torch.Tensor, ...]], Made],
        proto: onnx.ModelProto | None = None,
    ) -> None:
        super().__init__()
        self.held = dict(held)
        for i, tensor in enumerate(self.held.values()):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(f"weight_{i}", tensor)
            else:
                self.register_buffer(f"buffer_{i}", tensor)
        self.__dict__["make"] = make
        self.names, self.results = descriptions.names, descriptions.results
        self.loss, self.options, self.proto = descriptions.loss, options, proto
        self._made: dict[bool, Made] = {}
        self._steps: dict[tuple[bool, bool], Step] = {}

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The outputs, in the order in which they are described.

        Raises:
            InputError: an input is missing, or has a size that the graph has fixed otherwise.
        """
        made = self._made_for(self.training, inputs)
        if not made.accepts(inputs):
            raise InputError(
                f"the graph does not hold for the shapes {[list(t.shape) for t in inputs]}",
                because="the module's code has fixed a size of the first call",
                help="leave out the function that changes the graph, or pass that size",
            )
        grad = torch.is_grad_enabled()
        key = self.training, grad
        if key not in self._steps:
            self._steps[key] = self._step(made.program, grad=grad)
        step = self._steps[key]
        given = dict(zip(self.names, inputs, strict=True))
        users = [given[value.name or ""] for value in made.program.inputs(Role.USER_INPUT)]
        outputs = step.train(users) if grad else step.infer(users)
        named = [value.name for value in made.program.outputs(Role.USER_OUTPUT, Role.LOSS)]
        return tuple(outputs[named.index(name)] for name in self.results)

    def _made_for(self, training: bool, inputs: tuple[torch.Tensor, ...]) -> Made:
        if len(inputs) < len(self.names):
            raise InputError(
                f"a step was not given {listing([*self.names[len(inputs) :]])}",
                because="an ONNX model needs all of its inputs",
            )
        if training not in self._made:
            self._made[training] = self.__dict__["make"](training, inputs)
        return self._made[training]

    def _step(self, program: Program, *, grad: bool) -> Step:
        wrt = [
            value.name or ""
            for value in program.inputs(Role.PARAMETER)
            if grad and self.held[value.name or ""].requires_grad
        ]
        device = next(iter(self.held.values())).device
        default = "onnxruntime" if device.type == "cpu" else "aten"
        executor = engines.executor(
            self.options.engine if self.options.engine in EXECUTORS else default,
            device=device,
            provider=self.options.provider,
            threads=self.options.threads or torch.get_num_threads(),
            arena=self.options.arena,
        )
        plan = build(program, wrt, [self.results[self.loss]] if wrt else None, executor)
        return Step(plan, self.held, _no_other)

    def save(self, path: str | os.PathLike[str], sample: tuple[torch.Tensor, ...] | None) -> None:
        """Writes the graph with the weights that there are now.

        Of an ONNX model that was given, it is that model; of a module, its graph in evaluation.

        Args:
            path: of the file.
            sample: inputs of a call; None where no step has run.

        Raises:
            StateError: there is no sample, and the graph is not known yet.
            SaveError: the file could not be written.
        """
        target = Path(path)
        if self.proto is None:
            if sample is None and False not in self._made:
                raise StateError(
                    "save_as_onnx was called before a step has run",
                    because="the graph is made of a call's inputs",
                    help="call train_step or eval_step once",
                )
            program = with_weights(self._made_for(False, sample or ()).program, self.held)
            expand(program.graph, opset=program.opset)
            program.name_values()
            program.import_domains()
        else:
            program = Program(ir.from_proto(self.proto))
            for name, value in program.graph.initializers.items():
                if name in self.held:
                    value.const_value = ir.tensor(_array(self.held[name]), name=name)
        with staged(target.parent, target.name, "ONNX file") as folder:
            program.save(folder / target.name)


def _no_other(received: Any) -> Step:
    raise AssertionError("only the loss receives a gradient")


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().numpy()


# -- of a module -----------------------------------------------------------------------------------


def postprocessed(
    module: WithLoss,
    descriptions: Descriptions,
    held: Mapping[str, torch.Tensor],
    postprocess: Postprocess,
    options: Options,
) -> GraphModule:
    """A module that runs the graph of another one as a function has changed it.

    Args:
        module: the model with its loss.
        descriptions: of inputs and outputs.
        held: weights and buffers, by name.
        postprocess: changes an ONNX model in place, or returns another one. Weights are its
            initializers, and composites of ortrain stand in it as operators of that domain.
        options: of the pipeline.
    """

    def make(training: bool, inputs: tuple[torch.Tensor, ...]) -> Made:
        module.train(training)
        named = dict(zip(descriptions.names, inputs, strict=True))
        both = ByName(module, descriptions)
        exported = export(both, (), named, opset=options.opset)
        program = exported.program.clone()
        own = {**dict(both.named_buffers()), **dict(both.named_parameters())}
        names = {id(tensor): name for name, tensor in held.items()}
        for value in program.inputs(*_HELD):
            value.name = names[id(own[value.name or ""])]
        for value in program.outputs(Role.UPDATED_BUFFER):
            set_role(value, Role.UPDATED_BUFFER, names[id(own[target_of(value)])])
        users = program.outputs(Role.USER_OUTPUT, Role.LOSS)
        for name, place in zip(descriptions.results, exported.leaves, strict=True):
            assert place is not None
            users[place].name = name
        places = {name: i for i, name in enumerate(descriptions.names)}
        taken = [places[name.split(".")[-1]] for name in exported.tensors]
        return Made(
            changed(program, held, postprocess),
            lambda given: exported.accepts([tuple(given[i].shape) for i in taken]),
        )

    return GraphModule(held, descriptions, options, make)


def changed(
    program: Program, held: Mapping[str, torch.Tensor], postprocess: Postprocess
) -> Program:
    """A program as a function of ONNX models changes it.

    Raises:
        GraphError: what the function leaves lacks an input or an output.
    """
    roles = {v.name: (role_of(v), target_of(v)) for v in (*program.inputs(), *program.outputs())}
    inside = [value.name or "" for value in program.inputs(*_HELD)]
    outputs = [value.name for value in program.outputs()]
    proto = written(postprocess, ir.to_proto(with_weights(program, held).model))
    with foreign(proto):
        result = Program(ir.from_proto(proto))
    graph = result.graph
    for name in inside:
        if name in graph.initializers:
            value = graph.initializers.pop(name)
            if value.const_value is not None:
                shapes.assign(value, value.const_value.dtype, ir.Shape(held[name].shape))
            value.const_value = None
            graph.inputs.append(value)
    for value in (*graph.inputs, *graph.outputs):
        if value.name not in roles:
            raise GraphError(
                f"the function that changes the graph has added {value.name!r} to its inputs or "
                "outputs",
                help="it may change nodes and initializers",
            )
        role, target = roles[value.name]
        assert role is not None
        set_role(value, role, target)
    if missing := [str(name) for name in outputs if name not in {v.name for v in graph.outputs}]:
        raise GraphError(f"the function that changes the graph has removed {listing(missing)}")
    shapes.infer_all(result.model)
    return result


def with_weights(program: Program, held: Mapping[str, torch.Tensor]) -> Program:
    """A copy of a program in which parameters and buffers are initializers."""
    result = program.clone()
    for value in result.inputs(*_HELD):
        result.graph.inputs.remove(value)
        value.const_value = ir.tensor(_array(held[value.name or ""]), name=value.name)
        result.graph.register_initializer(value)
    return result


def written(postprocess: Postprocess, model: onnx.ModelProto) -> onnx.ModelProto:
    """The model that a function leaves: what it returns, or what it was given.

    Raises:
        InputError: it returns something else.
    """
    result = postprocess(model)
    if result is None:
        return model
    if not isinstance(result, onnx.ModelProto):
        raise InputError(
            f"the function that changes the graph returns {shown(result)}",
            help="return an onnx.ModelProto, or None where it was changed in place",
        )
    return result


# -- of an ONNX model ------------------------------------------------------------------------------


def of_model(
    model: onnx.ModelProto,
    descriptions: Descriptions,
    frozen: Sequence[str],
    device: torch.device,
    options: Options,
) -> GraphModule:
    """A module that runs an ONNX model which has its loss.

    Every floating initializer with a dimension is trained, except running statistics and those
    that are frozen.

    Args:
        model: the model.
        descriptions: of inputs and outputs, by the model's names.
        frozen: names of initializers that are not trained.
        device: to train on.
        options: of the pipeline.

    Raises:
        InputError: the descriptions are not of this model.
        GraphError: it is not valid, or cannot be trained.
    """
    graph = model.graph
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    own = [value.name for value in graph.input if value.name not in initializers]
    for what, expected, given in (
        ("inputs", own, descriptions.names),
        ("outputs", [value.name for value in graph.output], descriptions.results),
    ):
        strange = [name for name in given if name not in expected]
        missing = [name for name in expected if name not in given] if what == "inputs" else []
        if strange or missing:
            raise InputError(
                f"the {what} of the ONNX model are {listing(expected, 20)}",
                because=f"described are {listing([*given], 20)}",
                help="describe them by the model's names",
            )
    with foreign(model):
        statistics = {
            name
            for node in graph.node
            if node.op_type == "BatchNormalization"
            for name in node.input[3:5]
        }
    floating = [
        name
        for name, tensor in initializers.items()
        if tensor.data_type == onnx.TensorProto.FLOAT and tensor.dims and name not in statistics
    ]
    if missing := [name for name in frozen if name not in initializers]:
        raise unknown("the frozen weight", missing[0], floating)
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    learned = [name for name in floating if name not in frozen]
    fixed = [name for name in floating if name in frozen]
    forward = from_onnx(copied, learned, fixed)
    held: dict[str, torch.Tensor] = {}
    for name, array in forward.tensors.items():
        tensor = torch.from_numpy(np.array(array)).to(device)
        held[name] = nn.Parameter(tensor, name in learned) if name in floating else tensor
    programs = {True: forward.training, False: forward.evaluation}
    return GraphModule(
        held,
        descriptions,
        options,
        lambda training, _: Made(programs[training], lambda _: True),
        model,
    )


__all__ = ["GraphModule", "Postprocess", "of_model", "postprocessed", "written"]
