"""``TrainingRun``: what every run in training mode does, with an update or without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnxruntime

from ortrain.ondevice import contract
from ortrain.ondevice.running.checkpoint import CheckpointState
from ortrain.ondevice.running.session import BoundModel, Value
from ortrain.ondevice.running.tensor import Tensor


class TrainingRun:
    """A model in training mode: each run has a seed of its own, and moves running statistics.

    Args:
        session: of the model.
        label: what the model is, for errors.
        state: what it trains.
        inputs: further state by the names of inputs, beside parameters, buffers and seed.
        outputs: where the session writes, beside the buffers.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        label: str,
        state: CheckpointState,
        inputs: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
    ) -> None:
        self._state = state
        written = {output.name for output in session.get_outputs()}
        # Memory of their own: a run that fails must not have moved them.
        moved = {
            contract.updated(spec.name): Tensor(spec, device=state.device)
            for spec in state.description.buffers
            if contract.updated(spec.name) in written
        }
        self._moves = [(state.tensors[tensor.spec.name], tensor) for tensor in moved.values()]
        seed = {contract.SEED: state.inputs[contract.SEED]}
        self.model = BoundModel(
            session, label, state.device, {**state.tensors, **seed, **inputs}, {**moved, **outputs}
        )

    def __call__(self, inputs: Sequence[Value]) -> list[Value]:
        """Runs the model.

        Raises:
            StateError: the checkpoint is nominal.
            TypeError, ValueError, ExecutionError: as `BoundModel.run`.
        """
        self._state.require_values("TrainStep")
        results = self.model.run(inputs)
        for buffer, moved in self._moves:
            buffer.copy_from(moved)
        self._state.seed += 1
        return results
