"""A training ends with one line: what ran, how fast it was, how close to PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ortrain.step.report import Contest, Report
from ortrain.trainer import TrainerReport
from tests.trainer.test_behaviour import trainer


def last_line(capsys: Any) -> str:
    return str(capsys.readouterr().out.strip().splitlines()[-1])


def test_a_training_ends_with_a_line_on_what_ran(tmp_path: Path, capsys: Any) -> None:
    trained = trainer(tmp_path, max_steps=3)
    trained.train()
    line = last_line(capsys)
    assert line == trained.ort_report.line()
    assert line.startswith("ORTTrainer: 3 of 3 forwards ran as a graph")
    assert trained.ort_report.training.certificate in line


def told(**values: Any) -> str:
    return TrainerReport([Report(**values)]).line()


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {
                "mode": "graph",
                "graph_calls": 90,
                "eager_calls": 10,
                "contest": Contest({"onnxruntime": [1.0]}, [1.5], "graph", engine="onnxruntime"),
                "certificate": "…",
            },
            (
                "90 of 100 forwards ran as a graph; "
                "this was 1.50 times as fast as PyTorch; certificate: …"
            ),
        ),
        (
            {
                "mode": "eager",
                "reason": "eager is faster: …",
                "graph_calls": 10,
                "eager_calls": 90,
                "contest": Contest({"onnxruntime": [1.25]}, [1.0], "eager"),
            },
            "10 of 100 forwards ran as a graph; this was 0.80 times as fast as PyTorch",
        ),
        (
            {
                "mode": "parts",
                "reason": "the forward draws\n  where: …",
                "eager_calls": 4,
                "parts": {"a": Report("graph"), "b": Report("eager")},
            },
            (
                "0 of 4 forwards ran as a graph; "
                "in the others 1 of 2 parts of the model did: the forward draws"
            ),
        ),
        (
            {
                "mode": "parts",
                "reason": "the forward draws",
                "eager_calls": 4,
                "parts": {"a": Report("graph")},
                "contest": Contest(left=14),
            },
            (
                "0 of 4 forwards ran as a graph; "
                "in the others 1 of 1 parts of the model did: the forward draws"
            ),
        ),
        (
            {"mode": "eager", "eager_calls": 4, "contest": Contest(left=15)},
            "0 of 4 forwards ran as a graph; the contest with PyTorch had 15 calls or more to go",
        ),
        (
            {"mode": "eager", "reason": "the forward branches\n  where: …", "eager_calls": 4},
            "0 of 4 forwards ran as a graph; the rest in PyTorch: the forward branches",
        ),
        ({}, "nothing was trained"),
    ],
)
def test_the_line_says_what_was_measured(values: dict[str, Any], line: str) -> None:
    assert told(**values) == f"ORTTrainer: {line}"
