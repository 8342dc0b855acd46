"""``Optimizer``: updates the parameters by the gradients that a module has accumulated."""

from __future__ import annotations

from ortrain.errors import StateError
from ortrain.kinds import expect
from ortrain.ondevice import contract
from ortrain.ondevice.running.checkpoint_file import Spec, Uri, source_name
from ortrain.ondevice.running.module import Module, expect_model
from ortrain.ondevice.running.session import BoundModel, check_fits, open_session
from ortrain.ondevice.running.update import Update, needed


class Optimizer(Update):
    """Updates parameters and optimizer states in place.

    Without states in the checkpoint they start at zero.

    Args:
        optimizer_uri: the optimizer model, as a path or as the file's content.
        module: whose gradients it takes.

    Raises:
        TypeError: an argument is of another type.
        InputError: onnxruntime cannot load the model, or it is not of the module's artifacts.
    """

    def __init__(self, optimizer_uri: Uri, module: Module) -> None:
        expect_model("optimizer_uri", optimizer_uri)
        expect("module", module, Module, "a Module of ortrain.ondevice")
        state = module.state
        label = f"optimizer model {source_name(optimizer_uri)}"
        session = open_session(optimizer_uri, label, state.device, module.session_options)
        trained = state.trained()
        gradients = [Spec(contract.gradient(s.name), s.dtype, s.shape) for s in trained]
        check_fits(
            session,
            label,
            [*trained, *gradients, *state.description.states],
            model=state.description.texts["model"],
            needed=[*needed(state), *(spec.name for spec in gradients)],
            claimed=[
                argument.name
                for argument in session.get_inputs()
                if argument.name not in (contract.STEP, contract.LEARNING_RATE)
            ],
        )
        super().__init__(state, session)
        inputs = {contract.gradient(name): tensor for name, tensor in state.gradients.items()}
        self._model = BoundModel(
            session, label, state.device, state.tensors | inputs | self._inputs(), self._outputs()
        )

    def step(self) -> None:
        """Updates the parameters once. The gradients stay, until ``module.lazy_reset_grad()``.

        Raises:
            StateError: there are no gradients.
            ExecutionError: onnxruntime failed.
        """
        if not self.state.has_gradients:
            raise StateError(
                "there are no gradients to update the parameters by",
                because="the module has not run in training mode since they were reset",
                help="call the module in training mode before optimizer.step()",
            )
        self._model.run()
        self._finish()
