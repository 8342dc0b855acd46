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

    def line(self) -> str:
        """What ran the last training, and how fast and how close to PyTorch that was."""
        report = self.training
        if report is None or not report.mode:
            return "ORTTrainer: nothing was trained"
        calls, contest = report.graph_calls + report.eager_calls, report.contest
        parts = [f"{report.graph_calls} of {calls} forwards ran as a graph"]
        if contest is not None and contest.speedup and contest.winner:
            parts.append(f"this was {contest.speedup:.2f} times as fast as PyTorch")
        elif contest is not None and not contest.winner:
            parts.append(f"the contest with PyTorch had {contest.left} calls or more to go")
        elif report.mode == "eager":
            parts.append(f"the rest in PyTorch: {report.reason.partition(chr(10))[0]}")
        if report.overhead is not None:
            parts.append(f"overhead {report.overhead}")
        if report.certificate:
            parts.append(f"certificate: {report.certificate}")
        return f"ORTTrainer: {'; '.join(parts)}"

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
