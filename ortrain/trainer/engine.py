"""Which engine trains is part of a checkpoint: a resumed run goes on with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformers import TrainerCallback

from ortrain.config import Engine
from ortrain.module import ORTModule

_KEY = "ortrain"
_ENGINES: dict[str, Engine] = {"graph": "onnxruntime", "eager": "torch"}


class RemembersEngine(TrainerCallback):
    """Notes the winner of the contest between graph and PyTorch in the trainer's state.

    Without it a resumed run would hold the contest again: its first steps would run in PyTorch, and
    end with other bits than the steps of the run that it continues.

    Args:
        wrapped: returns the model that is trained.
    """

    def __init__(self, wrapped: Callable[[], ORTModule | None]) -> None:
        self.wrapped = wrapped

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Takes over what the checkpoint says."""
        model = self.wrapped()
        noted = (state.stateful_callbacks or {}).get(_KEY, {}).get("attributes", {}).get("winner")
        if model is not None and noted in _ENGINES and model.options.engine == "auto":
            model.options = replace(model.options, engine=_ENGINES[noted])

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Notes the winner once there is one."""
        model = self.wrapped()
        contest = model.report.contest if model is not None else None
        if contest is not None and contest.winner and _KEY not in state.stateful_callbacks:
            state.stateful_callbacks[_KEY] = {
                "args": {},
                "attributes": {"winner": contest.winner},
            }
