"""``generate_artifacts``: a model becomes what any stock onnxruntime trains."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import torch

from ortrain.errors import GraphError
from ortrain.graph.build import Builder
from ortrain.ondevice import contract, losses
from ortrain.ondevice.forward import Forward
from ortrain.ondevice.module_source import from_module
from ortrain.ondevice.onnx_source import from_onnx
from ortrain.ondevice.training import accumulating, arrange, backward, select
from ortrain.program import Role, set_role
from ortrain.runtime.onnxruntime.lowering import make_standard


class LossType(enum.Enum):
    """Losses by name."""

    MSELoss = 1
    CrossEntropyLoss = 2
    BCEWithLogitsLoss = 3
    L1Loss = 4


def generate_artifacts(
    model: onnx.ModelProto | str | os.PathLike[str] | torch.nn.Module,
    requires_grad: Sequence[str] | None = None,
    frozen_params: Sequence[str] | None = None,
    loss: LossType | Callable[..., Any] | None = None,
    artifact_directory: str | os.PathLike[str] | None = None,
    prefix: str = "",
    additional_output_names: Sequence[str] | None = None,
    loss_input_names: Sequence[str] | None = None,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    example_targets: Sequence[Any] = (),
) -> None:
    if isinstance(model, torch.nn.Module):
        assert example_inputs is not None
        graph_loss = loss is None or isinstance(loss, LossType)
        forward = from_module(
            model, example_inputs, example_targets, None if graph_loss else loss, requires_grad
        )
        if graph_loss:
            attach_loss(forward, loss, loss_input_names)
    else:
        forward = from_onnx(model, requires_grad or [], frozen_params or [])
        attach_loss(forward, loss, loss_input_names)
    write(forward, Path(artifact_directory or "."), prefix, additional_output_names or ())


def attach_loss(
    forward: Forward, loss: LossType | losses.Loss | None, names: Sequence[str] | None
) -> None:
    """Computes the loss of the outputs, in both modes."""
    function = getattr(losses, loss.name)() if isinstance(loss, LossType) else loss
    for program in (forward.training, forward.evaluation):
        outputs = {v.name or "": v for v in program.outputs(Role.USER_OUTPUT)}
        chosen = list(outputs) if names is None else list(names)
        if missing := [name for name in chosen if name not in outputs]:
            raise GraphError(
                f"loss_input_names: the model has no output {missing[0]!r}",
                help=f"it has {', '.join(outputs)}",
            )
        values = [outputs[name] for name in chosen]
        if function is None:
            value = values[0]
        else:
            with Builder(program.graph, opset=program.opset, prefix="loss") as op:
                value = function(op, *values)
            program.graph.outputs.append(value)
            value.name = "loss"
        set_role(value, Role.LOSS)


def write(forward: Forward, folder: Path, prefix: str, additional: Sequence[str]) -> None:
    select(forward.training, additional)
    program, gradients = backward(forward.training, forward.trainable)
    trained = list(gradients)
    training = accumulating(program, gradients)
    arrange(training, trained, list(forward.tensors))
    evaluation = forward.evaluation
    select(evaluation, additional)
    make_standard(evaluation)
    arrange(evaluation, trained, list(forward.tensors))
    folder.mkdir(parents=True, exist_ok=True)
    training.save(folder / f"{prefix}{contract.TRAINING_MODEL}")
    evaluation.save(folder / f"{prefix}{contract.EVAL_MODEL}")
