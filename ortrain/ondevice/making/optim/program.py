"""The optimizer model: one update by gradients that are fed to it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import onnx_ir as ir

from ortrain.errors import OrtrainWarning
from ortrain.graph.aliasing import check_aliases
from ortrain.graph.build import Builder
from ortrain.graph.check import check
from ortrain.ondevice import contract
from ortrain.ondevice.making.optim.base import Optimizer
from ortrain.ondevice.making.optim.blocks import Slot, state_shape
from ortrain.ondevice.making.optim.emit import emit
from ortrain.program import Phase, Program, Role, set_role

Parameter = tuple[str, ir.DataType, Sequence[int]]


@dataclass(frozen=True)
class State:
    """A state of a parameter; it starts at zero.

    Attributes:
        name: of the model's input, and in the checkpoint.
        parameter: that it belongs to.
        kind: what it is.
        dtype: the parameter's.
        shape: the parameter's, or [rows, elements of a row] where that is large.
    """

    name: str
    parameter: str
    kind: str
    dtype: ir.DataType
    shape: tuple[int, ...]

    def row(self) -> dict[str, Any]:
        """As it stands in the metadata of a checkpoint."""
        return {
            "name": self.name,
            "parameter": self.parameter,
            "kind": self.kind,
            "dtype": "F32",
            "shape": list(self.shape),
        }


def states(optimizer: Optimizer, parameters: Sequence[Parameter]) -> list[State]:
    """The states of parameters, in the order of the model's inputs.

    Args:
        optimizer: that keeps them.
        parameters: name, dtype and shape of each that is trained.

    Raises:
        TypeError: a parameter is not float32.
        ValueError: two have the same name, or there are none.
    """
    _check(parameters)
    return [
        State(contract.state(name, kind), name, kind, dtype, state_shape(shape))
        for name, dtype, shape in parameters
        for kind in optimizer.kinds
    ]


def optimizer_program(optimizer: Optimizer, parameters: Sequence[Parameter]) -> Program:
    """The model of one update; its inputs and outputs are those of the contract.

    Args:
        optimizer: what an update is.
        parameters: name, dtype and shape of each that is trained, in order.

    Returns:
        A program of opset 18. Its aliases hold in whatever order its nodes run.

    Raises:
        TypeError: a parameter is not float32.
        ValueError: two have the same name, or there are none.
    """
    kept = states(optimizer, parameters)
    _warn_of_unused(optimizer, [name for name, _, _ in parameters])
    graph = ir.Graph([], [], nodes=[], opset_imports={"": contract.OPSET}, name="optimizer")

    def feed(name: str, dtype: ir.DataType, shape: Sequence[int], role: Role, of: str) -> ir.Value:
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        graph.inputs.append(set_role(value, role, of))
        return value

    rate = feed(contract.LEARNING_RATE, ir.DataType.FLOAT, [1], Role.HYPERPARAMETER, "")
    step = feed(contract.STEP, ir.DataType.INT64, [1], Role.HYPERPARAMETER, "")
    values = {n: feed(n, dtype, shape, Role.PARAMETER, "") for n, dtype, shape in parameters}
    gradients = {
        n: feed(contract.gradient(n), dtype, shape, Role.GRADIENT, n)
        for n, dtype, shape in parameters
    }
    by_parameter: dict[str, dict[str, ir.Value]] = {name: {} for name in values}
    for state in kept:
        by_parameter[state.parameter][state.kind] = feed(
            state.name, state.dtype, state.shape, Role.OPTIMIZER_STATE, state.parameter
        )
    slots = [Slot(n, values[n], gradients[n], by_parameter[n]) for n in values]
    op = Builder(graph, opset=contract.OPSET, prefix="update", phase=Phase.UPDATE)
    aliases = emit(op, optimizer, slots, rate, step).add_outputs(graph)
    program = Program(ir.Model(graph, ir_version=contract.IR_VERSION), aliases)
    check(graph, "optimizer_program")
    check_aliases(graph, aliases)
    return program


def _check(parameters: Sequence[Parameter]) -> None:
    names = [name for name, _, _ in parameters]
    if not names:
        raise ValueError("no parameter is trained, so there is nothing to update")
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise ValueError(f"two parameters are named {min(repeated)!r}")
    for name, dtype, _ in parameters:
        if dtype != ir.DataType.FLOAT:
            raise TypeError(
                f"{name!r} is {dtype.name.lower()}; updates are of float32 parameters, the only "
                "floating point type that onnxruntime computes in everywhere"
            )


def _warn_of_unused(optimizer: Optimizer, names: Sequence[str]) -> None:
    for pattern in optimizer.groups:
        if not any(fnmatchcase(name, pattern) for name in names):
            warnings.warn(
                f"no parameter that is trained has a name like {pattern!r}, a pattern of "
                f"{type(optimizer).__name__}.groups; one of the names is {names[0]!r}",
                OrtrainWarning,
                stacklevel=3,
            )
