"""What an ORTTrainer ran where."""

from __future__ import annotations

from dataclasses import dataclass, field

from ortrain.step.report import Report


@dataclass
class TrainerReport:
    """Calls of the model in training and in inference, and what ran them.

    Attributes:
        training: on the model in training; None before the first ``train()``.
        inference: on evaluation and prediction through onnxruntime; None where there was none.
    """

    training: Report | None = None
    inference: Report | None = None
    _earlier: list[Report] = field(default_factory=list, repr=False)

    @property
    def graph_calls(self) -> int:
        """Forwards of training that ran as a graph, in all calls of ``train()``."""
        return sum(report.graph_calls for report in self._all())

    @property
    def fallback_calls(self) -> int:
        """Forwards of training that ran in PyTorch, those of the contest included."""
        return sum(report.eager_calls for report in self._all())

    def begin(self, report: Report) -> None:
        """Takes the report of another wrapped model."""
        if self.training is not None:
            self._earlier.append(self.training)
        self.training = report

    def _all(self) -> list[Report]:
        return [*self._earlier, *([self.training] if self.training is not None else [])]

    def __str__(self) -> str:
        if self.training is None and self.inference is None:
            return "ORTTrainer: nothing has run yet"
        rows = []
        for name, report in (("training", self.training), ("evaluation", self.inference)):
            if report is not None:
                graph, eager = report.graph_calls, report.eager_calls
                rows.append(f"{name}: {graph} forwards as a graph, {eager} in PyTorch")
                rows += report.rows()
        return "\n".join(rows)
