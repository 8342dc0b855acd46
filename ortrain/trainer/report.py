"""What an ORTTrainer ran where."""

from __future__ import annotations

from dataclasses import dataclass, field

from ortrain.deploy.generation import GenerationReport
from ortrain.step.report import Report


@dataclass
class TrainerReport:
    """Calls of the model in training and in inference, and what ran them.

    Attributes:
        trainings: on the models in training, in order; a search trains several.
        inference: on evaluation and prediction through onnxruntime; None where there was none.
        generation: on ``predict_with_generate`` through onnxruntime; None where there was none.
    """

    trainings: list[Report] = field(default_factory=list)
    inference: Report | None = None
    generation: GenerationReport | None = None

    @property
    def training(self) -> Report | None:
        """On the model that is trained last; None before the first ``train()``."""
        return self.trainings[-1] if self.trainings else None

    @property
    def graph_calls(self) -> int:
        """Forwards of training that ran as a graph, in all calls of ``train()``."""
        return sum(report.graph_calls for report in self.trainings)

    @property
    def fallback_calls(self) -> int:
        """Forwards of training that ran in PyTorch, those of the contest included."""
        return sum(report.eager_calls for report in self.trainings)

    def __str__(self) -> str:
        if self.training is None and self.inference is None:
            return "ORTTrainer: nothing has run yet"
        rows = []
        for name, report in (("training", self.training), ("evaluation", self.inference)):
            if report is not None:
                graph, eager = report.graph_calls, report.eager_calls
                why = f" ({report.reason})" if report.reason else ""
                rows.append(f"{name}: {graph} forwards as a graph, {eager} in PyTorch{why}")
                rows += report.rows()
        if self.generation is not None:
            rows.append(str(self.generation))
        return "\n".join(rows)
