"""Settings from a JSON file, by the keys of ONNX Runtime Training.

::

    {"DebugOptions": {"LogLevel": "INFO"}, "FallbackPolicy": ["FALLBACK_DISABLE"]}

The file in ``ORTMODULE_JSON_CONFIG_PATH`` holds for each ORTModule that is made.
"""

from __future__ import annotations

import difflib
import json
import os
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ortrain.config import (
    DebugOptions,
    LogLevel,
    Options,
    errors_under,
    json_config_path,
    served_opset,
)
from ortrain.errors import InputError, OrtrainWarning
from ortrain.files.regular import expect_regular
from ortrain.kinds import shown

_LEVELS = (*LogLevel.__members__,)
# The last one is of the files of 2021.
_STRATEGIES = ("NONE", "INSERT_AND_REDUCE", "FLOOD_FILL", "REMOVE_INPUT_OUTPUT_UP_DOWN_CASTS")
_SKIPS = (
    "SKIP_CHECK_DISABLED",
    "SKIP_CHECK_DEVICE",
    "SKIP_CHECK_BUILD_GRADIENT",
    "SKIP_CHECK_EXECUTION_AGENT",
)


@dataclass
class Settings:
    """What a file says.

    Attributes:
        options: fields of `Options`.
        debug: fields of `DebugOptions`.
        without_effect: lines on what it asks for and does not get.
    """

    options: dict[str, Any] = field(default_factory=dict)
    debug: dict[str, Any] = field(default_factory=dict)
    without_effect: list[str] = field(default_factory=list)

    def applied(
        self, options: Options, debug_options: DebugOptions
    ) -> tuple[Options, DebugOptions]:
        """The settings with those of the file; of options, where they are as by default."""
        default = Options()
        mine = {
            name: value
            for name, value in self.options.items()
            if getattr(options, name) == getattr(default, name)
        }
        return replace(options, **mine), replace(debug_options, **self.debug)

    def tell(self) -> None:
        """Warns of what has no effect."""
        if self.without_effect:
            warnings.warn("\n".join(self.without_effect), OrtrainWarning, stacklevel=3)


def settings_from_environment() -> Settings | None:
    """The settings in ``ORTMODULE_JSON_CONFIG_PATH``; None where it is not set.

    Raises:
        InputError: as `settings_in`.
    """
    path = json_config_path()
    return None if path is None else settings_in(path)


def settings_in(path: str | os.PathLike[str]) -> Settings:
    """What a file says.

    Raises:
        InputError: it cannot be read, has a key that does not exist, or a bad value.
    """
    try:
        expect_regular(path)
    except InputError as error:
        raise _fault(path, error.what) from None
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_once)
    except OSError as error:
        raise _fault(path, error.strerror or "it cannot be read") from None
    except ValueError as error:
        raise _fault(path, f"it is not JSON: {error}") from None
    settings = Settings()
    try:
        _read(content, _KEYS, settings, "")
        DebugOptions(**settings.debug)
    except ValueError as error:
        raise _fault(path, str(error)) from None
    return settings


def _fault(path: str | os.PathLike[str], why: str) -> InputError:
    return InputError(
        f"the JSON configuration {os.fspath(path)!r} cannot be used: {why}",
        help="docs/migration.md lists its keys and values",
    )


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {name!r} stands there twice")
        found[name] = value
    return found


def _read(content: Any, keys: dict[str, _Reader], settings: Settings, within: str) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"{within or 'the file'} is {shown(content)}: expected an object")
    start = f"{within}." if within else ""
    for name, value in content.items():
        if name not in keys:
            near = difflib.get_close_matches(name, keys, 3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(keys)}"
            raise ValueError(f"the key {start}{name} does not exist; {hint}")
        keys[name](settings, f"{start}{name}", value)


# --- values -------------------------------------------------------------------------------------

_Reader = Callable[[Settings, str, Any], None]


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{key} is {shown(value)}: expected true or false")
    return value


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{key} is {shown(value)}: expected a string")
    return value


def _whole(key: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{key} is {shown(value)}: expected a whole number")
    return value


def _one_of(names: Collection[str], key: str, value: Any) -> str:
    if not isinstance(value, str) or value not in names:
        raise ValueError(f"{key} is {shown(value)}: expected one of {', '.join(names)}")
    return value


def _names(key: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError(f"{key} is {shown(value)}: expected a list of names")
    return value


# --- keys ---------------------------------------------------------------------------------------


def _switch(so_anyway: bool, why: str) -> _Reader:
    """A switch that does nothing here: its one position is so in any case."""

    def read(settings: Settings, key: str, value: Any) -> None:
        if _flag(key, value) is not so_anyway:
            settings.without_effect.append(f"{key}={json.dumps(value)} does nothing here: {why}")

    return read


def _skip_check(settings: Settings, key: str, value: Any) -> None:
    for name in _names(key, value):
        if _one_of(_SKIPS, key, name) != _SKIPS[0]:
            settings.without_effect.append(
                f"{key}={name} does nothing here: the checks before a step keep a stale graph from "
                "running, and take microseconds"
            )


def _fallback_policy(settings: Settings, key: str, value: Any) -> None:
    policy = errors_under(_names(key, value), key)
    settings.options |= {"policy": policy, "fallback": "torch" if policy else "raise"}


def _custom_autograd(settings: Settings, key: str, value: Any) -> None:
    settings.options["custom_autograd"] = _flag(key, value)


def _opset(settings: Settings, key: str, value: Any) -> None:
    settings.options["opset"] = served_opset(_whole(key, value), key)


def _cast_level(settings: Settings, key: str, value: Any) -> None:
    if _whole(key, value) < -1:
        raise ValueError(f"{key} is {value}: expected -1 or more")
    if value > 1:
        settings.without_effect.append(
            f"{key}={value} does nothing here: casts move as far as no number changes"
        )


def _cast_allowed(settings: Settings, key: str, value: Any) -> None:
    if _names(key, value):
        settings.without_effect.append(
            f"{key} does nothing here: casts move as far as no number changes"
        )


def _strategy(settings: Settings, key: str, value: Any) -> None:
    _one_of(_STRATEGIES, key, value)  # where casts move, none changes what is computed


def _level(settings: Settings, key: str, value: Any) -> None:
    settings.debug["log_level"] = LogLevel[_one_of(_LEVELS, key, value)]


def _casts(settings: Settings, key: str, value: Any) -> None:
    _read(value, _CASTS, settings, key)


def _debug(settings: Settings, key: str, value: Any) -> None:
    _read(value, _DEBUG, settings, key)


def _shown(name: str, check: Callable[[str, Any], Any]) -> _Reader:
    def read(settings: Settings, key: str, value: Any) -> None:
        settings.debug[name] = check(key, value)

    return read


_CASTS: dict[str, _Reader] = {
    "Strategy": _strategy,
    "Level": _cast_level,
    "Allow": _cast_allowed,
}
_DEBUG: dict[str, _Reader] = {
    "LogLevel": _level,
    "SaveONNX": _shown("save_onnx", _flag),
    "ONNXPrefix": _shown("onnx_prefix", _text),
    "SaveONNXPath": _shown("save_path", _text),
}
_KEYS: dict[str, _Reader] = {
    "PropagateCastOps": _casts,
    "UseExternalGPUAllocator": _switch(True, "memory on a GPU is always PyTorch's"),
    "EnableCustomAutogradFunction": _custom_autograd,
    "EnableGradAccOptimization": _switch(
        False, "values that depend on parameters alone are computed at each step"
    ),
    "UseStaticShape": _switch(False, "sizes stay symbolic as far as the module's code allows"),
    "RunSymbolicShapeInference": _switch(True, "each value has a symbolic shape"),
    "AllowLayerNormModPrecision": _switch(
        False, "a layer norm is captured whole, in the precision that it has"
    ),
    "SkipCheck": _skip_check,
    "DebugOptions": _debug,
    "UseMemoryEfficientGradient": _switch(True, "a backward prefers what can be computed again"),
    "FallbackPolicy": _fallback_policy,
    "OnnxOpsetVersion": _opset,
}
