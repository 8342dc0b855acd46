"""How a library's own code is run: plainly, or with its modules and trainers through ortrain."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass
class Way:
    """One run of a row.

    Attributes:
        options: of ``ORTModule``; None is plain.
        steps: that it takes.
        large: whether 300 plain steps take a minute or more, or as little as they may.
        losses: of each step, and of a Trainer the norm of each gradient.
        said: what ortrain has printed, and what it has warned of.
    """

    options: dict[str, Any] | None
    steps: int
    large: bool = False
    losses: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    _wrapped: list[Any] = field(default_factory=list)

    def module(self, module: nn.Module) -> Any:
        """A module as a script would wrap it."""
        if self.options is None:
            return module
        from ortrain import Options, ORTModule

        made = ORTModule(module, options=Options(**self.options))
        self._wrapped.append(made)
        return made

    def trainer(self, kind: Any, **given: Any) -> Any:
        """A subclass of transformers' Trainer as a script would make it, with its arguments."""
        if self.options is None:
            return kind(**given)
        from ortrain import Options, ORTTrainerMixin

        through = type(f"Through{kind.__name__}", (ORTTrainerMixin, kind), {})
        made = through(options=Options(**self.options), **given)
        self._wrapped.append(made)
        return made

    def arguments(self, folder: str) -> dict[str, Any]:
        """Of a Trainer: short, silent, with a loss of each step."""
        return {
            "output_dir": folder,
            "max_steps": self.steps,
            "learning_rate": 1e-4,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            "use_cpu": True,
            "seed": 1,
        }

    def trained(self, trainer: Any, **given: Any) -> None:
        """Trains, and keeps losses and norms of gradients: GRPO's losses are zero."""
        trainer.train(**given)
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        self.losses += [entry[key] for entry in logs for key in ("loss", "grad_norm")]

    def reports(self) -> list[Any]:
        """Of all modules that were wrapped."""
        return [
            report
            for each in self._wrapped
            for report in (
                each.ort_report.trainings if hasattr(each, "ort_report") else [each.report]
            )
        ]

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Keeps what ortrain says meanwhile."""
        with (
            redirect_stdout(io.StringIO()) as printed,
            warnings.catch_warnings(record=True) as warned,
        ):
            warnings.simplefilter("ignore")
            if self.options is not None:
                from ortrain import OrtrainWarning

                warnings.simplefilter("default", OrtrainWarning)
            yield
        self.said += [str(each.message) for each in warned]
        lines = printed.getvalue().split("\n")
        self.said += [line for line in lines if line.startswith("ORTTrainer:")]
