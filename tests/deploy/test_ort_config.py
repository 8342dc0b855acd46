"""``ort_config.json``: plain values that are read back, also those of older files."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortrain.deploy import ORTConfig
from ortrain.errors import InputError, SaveError


class Format(Enum):
    QDQ = 1


@dataclass
class Configuration:
    fmt: Format = Format.QDQ
    nodes: list[str] = field(default_factory=lambda: ["a"])
    axes: dict[str, int] = field(default_factory=lambda: {"MatMul": 1})
    share: Any = field(default_factory=lambda: np.float32(0.5))
    where: Path = Path("x")
    kinds: set[str] = field(default_factory=lambda: {"b", "a"})


PLAIN = {
    "fmt": "QDQ",
    "nodes": ["a"],
    "axes": {"MatMul": 1},
    "share": 0.5,
    "where": "x",
    "kinds": ["a", "b"],
}


def test_a_configuration_is_written_in_plain_values_and_read_back(tmp_path: Path) -> None:
    config = ORTConfig(opset=21, one_external_file=False, quantization=Configuration())
    path = config.save_pretrained(tmp_path / "new")
    assert path == tmp_path / "new" / "ort_config.json"
    assert json.loads(path.read_text()) == {
        "one_external_file": False,
        "opset": 21,
        "optimization": None,
        "quantization": PLAIN,
        "use_external_data_format": False,
    }
    for place in (tmp_path / "new", path):
        found = ORTConfig.from_pretrained(place)
        assert found == ORTConfig(opset=21, one_external_file=False, quantization=PLAIN)
    assert found.to_dict() == config.to_dict()


def test_older_files_have_versions_and_empty_parts(tmp_path: Path) -> None:
    said = {"opset": None, "optimization": {}, "quantization": {}, "optimum_version": "1.23.3"}
    (tmp_path / "ort_config.json").write_text(json.dumps(said))
    assert ORTConfig.from_pretrained(tmp_path) == ORTConfig()


@pytest.mark.parametrize("text", ["{", "[]", '{"opset": "21"}', '{"optimization": 3}'])
def test_what_is_no_configuration_is_told(text: str, tmp_path: Path) -> None:
    (tmp_path / "ort_config.json").write_text(text)
    with pytest.raises(InputError, match=r"ort_config\.json is no configuration"):
        ORTConfig.from_pretrained(tmp_path)
    with pytest.raises(InputError, match="is no configuration"):
        ORTConfig.from_pretrained(tmp_path / "nothing")


@pytest.mark.parametrize(
    "values",
    [{"opset": "21"}, {"use_external_data_format": "yes"}, {"optimization": 3}, {"opset": True}],
)
def test_a_value_of_another_type_is_told_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"{next(iter(values))}="):
        ORTConfig(**values)


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match="cannot save the configuration"):
        ORTConfig().save_pretrained(tmp_path / "file")
