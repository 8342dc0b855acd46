from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import measurement
import pytest

MACHINE = {"slug": "amd-zen5", "processor": "AMD EPYC", "cores": 2, "torch": "2"}


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Makes Results of a machine that differs from the usual one as said."""

    def make(benchmark: str = "step", **more: Any) -> measurement.Results:
        monkeypatch.setattr("processor.facts", lambda device: {**MACHINE, **more})
        path = measurement.file_of(benchmark, {**MACHINE, **more}, tmp_path)
        return measurement.Results(benchmark, path)

    return make


def test_each_round_has_another_first() -> None:
    assert "".join(measurement.turns("abc", 4)) == "abcbcacababc"


def test_warm_up_is_not_counted_and_all_have_as_many_turns() -> None:
    calls: list[str] = []
    functions = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    times = measurement.alternate(functions, rounds=3, warm_up=2)
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3}
    assert sorted(calls) == ["a"] * 5 + ["b"] * 5


def test_ratios_are_of_the_same_round() -> None:
    times = {"eager": [1.0, 10.0, 2.0], "ours": [0.5, 5.0, 1.0], "slow": [3.0, 10.0, 4.0]}
    rows = measurement.compared(times)
    assert [rows[name]["ratio"] for name in times] == [1.0, 0.5, 2.0]
    assert rows["ours"]["median_ms"] == 1.0
    assert measurement.compared(times, "ours")["eager"]["ratio"] == 2.0


def test_a_table_says_why_a_row_is_empty() -> None:
    rows = {**measurement.compared({"eager": [2.0]}), "aten": {"skipped": "ValueError: no"}}
    lines = measurement.table("a model", rows, lambda row: "  more").splitlines()
    assert lines[1].split() == ["eager", *["2.000ms"] * 3, "1.00x", "more"]
    assert lines[2].split(maxsplit=1) == ["aten", "skipped: ValueError: no"]


def test_results_stay_in_the_folder_of_their_processor(results: Any, tmp_path: Path) -> None:
    results().save(a=1)
    results(slug="intel-xeon-amx", processor="Xeon").save(a=2)
    results(slug="nvidia-h100", gpu="NVIDIA H100").save(a=3)
    found = {p.parent.name: json.loads(p.read_text())["a"] for p in tmp_path.glob("*/step.json")}
    assert found == {"amd-zen5": 1, "intel-xeon-amx": 2, "nvidia-h100": 3}


def test_another_machine_of_the_same_kind_gets_a_folder_of_its_own(
    results: Any, tmp_path: Path
) -> None:
    for machine in ({}, {"cores": 16}, {"processor": "AMD Ryzen 9"}):
        results(**machine).save(a=machine)
        results(**machine).save(a=machine)
    folders = {path.name for path in tmp_path.iterdir()}
    assert folders == {"amd-zen5", "amd-zen5-16-cores", "amd-zen5-2-cores"}
    results(processor="AMD EPYC 9B45").save(a=0)
    assert json.loads((tmp_path / "amd-zen5/step.json").read_text())["a"] == {}
    assert (tmp_path / "amd-zen5-amd-epyc-9b45-2-cores/step.json").exists()


def test_a_run_of_some_rows_does_not_replace_one_of_more(
    results: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def found(model: str, *names: str, time: int) -> dict[str, Any]:
        return {model: {"title": "BERT", "contestants": {name: {"ms": time} for name in names}}}

    results().save(workloads=found("bert", "eager", "ort", time=1))
    whole = (tmp_path / "amd-zen5/step.json").read_text()
    for again in ("bert", "ort"), ("gpt2", "eager"):  # of another workload nothing is there
        capsys.readouterr()
        results().save(workloads=found(*again, time=2))
        part = again[0] == "bert"
        assert ("step.json has also eager" in capsys.readouterr().out) is part
        assert ((tmp_path / "amd-zen5/step.json").read_text() == whole) is part
    beside = json.loads((tmp_path / "amd-zen5/step.part.json").read_text())["workloads"]
    assert beside["bert"]["contestants"] == {"ort": {"ms": 2}}
    results().save(workloads=found("bert", "eager", "ort", "aten", time=3))
    now = json.loads((tmp_path / "amd-zen5/step.json").read_text())["workloads"]
    assert now == found("bert", "eager", "ort", "aten", time=3) | found("gpt2", "eager", time=2)


def test_what_is_not_found_anew_stays_with_the_same_versions_only(
    results: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    results().save(workloads={"bert": 1, "mlp": 2})
    results().save(workloads={"mlp": 3})
    found = results()
    assert json.loads(found.path.read_text())["workloads"] == {"bert": 1, "mlp": 3}
    newer = results(torch="3")
    newer.save(workloads={"mlp": 4})
    assert json.loads(newer.path.read_text())["workloads"] == {"mlp": 4}
    assert "what other versions had found there is replaced" in capsys.readouterr().out


def test_a_process_that_fails_is_told_by_its_last_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nif sys.argv[2] == 'a':\n    print('{\"x\": 1}')\nelse: 1 / 0\n")
    assert measurement.in_a_process(str(script), "a") == {"x": 1}
    with pytest.raises(measurement.ProcessFailed, match=r"^ZeroDivisionError: division by zero$"):
        measurement.in_a_process(str(script), "b")
