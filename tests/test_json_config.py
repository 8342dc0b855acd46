"""A JSON file configures ORTModule by the old keys: each acts, or is told of."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import LogLevel, Options, ORTModule
from ortrain.compat.json_config import load_from_json
from ortrain.errors import CaptureError, InputError, NotServed, OrtrainWarning
from ortrain.json_config import _CASTS, _DEBUG, _KEYS

# Key → values that are fine, values that are told to have no effect, values that are refused.
VALUES: dict[str, tuple[list[Any], list[Any], list[Any]]] = {
    "PropagateCastOps.Strategy": (
        ["NONE", "INSERT_AND_REDUCE", "FLOOD_FILL", "REMOVE_INPUT_OUTPUT_UP_DOWN_CASTS"],
        [],
        ["ALL", 1],
    ),
    "PropagateCastOps.Level": ([-1, 0, 1], [2, 5], [-2, "1", True]),
    "PropagateCastOps.Allow": ([[]], [["Softmax"]], ["Softmax", [1]]),
    "UseExternalGPUAllocator": ([True], [False], [1, "true"]),
    "EnableCustomAutogradFunction": ([True, False], [], [1]),
    "EnableGradAccOptimization": ([False], [True], [None]),
    "UseStaticShape": ([False], [True], [0]),
    "RunSymbolicShapeInference": ([True], [False], ["yes"]),
    "AllowLayerNormModPrecision": ([False], [True], [1]),
    "SkipCheck": (
        [[], ["SKIP_CHECK_DISABLED"]],
        [["SKIP_CHECK_DEVICE", "SKIP_CHECK_EXECUTION_AGENT"]],
        ["SKIP_CHECK_DEVICE", ["SKIP_ALL"]],
    ),
    "DebugOptions.LogLevel": (["VERBOSE", "FATAL"], [], ["LOUD", 3]),
    "DebugOptions.SaveONNX": ([False], [], ["true", True]),  # True lacks a prefix
    "DebugOptions.ONNXPrefix": (["model"], [], [1]),
    "DebugOptions.SaveONNXPath": (["folder"], [], [None]),
    "UseMemoryEfficientGradient": ([True], [False], [2]),
    "FallbackPolicy": ([["FALLBACK_DISABLE"], []], [], ["FALLBACK_DISABLE", ["SOMETIMES"]]),
    "OnnxOpsetVersion": ([18, 23], [], [24, 0, "18", 18.0]),
}


def nested(key: str, value: Any) -> dict[str, Any]:
    outer, _, inner = key.partition(".")
    return {outer: {inner: value} if inner else value}


def load(tmp_path: Path, content: Any) -> ORTModule:
    file = tmp_path / "config.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    module = ORTModule(nn.Linear(2, 2))
    load_from_json(module, file)
    return module


CASES = [(key, kind, v) for key, kinds in VALUES.items() for kind in range(3) for v in kinds[kind]]


@pytest.mark.parametrize(("key", "kind", "value"), CASES)
def test_a_value_acts_or_is_told(key: str, kind: int, value: Any, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if kind == 2:
            with pytest.raises(InputError, match=r"config\.json") as raised:
                load(tmp_path, nested(key, value))
            assert key in str(raised.value) or "onnx_prefix" in str(raised.value)
        else:
            load(tmp_path, nested(key, value))
    assert bool(caught) == (kind == 1)
    if caught:
        assert "does nothing here: " in str(caught[0].message)
        assert key.partition(".")[0] in str(caught[0].message)


def test_the_cases_are_all_keys() -> None:
    keys = {f"PropagateCastOps.{k}" for k in _CASTS} | {f"DebugOptions.{k}" for k in _DEBUG}
    assert keys | {*_KEYS} - {"PropagateCastOps", "DebugOptions"} == {*VALUES}


def test_what_acts_is_in_the_options(tmp_path: Path) -> None:
    module = load(
        tmp_path,
        {
            "OnnxOpsetVersion": 20,
            "FallbackPolicy": ["FALLBACK_UNSUPPORTED_DEVICE", "FALLBACK_UNSUPPORTED_TORCH_MODEL"],
            "DebugOptions": {
                "LogLevel": "ERROR",
                "SaveONNX": True,
                "ONNXPrefix": "m",
                "SaveONNXPath": str(tmp_path),
            },
        },
    )
    assert module.options.opset == 20
    assert module.options.policy == (NotServed, CaptureError)
    assert module._debug_options.log_level == LogLevel.ERROR
    module.options = Options(engine="aten")
    load_from_json(module, tmp_path / "config.json")
    assert (module.options.engine, module.options.opset) == ("aten", 20)
    module(torch.ones(1, 2)).sum().backward()
    assert {p.name for p in tmp_path.glob("m_*.onnx")}


def test_nothing_falls_back_where_it_is_disabled(tmp_path: Path) -> None:
    assert load(tmp_path, {"FallbackPolicy": ["FALLBACK_DISABLE"]}).options.fallback == "raise"


def test_an_old_opset_is_the_least_one(tmp_path: Path) -> None:
    with pytest.warns(OrtrainWarning, match="OnnxOpsetVersion=17"):
        assert load(tmp_path, {"OnnxOpsetVersion": 17}).options.opset == 18


BROKEN = {
    '{"FallbakPolicy": []}': "FallbakPolicy does not exist; did you mean FallbackPolicy",
    '{"DebugOptions": {"Level": 1}}': "DebugOptions.Level does not exist; did you mean LogLevel",
    '{"Zzz": 1}': "there are PropagateCastOps",
    '{"DebugOptions": []}': "expected an object",
    "[]": "expected an object",
    "{": "it is not JSON",
    '{"UseStaticShape": false, "UseStaticShape": true}': "stands there twice",
}


@pytest.mark.parametrize("content", BROKEN)
def test_a_broken_file_is_one_error(content: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as raised:
        load(tmp_path, content)
    assert BROKEN[content] in str(raised.value)


def test_the_file_of_the_environment_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"OnnxOpsetVersion": 19, "DebugOptions": {"LogLevel": "FATAL"}}')
    monkeypatch.setenv("ORTMODULE_JSON_CONFIG_PATH", str(file))
    module = load(tmp_path, {"OnnxOpsetVersion": 22})
    assert module.options.opset == 19
    made = ORTModule(nn.Linear(1, 1))
    assert (made.options.opset, made._debug_options.log_level) == (19, LogLevel.FATAL)
    assert ORTModule(nn.Linear(1, 1), options=Options(engine="aten")).options.opset == 19
    assert ORTModule(nn.Linear(1, 1), options=Options(opset=23)).options.opset == 23
    monkeypatch.setenv("ORTMODULE_JSON_CONFIG_PATH", str(tmp_path / "none.json"))
    with pytest.raises(InputError, match=r"none\.json"):
        ORTModule(nn.Linear(1, 1))


def test_parts_of_a_model_are_configured(tmp_path: Path) -> None:
    model = nn.Sequential(ORTModule(nn.Linear(1, 1)), nn.ReLU(), ORTModule(nn.Linear(1, 1)))
    file = tmp_path / "config.json"
    file.write_text('{"OnnxOpsetVersion": 19}')
    load_from_json(model, file)
    assert [model[0].options.opset, model[2].options.opset] == [19, 19]
    load_from_json(model)  # without a file nothing changes
    with pytest.raises(TypeError, match="expected an ORTModule"):
        load_from_json(nn.Linear(1, 1), file)
