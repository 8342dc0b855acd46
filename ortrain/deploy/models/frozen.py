"""``Frozen``: what a model of PyTorch may be asked for, and one of a file has not."""

from __future__ import annotations

from typing import Any, Self

from ortrain.errors import StateError

_TRAIN = "wrap the PyTorch model in ortrain.ORTModule, and export it again when it is trained"


class Frozen:
    """Runs a file, whose weights are constants: it has one mode, and no parameters."""

    def eval(self) -> Self:
        """Itself: it is in evaluation mode always."""
        return self

    def train(self, mode: bool = True) -> Self:
        """Itself, if the mode is False.

        Raises:
            StateError: the mode is True.
        """
        return self._no_training("has no training mode") if mode else self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Itself, if no gradient is asked for.

        Raises:
            StateError: one is.
        """
        return self._no_training("computes no gradients") if requires_grad else self

    def parameters(self, recurse: bool = True) -> Any:
        """Raises StateError: the weights are constants of the file."""
        self._no_training("has no parameters")

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Raises StateError: the weights are constants of the file."""
        self._no_training("has no parameters")

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Raises StateError: the weights are constants of the file."""
        self._no_training("has no state")

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Raises StateError: the weights are constants of the file."""
        self._no_training("has no state")

    def num_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Raises StateError: the weights are constants of the file."""
        self._no_training("has no parameters")

    def buffers(self, recurse: bool = True) -> Any:
        """Raises StateError: they are constants of the file."""
        self._no_training("has no buffers")

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        """Raises StateError: they are constants of the file."""
        self._no_training("has no buffers")

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> Any:
        """Raises StateError: no gradients are computed."""
        self._no_training("computes no gradients")

    def get_input_embeddings(self) -> Any:
        """Raises StateError: they are constants of the file."""
        self._no_training("has no table of embeddings by itself")

    def get_output_embeddings(self) -> Any:
        """Raises StateError: they are constants of the file."""
        self._no_training("has no output layer by itself")

    def set_input_embeddings(self, value: Any) -> Any:
        """Raises StateError: they are constants of the file."""
        self._no_training("has no table of embeddings by itself")

    def set_output_embeddings(self, value: Any) -> Any:
        """Raises StateError: they are constants of the file."""
        self._no_training("has no output layer by itself")

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Raises StateError: they are constants of the file."""
        self._no_training("cannot be given other embeddings")

    def _no_training(self, what: str) -> Any:
        raise StateError(
            f"{type(self).__name__} {what}",
            because="it runs an exported file, whose weights are constants",
            help=f"to train, {_TRAIN}",
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(
            f"{type(self).__name__} cannot be pickled or copied",
            because="a session of onnxruntime belongs to its process",
            help="save_pretrained writes it; from_pretrained loads it in the other process",
        )
