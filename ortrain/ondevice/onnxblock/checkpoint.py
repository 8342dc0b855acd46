"""Checkpoints of what training blocks return, and back into models."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

import onnx
from onnx import TensorProto, numpy_helper

from ortrain.errors import GraphError, InputError, OrtrainWarning, listing
from ortrain.ondevice.onnxblock.models import Parameters
from ortrain.ondevice.running import checkpoint_file


def save_checkpoint(
    parameters: tuple[Sequence[TensorProto], Sequence[TensorProto]],
    path_to_checkpoint: str | os.PathLike[str],
    nominal_checkpoint: bool = False,
) -> None:
    """Writes a checkpoint before training.

    Args:
        parameters: those that are trained and those that are frozen, as
            :meth:`TrainingBlock.parameters` returns them, as they are or taken apart. The states
            of an optimizer that was called with them stand in the checkpoint, so call it first.
        path_to_checkpoint: of the file, which is replaced.
        nominal_checkpoint: leave the values of the parameters out.

    Raises:
        SaveError: the file could not be written.
        InputError: a tensor is of a dtype that a checkpoint cannot hold.
    """
    trained, frozen = parameters
    buffers: Sequence[TensorProto] = ()
    states: list[dict[str, object]] = []
    if (whole := Parameters.of(parameters)) is not None:
        buffers = whole.buffers
        states = [state.row() for state in whole.states]
    content = checkpoint_file.new(
        {
            tensor.name: (numpy_helper.to_array(tensor), requires_grad)
            for tensors, requires_grad in ((trained, True), (frozen, False))
            for tensor in tensors
        },
        {tensor.name: numpy_helper.to_array(tensor) for tensor in buffers},
        states,
    )
    checkpoint_file.write(content.nominal() if nominal_checkpoint else content, path_to_checkpoint)


def load_checkpoint_to_model(
    path_to_checkpoint: str | os.PathLike[str], model: onnx.ModelProto
) -> None:
    """Puts the tensors of a checkpoint into a model, in place of its initializers.

    A tensor of which the model has no initializer is left out, with a warning.

    Args:
        path_to_checkpoint: of the file.
        model: changed in place.

    Raises:
        InputError: the checkpoint cannot be read, or has no parameters.
        GraphError: the model has none of the tensors, or one of another shape or dtype.
    """
    content = checkpoint_file.read(path_to_checkpoint)
    specs = [*content.parameters, *content.buffers]
    tensors = {s.name: content.tensors[s.name] for s in specs if s.name in content.tensors}
    if not any(spec.name in tensors for spec in content.parameters):
        raise InputError(
            f"the checkpoint {os.fspath(path_to_checkpoint)} has no parameters",
            because="it is a nominal one",
            help="load one that was saved after training",
        )
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    found = {name: initializers[name] for name in tensors if name in initializers}
    if not found:
        raise GraphError(
            f"the model has no initializer of the checkpoint {os.fspath(path_to_checkpoint)}",
            because=f"this has {listing([*tensors])}",
            help="load it into the model that the artifacts were made of",
        )
    for name, old in found.items():
        new = numpy_helper.from_array(tensors[name], name)
        if (new.data_type, [*new.dims]) != (old.data_type, [*old.dims]):
            raise GraphError(
                f"{name!r} is {tensors[name].dtype} {[*new.dims]} in the checkpoint, and "
                f"{_dtype(old)} {[*old.dims]} in the model",
                help="load it into the model that the artifacts were made of",
            )
    for name, old in found.items():
        old.CopyFrom(numpy_helper.from_array(tensors[name], name))
    if left_out := [name for name in tensors if name not in found]:
        warnings.warn(
            f"the model has no initializer {listing(left_out)}: left out",
            OrtrainWarning,
            stacklevel=2,
        )


def _dtype(tensor: TensorProto) -> str:
    return str(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
