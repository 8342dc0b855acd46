"""``Update``: what an optimizer and a fused training step share."""

from __future__ import annotations

import numpy as np
import onnxruntime

from ortrain.ondevice import contract
from ortrain.ondevice.running.checkpoint import CheckpointState
from ortrain.ondevice.running.checkpoint_file import Spec
from ortrain.ondevice.running.pickling import NotPickled
from ortrain.ondevice.running.tensor import Tensor

# Where neither the checkpoint nor the user says otherwise.
LEARNING_RATE = 0.001


class Update(NotPickled):
    """Learning rate, number of updates and optimizer states of a model that updates parameters."""

    def __init__(self, state: CheckpointState, session: onnxruntime.InferenceSession) -> None:
        self.state = state
        for spec in state.description.states:
            if spec.name not in state.optimizer_states:
                state.optimizer_states[spec.name] = Tensor(spec, device=state.device)
        if state.learning_rate is None:
            state.learning_rate = LEARNING_RATE
        self._next_step = Tensor(Spec(contract.updated(contract.STEP), np.dtype(np.int64), (1,)))
        self._norm = Tensor(Spec(contract.GRAD_NORM, np.dtype(np.float32), (1,)))
        self._clips = any(output.name == contract.GRAD_NORM for output in session.get_outputs())
        self._done = False

    def set_learning_rate(self, learning_rate: float) -> None:
        """Sets the learning rate of the updates that follow.

        Raises:
            ValueError: it is not finite.
        """
        self.state.learning_rate = learning_rate

    def get_learning_rate(self) -> float:
        """The learning rate of the next update; 0.001 where nobody has set another."""
        rate = self.state.learning_rate
        assert rate is not None
        return rate

    @property
    def grad_norm(self) -> float | None:
        """The norm of all gradients in the last update, before they were clipped.

        None before the first update, and where the optimizer does not clip.
        """
        return float(self._norm.numpy()[0]) if self._clips and self._done else None

    def _inputs(self) -> dict[str, Tensor]:
        """What the model reads, beside parameters and gradients."""
        names = (contract.STEP, contract.LEARNING_RATE)
        return {**self.state.optimizer_states, **{n: self.state.inputs[n] for n in names}}

    def _outputs(self) -> dict[str, Tensor]:
        """Where the model writes: in place, but for the number of updates."""
        state = self.state
        written = {s.name: state.tensors[s.name] for s in state.trained()} | state.optimizer_states
        outputs = {contract.updated(name): tensor for name, tensor in written.items()}
        return outputs | {t.spec.name: t for t in (self._next_step, self._norm)}

    def _finish(self) -> None:
        """Counts an update."""
        self.state.inputs[contract.STEP].copy_from(self._next_step)
        self._done = True


def needed(state: CheckpointState) -> list[str]:
    """Inputs and outputs without which a model does not update the state."""
    names = [spec.name for spec in (*state.trained(), *state.description.states)]
    return [*names, *map(contract.updated, (*names, contract.STEP))]
