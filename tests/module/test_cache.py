"""Graphs kept between processes: what decides them is in their names, and damage is seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ortrain import ORTModule
from ortrain.autodiff import registry
from ortrain.step.captures import Captures
from tests.module.agreement import GRAPH


def trained(folder: Path) -> tuple[Tensor, ORTModule]:
    """The gradient of one step with graphs kept in a folder."""
    torch.manual_seed(0)
    model = ORTModule(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), options=replace(
        GRAPH, cache_dir=folder, certificate="off"
    ))  # fmt: skip
    model(torch.randn(5, 4)).sum().backward()
    gradient = model.module[0].weight.grad
    assert gradient is not None
    return gradient, model


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
        again, _ = trained(tmp_path)
        assert torch.equal(first, again), path.name
    whole = {path.relative_to(tmp_path) for path in files(tmp_path)}
    trained(tmp_path)
    assert {path.relative_to(tmp_path) for path in files(tmp_path)} == whole


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
    own = Captures._build

    def build(self: Captures, *args: Any) -> Any:
        built.append(self.options.opset)
        return own(self, *args)

    monkeypatch.setattr(Captures, "_build", build)
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
