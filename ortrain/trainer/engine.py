"""Which engine trains is part of a checkpoint: a resumed run goes on with it.

Without that a resumed run would hold the contest between graph and PyTorch again: its first steps
would run in PyTorch, and end with other bits than the steps of the run that it continues.

The note stands in the trainer's state, among those of the callbacks. It is not made by a callback,
because what is in a trainer's list of callbacks is the user's affair.
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
_ENGINES: dict[str, Engine] = {"graph": "onnxruntime", "eager": "torch"}


def note_engine(state: TrainerState, model: ORTModule) -> None:
    """Notes the winner of the contest, once there is one."""
    contest = model.report.contest
    if contest is not None and contest.winner:
        _notes(state).setdefault(_KEY, {"args": {}, "attributes": {"winner": contest.winner}})


def go_on_with_engine(state: TrainerState, model: ORTModule) -> None:
    """Lets the noted winner run the model, where there is to be a contest."""
    noted = _notes(state).get(_KEY, {}).get("attributes", {}).get("winner")
    if noted in _ENGINES and model.options.engine == "auto":
        model.options = replace(model.options, engine=_ENGINES[noted])


@contextmanager
def only_callbacks(state: TrainerState) -> Iterator[None]:
    """The state without the note, for which Trainer would look for a callback."""
    noted = _notes(state).pop(_KEY, None)
    try:
        yield
    finally:
        if noted is not None:
            _notes(state)[_KEY] = noted


def _notes(state: TrainerState) -> dict[str, Any]:
    """Those of the callbacks, by their names: what is declared is what they are made from."""
    return cast(dict[str, Any], state.stateful_callbacks)
