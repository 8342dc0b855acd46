"""``Module``: runs the training and the evaluation model on a state."""

from __future__ import annotations

import math
import os
from typing import Literal

import numpy as np
import onnxruntime

from ortrain.errors import InputError, StateError, listing
from ortrain.kinds import NONE, expect, expect_flag, expect_names, expect_path
from ortrain.ondevice import contract
from ortrain.ondevice.running.adapters import merged, without_rank
from ortrain.ondevice.running.checkpoint import CheckpointState
from ortrain.ondevice.running.checkpoint_file import Spec, Uri, source_name
from ortrain.ondevice.running.inference import export
from ortrain.ondevice.running.pickling import NotPickled
from ortrain.ondevice.running.session import (
    BoundModel,
    Results,
    Value,
    check_fits,
    default_options,
    open_session,
    unpacked,
)
from ortrain.ondevice.running.tensor import CPU, Device, Tensor
from ortrain.ondevice.running.training import TrainingRun


class Module(NotPickled):
    """Runs a model on the parameters of a state: in training mode it also accumulates gradients.

    ::

        module = Module("training_model.onnx", state, "eval_model.onnx")
        loss = module(x, labels)        # adds to the gradients
        module.eval()
        loss, logits = module(x, labels)

    Args:
        train_model_uri: the training model, as a path or as the file's content.
        state: of the same artifacts. Modules may share one, on one device.
        eval_model_uri: the evaluation model; without it there is neither evaluation nor export.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
        session_options: of all sessions, also the optimizer's; without them a small model runs on
            one thread.

    Raises:
        TypeError: an argument is of another type.
        InputError: onnxruntime cannot load a model, or it is not of the state's artifacts.
        ExecutionError: onnxruntime has no execution provider for the device.
        StateError: the state is trained on another device already.
    """

    def __init__(
        self,
        train_model_uri: Uri,
        state: CheckpointState,
        eval_model_uri: Uri | None = None,
        device: str = "cpu",
        session_options: onnxruntime.SessionOptions | None = None,
    ) -> None:
        expect_model("train_model_uri", train_model_uri)
        expect_state(state)
        expect_model("eval_model_uri", eval_model_uri, optional=True)
        expect_session(device, session_options)
        place = Device.parse(device)
        self.state = state
        self.session_options = session_options or default_options(state)
        self.training = True
        label = f"training model {source_name(train_model_uri)}"
        session = open_session(train_model_uri, label, place, self.session_options)
        _check_training(session, label, state)
        self._eval_model_uri = eval_model_uri
        self._eval: BoundModel | None = None
        if eval_model_uri is not None:
            eval_label = f"evaluation model {source_name(eval_model_uri)}"
            evaluation = open_session(eval_model_uri, eval_label, place, self.session_options)
            _check_evaluation(evaluation, eval_label, state, session)
        state.place(place)
        if eval_model_uri is not None:
            self._eval = BoundModel(evaluation, eval_label, place, state.tensors, {})
        for spec in state.trained():
            if spec.name not in state.gradients:
                state.gradients[spec.name] = Tensor(spec, device=place)
        buffers, outs = (
            {name(parameter): tensor for parameter, tensor in state.gradients.items()}
            for name in (contract.accumulation_buffer, contract.accumulation_out)
        )
        reset = {contract.LAZY_RESET_GRAD: state.inputs[contract.LAZY_RESET_GRAD]}
        self._train = TrainingRun(session, label, state, buffers | reset, outs)

    # -- running ---------------------------------------------------------------------------------

    def __call__(self, *user_inputs: Value) -> Results:
        """Runs the model of the current mode.

        Args:
            *user_inputs: numpy arrays or OrtValues, in the order of `input_names`.

        Returns:
            The loss, and further results where the model has them: a single one bare, several as a
            tuple. OrtValues where all inputs are such, else numpy arrays.

        Raises:
            TypeError: the number of inputs or the dtype of one is wrong.
            ValueError: the shape of an input is wrong.
            StateError: the checkpoint is nominal, and its parameters have not been loaded.
            ExecutionError: onnxruntime failed.
        """
        if not self.training:
            self.state.require_values("EvalStep")
            return unpacked(self._evaluation().run(user_inputs))
        results = self._train(user_inputs)
        self.state.has_gradients = True
        return unpacked(results)

    def train(self, mode: bool = True) -> Module:
        """Goes into training mode, or with False into evaluation mode; returns the module.

        Raises:
            TypeError: ``mode`` is neither True nor False.
            StateError: evaluation is asked for, and there is no evaluation model.
        """
        expect_flag("mode", mode)
        if not mode:
            self._evaluation()
        self.training = mode
        return self

    def eval(self) -> Module:
        """Goes into evaluation mode; returns the module.

        Raises:
            StateError: there is no evaluation model.
        """
        return self.train(False)

    def lazy_reset_grad(self) -> None:
        """Lets the next run in training mode start the gradients anew."""
        self.state.has_gradients = False

    def input_names(self) -> list[str]:
        """The inputs that a call takes in the current mode, in order."""
        return list(self._current().inputs)

    def output_names(self) -> list[str]:
        """The results that a call gives in the current mode, in order."""
        return list(self._current().results)

    def _current(self) -> BoundModel:
        return self._train.model if self.training else self._evaluation()

    def _evaluation(self) -> BoundModel:
        if self._eval is None:
            raise StateError(
                "cannot evaluate",
                because="the module was made without an evaluation model",
                help="give Module the eval_model_uri",
            )
        return self._eval

    # -- parameters as one buffer ----------------------------------------------------------------

    def get_parameters_size(self, trainable_only: bool = True) -> int:
        """Elements of all parameters together.

        Args:
            trainable_only: leave out those that are frozen.
        """
        return sum(math.prod(spec.shape) for spec in self._specs(trainable_only))

    def get_contiguous_parameters(self, trainable_only: bool = False) -> onnxruntime.OrtValue:
        """All parameters one after the other, in the models' order.

        Args:
            trainable_only: leave out those that are frozen.

        Returns:
            A copy on the CPU, of shape ``[get_parameters_size(trainable_only)]``.

        Raises:
            StateError: the checkpoint is nominal, and they have not been loaded.
            InputError: they are not of one dtype.
        """
        self.state.require_values("a copy of the parameters")
        specs = self._specs(trainable_only)
        # Memory of onnxruntime's, which an array of it keeps alive: of a value made of an array,
        # `numpy()` would be left without memory once the value is gone.
        shape = [self.get_parameters_size(trainable_only)]
        value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, _common_dtype(specs).type)
        for spec, part in zip(specs, _parts(value.numpy(), specs), strict=True):
            part[...] = self.state.tensors[spec.name].numpy()
        return value

    def copy_buffer_to_parameters(
        self, buffer: onnxruntime.OrtValue, trainable_only: bool = True
    ) -> None:
        """Sets all parameters from what `get_contiguous_parameters` gave.

        It also loads the parameters of a nominal checkpoint.

        Args:
            buffer: of shape ``[get_parameters_size(trainable_only)]``.
            trainable_only: leave out those that are frozen.

        Raises:
            TypeError: the buffer is no OrtValue, or of another dtype.
            ValueError: it is of another shape.
            InputError: the parameters are not of one dtype.
        """
        specs = self._specs(trainable_only)
        dtype, size = _common_dtype(specs), self.get_parameters_size(trainable_only)
        wanted = f"the parameters take a buffer that is {dtype} [{size}]"
        if not isinstance(buffer, onnxruntime.OrtValue):
            raise TypeError(
                f"{wanted}, and were given a {type(buffer).__name__}; give an OrtValue, such as "
                "OrtValue.ortvalue_from_numpy(array)"
            )
        values = buffer.numpy()
        given = f"were given {values.dtype} {list(values.shape)}"
        if values.dtype != dtype:
            raise TypeError(f"{wanted}, and {given}")
        if values.shape != (size,):
            raise ValueError(f"{wanted} with trainable_only={trainable_only}, and {given}")
        for spec, part in zip(specs, _parts(values, specs), strict=True):
            self.state.tensors[spec.name].assign(part)

    def _specs(self, trainable_only: bool) -> list[Spec]:
        return self.state.trained() if trainable_only else self.state.description.parameters

    # -- inference -------------------------------------------------------------------------------

    def export_model_for_inferencing(
        self,
        inference_model_uri: str | os.PathLike[str],
        graph_output_names: list[str],
        adapters: Literal["kept", "merged", "inputs"] = "kept",
    ) -> None:
        """Writes an ONNX model for inference: the evaluation model with the current parameters.

        Args:
            inference_model_uri: the file, replaced once the new one is on the disk.
            graph_output_names: values of the evaluation model, such as the logits. What they do not
                need is left out, inputs such as the labels among it.
            adapters: what becomes of low-rank adapters: ``"kept"``, beside their weights;
                ``"merged"`` into them; or ``"inputs"``, of rank 0 by default, so that the model is
                the base until a run has an adapter of :func:`export_adapter`.

        Raises:
            TypeError: an argument is of another type.
            ValueError: ``adapters`` is none of these.
            StateError: there is no evaluation model, or the checkpoint is nominal.
            InputError: the model has no such value, keeps weights in other files, or would pass
                2 GB.
            SaveError: the file could not be written.
        """
        expect_path("inference_model_uri", inference_model_uri, expected="the path of a file")
        expect_names("graph_output_names", graph_output_names)
        self._evaluation()
        assert self._eval_model_uri is not None
        self.state.require_values("export")
        tensors = {name: tensor.numpy() for name, tensor in self.state.tensors.items()}
        defaults: list[str] = []
        if adapters not in ("kept", "merged", "inputs"):
            raise ValueError(f'adapters={adapters!r}: expected "kept", "merged" or "inputs"')
        if adapters != "kept":
            empty = without_rank(self.state)
            tensors |= empty
            if adapters == "merged":
                tensors |= merged(self.state)
            else:
                defaults = list(empty)
        export(
            self._eval_model_uri,
            tensors,
            graph_output_names,
            inference_model_uri,
            lambda model: open_session(model, "model for inference", CPU, self.session_options),
            defaults,
        )


def expect_model(name: str, uri: object, *, optional: bool = False) -> None:
    """Raises TypeError where an argument is neither the path of a model nor its content."""
    if uri is not None or not optional:
        kinds = (str, os.PathLike, bytes, bytearray, memoryview)
        expect(name, uri, kinds, "the path of a model, or its content")


def expect_state(state: object) -> None:
    """Raises TypeError where an argument is no state."""
    hint = "load it with CheckpointState.load_checkpoint" if isinstance(state, str | bytes) else ""
    expect("state", state, CheckpointState, "a CheckpointState", hint)


def expect_session(device: object, session_options: object) -> None:
    """Raises TypeError where an argument is no name of a device, or no options of sessions."""
    expect("device", device, str, 'the name of a device, such as "cpu"')
    expect(
        "session_options",
        session_options,
        (onnxruntime.SessionOptions, NONE),
        "onnxruntime.SessionOptions",
    )


def _check_training(
    session: onnxruntime.InferenceSession, label: str, state: CheckpointState
) -> None:
    trained = state.trained()
    buffers = [Spec(contract.accumulation_buffer(s.name), s.dtype, s.shape) for s in trained]
    suffix = contract.accumulation_buffer("")
    taken = [a.name for a in session.get_inputs() if a.name.endswith(suffix)]
    check_fits(
        session,
        label,
        [*state.description.parameters, *state.description.buffers, *buffers],
        model=state.description.texts["model"],
        needed=[*(b.name for b in buffers), *(contract.accumulation_out(s.name) for s in trained)],
        claimed=taken,
    )


def _check_evaluation(
    session: onnxruntime.InferenceSession,
    label: str,
    state: CheckpointState,
    training: onnxruntime.InferenceSession,
) -> None:
    suffix = contract.accumulation_buffer("")
    given = {a.name for a in training.get_inputs() if not a.name.endswith(suffix)}
    given -= {contract.SEED, contract.LAZY_RESET_GRAD}
    check_fits(
        session,
        label,
        [*state.description.parameters, *state.description.buffers],
        model=state.description.texts["model"],
        needed=[],
        # What is no input of training is a parameter of another model.
        claimed=[
            a.name
            for a in session.get_inputs()
            if a.name not in given and a.name not in state.tensors
        ],
    )


def _common_dtype(specs: list[Spec]) -> np.dtype:
    dtypes = {spec.dtype for spec in specs}
    if len(dtypes) > 1:
        names = [f"{spec.name} is {spec.dtype}" for spec in specs]
        raise InputError(
            "the parameters do not fit into one buffer",
            because=f"they are of several dtypes: {listing(names)}",
            help="take them from state.parameters one by one",
        )
    return dtypes.pop() if dtypes else np.dtype(np.float32)


def _parts(buffer: np.ndarray, specs: list[Spec]) -> list[np.ndarray]:
    """Views of the parts of a buffer, in the shapes of the parameters."""
    ends = np.cumsum([math.prod(spec.shape) for spec in specs])
    return [
        part.reshape(spec.shape)
        for part, spec in zip(np.split(buffer, ends[:-1]), specs, strict=True)
    ]
