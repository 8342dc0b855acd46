"""With ``cache_dir`` a contest is held once, and later processes take what it has found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import DebugOptions, Options, ORTModule
from ortrain.errors import OrtrainWarning
from ortrain.frontend.machine import Machine
from ortrain.runtime.aten.executor import AtenCompiled
from ortrain.runtime.onnxruntime import Compiled
from ortrain.step import marks
from ortrain.step.report import Contest

FIRST_TURN = 2


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(4, width)

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.layer(value).tanh()
        return result


class Paces:
    """A clock on which each engine takes what a test says."""

    def __init__(self) -> None:
        self.now, self.seconds = 0.0, {"onnxruntime": 0.2, "aten": 0.2, "eager": 1.0}

    def __call__(self) -> float:
        return self.now

    def taking(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def longer(*args: Any) -> Any:
            self.now += self.seconds[name]
            return run(*args)

        return longer


@pytest.fixture
def paces(monkeypatch: pytest.MonkeyPatch) -> Paces:
    paces = Paces()
    monkeypatch.setattr(marks, "clock", paces)
    for name, kind, run in (
        ("onnxruntime", Compiled, "run_values"),
        ("aten", AtenCompiled, "run_values"),
        ("eager", Machine, "_in_pytorch"),
    ):
        monkeypatch.setattr(kind, run, paces.taking(name, getattr(kind, run)))
    return paces


def trained(
    folder: Path | None,
    steps: int = 40,
    make: Callable[[], nn.Module] = Net,
    batch: int = 3,
    debug: DebugOptions | None = None,
    **options: Any,
) -> ORTModule:
    model = ORTModule(make(), debug, options=Options(cache_dir=folder, **options))
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        value = torch.randn(batch, 4, dtype=dtype)
        output = model(value)
        torch.testing.assert_close(output, model.module(value))
        if output.requires_grad:
            output.sum().backward()
    return model


def found(model: ORTModule) -> Contest:
    assert model.report.contest is not None
    return model.report.contest


def test_an_engine_that_has_won_runs_once_a_graph_pays(paces: Paces, tmp_path: Path) -> None:
    winner = "aten"
    paces.seconds |= {"eager": 0.3, winner: 0.1}
    first = trained(tmp_path)
    assert found(first).engine == winner
    assert not found(first).recalled
    later = trained(tmp_path)
    assert found(later).engine == later.report.engine.split()[0] == winner
    assert found(later).recalled
    assert str(found(later)).endswith("; found by an earlier process")
    assert found(later).engines == found(first).engines
    assert later.report.eager_calls == FIRST_TURN < first.report.eager_calls
    assert later.report.certificate


def test_where_eager_has_won_nothing_is_captured(paces: Paces, tmp_path: Path) -> None:
    paces.seconds["eager"] = 0.1
    assert found(trained(tmp_path)).winner == "eager"
    later = trained(tmp_path)
    assert found(later).winner == later.report.mode == "eager"
    assert "eager is faster" in later.report.reason
    assert later.report.captures == later.report.graph_calls == 0


OTHERS: dict[str, dict[str, Any]] = {
    "width": {"make": lambda: Net(5)},
    "dtype": {"make": lambda: Net().double()},
    "a frozen parameter": {"make": lambda: Net().requires_grad_(False)},
    "another class": {"make": lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh())},
    "evaluation": {"make": lambda: Net().eval()},
    "batch": {"batch": 400},
    "options": {"skip_padding": False},
    "threads": {"threads": 1},
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_may_have_another_winner_has_a_contest_of_its_own(
    paces: Paces, tmp_path: Path, name: str
) -> None:
    trained(tmp_path)
    model = trained(tmp_path, **OTHERS[name])
    assert found(model).winner
    assert not found(model).recalled
    assert found(trained(tmp_path, **OTHERS[name])).recalled


def test_without_a_folder_nothing_is_kept(paces: Paces) -> None:
    trained(None)
    assert not found(trained(None)).recalled


class Mode(str):
    """An argument that does not like to be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("not now")


class Moody(Net):
    def forward(self, value: Tensor, mode: str = "") -> Tensor:
        return super().forward(value) * len(mode or "a")


def test_an_argument_that_cannot_be_shown_costs_the_note_alone(
    paces: Paces, tmp_path: Path
) -> None:
    model = ORTModule(Moody(), options=Options(cache_dir=tmp_path))
    for _ in range(40):
        given = torch.randn(3, 4), Mode("bc")
        output = model(*given)
        torch.testing.assert_close(output, model.module(*given))
        output.sum().backward()
    assert found(model).winner == "graph"
    assert not [*tmp_path.glob("*.note")]


@pytest.mark.parametrize("factor", [0.3, 0.8, 1.0, 1.5, 3.0])
def test_what_a_busy_machine_has_found_is_not_believed(
    paces: Paces, tmp_path: Path, factor: float
) -> None:
    trained(tmp_path)
    paces.seconds = {name: t * factor for name, t in paces.seconds.items()}
    assert found(trained(tmp_path)).recalled is (0.5 < factor < 2)
    assert found(trained(tmp_path)).recalled


def test_calls_of_about_the_same_size_share_a_note(paces: Paces, tmp_path: Path) -> None:
    trained(tmp_path, batch=4)
    assert found(trained(tmp_path, batch=5)).recalled


def test_a_damaged_note_is_dropped(paces: Paces, tmp_path: Path) -> None:
    trained(tmp_path)
    (note,) = tmp_path.glob("*.note")
    note.write_bytes(note.read_bytes()[:-3])
    with pytest.warns(OrtrainWarning, match="is damaged"):
        assert not found(trained(tmp_path)).recalled
    assert found(trained(tmp_path)).recalled


@pytest.mark.parametrize(
    "text",
    ["", "[]", "7", "{}", '[{"winner": "graph"}, 1]', "no json", json.dumps([{}, 1]), "[1, 2, 3]"],
)
def test_a_note_that_says_nothing_is_none(
    paces: Paces, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ortrain.cache.Cache.note", lambda *_: text)
    assert not found(trained(tmp_path)).recalled


def test_a_folder_that_cannot_be_written_costs_the_note_alone(paces: Paces, tmp_path: Path) -> None:
    folder = tmp_path / "file"
    folder.write_text("no folder")
    with pytest.warns(OrtrainWarning, match="cannot be used"):
        assert not found(trained(folder)).recalled


def test_files_that_are_asked_for_are_written_whatever_has_won(
    paces: Paces, tmp_path: Path
) -> None:
    paces.seconds["eager"] = 0.1
    assert found(trained(tmp_path / "cache")).winner == "eager"
    shown = DebugOptions(save_onnx=True, onnx_prefix="net", save_path=str(tmp_path))
    trained(tmp_path / "cache", debug=shown)
    assert [*tmp_path.glob("net*.onnx")]
