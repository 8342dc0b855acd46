"""The quickstart of the README runs, and ends with a report of a graph."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import transformers

SCRIPT = Path(__file__).parents[2] / "examples" / "quickstart.py"
SMALL = {"num_hidden_layers": 1, "hidden_size": 12, "intermediate_size": 16}


def test_the_quickstart_ends_as_a_graph(
    graph_wins: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.BertConfig

    def small(**sizes: Any) -> transformers.BertConfig:
        return config(**{**sizes, **SMALL})

    monkeypatch.setattr(transformers, "BertConfig", small)
    script = runpy.run_path(str(SCRIPT))
    monkeypatch.setitem(script["main"].__globals__, "STEPS", 30)
    script["main"]()
    told = capsys.readouterr().out
    assert "step  30  loss " in told
    assert "ORTModule: graph" in told
    assert "certificate  loss " in told
    assert "contest   graph is faster" in told
