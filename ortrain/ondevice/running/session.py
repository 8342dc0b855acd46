"""Sessions whose state is bound once, so that a run binds only what the user gives and gets."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnxruntime

from ortrain.errors import ExecutionError, InputError, listing
from ortrain.files import seal
from ortrain.ondevice import contract
from ortrain.ondevice.running.checkpoint import CheckpointState
from ortrain.ondevice.running.checkpoint_file import Spec, Uri
from ortrain.ondevice.running.tensor import Device, Tensor

Value: TypeAlias = "np.ndarray | onnxruntime.OrtValue"
Results: TypeAlias = "Value | tuple[Value, ...]"

# Differences between a model and a checkpoint that an error tells.
MOST_NAMED = 3

# With fewer elements of parameters than this, and no convolution to use them many times over,
# waking a second thread costs more than it brings.
SMALL = 1 << 15

_DTYPES = {
    f"tensor({name})": np.dtype(dtype)
    for name, dtype in (
        ("bool", np.bool_),
        ("double", np.float64),
        ("float", np.float32),
        ("float16", np.float16),
        ("int16", np.int16),
        ("int32", np.int32),
        ("int64", np.int64),
        ("int8", np.int8),
        ("string", np.object_),
        ("uint16", np.uint16),
        ("uint32", np.uint32),
        ("uint64", np.uint64),
        ("uint8", np.uint8),
    )
}


def default_options(state: CheckpointState) -> onnxruntime.SessionOptions:
    """The options of a session where the user gives none."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what fails is raised, and need not be printed as well
    shapes = [spec.shape for spec in state.description.parameters]
    if sum(map(math.prod, shapes)) < SMALL and all(len(shape) < 3 for shape in shapes):
        options.intra_op_num_threads = 1
    return options


def open_session(
    uri: Uri, label: str, device: Device, options: onnxruntime.SessionOptions
) -> onnxruntime.InferenceSession:
    """Makes a session of a model.

    Args:
        uri: a path, or the file's content.
        label: what the model is, for the error.
        device: where it runs.
        options: of the session.

    Raises:
        InputError: it is damaged, or onnxruntime refuses it.
        ExecutionError: it cannot run it on the device.
    """
    in_memory = isinstance(uri, bytes | bytearray | memoryview)
    source = bytes(uri) if in_memory else os.fspath(uri)  # type: ignore[arg-type]
    try:
        if isinstance(source, bytes):
            seal.is_whole(source, label)
        else:
            seal.is_model_whole(source, label)
        # Its fallback would be the CPU, which the state is not on.
        session = onnxruntime.InferenceSession(
            source, options, providers=device.providers(), enable_fallback=0
        )
    except InputError:
        raise
    except Exception as error:  # onnxruntime has no common base of its errors
        raise InputError(
            f"onnxruntime cannot load the {label}",
            because=str(error).strip().splitlines()[0],
            help="give the file that generate_artifacts has written, whole and unchanged",
        ) from error
    device.check_runs(session.get_providers())
    metadata = session.get_modelmeta().custom_metadata_map
    told = metadata.get(seal.KEY, "")
    if contract.MODEL_HASH in metadata and not told.startswith((seal.MARK.decode(), seal.NONE)):
        seal.warn_unsealed(label, "make it anew with generate_artifacts", 3)
    return session


def check_fits(
    session: onnxruntime.InferenceSession,
    label: str,
    specs: Iterable[Spec],
    *,
    model: str,
    needed: Iterable[str],
    claimed: Iterable[str],
) -> None:
    """Raises where a model and a checkpoint do not belong together.

    Args:
        session: of the model.
        label: what the model is, for the error.
        specs: what the checkpoint has for the model.
        model: the hash by which the checkpoint knows its models; one that has none may be its own.
        needed: inputs and outputs that the model has if it is for this checkpoint.
        claimed: inputs of the model that should be among the specs.

    Raises:
        InputError: names, dtypes or shapes differ.
    """
    inputs = {argument.name: argument for argument in session.get_inputs()}
    outputs = {argument.name for argument in session.get_outputs()}
    known = {spec.name: spec for spec in specs}
    differences = [
        f"{name} is {_described(argument)} in the model and {known[name]} in the checkpoint"
        for name, argument in inputs.items()
        if name in known and not _is_like(argument, known[name])
    ]
    noted = session.get_modelmeta().custom_metadata_map.get(contract.MODEL_HASH, model)
    other = [] if noted == model or differences else ["it was made with another checkpoint"]
    missing = [name for name in needed if name not in inputs and name not in outputs]
    unknown = [name for name in claimed if name not in known]
    rows = (
        ("", differences),
        ("", other),
        ("the model lacks ", missing),
        ("the checkpoint lacks ", unknown),
    )
    if any(names for _, names in rows):
        raise InputError(
            f"the {label} does not belong to this checkpoint",
            because="; ".join(title + listing(names, MOST_NAMED) for title, names in rows if names),
            help="give the models and the checkpoint that one generate_artifacts has written",
        )


def _is_like(argument: Any, spec: Spec) -> bool:
    return (
        _DTYPES.get(argument.type) == spec.dtype
        and len(argument.shape) == len(spec.shape)
        and all(
            size == own or not isinstance(size, int)
            for size, own in zip(argument.shape, spec.shape, strict=True)
        )
    )


def _described(argument: Any) -> str:
    dtype = _DTYPES.get(argument.type, argument.type)
    return f"{dtype} [{', '.join('?' if size is None else str(size) for size in argument.shape)}]"


def unpacked(results: list[Value]) -> Results:
    """A single result bare, several as a tuple."""
    return results[0] if len(results) == 1 else tuple(results)


class BoundModel:
    """A session with its state bound; what is left of its inputs and outputs is the user's.

    Args:
        session: of a model.
        label: what the model is, for errors.
        device: where the session runs.
        inputs: the state, by the names of inputs; the session takes those that it has.
        outputs: likewise; where the session writes.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        label: str,
        device: Device,
        inputs: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
    ) -> None:
        self._session, self._label, self._device = session, label, device
        self._io = session.io_binding()
        self._arguments = [a for a in session.get_inputs() if a.name not in inputs]
        self.inputs = [argument.name for argument in self._arguments]
        names = [argument.name for argument in session.get_outputs()]
        self.results = [name for name in names if name not in outputs]
        # First, so that they are the first among the outputs of a run.
        for name in self.results:
            self._io.bind_output(name)
        for name in names:
            if name in outputs:
                self._io.bind_ortvalue_output(name, outputs[name].value)
        self._apart = []
        for argument in session.get_inputs():
            if argument.name in inputs:
                tensor = inputs[argument.name]
                self._io.bind_ortvalue_input(argument.name, tensor.value)
                if tensor.device != device:
                    self._apart.append((argument.name, tensor.value))
        self._checked: list[tuple[object, ...]] | None = None
        everything = [*session.get_inputs(), *session.get_outputs()]
        self._has_strings = any(_DTYPES.get(a.type) == np.object_ for a in everything)
        taken = {argument.name for argument in session.get_inputs()}
        self._state = {name: tensor for name, tensor in inputs.items() if name in taken}
        self._written = {name: outputs[name] for name in names if name in outputs}

    def run(self, inputs: Sequence[Value] = ()) -> list[Value]:
        """Runs the model.

        Args:
            inputs: the user's, in the model's order.

        Returns:
            The user's results: OrtValues where all inputs are such, else numpy arrays.

        Raises:
            TypeError: the number of inputs, or the dtype of one, is wrong.
            ValueError: the shape of an input is wrong.
            ExecutionError: onnxruntime failed.
        """
        kinds = [_kind(value) for value in inputs]
        if kinds != self._checked:
            self._check(inputs, kinds)
            self._checked = kinds
        if self._has_strings:
            return self._run_unbound(inputs)
        io, as_values = self._io, bool(inputs)
        for name, value in zip(self.inputs, inputs, strict=True):
            if isinstance(value, np.ndarray):
                as_values = False
                io.bind_cpu_input(name, np.asarray(value, order="C"))
            else:
                io.bind_ortvalue_input(name, value)
        # Bound anew, or a run would write over the results of the last.
        place = (self._device.kind, self._device.index) if as_values else ("cpu", 0)
        for name in self.results:
            io.bind_output(name, *place)
        # What lies elsewhere has been copied when it was bound.
        for name, value in self._apart:
            io.bind_ortvalue_input(name, value)
        try:
            # Without run options, in which it would look for a captured graph: 21 µs against 46.
            self._session.run_with_iobinding(io)
        except Exception as error:  # onnxruntime has no common base of its errors
            raise self._failed(error) from error
        values = io.get_outputs_as_ortvaluevector()
        if as_values:
            return [onnxruntime.OrtValue(values[i]) for i in range(len(self.results))]
        return [values[i].numpy() for i in range(len(self.results))]

    def _run_unbound(self, inputs: Sequence[Value]) -> list[Value]:
        """The same with the state copied in and out: onnxruntime binds no strings."""
        arrays = [v if isinstance(v, np.ndarray) else v.numpy() for v in inputs]
        feeds = {name: tensor.numpy() for name, tensor in self._state.items()}
        feeds.update(zip(self.inputs, arrays, strict=True))
        try:
            found = self._session.run([*self.results, *self._written], feeds)
        except Exception as error:
            raise self._failed(error) from error
        for tensor, array in zip(self._written.values(), found[len(self.results) :], strict=True):
            tensor.assign(array)
        return found[: len(self.results)]

    def _failed(self, error: Exception) -> ExecutionError:
        return ExecutionError(
            f"the {self._label} failed",
            because=str(error).strip().splitlines()[0],
            help="look at the inputs' values and sizes, such as labels out of range",
        )

    def _check(self, inputs: Sequence[Value], kinds: list[tuple[object, ...]]) -> None:
        if len(inputs) != len(self._arguments):
            taken = ", ".join(f"{a.name}: {_described(a)}" for a in self._arguments)
            raise TypeError(
                f"the {self._label} takes {len(self._arguments)} inputs ({taken}), and was given "
                f"{len(inputs)}"
            )
        sizes: dict[str, tuple[int, str]] = {}
        for argument, value, (dtype, shape) in zip(self._arguments, inputs, kinds, strict=True):
            name = argument.name
            wanted = f"the input {name!r} of the {self._label} is {_described(argument)}"
            if shape is None:
                raise TypeError(
                    f"{wanted}, and was given a {type(value).__name__}; give a numpy array or an "
                    "OrtValue"
                )
            assert isinstance(shape, tuple)
            given = f"was given {dtype} {list(shape)}"
            if dtype != _DTYPES.get(argument.type):
                raise TypeError(f"{wanted}, and {given}; convert it")
            if len(shape) != len(argument.shape):
                raise ValueError(f"{wanted}, and {given}")
            for size, own in zip(shape, argument.shape, strict=True):
                if isinstance(own, int) and size != own:
                    raise ValueError(f"{wanted}, and {given}")
                if isinstance(own, str) and sizes.setdefault(own, (size, name))[0] != size:
                    first, where = sizes[own]
                    raise ValueError(f"{wanted}, and {given}; {own} is {first} in {where!r}")


def _kind(value: object) -> tuple[object, ...]:
    """Dtype and shape; None for both where it is no tensor."""
    if isinstance(value, np.ndarray):
        strings = value.dtype.kind == "U"  # of a length that the model does not ask for
        return np.dtype(np.object_) if strings else value.dtype, value.shape
    if isinstance(value, onnxruntime.OrtValue):
        return _DTYPES.get(value.data_type(), value.data_type()), tuple(value.shape())
    return None, None
