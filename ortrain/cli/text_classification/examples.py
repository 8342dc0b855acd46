"""Labelled text from CSV, TSV and JSON-lines files, with every defect named by file and row.

The row in a message counts the rows of the file from 1, the header line and blank lines included,
as a spreadsheet shows them: a quoted text that goes over several lines is one row.
"""

from __future__ import annotations

import csv
import io
import json
import re
import stat
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from ortrain.cli.usage import UsageError, excerpt, one_line

_SEPARATED = {".csv": ",", ".tsv": "\t"}
_JSON_LINES = {".jsonl", ".ndjson", ".json"}
# Not splitlines(), which would also cut at the exotic line ends that a JSON string may hold.
_LINE_END = re.compile("\r\n|\n|\r")
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


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
        The examples in the order of the file, at least one. Texts and labels can be written as
        UTF-8 and hold no NUL character; a label is one line.

    Raises:
        UsageError: The file is missing, empty, in an unknown format, or a row of it is broken.
    """
    if text_column == label_column:
        raise UsageError(
            f"--text-column and --label-column are both '{excerpt(text_column)}'; the label has to "
            "be in a column of its own"
        )
    _check_file(path)
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
    with _fields_of(len(text)):
        examples = list(rows)
    if not examples:
        raise UsageError(f"{path}: no examples in it; give a file with one labelled text a row")
    return examples


def label_names(examples: Sequence[Example], path: Path) -> list[str]:
    """The labels that occur, in order: by value if all are whole numbers, else by name.

    Raises:
        UsageError: All examples have the same label, or two labels are one to a reader.
    """
    rows: dict[str, int] = {}
    for example in examples:
        rows.setdefault(example.label, example.row)
    if len(rows) < 2:
        label = excerpt(examples[0].label)
        raise UsageError(
            f"{path}: every row has the label '{label}'; add examples of a second label"
        )
    read: dict[str, str] = {}
    for label, row in rows.items():
        other = read.setdefault(_as_read(label), label)
        if other != label:
            raise UsageError(
                f"{path}, row {row}: the label {_spelled(label)} and the label {_spelled(other)} "
                f"of row {rows[other]} are one label in two spellings; write them alike, or give "
                "one of them another name"
            )
    if all(_is_whole(label) for label in rows):
        # Decimal takes any number of digits where int refuses more than 4300.
        return sorted(rows, key=lambda label: (Decimal(label), label))
    return sorted(rows)


def check_labels(
    examples: Sequence[Example], path: Path, names: Sequence[str], training_file: Path
) -> None:
    """Raise a UsageError for the first example whose label does not occur in training."""
    known = set(names)
    for example in examples:
        if example.label not in known:
            label = f"'{excerpt(example.label)}'"
            listed = ", ".join(f"'{excerpt(name)}'" for name in names[:8])
            more = ", …" if len(names) > 8 else ""
            for name in names:
                if _as_read(name) == _as_read(example.label):
                    label, listed = _spelled(example.label), f"{_spelled(name)} among {listed}"
                    break
            raise UsageError(
                f"{path}, row {example.row}: the label {label} does not occur in "
                f"{training_file} (it has {listed}{more}); correct the row, or add examples of "
                "this label to the training file"
            )


def _check_file(path: Path) -> None:
    # A pipe is no file: the run reads it a second time, to know it again when it is resumed. A
    # device such as /dev/zero has no end.
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    if stat.S_ISDIR(mode):
        raise UsageError(f"{path}: is a directory; give the path of a file in it")
    if not stat.S_ISREG(mode):
        raise UsageError(
            f"{path}: is a pipe or a device; write what it gives to a file, and give the file"
        )


def _unreadable(path: Path, error: Exception) -> UsageError:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return UsageError(f"{path}: no such file; check the path")
    if isinstance(error, PermissionError):
        return UsageError(f"{path}: cannot be read ({error.strerror}); check its permissions")
    if isinstance(error, MemoryError):
        return UsageError(f"{path}: does not fit into the memory; give a smaller file")
    reason = error.strerror if isinstance(error, OSError) else one_line(error)
    return UsageError(f"{path}: cannot be read ({reason}); check the path")


def _decoded(path: Path) -> str:
    try:
        data = path.read_bytes()
    except (OSError, ValueError, MemoryError) as error:
        raise _unreadable(path, error) from None
    if data.startswith(_UTF16):
        raise UsageError(f"{path}: is UTF-16 text; convert the file to UTF-8")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # Where the bytes before the defect end in the middle of a character, that is the defect.
        row = _row_at(path, data[: error.start].decode("utf-8-sig", "ignore"))
        raise UsageError(
            f"{path}, row {row}: is not UTF-8 text; convert the file to UTF-8"
        ) from None
    except MemoryError as error:
        raise _unreadable(path, error) from None
    if not text.strip():
        raise UsageError(f"{path}: is empty; give a file with one labelled text a row")
    if "\0" in text:
        raise UsageError(
            f"{path}, row {_row_at(path, text[: text.index(chr(0))])}: holds a NUL character, so "
            "the file is damaged or is UTF-16; restore it, or convert it to UTF-8"
        )
    return text


def _row_at(path: Path, before: str) -> int:
    """The row that what comes after this beginning of a file is in."""
    separator = _SEPARATED.get(path.suffix.lower())
    if separator is None:
        return len(_LINE_END.findall(before)) + 1
    with _fields_of(len(before) + 1):
        # What follows the beginning is at least one character.
        return sum(1 for _ in _reader(before + "x", separator, strict=False))


def _reader(text: str, separator: str, *, strict: bool) -> Any:
    # A tab-separated file is not quoted: in real ones a lone quotation mark is part of the text,
    # and read as a quote it would swallow the rows that follow.
    quoting: Literal[0, 3] = csv.QUOTE_NONE if separator == "\t" else csv.QUOTE_MINIMAL
    stream = io.StringIO(text, newline="")
    return csv.reader(stream, delimiter=separator, quoting=quoting, strict=strict)


@contextmanager
def _fields_of(length: int) -> Iterator[None]:
    """Lets the csv module read fields of so many characters; by itself it stops at 131072."""
    before = csv.field_size_limit()
    csv.field_size_limit(max(before, length))
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _separated_rows(
    path: Path,
    text: str,
    separator: str,
    text_column: str,
    label_column: str,
    columns: Sequence[str] | None,
) -> Iterator[Example]:
    reader = _reader(text, separator, strict=True)
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
        if [field.strip("\ufeff \t") for field in fields] == names:
            raise UsageError(
                f"{path}, row {row}: holds the names of the columns, as a header line does; drop "
                f"{'--columns' if columns else 'the row'}"
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
            f"{path}, row {row}: {names.count(name)} columns are called '{excerpt(name)}'; rename "
            "all but one of them"
        )
    listed = ", ".join(f"'{excerpt(other)}'" for other in names[:8])
    raise UsageError(
        f"{path}, row {row}: there is no column '{excerpt(name)}' among {listed}; name the right "
        f"one with {option}, or, if the file has no header line, name all of its columns with "
        "--columns"
    )


class _Whole(str):
    """A whole number of a JSON text in its own digits, of which there may be any number."""


class _Object(dict[str, Any]):
    """An object of a JSON text, which also knows the keys that it had more than once."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.repeated: set[str] = set()
        if len(self) < len(pairs):
            counts = Counter(key for key, _ in pairs)
            self.repeated = {key for key, count in counts.items() if count > 1}


_DECODER = json.JSONDecoder(
    object_pairs_hook=_Object,
    parse_int=lambda digits: _Whole("0" if digits == "-0" else digits),
)


def _json_rows(path: Path, text: str, text_key: str, label_key: str) -> Iterator[Example]:
    for row, line in enumerate(_LINE_END.split(text), start=1):
        if not line.strip():
            continue
        try:
            value = _DECODER.decode(line)
        except json.JSONDecodeError as error:
            raise UsageError(
                f"{path}, row {row}: is not JSON ({error.msg} at character {error.pos + 1}); write "
                "one object a line"
            ) from None
        except RecursionError:
            raise UsageError(
                f"{path}, row {row}: is nested too deeply; write one flat object a line"
            ) from None
        if not isinstance(value, _Object):
            raise UsageError(
                f"{path}, row {row}: is not a JSON object; write one object a line, such as "
                f'{{"{excerpt(text_key)}": "…", "{excerpt(label_key)}": "…"}}'
            )
        for key, option in ((text_key, "--text-column"), (label_key, "--label-column")):
            if key not in value:
                listed = ", ".join(f"'{excerpt(other)}'" for other in list(value)[:8])
                raise UsageError(
                    f"{path}, row {row}: there is no key '{excerpt(key)}' among "
                    f"{listed or 'none at all'}; add it to the row, or name the right one with "
                    f"{option}"
                )
            if key in value.repeated:
                raise UsageError(
                    f"{path}, row {row}: has the key '{excerpt(key)}' more than once; keep one"
                )
        content, label = value[text_key], value[label_key]
        if not isinstance(content, str) or isinstance(content, _Whole):
            raise UsageError(
                f"{path}, row {row}: '{excerpt(text_key)}' is not a string; make it one"
            )
        # bool is an int to Python; its JSON spelling is the label then.
        if not isinstance(label, str | bool):
            raise UsageError(
                f"{path}, row {row}: '{excerpt(label_key)}' is neither a string nor a whole "
                "number; make it one of them"
            )
        name = json.dumps(label) if isinstance(label, bool) else str(label)
        yield _example(path, row, content, name, text_key, label_key)


def _example(
    path: Path, row: int, text: str, label: str, text_column: str, label_column: str
) -> Example:
    """The example of a row: what holds for every one of them is seen to here."""
    label = label.strip()
    for value, column in ((text, text_column), (label, label_column)):
        place = f"{path}, row {row}: '{excerpt(column)}'"
        if _is_blank(value):
            raise UsageError(f"{place} is empty; fill it or drop the row")
        if "\0" in value:
            raise UsageError(f"{place} holds a NUL character; remove it")
        if not _is_text(value):
            raise UsageError(
                f"{place} holds one half of a surrogate pair (\\ud800 to \\udfff), which is no "
                "character; write both halves, or remove it"
            )
    if any(unicodedata.category(character) in ("Cc", "Zl", "Zp") for character in label):
        raise UsageError(
            f"{path}, row {row}: '{excerpt(label_column)}' holds a line end or another control "
            "character; write the label on one line"
        )
    return Example(text, label, row)


def _is_blank(text: str) -> bool:
    # Stops at the first character that shows.
    return all(character.isspace() or unicodedata.category(character) == "Cf" for character in text)


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_whole(label: str) -> bool:
    return label.removeprefix("-").isdecimal()


def _as_read(label: str) -> str:
    """What a reader takes the label for: two that are the same here look or count the same.

    Characters that do not show go, those that can be written in two ways are written in one, and
    a whole number is its value.
    """
    shown = "".join(
        character
        for character in unicodedata.normalize("NFC", label)
        if unicodedata.category(character) != "Cf" and not "\ufe00" <= character <= "\ufe0f"
    )
    shown = " ".join(shown.split())
    if not _is_whole(shown):
        return shown
    digits = "".join(str(unicodedata.decimal(digit)) for digit in shown.removeprefix("-"))
    digits = digits.lstrip("0") or "0"
    return f"-{digits}" if shown.startswith("-") and digits != "0" else digits


def _spelled(label: str) -> str:
    return ascii(excerpt(label))
