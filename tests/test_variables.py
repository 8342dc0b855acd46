"""Environment variables of ONNX Runtime Training: each acts, or is told of once."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
from torch import nn

from ortrain import DebugOptions, LogLevel, Options, ORTModule, variables
from ortrain.errors import OrtrainWarning

PAGE = (Path(__file__).parents[1] / "docs" / "features.md").read_text()
# With a value other than the old default.
WITHOUT_EFFECT = {
    "ORTMODULE_CONV_ALGO_SEARCH": "EXHAUSTIVE",
    "ORTMODULE_ENABLE_CUSTOM_AUTOGRAD": "0",
    "ORTMODULE_SKIPCHECK_POLICY": "SKIP_CHECK_BUILD_GRADIENT|SKIP_CHECK_EXECUTION_AGENT",
    "ORTMODULE_ENABLE_SPARSE_OPTIMIZER": "0",
}


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variables, "_told", set())


def told() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ORTModule(nn.Linear(1, 1))
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("name", variables.WITHOUT_EFFECT)
def test_what_does_nothing_is_told_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert told() == []
    monkeypatch.setenv(name, WITHOUT_EFFECT.get(name, "1"))
    (line,) = told()
    assert line.startswith(f"{name}=")
    assert "does nothing here: " in line
    assert told() == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (name, v)
        for name, (so_anyway, _) in variables.WITHOUT_EFFECT.items()
        for v in sorted(so_anyway)
    ],
)
def test_what_is_so_in_any_case_is_not(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value.upper())
    assert told() == []


def test_a_name_that_nothing_reads_is_told_with_those_near_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLCY", "FALLBACK_DISABLE")
    (line,) = told()
    assert line.endswith(
        "no variable of that name is read; did you mean ORTMODULE_FALLBACK_POLICY?"
    )


def test_several_are_told_in_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_USE_TRITON", "1")
    monkeypatch.setenv("ORTMODULE_ENABLE_TUNING", "1")
    (line,) = told()
    assert line.count("does nothing") == 2


def test_nothing_is_told_below_the_level_of_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_USE_TRITON", "1")
    ORTModule(nn.Linear(1, 1), DebugOptions(log_level=LogLevel.ERROR))


def test_the_page_of_features_has_every_variable() -> None:
    listed = set(re.findall(r"^\| `(O\w+)` \|", PAGE, re.MULTILINE))
    ours = {"ORTMODULE_CACHE_BYTES"}
    assert listed == {*variables.READ, *variables.WITHOUT_EFFECT} - ours


@pytest.mark.parametrize("opset", [9, 12, 15, 17])
def test_old_opsets_run_at_the_least_one(opset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_ONNX_OPSET_VERSION", str(opset))
    with pytest.warns(OrtrainWarning, match=f"ORTMODULE_ONNX_OPSET_VERSION={opset}: graphs are"):
        assert Options().opset == 18


@pytest.mark.parametrize("value", ["0", "24", "-1", "seventeen", "17.0"])
def test_an_opset_that_is_none_is_an_error(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_ONNX_OPSET_VERSION", value)
    with pytest.raises(ValueError, match="ORTMODULE_ONNX_OPSET_VERSION"):
        Options()
