"""Rows of a file of text: separated values, or JSON, one object a line."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ortrain.errors import InputError, listing
from ortrain.files.regular import expect_regular


@dataclass(frozen=True)
class Row:
    """A row of a file.

    Attributes:
        number: from 1, the header line included.
        values: by the names of the columns.
    """

    number: int
    values: Mapping[str, Any]


def _decoded(file: Path) -> str:
    expect_regular(file)
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{file} is not text in UTF-8", because=str(error), help="convert the file to UTF-8"
        ) from error
    except OSError as error:
        raise InputError(f"{file} cannot be read", because=str(error)) from error


def separated(file: Path, separator: str, limit: int | None) -> Iterator[Row]:
    """The rows of a file of separated values, the first of which names the columns.

    Raises:
        InputError: it is no such file, or a row has other fields than there are columns.
    """
    text = _decoded(file)
    before = csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    try:
        # Tab-separated text is not quoted: a lone mark would swallow the rows that follow.
        quoting: Literal[0, 3] = csv.QUOTE_NONE if separator == "\t" else csv.QUOTE_MINIMAL
        stream = io.StringIO(text, newline="")
        reader = csv.reader(stream, delimiter=separator, quoting=quoting, strict=True)
        names: list[str] | None = None
        given = 0
        for number, fields in enumerate(reader, start=1):
            if not fields:
                continue
            if names is None:
                names = [field.strip() for field in fields]
                if len(set(names)) < len(names):
                    raise InputError(
                        f"{file}: two columns have one name", because=f"they are {listing(names)}"
                    )
                continue
            if len(fields) != len(names):
                raise InputError(
                    f"{file}, row {number}: has {len(fields)} fields where there are {len(names)} "
                    "columns",
                    help="put text that holds a comma in quotation marks"
                    if separator == ","
                    else "separate the fields by one tab each",
                )
            yield Row(number, dict(zip(names, fields, strict=True)))
            given += 1
            if given == limit:
                return
    except csv.Error as error:
        raise InputError(
            f"{file}: {error}", help="a quotation mark inside quoted text is written twice"
        ) from error
    finally:
        csv.field_size_limit(before)


def json_lines(file: Path, limit: int | None) -> Iterator[Row]:
    """The rows of a file of JSON objects, one a line; empty lines are none.

    Raises:
        InputError: a line is none.
    """
    given = 0
    for number, line in enumerate(_decoded(file).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{file}, row {number}: is no JSON ({error})",
                help="write one object a row, as json.dumps gives it",
            ) from error
        if not isinstance(values, dict):
            raise InputError(f"{file}, row {number}: is no JSON object", help='write {"text": …}')
        yield Row(number, values)
        given += 1
        if given == limit:
            return


def value_of(file: Path, row: Row, column: str, what: str) -> Any:
    """What a row has in a column.

    Args:
        file: for errors.
        row: of it.
        column: its name.
        what: is there, for errors.

    Raises:
        InputError: the row has no such column.
    """
    if column not in row.values:
        raise InputError(
            f"{file}, row {row.number}: there is no {what} {column!r}",
            because=f"it has {listing([*row.values])}",
            help=f"name the column of the {what}, or complete the row",
        )
    return row.values[column]
