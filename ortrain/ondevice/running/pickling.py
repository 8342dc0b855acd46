"""Objects that hold memory and sessions of onnxruntime, which no other process could use."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from ortrain.errors import StateError


class NotPickled:
    """Refuses to be pickled or copied, and says what to do instead."""

    instead: ClassVar[str] = (
        "save a checkpoint with CheckpointState.save_checkpoint(state, path, "
        "include_optimizer_state=True), load it where it is needed, and make the modules and "
        "optimizers of it anew"
    )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise StateError(
            f"a {type(self).__name__} cannot be pickled or copied",
            because="it holds memory and sessions of onnxruntime, of this process alone",
            help=self.instead,
        )
