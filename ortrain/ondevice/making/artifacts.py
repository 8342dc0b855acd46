"""``generate_artifacts``: a model becomes what any stock onnxruntime trains.

::

    generate_artifacts(
        "model.onnx",
        requires_grad=["fc.weight", "fc.bias"],
        loss=LossType.CrossEntropyLoss,
        optimizer=OptimType.AdamW,
        artifact_directory="artifacts",
    )

What the files hold stands in docs/ondevice-contract.md.
"""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, cast

import onnx
import onnx_ir as ir
import onnxruntime

from ortrain.errors import GraphError, listing
from ortrain.files import seal
from ortrain.files.names import expect_name_part
from ortrain.files.replacing import staged
from ortrain.graph.build import Builder
from ortrain.kinds import (
    NONE,
    expect,
    expect_flag,
    expect_names,
    expect_path,
    refused,
)
from ortrain.ondevice import contract
from ortrain.ondevice.making import losses, optim
from ortrain.ondevice.making.block import Block, with_loss
from ortrain.ondevice.making.forward import Forward
from ortrain.ondevice.making.lora import LoRA, adapt
from ortrain.ondevice.making.models import accumulating, arrange, backward, select, stepping
from ortrain.ondevice.making.onnx_source import foreign, from_onnx
from ortrain.ondevice.making.optim import Optimizer, State, optimizer_program, states
from ortrain.ondevice.running import checkpoint_file
from ortrain.ondevice.running.adapters import Adapter
from ortrain.ondevice.running.checkpoint_file import Content
from ortrain.program import Program, Role, role_of, set_role
from ortrain.runtime.onnxruntime.lowering import make_standard

if TYPE_CHECKING:
    import torch

Onnx: TypeAlias = onnx.ModelProto | str | os.PathLike[str]
Model: TypeAlias = "Onnx | torch.nn.Module"


class LossType(enum.Enum):
    """Losses by name: those of :mod:`ortrain.ondevice.losses`, with their defaults."""

    MSELoss = 1
    CrossEntropyLoss = 2
    BCEWithLogitsLoss = 3
    L1Loss = 4


class OptimType(enum.Enum):
    """Optimizers by name: those of :mod:`ortrain.ondevice.optim`.

    AdamW has the defaults of ONNX Runtime Training, eps 1e-6 and no weight decay.
    """

    AdamW = 1
    SGD = 2
    Adam = 3
    Lion = 4

    def optimizer(self) -> Optimizer:
        """One with the defaults."""
        options = {"eps": 1e-6, "weight_decay": 0.0} if self is OptimType.AdamW else {}
        result: Optimizer = getattr(optim, self.name)(**options)
        return result


def generate_artifacts(
    model: Model,
    requires_grad: Sequence[str] | None = None,
    frozen_params: Sequence[str] | None = None,
    loss: LossType | Callable[..., Any] | None = None,
    optimizer: OptimType | Optimizer | Block | None = None,
    artifact_directory: str | os.PathLike[str] | None = None,
    prefix: str = "",
    ort_format: bool = False,
    custom_op_library: str | os.PathLike[str] | None = None,
    additional_output_names: Sequence[str] | None = None,
    nominal_checkpoint: bool = False,
    loss_input_names: Sequence[str] | None = None,
    *,
    lora: LoRA | None = None,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    example_targets: Sequence[Any] = (),
) -> None:
    """Writes training model, evaluation model, optimizer, train step model and checkpoint.

    Args:
        model: an ONNX model, the path of its file, or a torch module. An ONNX file is trained in
            the modes it says: export it in training mode where it holds dropout or batch
            normalization.
        requires_grad: names of the parameters to train. Of an ONNX model, and with ``lora``, none
            by default; of a module, those that require a gradient.
        frozen_params: of an ONNX model, names of initializers that stand in the checkpoint and are
            not trained; what neither list names stays a constant of the graphs. Of a module, all
            parameters that are not trained are such.
        loss: computes the loss of the outputs. A :class:`LossType` or one of
            :mod:`ortrain.ondevice.losses` adds the target to the inputs. Of an ONNX model, a
            :class:`~ortrain.ondevice.onnxblock.Block` is called with the names of the outputs; the
            first name that it returns is the loss, others are additional outputs. Of a module, a
            function ``loss(outputs, *targets)`` in PyTorch is traced together with it. None: the
            model's first output is the loss.
        optimizer: an :class:`OptimType`, or one of :mod:`ortrain.ondevice.optim` or
            :mod:`ortrain.ondevice.onnxblock.optim` with its options. Without it there are
            neither optimizer nor train step model. Without anything to train either, the training
            model computes the loss alone, in training mode.
        artifact_directory: where to write, made where it does not exist; by default the working
            directory. Files that are there are replaced once all new ones are complete.
        prefix: put before each file's name.
        ort_format: also write each model in ORT format, as ``.ort``.
        custom_op_library: path of a shared library with the operators of the model that are not
            ONNX's, for the conversion to ORT format; those on the way from the loss to a parameter
            need a gradient rule (:func:`ortrain.gradient`).
        additional_output_names: values that training and evaluation return besides the loss.
        nominal_checkpoint: also write a checkpoint without parameters, for devices that get these
            later. It holds the buffers.
        loss_input_names: the outputs that go to the loss, in this order; by default all.
        lora: adapters to train; of an ONNX model, all its weights then are frozen parameters.
        example_inputs: arguments of a module's ``forward``, by position or by name; all sizes stay
            open as far as its code allows.
        example_targets: of a loss function in PyTorch, its arguments after the first.

    Raises:
        FileNotFoundError: there is no such model.
        TypeError, ValueError: an argument is of another kind, or one that is needed is missing.
        GraphError: a name does not exist, or the model cannot be trained so.
        GradientError: a gradient is needed that does not exist.
        CaptureError: the module or the loss cannot become one graph.
        SaveError: the files could not be written.
    """
    if not _is_module(model):
        kinds = (onnx.ModelProto, str, os.PathLike)
        expect("model", model, kinds, "an ONNX model, the path of one or a torch module")
    expect_names("requires_grad", requires_grad, NONE)
    expect_names("frozen_params", frozen_params, NONE)
    # A class that is not called yet would take the outputs for its options.
    given: Any = loss
    if not isinstance(given, LossType | None) and (not callable(given) or isinstance(given, type)):
        raise refused("loss", loss, "a LossType, a loss or a function")
    expect(
        "optimizer",
        optimizer,
        (OptimType, Optimizer, Block, NONE),
        "an OptimType or an optimizer of ortrain.ondevice.optim",
    )
    expect_path("artifact_directory", artifact_directory, NONE, expected="the path of a folder")
    expect("prefix", prefix, str, "a string")
    expect_name_part("prefix", prefix)
    expect_flag("ort_format", ort_format)
    expect_path("custom_op_library", custom_op_library, NONE, expected="the path of a library")
    expect_names("additional_output_names", additional_output_names, NONE)
    expect_flag("nominal_checkpoint", nominal_checkpoint)
    expect_names("loss_input_names", loss_input_names, NONE)
    expect("lora", lora, (LoRA, NONE), "a LoRA")
    arguments = "the arguments of one call of the module"
    expect("example_inputs", example_inputs, (Sequence, Mapping, NONE), arguments)
    expect("example_targets", example_targets, Sequence, "those of the loss after the first")
    if isinstance(loss, Block):
        if _is_module(model):
            raise TypeError("a block is stacked on an ONNX model: export the module first")
        model, results = with_loss(cast("Onnx", model), loss, loss_input_names)
        additional_output_names = list(dict.fromkeys([*results, *(additional_output_names or ())]))
        loss, loss_input_names = None, None
    if isinstance(optimizer, OptimType):
        optimizer = optimizer.optimizer()
    elif isinstance(optimizer, Block):
        optimizer = getattr(optimizer, "optimizer", optimizer)  # of those of onnxblock.optim
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer={optimizer!r}: expected an OptimType or an optimizer")
    if custom_op_library is not None and not Path(custom_op_library).is_file():
        raise FileNotFoundError(f"there is no library at {os.fspath(custom_op_library)!r}")
    if lora is not None:
        requires_grad = requires_grad or ()
    in_graph = getattr(losses, loss.name)() if isinstance(loss, LossType) else loss
    traced = None if in_graph is None or isinstance(in_graph, losses.Loss) else in_graph
    if _is_module(model):
        from ortrain.ondevice.making.module_source import from_module

        if example_inputs is None:
            raise ValueError("example_inputs is missing: the arguments of one call of the module")
        forward = from_module(model, example_inputs, example_targets, traced, requires_grad)
    elif traced is not None:
        raise TypeError("a loss function in PyTorch is traced with a torch module, not a file")
    elif example_inputs is not None:
        raise ValueError("example_inputs are those of a torch module; leave them out")
    else:
        forward = from_onnx(
            cast("Onnx", model),
            requires_grad or (),
            frozen_params or (),
            all_frozen=lora is not None,
        )
    source = nullcontext() if _is_module(model) else foreign(model)
    with source:
        if traced is None:
            for program in (forward.training, forward.evaluation):
                _attach(program, in_graph, loss_input_names)
        adapters = [] if lora is None else adapt(forward, lora)
        programs, content = make(forward, optimizer, adapters, additional_output_names or ())
        with staged(Path(artifact_directory or "."), "artifacts", "artifacts") as folder:
            for name, program in programs.items():
                path = folder / f"{prefix}{name}"
                program.save(path)
                if ort_format:
                    _save_as_ort(path, custom_op_library)
            checkpoint_file.write(content, folder / f"{prefix}{contract.CHECKPOINT}")
            if nominal_checkpoint:
                path = folder / f"{prefix}{contract.NOMINAL_CHECKPOINT}"
                checkpoint_file.write(content.nominal(), path)


def _is_module(model: Model) -> TypeGuard[torch.nn.Module]:
    """Whether a model is one of PyTorch, which an ONNX model does without."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def _attach(program: Program, loss: Callable[..., Any] | None, names: Sequence[str] | None) -> None:
    """Computes the loss of the outputs."""
    outputs = {value.name or "": value for value in program.outputs(Role.USER_OUTPUT)}
    chosen = list(outputs) if names is None else list(names)
    if missing := [name for name in chosen if name not in outputs]:
        raise GraphError(
            f"loss_input_names: the model has no output {missing[0]!r}",
            help=f"it has {listing([*outputs])}",
        )
    values = [outputs[name] for name in chosen]
    if loss is None:
        set_role(values[0], Role.LOSS)
        return
    with Builder(program.graph, opset=program.opset, prefix="loss") as op:
        value = loss(op, *values)
    value.name = contract.LOSS
    program.graph.outputs.append(set_role(value, Role.LOSS))


def make(
    forward: Forward,
    optimizer: Optimizer | None,
    adapters: Sequence[Adapter],
    additional: Sequence[str],
    inputs: Sequence[str] = (),
) -> tuple[dict[str, Program], Content]:
    """The models by file name, and the checkpoint.

    Args:
        forward: with a loss; its programs are changed.
        optimizer: without it there are neither optimizer nor train step model.
        adapters: of the forward.
        additional: names of values that training and evaluation return besides the loss.
        inputs: names of the user's inputs whose gradients the training model returns.

    Raises:
        GraphError: there is no such value, or the loss cannot be trained on.
        GradientError: a gradient does not exist.
    """
    select(forward.training, additional)
    if optimizer is not None and not forward.trainable:
        raise GraphError(
            "there is no parameter to train for the optimizer",
            because="requires_grad is empty",
            help="name the parameters in requires_grad, or leave the optimizer out: the models "
            "then compute the loss and evaluate",
        )
    program, gradients = backward(forward.training, forward.trainable, inputs)
    evaluation = forward.evaluation
    make_standard(evaluation)  # while all are outputs: an inference model can name any of them
    select(evaluation, additional)
    programs = {contract.EVAL_MODEL: evaluation}
    kept: list[State] = []
    if optimizer is not None:
        shapes = [(n, ir.DataType.FLOAT, forward.tensors[n].shape) for n in gradients]
        kept = states(optimizer, shapes)
        programs[contract.OPTIMIZER_MODEL] = optimizer_program(optimizer, shapes)
        step = program.clone()
        outputs = {value.name: value for value in step.graph.outputs}
        own = {name: outputs[value.name] for name, value in gradients.items()}
        programs[contract.TRAIN_STEP_MODEL] = stepping(step, own, optimizer, kept)
    programs[contract.TRAINING_MODEL] = accumulating(program, gradients)
    for name, each in programs.items():
        if name != contract.OPTIMIZER_MODEL:
            arrange(each, list(gradients), list(forward.tensors))
    content = _content(forward, list(gradients), programs, kept, adapters)
    for each in programs.values():
        each.model.metadata_props[contract.MODEL_HASH] = content.texts["model"]
        each.model.metadata_props[seal.KEY] = seal.NONE
    return programs, content


def _content(
    forward: Forward,
    trained: list[str],
    programs: Mapping[str, Program],
    kept: list[State],
    adapters: Sequence[Adapter],
) -> Content:
    """The checkpoint: what the models take of the tensors, and what the optimizer keeps."""
    taken = {v.name: role_of(v) for each in programs.values() for v in each.graph.inputs}
    parameters = {n: t for n, t in forward.tensors.items() if taken.get(n) is Role.PARAMETER}
    order = [*trained, *(name for name in parameters if name not in trained)]
    return checkpoint_file.new(
        {name: (parameters[name], name in trained) for name in order},
        {n: t for n, t in forward.tensors.items() if taken.get(n) is Role.BUFFER},
        [state.row() for state in kept],
        [adapter.described() for adapter in adapters],
    )


def _save_as_ort(path: Path, custom_op_library: str | os.PathLike[str] | None) -> None:
    options = onnxruntime.SessionOptions()
    # Beyond the basic level a file fits the machine that wrote it.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(path.with_suffix(".ort"))
    options.add_session_config_entry("session.save_model_format", "ORT")
    if custom_op_library is not None:
        options.register_custom_ops_library(os.fspath(custom_op_library))
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    seal.seal_ort_model(path.with_suffix(".ort"))  # the mark is the ONNX file's
