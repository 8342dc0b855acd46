"""Labelled text from CSV, TSV and JSON-lines files, with every defect named by file and row.

The row in a message counts the rows of the file from 1, the header line and blank lines included,
as an editor or a spreadsheet shows them.
"""

from __future__ import annotations

import csv
import io
import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ortrain.cli.usage import UsageError, one_line

_SEPARATED = {".csv": ",", ".tsv": "\t"}
_JSON_LINES = {".jsonl", ".ndjson", ".json"}


@dataclass(frozen=True, slots=True)
class Example:
    """One text and its label, and the row that they come from."""

    text: str
    label: str
    row: int


def read_examples(
    path: Path,
    *,
    text_column: str = "text",
    label_column: str = "label",
    columns: Sequence[str] | None = None,
) -> list[Example]:
    """Read all examples of a file.

    Args:
        path: A ``.csv`` file (quoted as spreadsheets do), a ``.tsv`` file (never quoted) or a
            ``.jsonl`` file (one object a line), in UTF-8.
        text_column: The column, or the key, that holds the text.
        label_column: The column, or the key, that holds the label: a string or a whole number.
        columns: The names of the columns of a file without a header line; JSON-lines have none.

    Returns:
        The examples in the order of the file, at least one.

    Raises:
        UsageError: The file is missing, empty, in an unknown format, or a row of it is broken.
    """
    suffix = path.suffix.lower()
    if suffix in _SEPARATED:
        text = _decoded(path)
        rows = _separated_rows(path, text, _SEPARATED[suffix], text_column, label_column, columns)
    elif suffix in _JSON_LINES:
        text = _decoded(path)
        rows = _json_rows(path, text, text_column, label_column)
    else:
        raise UsageError(
            f"{path}: unknown format '{suffix}'; convert the file and name it .csv, .tsv or .jsonl"
        )
    examples = list(rows)
    if not examples:
        raise UsageError(f"{path}: no examples in it; give a file with one labelled text a row")
    return examples


def label_names(examples: Sequence[Example], path: Path) -> list[str]:
    """The labels that occur, in order: by value if all are whole numbers, else by name.

    Raises:
        UsageError: All examples have the same label.
    """
    labels = {example.label for example in examples}
    if len(labels) < 2:
        raise UsageError(
            f"{path}: every row has the label '{labels.pop()}'; add examples of a second label"
        )
    if all(label.removeprefix("-").isdecimal() for label in labels):
        return sorted(labels, key=lambda label: (int(label), label))
    return sorted(labels)


def check_labels(
    examples: Sequence[Example], path: Path, names: Sequence[str], training_file: Path
) -> None:
    """Raise a UsageError for the first example whose label does not occur in training."""
    known = set(names)
    for example in examples:
        if example.label not in known:
            listed = ", ".join(f"'{_short(name)}'" for name in names[:8])
            more = ", …" if len(names) > 8 else ""
            raise UsageError(
                f"{path}, row {example.row}: the label '{_short(example.label)}' does not occur in "
                f"{training_file} (it has {listed}{more}); correct the row, or add examples of "
                "this label to the training file"
            )


def _decoded(path: Path) -> str:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; check the path") from None
    except IsADirectoryError:
        raise UsageError(f"{path}: is a directory; give the path of a file in it") from None
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read ({error.strerror}); check its permissions"
        ) from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        row = data.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"{path}, row {row}: is not UTF-8 text; convert the file to UTF-8"
        ) from None
    if not text.strip():
        raise UsageError(f"{path}: is empty; give a file with one labelled text a row")
    return text


def _separated_rows(
    path: Path,
    text: str,
    separator: str,
    text_column: str,
    label_column: str,
    columns: Sequence[str] | None,
) -> Iterator[Example]:
    # A tab-separated file is not quoted: in real ones a lone quotation mark is part of the text,
    # and read as a quote it would swallow the rows that follow.
    quoting: Literal[0, 3] = csv.QUOTE_NONE if separator == "\t" else csv.QUOTE_MINIMAL
    stream = io.StringIO(text, newline="")
    reader = csv.reader(stream, delimiter=separator, quoting=quoting, strict=True)
    names = list(columns) if columns else None
    text_at = label_at = -1
    row = 0
    while True:
        row += 1
        try:
            fields = next(reader, None)
        except csv.Error as error:
            raise UsageError(
                f"{path}, row {row}: {one_line(error)}; correct the quotation marks of this row "
                "(a mark inside quoted text is written twice)"
            ) from None
        if fields is None:
            return
        if not fields:
            continue
        if text_at < 0:
            header = names is None
            names = [field.strip() for field in fields] if names is None else names
            text_at = _column(path, row, names, text_column, "--text-column")
            label_at = _column(path, row, names, label_column, "--label-column")
            if header:
                continue
        assert names is not None
        if len(fields) != len(names):
            raise UsageError(
                f"{path}, row {row}: has {len(fields)} fields where there are {len(names)} "
                f"columns; {_remedy_for_fields(separator)}"
            )
        yield _example(path, row, fields[text_at], fields[label_at], text_column, label_column)


def _remedy_for_fields(separator: str) -> str:
    if separator == "\t":
        return "separate the fields by one tab each, and replace tabs inside the text"
    return "put text that holds a comma in quotation marks"


def _column(path: Path, row: int, names: Sequence[str], name: str, option: str) -> int:
    if names.count(name) == 1:
        return names.index(name)
    if name in names:
        raise UsageError(
            f"{path}, row {row}: {names.count(name)} columns are called '{name}'; rename all but "
            "one of them"
        )
    listed = ", ".join(f"'{_short(other)}'" for other in names[:8])
    raise UsageError(
        f"{path}, row {row}: there is no column '{name}' among {listed}; name the right one with "
        f"{option}, or, if the file has no header line, name all of its columns with --columns"
    )


def _json_rows(path: Path, text: str, text_key: str, label_key: str) -> Iterator[Example]:
    # Not splitlines(), which would also cut at the exotic line ends that a JSON string may hold.
    for row, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise UsageError(
                f"{path}, row {row}: is not JSON ({one_line(error)}); write one object a line"
            ) from None
        if not isinstance(value, dict):
            raise UsageError(
                f"{path}, row {row}: is not a JSON object; write one object a line, such as "
                f'{{"{text_key}": "…", "{label_key}": "…"}}'
            )
        for key, option in ((text_key, "--text-column"), (label_key, "--label-column")):
            if key not in value:
                listed = ", ".join(f"'{_short(str(other))}'" for other in list(value)[:8])
                raise UsageError(
                    f"{path}, row {row}: there is no key '{key}' among {listed or 'none at all'}; "
                    f"add it to the row, or name the right one with {option}"
                )
        content, label = value[text_key], value[label_key]
        if not isinstance(content, str):
            raise UsageError(f"{path}, row {row}: '{text_key}' is not a string; make it one")
        # bool is an int to Python; its JSON spelling is the label then.
        if not isinstance(label, str | int):
            raise UsageError(
                f"{path}, row {row}: '{label_key}' is neither a string nor a whole number; "
                "make it one of them"
            )
        name = json.dumps(label) if isinstance(label, bool) else str(label)
        yield _example(path, row, content, name, text_key, label_key)


def _example(
    path: Path, row: int, text: str, label: str, text_column: str, label_column: str
) -> Example:
    if not text.strip():
        raise UsageError(f"{path}, row {row}: '{text_column}' is empty; fill it or drop the row")
    if not label.strip():
        raise UsageError(f"{path}, row {row}: '{label_column}' is empty; fill it or drop the row")
    return Example(text, label.strip(), row)


def _short(name: str) -> str:
    return textwrap.shorten(name, 32, placeholder="…") or name[:32]
