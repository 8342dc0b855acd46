"""Graphs kept between processes: what decides them is in their names, and damage is seen."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, fx, nn

from ortrain import Options, ORTModule
from ortrain.autodiff import registry
from ortrain.cache import _sealed, _unsealed
from ortrain.errors import ExecutionError, OrtrainWarning
from ortrain.frontend.backend import _KNOWN
from ortrain.frontend.program import Translated, translated
from ortrain.runtime.onnxruntime.executor import Compiled
from tests.module.agreement import GRAPH


def trained(folder: Path, **options: Any) -> tuple[Tensor, ORTModule]:
    """The gradient of one step with graphs kept in a folder, as in another process."""
    _KNOWN.clear()
    torch.manual_seed(0)
    options = {"cache_dir": folder, "certificate": "off", **options}
    model = ORTModule(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), options=replace(GRAPH, **options))
    model(torch.randn(5, 4)).sum().backward()
    gradient = model.module[0].weight.grad
    assert gradient is not None
    return gradient, model


def damage_told() -> AbstractContextManager[Any]:
    return pytest.warns(
        OrtrainWarning, match="(is damaged.*; it is made again|did not serve; they are new)"
    )


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_second_module_takes_what_the_first_has_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = trained(tmp_path)
    monkeypatch.setattr("ortrain.step.build.cut", lambda *_: pytest.fail("cut again"))
    second, _ = trained(tmp_path)
    assert torch.equal(first, second)


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "missing", "nonsense"])
def test_a_damaged_entry_is_none_and_is_made_again(tmp_path: Path, damage: str) -> None:
    first, _ = trained(tmp_path)
    generator = np.random.default_rng(0)
    for path in files(tmp_path):
        data = bytearray(path.read_bytes())
        if damage == "flipped":
            data[generator.integers(len(data))] ^= 1 << int(generator.integers(8))
        elif damage == "cut":
            del data[generator.integers(len(data)) :]
        elif damage == "nonsense":
            data = bytearray(b"null")
        if damage == "missing":
            path.unlink()
        else:
            path.write_bytes(b"" if damage == "empty" else bytes(data))
        with contextlib.nullcontext() if damage == "missing" else damage_told():
            again, _ = trained(tmp_path)
        assert torch.equal(first, again), path.name
    whole = {path: path.read_bytes() for path in files(tmp_path)}
    trained(tmp_path)
    assert {path: path.read_bytes() for path in files(tmp_path)} == whole


def test_entries_in_each_others_places_are_damaged(tmp_path: Path) -> None:
    first, _ = trained(tmp_path)
    trained(tmp_path, opset=18)
    one, other = files(tmp_path)
    whole = one.read_bytes(), other.read_bytes()
    one.write_bytes(whole[1])
    other.write_bytes(whole[0])
    for opset in (21, 18):
        with damage_told():
            again, _ = trained(tmp_path, opset=opset)
        assert torch.equal(first, again)
    assert (one.read_bytes(), other.read_bytes()) == whole


@pytest.mark.parametrize("wrong", ["another graph", "no graph", "none", "too few"])
@pytest.mark.parametrize("certificate", ["off", "first"])
def test_an_entry_that_is_whole_and_does_not_serve_is_made_again(
    tmp_path: Path, wrong: str, certificate: str
) -> None:
    """As a library would write it that had the versions of these and another mistake."""
    first, _ = trained(tmp_path)
    read = {path: [bytes(part) for part in _unsealed(path)] for path in files(tmp_path)}
    entry = next(path for path, parts in read.items() if len(parts) > 1)
    whole = entry.read_bytes()
    parts = read[entry]
    if wrong == "another graph":
        other = onnx.parser.parse_model(
            '<ir_version: 10, opset_import: ["" : 21]> '
            "other (float[N] x) => (float[N] y) { y = Missing (x) }"
        )
        parts = [other.SerializeToString()] * len(parts)
    elif wrong == "no graph":
        parts = [b""] * len(parts)
    else:
        parts = [] if wrong == "none" else parts[:-1]
    entry.write_bytes(b"".join(_sealed(entry.name, parts)))
    with damage_told():
        again, model = trained(tmp_path, certificate=certificate)
    assert torch.equal(first, again)
    assert (model.report.mode, model.report.eager_calls) == ("graph", 0)
    assert entry.read_bytes() == whole
    trained(tmp_path)


def test_a_graph_with_other_numbers_is_made_again_where_it_is_compared(tmp_path: Path) -> None:
    first, _ = trained(tmp_path)
    step = max(files(tmp_path), key=lambda path: path.stat().st_size)
    whole = step.read_bytes()
    parts = [onnx.ModelProto.FromString(part) for part in _unsealed(step)]
    for node in (node for part in parts for node in part.graph.node):
        node.op_type = {"Tanh": "Sigmoid"}.get(node.op_type, node.op_type)
    step.write_bytes(b"".join(_sealed(step.name, [p.SerializeToString() for p in parts])))
    with pytest.warns(OrtrainWarning, match="did not serve; they are new"):
        again, model = trained(tmp_path, certificate="first")
    assert torch.equal(first, again)
    assert model.report.mode == "graph"
    assert step.read_bytes() == whole


def test_a_graph_that_fails_as_it_runs_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = trained(tmp_path)
    own, failures = Compiled.run_values, iter([True])

    def run_values(self: Compiled, feeds: Any) -> Any:
        if next(failures, False):
            raise ExecutionError("onnxruntime failed to run the graph")
        return own(self, feeds)

    monkeypatch.setattr(Compiled, "run_values", run_values)
    with pytest.warns(OrtrainWarning, match="did not serve; they are new"):
        again, model = trained(tmp_path)
    assert torch.equal(first, again)
    assert (model.report.mode, model.report.eager_calls) == ("graph", 0)
    assert len(files(tmp_path)) == 1


def test_a_backward_that_fails_takes_its_entries_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = trained(tmp_path)
    own, runs = Compiled.run_values, iter([False, True])

    def run_values(self: Compiled, feeds: Any) -> Any:
        if next(runs, False):
            raise ExecutionError("onnxruntime failed to run the graph")
        return own(self, feeds)

    monkeypatch.setattr(Compiled, "run_values", run_values)
    with pytest.warns(OrtrainWarning, match="did not serve; they are new"):
        again, model = trained(tmp_path, fallback="torch")
    torch.testing.assert_close(first, again)
    assert files(tmp_path) == []
    model(torch.randn(5, 4)).sum().backward()
    assert (model.report.mode, model.report.recovered) == ("graph", 1)
    assert len(files(tmp_path)) == 1


def test_what_does_not_become_a_graph_costs_no_entry_of_what_does(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, value: Tensor, named: bool = False) -> Any:
            out = self.layer(value).tanh()
            return out if not named else (out * 1j).abs().sum()

    for _ in range(2):
        model = ORTModule(
            Two(), options=Options(engine="onnxruntime", cache_dir=tmp_path, certificate="off")
        )
        model(torch.randn(5, 4)).sum().backward()
        with pytest.warns(OrtrainWarning, match="in PyTorch"):
            model(torch.randn(5, 4), named=True).backward()
        assert len(files(tmp_path)) == 1


def test_a_module_without_a_backward_in_the_graph_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its evaluation and its training have one capture, and only the first becomes a step."""
    monkeypatch.delitem(registry._ENTRIES, registry._key("Tanh"))
    for _ in range(3):
        model = ORTModule(
            nn.Sequential(nn.Linear(4, 3), nn.Tanh()),
            options=Options(engine="onnxruntime", cache_dir=tmp_path),
        )
        value = torch.rand(3, 4)
        with torch.no_grad():
            model(value)
        assert model.report.mode == "graph"
        with pytest.warns(OrtrainWarning, match="in PyTorch") as told:
            model(value).sum().backward()
        assert len(told) == 1


@pytest.mark.parametrize("place", ["a file", "below a file", "a lost link"])
def test_a_folder_that_cannot_be_used_is_none_and_is_told_once(tmp_path: Path, place: str) -> None:
    first, _ = trained(tmp_path / "usable")
    folder = tmp_path / "cache"
    if place == "a lost link":
        folder.symlink_to(tmp_path / "nowhere")
    else:
        folder.write_text("mine")
    used = folder / "inner" if place == "below a file" else folder
    with pytest.warns(OrtrainWarning, match="cannot be used .*; graphs are made") as told:
        again, model = trained(used)
    assert len(told) == 1
    assert told[0].filename == __file__
    assert torch.equal(first, again)
    assert model.report.mode == "graph"
    assert place == "a lost link" or folder.read_text() == "mine"


def test_a_rule_of_the_users_own_is_part_of_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = trained(tmp_path)
    key = registry._key("Tanh")
    own = registry._ENTRIES[key]

    def twice(g: Any, input: Any) -> Any:
        return g.dy * (1.0 - g.y * g.y) * 2.0

    def thrice(g: Any, input: Any) -> Any:
        return g.dy * (1.0 - g.y * g.y) * 3.0

    for factor, rule in ((2.0, twice), (3.0, thrice)):
        monkeypatch.setitem(registry._ENTRIES, key, replace(own, rule=rule))
        changed, _ = trained(tmp_path)
        torch.testing.assert_close(changed, first * factor)
    monkeypatch.setitem(registry._ENTRIES, key, own)
    again, _ = trained(tmp_path)
    assert torch.equal(again, first)


def test_new_options_hold_from_the_next_call_on(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []

    def noted(module: fx.GraphModule, real: Sequence[Any], opset: int) -> Translated:
        built.append(opset)
        return translated(module, real, opset)

    monkeypatch.setattr("ortrain.frontend.graph.translated", noted)
    model = ORTModule(nn.Linear(4, 3), options=GRAPH)
    value = torch.randn(2, 4)
    model(value)
    model.options = replace(GRAPH, opset=18)
    model(value)
    assert built == [21, 18]
    model.options = replace(GRAPH, engine="torch")
    model(value)
    assert model.report.mode == "eager"
    model.options = GRAPH
    model(value)
    assert model.report.mode == "graph"
