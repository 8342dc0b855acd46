"""``ortrain check`` tells what is whole, what is damaged, and seals what was changed on purpose."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch

from ortrain.cli import main
from ortrain.deploy import export_onnx


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """An exported model with its weights in a file beside it."""
    path = tmp_path / "model.onnx"
    export_onnx(
        torch.nn.Linear(32, 32), [{"input": torch.zeros(1, 32)}], path, external_data_above=1
    )
    return path


def test_a_whole_model_is_told_so(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(model), str(model.parent)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{model}: whole",
        f"{model.parent}: has no checksums",
        f"{model}: whole",
    ]


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data"])
def test_a_damaged_one_is_named(model: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = model.with_name(name)
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(content)
    assert main(["check", str(model)]) == 2
    printed = capsys.readouterr()
    assert "is damaged" in printed.out
    assert printed.err.startswith(f"ortrain: error: 1 not whole: {model}; take whole copies")


def test_a_model_that_another_program_has_changed_is_sealed_again(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = onnx.load(model)
    changed.graph.doc_string = "changed"
    onnx.save(changed, model)
    assert main(["check", str(model)]) == 2
    assert "written again by another program" in capsys.readouterr().out
    assert main(["check", "--seal", str(model)]) == 0
    assert main(["check", str(model)]) == 0
    assert onnx.load(model).graph.doc_string == "changed"
    foreign = model.with_name("foreign.onnx")
    changed.ClearField("metadata_props")
    onnx.save(changed, foreign)
    assert main(["check", str(foreign)]) == 0
    assert f"{foreign}: has no checksum\n" in capsys.readouterr().out
    assert main(["check", "--seal", str(foreign)]) == 0
    assert f"{foreign}: whole\n" in capsys.readouterr().out


def test_what_cannot_be_checked_ends_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "note.txt").write_text("text")
    for arguments, message in (
        ([str(tmp_path / "none")], "1 not whole"),
        (["/dev/null"], "1 not whole"),
        (["--seal", str(tmp_path)], "is a directory"),
        (["--seal", str(tmp_path / "note.txt")], "has no place for a checksum"),
        (["--seal", str(tmp_path / "none")], "cannot be sealed"),
    ):
        assert main(["check", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
