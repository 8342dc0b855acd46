"""``TrainStep``: forward, backward and update in one run."""

from __future__ import annotations

import onnxruntime

from ortrain.ondevice import contract
from ortrain.ondevice.running.checkpoint import CheckpointState
from ortrain.ondevice.running.checkpoint_file import Uri, source_name
from ortrain.ondevice.running.module import expect_model, expect_session, expect_state
from ortrain.ondevice.running.session import (
    Results,
    Value,
    check_fits,
    default_options,
    open_session,
    unpacked,
)
from ortrain.ondevice.running.tensor import Device
from ortrain.ondevice.running.training import TrainingRun
from ortrain.ondevice.running.update import Update, needed


class TrainStep(Update):
    """Trains by one batch a call, without accumulating gradients.

    ::

        step = TrainStep("train_step_model.onnx", state)
        for x, labels in batches:
            loss = step(x, labels)

    Args:
        train_step_model_uri: the fused model, as a path or as the file's content.
        state: of the same artifacts; modules may share it, on one device.
        session_options: without them a small model runs on one thread.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.

    Raises:
        TypeError: an argument is of another type.
        InputError: onnxruntime cannot load the model, or it is not of the state's artifacts.
        ExecutionError: onnxruntime has no execution provider for the device.
        StateError: the state is trained on another device already.
    """

    def __init__(
        self,
        train_step_model_uri: Uri,
        state: CheckpointState,
        session_options: onnxruntime.SessionOptions | None = None,
        device: str = "cpu",
    ) -> None:
        expect_model("train_step_model_uri", train_step_model_uri)
        expect_state(state)
        expect_session(device, session_options)
        place = Device.parse(device)
        label = f"train step model {source_name(train_step_model_uri)}"
        options = session_options or default_options(state)
        session = open_session(train_step_model_uri, label, place, options)
        _check(session, label, state)
        state.place(place)
        super().__init__(state, session)
        self._run = TrainingRun(session, label, state, self._inputs(), self._outputs())

    def __call__(self, *user_inputs: Value) -> Results:
        """Trains by one batch.

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
        results = self._run(user_inputs)
        self._finish()
        return unpacked(results)

    def input_names(self) -> list[str]:
        """The inputs that a call takes, in order."""
        return list(self._run.model.inputs)

    def output_names(self) -> list[str]:
        """The results that a call gives, in order."""
        return list(self._run.model.results)


def _check(session: onnxruntime.InferenceSession, label: str, state: CheckpointState) -> None:
    suffix = contract.updated("")
    updated = [output.name for output in session.get_outputs() if output.name.endswith(suffix)]
    gradients = {contract.gradient(spec.name) for spec in state.trained()}
    description = state.description
    check_fits(
        session,
        label,
        [
            *description.parameters,
            *description.buffers,
            *description.states,
            state.inputs[contract.STEP].spec,
        ],
        model=state.description.texts["model"],
        needed=needed(state),
        claimed=[
            *(name.removesuffix(suffix) for name in updated),
            # An optimizer model takes gradients, a fused one makes them.
            *(argument.name for argument in session.get_inputs() if argument.name in gradients),
        ],
    )
