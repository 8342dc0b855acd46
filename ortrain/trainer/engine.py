"""Which engine trains is part of a checkpoint: a resumed run goes on with it.

Without that a resumed run would hold the contest between graph and PyTorch again: its first steps
would run in PyTorch, and end with other bits than the steps of the run that it continues.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from transformers import TrainerState

from ortrain.config import Engine
from ortrain.module import ORTModule

_KEY = "ortrain"
# By what a checkpoint says; an earlier version knew of one engine.
_ENGINES: dict[str, Engine] = {
    "graph": "onnxruntime",
    "onnxruntime": "onnxruntime",
    "aten": "aten",
    "eager": "torch",
}


class EngineNote:
    """What checkpoints say of the contest between graph and PyTorch.

    It stands in their trainer states, among the notes of callbacks. In memory the trainer's state
    is without it, and there is no callback for it: both are as the user knows them.

    Attributes:
        winner: an engine or ``"eager"``, of the checkpoint that was loaded; else empty.
    """

    def __init__(self) -> None:
        self.winner = ""

    def take_from(self, state: TrainerState) -> None:
        """Takes the note out of a state that was loaded."""
        self.winner = _notes(state).pop(_KEY, {}).get("attributes", {}).get("winner", "")

    def decide(self, model: ORTModule) -> None:
        """Lets the noted winner run the model, where there is to be a contest."""
        if self.winner in _ENGINES and model.options.engine == "auto":
            model.options = replace(model.options, engine=_ENGINES[self.winner])

    @contextmanager
    def in_state(self, state: TrainerState, model: ORTModule | None) -> Iterator[None]:
        """Puts the note into a state while it is saved, once there is a winner."""
        contest = model.report.contest if model is not None else None
        winner = (contest.engine or contest.winner) if contest is not None else self.winner
        if winner:
            _notes(state)[_KEY] = {"args": {}, "attributes": {"winner": winner}}
        try:
            yield
        finally:
            _notes(state).pop(_KEY, None)


def _notes(state: TrainerState) -> dict[str, Any]:
    """Those of the callbacks, by their names: what is declared is what they are made from."""
    return cast(dict[str, Any], state.stateful_callbacks)
