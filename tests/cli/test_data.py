"""Data that a run is given: what cannot be read ends with status 2 and one line, whatever it is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ortrain.cli.text_classification.batches import Batches
from ortrain.cli.text_classification.classifier import load_classifier
from ortrain.cli.text_classification.examples import (
    Example,
    check_labels,
    label_names,
    read_examples,
)
from ortrain.cli.usage import UsageError

from .conftest import Run
from .malformed import files

ONCE = "write them alike, or give one of them another name"


def refusal(path: Path, **options: str) -> str:
    with pytest.raises(UsageError) as raised:
        read_examples(path, **options)
    assert str(raised.value).isprintable()
    return str(raised.value)


def labelled(*labels: str) -> list[Example]:
    return [Example("x", label, row) for row, label in enumerate(labels, start=2)]


# --- what is no file ----------------------------------------------------------------------------


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.csv")
    message = refusal(tmp_path / "x.csv")
    assert message.endswith(
        "x.csv: is a pipe or a device; write what it gives to a file, and give the file"
    )


def test_a_device_is_not_read_for_ever(tmp_path: Path) -> None:
    (tmp_path / "x.csv").symlink_to("/dev/zero")
    assert "is a pipe or a device" in refusal(tmp_path / "x.csv")
    assert "is a pipe or a device" in refusal(Path("/dev/null"))


def test_a_socket_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A socket's path is at most about a hundred characters long.
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("x.csv")
        assert "is a pipe or a device" in refusal(Path("x.csv"))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gone.csv", "gone.csv: no such file; check the path"),
        ("gone", "gone: no such file; check the path"),
        ("a\0b.csv", r"a\x00b.csv: cannot be read (embedded null byte); check the path"),
        ("\ud800.csv", r"\ud800.csv: cannot be read ('utf-8' codec can't encode"),
        ("x" * 300 + ".csv", "cannot be read (File name too long); check the path"),
        (__file__ + "/x.csv", "x.csv: no such file; check the path"),
    ],
)
def test_a_path_without_a_file_is_one_line(path: str, message: str) -> None:
    assert message in refusal(Path(path))


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), MemoryError()])
def test_a_file_that_cannot_be_read_is_one_line(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.csv").write_text("text,label\na,1\n")

    def fail(path: Path) -> bytes:
        raise error

    monkeypatch.setattr(Path, "read_bytes", fail)
    remedy = {
        PermissionError: "(Permission denied); check its permissions",
        MemoryError: "does not fit into the memory; give a smaller file",
    }
    assert remedy[type(error)] in refusal(tmp_path / "x.csv")


def test_a_file_that_vanishes_before_it_is_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.csv"
    path.write_text("text,label\na,1\n")
    read = Path.read_bytes

    def vanish(self: Path) -> bytes:
        self.unlink()
        return read(self)

    monkeypatch.setattr(Path, "read_bytes", vanish)
    assert refusal(path) == f"{path}: no such file; check the path"


# --- what is in a file --------------------------------------------------------------------------


def test_300_000_empty_lines_are_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(b"\n" * 300_000)
    assert "is empty; give a file" in refusal(path)
    path.write_bytes(b"text,label\n" + b"\r\n" * 300_000)
    assert "no examples in it; give a file" in refusal(path)
    path.write_bytes(b"text,label\n" + b"\n" * 300_000 + b"a,1\n")
    assert read_examples(path) == [Example("a", "1", 300_002)]


@pytest.mark.parametrize("name", ["x.csv", "x.tsv", "x.jsonl"])
def test_a_text_of_ten_million_characters_is_read(tmp_path: Path, name: str) -> None:
    text = "long " * 2_000_000
    path = tmp_path / name
    rows = {
        "x.csv": f'text,label\n"{text}",1\n',
        "x.tsv": f"text\tlabel\n{text}\t1\n",
        "x.jsonl": f'{{"text": "{text}", "label": 1}}\n',
    }
    path.write_text(rows[name])
    (example,) = read_examples(path)
    assert example.text == text


def test_a_row_in_a_message_is_a_row_of_a_spreadsheet(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    before = b'text,label\n"two\nlines\r\nor three",1\n\n"b\nc",0\n'
    for defect, message in (
        (b"caf\xe9,1\n", "x.csv, row 5: is not UTF-8 text"),
        (b"\0,1\n", "x.csv, row 5: holds a NUL character"),
        (b"d\n", "x.csv, row 5: has 1 fields"),
        (b'"d,1\n', "x.csv, row 5: unexpected end of data"),
    ):
        path.write_bytes(before + defect)
        assert message in refusal(path)


def test_the_text_and_the_label_are_two_columns(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("text,label\na,1\n")
    assert refusal(tmp_path / "x.csv", text_column="label") == (
        "--text-column and --label-column are both 'label'; the label has to be in a column of its "
        "own"
    )


def test_a_header_line_that_is_read_as_an_example_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("text,label\na,1\n")
    with pytest.raises(
        UsageError, match=r"row 1: holds the names of the columns.*; drop --columns"
    ):
        read_examples(path, columns=("text", "label"))
    path.write_text("text,label\na,1\n\ufefftext,label\nb,2\n")
    assert "row 3: holds the names of the columns, as a header line does; drop the" in refusal(path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"text": "\\ud800", "label": 1}', "'text' holds one half of a surrogate pair"),
        ('{"text": "a", "label": "\\udfff"}', "'label' holds one half of a surrogate pair"),
        ('{"text": "a\\u0000", "label": 1}', "'text' holds a NUL character; remove it"),
        ('{"text": "a", "text": "b", "label": 1}', "has the key 'text' more than once; keep one"),
        ('{"text": "a", "label": NaN}', "'label' is neither a string nor a whole number"),
        ('{"text": "a", "label": 1e999}', "'label' is neither a string nor a whole number"),
        ('{"text": "a", "label": 1.0}', "'label' is neither a string nor a whole number"),
        ("[" * 1_000_000, "is nested too deeply; write one flat object a line"),
        ('{"text": "a", "label": "x\\ny"}', "'label' holds a line end or another control charac"),
        ('{"text": 12, "label": 1}', "'text' is not a string; make it one"),
        ('{"text"', "is not JSON (Expecting ':' delimiter at character 8)"),
    ],
)
def test_a_json_value_that_is_none_is_named_by_row(tmp_path: Path, row: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a", "label": 1}\r\r\n' + row)
    assert f"x.jsonl, row 3: {message}" in refusal(path)


def test_a_whole_number_of_json_may_have_any_number_of_digits(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    digits = "7" * 5000
    path.write_text(
        f'{{"text": "a", "label": {digits}, "id": {digits}}}\n{{"text": "b", "label": -0}}\n'
    )
    examples = read_examples(path)
    assert [example.label for example in examples] == [digits, "0"]
    assert type(examples[0].label) is str
    assert label_names(examples, path) == ["0", digits]


# --- labels -------------------------------------------------------------------------------------


def test_labels_of_thousands_of_digits_are_ordered_by_value() -> None:
    longest = "9" * 5000
    labels = ["-" + longest, "-2", "٣", "１２", "7" + "0" * 4999, longest]
    assert label_names(labelled(*reversed(labels)), Path("x.csv")) == labels


def test_digits_that_are_no_decimals_are_ordered_by_name() -> None:
    assert label_names(labelled("²", "10", "9"), Path("x.csv")) == ["10", "9", "²"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1", "01"),
        ("1", "１"),
        ("-0", "0"),
        ("9" * 5000, "0" + "9" * 5000),
        ("café", "cafe\u0301"),
        ("yes", "y\u200bes"),
        ("yes", "\ufeffyes"),
        ("\u200eyes", "yes"),
        ("❤", "❤\ufe0f"),
        ("not sure", "not  sure"),
        ("not sure", "not\u00a0sure"),
    ],
)
def test_two_labels_that_read_the_same_are_refused(one: str, other: str) -> None:
    with pytest.raises(UsageError) as raised:
        label_names(labelled("no", one, other), Path("x.csv"))
    message = str(raised.value)
    assert message.startswith("x.csv, row 4: the label '")
    assert message.endswith(f" of row 3 are one label in two spellings; {ONCE}")
    assert message.isascii() or "…" in message
    with pytest.raises(UsageError, match=r"row 2: the label '.*' does not occur in train\.csv"):
        check_labels(labelled(other), Path("x.csv"), ["no", one], Path("train.csv"))


@pytest.mark.parametrize(
    "labels",
    [("yes", "Yes"), ("1", "1.0"), ("m²", "m2"), ("1", "-1"), ("a b", "ab"), ("1.1", "1.10")],
)
def test_labels_that_may_be_two_stay_two(labels: tuple[str, str]) -> None:
    assert set(label_names(labelled(*labels), Path("x.csv"))) == set(labels)


def test_an_evaluation_label_that_only_looks_known_is_shown_in_escapes() -> None:
    with pytest.raises(UsageError) as raised:
        check_labels(labelled("cafe\u0301"), Path("e.csv"), ["café", "tea"], Path("t.csv"))
    assert r"the label 'cafe\u0301' does not occur in t.csv (it has 'caf\xe9' among" in str(
        raised.value
    )


# --- runs ---------------------------------------------------------------------------------------


def test_a_run_over_a_malformed_file_ends_with_status_2_and_one_line(
    train: Run, tmp_path: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = [file for file in files(seed=9, count=80) if file.refused]
    assert len(refused) > 30
    for file in refused:
        path = tmp_path / file.name
        path.write_bytes(file.data)
        for option in ("--train", "--eval"):
            assert train(option, path) == 2, file.about
            lines = capsys.readouterr().err.splitlines()
            assert len(lines) == 1, file.about
            assert lines[0].startswith(f"ortrain: error: {path}"), file.about
    assert not output.exists()


def test_steps_beyond_any_sense_take_no_memory(tiny_model: Path) -> None:
    classifier = load_classifier(str(tiny_model), ["no", "yes"], seed=0)
    examples = [Example("a good film", "yes", 2), Example("a bad plot", "no", 3)]
    largest = 2**31 - 1
    batches = Batches(classifier, examples, size=largest, max_length=8, seed=2**32 - 1)
    assert batches.in_epoch == 1
    assert batches.batch(largest)["labels"].tolist() in ([0, 1], [1, 0])


def test_a_process_names_the_row_and_ends_with_status_2(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a", "label": 1}\n' + "[" * 1_000_000)
    command = [sys.executable, "-c", "import sys; from ortrain.cli import main; sys.exit(main())"]
    command += ["train", "text-classification", "--model", str(tiny_model)]
    command += ["--train", str(path), "--eval", str(path), "--output", str(tmp_path / "out")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2
    assert ended.stderr == (
        f"ortrain: error: {path}, row 2: is nested too deeply; write one flat object a line\n"
    )
    assert list(tmp_path.iterdir()) == [path]
