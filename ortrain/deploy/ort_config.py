"""``ORTConfig``: what was done to the ONNX files of a folder, as ``ort_config.json`` says it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from ortrain.errors import InputError, SaveError
from ortrain.files.regular import expect_regular
from ortrain.files.replacing import replace_file
from ortrain.kinds import NONE, expect, expect_flag, expect_path, expect_whole

NAME = "ort_config.json"


@dataclass
class ORTConfig:
    """How ONNX files were optimized and quantized, and how they are stored.

    Attributes:
        opset: of the standard ONNX domain; None where it was not changed.
        use_external_data_format: whether weights lie beside the files.
        one_external_file: whether these are one file for each model.
        optimization: the configuration of the optimizer, as a dataclass or a mapping.
        quantization: that of the quantizer.
    """

    opset: int | None = None
    use_external_data_format: bool = False
    one_external_file: bool = True
    optimization: Any = None
    quantization: Any = None

    def __post_init__(self) -> None:
        expect_whole("opset", self.opset, NONE)
        expect_flag("use_external_data_format", self.use_external_data_format)
        expect_flag("one_external_file", self.one_external_file)
        for name in ("optimization", "quantization"):
            value = getattr(self, name)
            if not dataclasses.is_dataclass(value):
                expect(name, value, (Mapping, NONE), "a configuration, a mapping or None")

    def to_dict(self) -> dict[str, Any]:
        """The configuration in plain values, as JSON has them; enumerations by their names."""
        return {field.name: plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ORTConfig:
        """The configuration of what :meth:`to_dict` gave, or another version of its keys.

        Keys that are not of a configuration, as the versions of libraries, are left out.

        Raises:
            TypeError: a value is of another type.
        """
        expect("values", values, Mapping, "a mapping")
        names = [field.name for field in dataclasses.fields(cls)]
        given = {name: values[name] for name in names if name in values}
        for name in ("optimization", "quantization"):
            given[name] = given.get(name) or None  # older files have {} for nothing
        return cls(**given)

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> Path:
        """Writes ``ort_config.json``.

        Args:
            save_directory: the folder, made where it does not exist.

        Returns:
            The path of the file.

        Raises:
            SaveError: it could not be written.
        """
        expect_path("save_directory", save_directory)
        folder = Path(save_directory)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SaveError(
                f"cannot save the configuration in {folder}",
                because=str(error),
                help="choose another place",
            ) from error
        text = json.dumps(self.to_dict(), indent=2, sort_keys=True, allow_nan=False) + "\n"
        replace_file(folder / NAME, [text.encode()], "configuration")
        return folder / NAME

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike[str]) -> ORTConfig:
        """Reads ``ort_config.json``.

        Args:
            source: the folder, or the file.

        Raises:
            InputError: there is none, or it is not what its name says.
        """
        expect_path("source", source)
        path = Path(source)
        path = path / NAME if path.is_dir() else path
        expect_regular(path)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(found, dict):
                raise ValueError("it is no JSON object")
            return cls.from_dict(found)
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise InputError(
                f"{path} is no configuration of ONNX files",
                because=str(error),
                help="give a folder that a tool of ortrain has written",
            ) from error


def plain(value: Any) -> Any:
    """A value in terms of JSON: dataclasses as objects, enumerations by name, paths as texts."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(plain(each) for each in value)
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return str(value)
