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


# Each variable that acts, a value that shows, and what it makes of the settings.
ACTING = {
    "ORTMODULE_CACHE_BYTES": ("7", lambda: Options().cache_bytes),
    "ORTMODULE_CACHE_DIR": ("somewhere", lambda: Options().cache_dir),
    "ORTMODULE_ENABLE_COMPUTE_OPTIMIZER": ("0", lambda: Options().skip_padding),
    "ORTMODULE_ENABLE_CUSTOM_AUTOGRAD": ("0", lambda: Options().custom_autograd),
    "ORTMODULE_FALLBACK_POLICY": ("FALLBACK_DISABLE", lambda: Options().fallback),
    "ORTMODULE_FALLBACK_RETRY": ("1", lambda: Options().retry),
    "ORTMODULE_LOG_LEVEL": ("ERROR", lambda: DebugOptions().log_level),
    "ORTMODULE_MEMORY_OPT_LEVEL": ("1", lambda: Options().memory_budget),
    "ORTMODULE_ONNX_OPSET_VERSION": ("20", lambda: Options().opset),
    "ORTMODULE_PRINT_INPUT_DENSITY": ("1", lambda: DebugOptions().print_input_density),
    "ORTMODULE_PRINT_MEMORY_STATS": ("1", lambda: DebugOptions().print_memory_stats),
    "ORTMODULE_SAVE_ONNX_PATH": ("elsewhere", lambda: DebugOptions().folder),
}
PATHS = {"ORTMODULE_CACHE_DIR", "ORTMODULE_SAVE_ONNX_PATH", "ORTMODULE_JSON_CONFIG_PATH"}
# Off by themselves alone they change nothing but for a warning.
PAIRED = {
    "ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER",
    "ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER",
}


def test_every_variable_that_acts_is_tried_here() -> None:
    assert {*ACTING, *PAIRED, "ORTMODULE_JSON_CONFIG_PATH"} == variables.READ


@pytest.mark.parametrize("name", ACTING)
@pytest.mark.parametrize("value", ["", " ", "\t"])
def test_one_that_is_empty_is_as_one_that_is_not_set(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = ACTING[name][1]
    unset = read()
    monkeypatch.setenv(name, ACTING[name][0])
    assert read() != unset
    monkeypatch.setenv(name, value)
    assert read() == unset
    assert told() == []


@pytest.mark.parametrize("name", sorted(ACTING.keys() - PATHS))
def test_spaces_around_a_value_do_not_count(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value, read = ACTING[name]
    monkeypatch.setenv(name, value)
    plain = read()
    monkeypatch.setenv(name, f" {value}\n")
    assert read() == plain


@pytest.mark.parametrize("name", sorted({*ACTING, *PAIRED} - PATHS))
@pytest.mark.parametrize("value", ["maybe", "-1", "0x1", "1.5"])
def test_a_value_that_none_of_them_has_is_an_error_that_names_it(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"^{name}='?{re.escape(value)}'?: expected"):
        (Options(), DebugOptions())


@pytest.mark.parametrize("option", ["print_input_density", "print_memory_stats"])
@pytest.mark.parametrize("value", ["0", "1"])
@pytest.mark.parametrize("given", [False, True])
def test_a_variable_wins_over_what_the_script_shows(
    option: str, value: str, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"ORTMODULE_{option.upper()}", value)
    assert getattr(DebugOptions(**{option: given}), option) is (value == "1")


def test_no_folder_has_an_empty_name() -> None:
    with pytest.raises(ValueError, match="None keeps no files"):
        Options(cache_dir="")
