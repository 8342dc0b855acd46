"""Files of labelled text, right ones and malformed ones, each with what a reader has to make of it.

::

    for file in files(seed=0, count=300):
        path.write_bytes(file.data)

The same seed gives the same files on every machine.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ortrain.cli.text_classification.examples import Example

TEXTS = (
    "good", "a film, a plot", 'he said "no"', '"', '""', "'", "  spaced  ", "text", "label",
    "NaN", "null", "{}", "[1, 2]", "\\", "\\n", "=1+1", "#", "é", "e\u0301", "好", "👩\u200d💻",
    "a\ufeffb", "\u202eright to left", "a\u2028b", "a\x85b", "a\x0bb", "a\x1cb", "x" * 3000, "0",
    "-1", "１２", "𝔘nicode", "\u00a0nbsp\u00a0", "a;b|c", "\ufffd",
)  # fmt: skip
WITH_LINE_ENDS = ("two\nlines", "two\r\nlines", "a\rb", "\n\nlate")
WITH_TABS = ("a\tb", "\tindented")
LABELS = ("yes", "no", "0", "1", "-1", "perhaps not", "好", "x²", "9" * 5000, "true", "label", "²")
LINE_ENDS = ("\n", "\r\n", "\r")
NOT_TEXT = (1, 1.5, None, True, [], {}, ["good"], 10**30)
NOT_LABELS = (0.5, None, [], {}, ["yes"], float("nan"), float("inf"), -float("inf"))


@dataclass(frozen=True)
class File:
    """One file.

    Attributes:
        name: Its name, whose suffix is its format.
        data: What it holds.
        about: What is special about it.
        examples: What is read of it; None where it is refused, or where nobody knows.
        refused: Whether it has to be refused; None where nobody knows.
        row: The row that a refusal names; None where it names the file alone.
    """

    name: str
    data: bytes
    about: str
    examples: tuple[Example, ...] | None = None
    refused: bool | None = False
    row: int | None = None


@dataclass
class _Rows:
    """The rows of a file before they are written, without the header line.

    A row is what stands in the file, without its line end; examples are in the rows ``at``.
    """

    suffix: str
    header: str | None
    rows: list[str]
    examples: list[tuple[str, str]]
    at: list[int]

    def number(self, index: int) -> int:
        """The row, as messages count, of the example of this index."""
        return self.at[index] + (1 if self.header is None else 2)


def files(seed: int, count: int) -> Iterator[File]:
    """So many files; a file, and whether and where it is to be refused, is drawn from the seed."""
    rng = random.Random(seed)
    for _ in range(count):
        yield rng.choice(_KINDS)(rng)


# -- rows ----------------------------------------------------------------------------------------


def _drawn(rng: random.Random, suffix: str = "") -> _Rows:
    suffix = suffix or rng.choice((".csv", ".tsv", ".jsonl"))
    texts = TEXTS
    if suffix != ".tsv":
        texts += WITH_LINE_ENDS + WITH_TABS
    examples = [(rng.choice(texts), rng.choice(LABELS)) for _ in range(rng.randint(1, 8))]
    order = ["text", "label"] + [f"more {n}" for n in range(rng.choice((0, 0, 1, 3)))]
    rng.shuffle(order)
    header = None if suffix == ".jsonl" else _joined(rng, suffix, order)
    rows, at = [], []
    for text, label in examples:
        rows += [""] * rng.choice((0, 0, 0, 0, 1, 3))
        at.append(len(rows))
        fields = {name: rng.choice(texts) for name in order} | {"text": text, "label": label}
        # A row of the columns' own names would be a header line.
        if len(order) > 2 or (text, label) != ("text", "label"):
            rows.append(_row(rng, suffix, fields))
        else:
            rows.append(_row(rng, suffix, fields | {"label": "yes"}))
            examples[len(at) - 1] = (text, "yes")
    return _Rows(suffix, header, rows, examples, at)


def _row(rng: random.Random, suffix: str, fields: dict[str, str]) -> str:
    if rng.random() < 0.2:
        # What stands around a label is not part of it.
        fields = fields | {"label": rng.choice((" ", "\u00a0", "  ")) + fields["label"] + " "}
    if suffix != ".jsonl":
        return _joined(rng, suffix, list(fields.values()))
    as_ascii = rng.random() < 0.5
    values = {name: json.dumps(value, ensure_ascii=as_ascii) for name, value in fields.items()}
    if fields["label"].lstrip("-").isascii() and fields["label"].lstrip("-").isdecimal():
        values["label"] = rng.choice((values["label"], fields["label"]))
    if fields["label"] == "true":
        values["label"] = rng.choice((values["label"], "true"))
    row = ", ".join(f"{json.dumps(name)}: {value}" for name, value in values.items())
    return f"{{{row}}}"


def _joined(rng: random.Random, suffix: str, fields: Sequence[str]) -> str:
    if suffix == ".tsv":
        return "\t".join(fields)
    return ",".join(
        '"' + field.replace('"', '""') + '"'
        if any(character in field for character in '",\r\n') or rng.random() < 0.2
        else field
        for field in fields
    )


def _written(rng: random.Random, rows: _Rows) -> str:
    lines = ([] if rows.header is None else [rows.header]) + rows.rows
    written = ""
    ends = rng.choice(((rng.choice(LINE_ENDS),), LINE_ENDS))
    for number, line in enumerate(lines):
        end = rng.choice(ends)
        if not line and written.endswith("\r") and end == "\n":
            end = "\r\n"  # the two together would be one line end
        last = number == len(lines) - 1
        written += line + (end if not last or rng.random() < 0.7 else "")
    return written


def _read(rows: _Rows) -> tuple[Example, ...]:
    return tuple(
        Example(text, label, rows.number(index))
        for index, (text, label) in enumerate(rows.examples)
    )


def _file(rng: random.Random, rows: _Rows, about: str) -> File:
    text = _written(rng, rows)
    return File(f"x{rows.suffix}", text.encode(errors="surrogatepass"), about, _read(rows))


def _refused(file: File, row: int | None) -> File:
    return replace(file, examples=None, refused=True, row=row)


# -- kinds of files ------------------------------------------------------------------------------


def _right(rng: random.Random) -> File:
    file = _file(rng, _drawn(rng), "nothing is wrong with it")
    return replace(file, data=rng.choice((b"", b"\xef\xbb\xbf")) + file.data)


def _harmless(rng: random.Random) -> File:
    rows = _drawn(rng, ".jsonl")
    index = rng.randrange(len(rows.examples))
    more = rng.choice(
        (
            '"other": ' + "9" * 5000,
            '"other": 1e999',
            '"other": NaN',
            '"other": "\\ud800"',
            '"other": "\\u0000"',
            '"other": 1, "other": 2',
            '"other": ' + "[" * 50 + "]" * 50,
        )
    )
    rows.rows[rows.at[index]] = f"{{{more}, {rows.rows[rows.at[index]][1:]}"
    return _file(rng, rows, f"the key that is not asked for is odd: {more[:30]}")


def _long(rng: random.Random) -> File:
    rows = _drawn(rng)
    rows.rows.append(_row(rng, rows.suffix, {"text": "y" * 200_000, "label": "no"}))
    if rows.header is not None:
        rows.header = _joined(rng, rows.suffix, ["text", "label"])
        rows.rows = [rows.rows[-1]]
        rows.examples, rows.at = [], []
    rows.at.append(len(rows.rows) - 1)
    rows.examples.append(("y" * 200_000, "no"))
    return _file(rng, rows, "a text of 200,000 characters")


def _broken_row(rng: random.Random) -> File:
    """One row, whose text and label are right as such, is written wrongly."""
    rows = _drawn(rng)
    index = rng.randrange(len(rows.examples))
    at = rows.at[index]
    ways: dict[str, Callable[[str], str]]
    if rows.suffix == ".jsonl":
        ways = {
            "cut short": lambda row: row[: rng.randrange(1, len(row))],
            "more behind it": lambda row: row + rng.choice(("}", " x", row, ",", "\ufeff")),
            "a list": lambda row: f"[{row}]",
            "a number": lambda row: rng.choice(("1", "1e999", "-0", "9" * 5000, "NaN", '"a"')),
            "nested without end": lambda row: rng.choice(("[", '{"text":')) * 100_000,
            "single quotation marks": lambda row: row.replace('"', "'"),
            "a text twice": lambda row: '{"text": "a", ' + row[1:],
            "a label twice": lambda row: row[:-1] + ', "label": "yes"}',
            "no text": lambda row: '{"label": "yes"}',
            "no label": lambda row: '{"text": "good"}',
            "nothing": lambda row: "{}",
        }
    else:
        separator = "," if rows.suffix == ".csv" else "\t"
        ways = {
            "a field more": lambda row: row + separator,
            "a field too few": lambda row: "good",
        }
        if rows.suffix == ".csv":
            assert rows.header is not None
            columns = rows.header.count(",") + 1
            ways["more behind a quotation mark"] = lambda row: ",".join(['"a"b'] * columns)
            if index == len(rows.examples) - 1:
                ways["a quotation mark never closed"] = lambda row: '"' + row.replace('"', "")
    way = rng.choice(list(ways))
    rows.rows[at] = ways[way](rows.rows[at])
    return _refused(_file(rng, rows, f"{rows.suffix}: {way}"), rows.number(index))


def _broken_value(rng: random.Random) -> File:
    """One row is written rightly, and its text or its label is none."""
    rows = _drawn(rng)
    index = rng.randrange(len(rows.examples))
    empty = ("", " ", "\u200b", "\ufeff", "\u00a0", "\u2029")
    values: dict[str, object] = {"text": "good", "label": "yes"}
    key = rng.choice(("text", "label"))
    wrong: list[object] = [*empty]
    if key == "label" and rows.suffix != ".tsv":
        wrong += ["a\nb", "a\rb", "a\x1bb", "a\u2028b"]
    if rows.suffix == ".jsonl":
        wrong += ["\ud800", "a\udfffb", "\0", "a\0b"]
        wrong += NOT_TEXT if key == "text" else NOT_LABELS
    values[key] = rng.choice(wrong)
    if rows.suffix == ".jsonl":
        row = json.dumps(values).replace("Infinity", rng.choice(("Infinity", "1e999")))
    else:
        rows.header = _joined(rng, rows.suffix, ["text", "label"])
        row = _joined(rng, rows.suffix, [str(value) for value in values.values()])
        # The rows of the same file have as many columns.
        rows.rows, rows.at = [row], [0]
        rows.examples, index = [("good", "yes")], 0
    rows.rows[rows.at[index]] = row
    about = f"{rows.suffix}: the {key} is {values[key]!r}"
    return _refused(_file(rng, rows, about), rows.number(index))


def _broken_bytes(rng: random.Random) -> File:
    """A NUL, or bytes that are no UTF-8, in one row."""
    rows = _drawn(rng)
    index = rng.randrange(len(rows.examples))
    defect = rng.choice(
        (b"\0", b"\xff", b"\xe9", b"\xed\xa0\x80", b"\xc0\x80", b"\xf5\x80\x80\x80")
    )
    mark = "\ue123"
    rows.rows[rows.at[index]] += mark
    file = _file(rng, rows, f"{rows.suffix}: the bytes {defect!r}")
    return _refused(
        replace(file, data=file.data.replace(mark.encode(), defect)), rows.number(index)
    )


def _broken_file(rng: random.Random) -> File:
    """What is wrong is wrong with the file as a whole."""
    rows = _drawn(rng)
    text = _written(rng, rows)
    name = f"x{rows.suffix}"
    whole = {
        "empty": b"",
        "a byte order mark alone": b"\xef\xbb\xbf",
        "blank lines alone": rng.choice((b"\n", b"\r\n", b" \n", b"\r")) * 3000,
        "UTF-16": text.encode("utf-16", errors="surrogatepass"),
    }
    if rows.header is not None:
        whole["a header line alone"] = rows.header.encode()
    about = rng.choice(list(whole))
    return File(name, whole[about], f"{rows.suffix}: {about}", refused=True)


def _broken_header(rng: random.Random) -> File:
    rows = _drawn(rng, rng.choice((".csv", ".tsv")))
    assert rows.header is not None
    separator = "," if rows.suffix == ".csv" else "\t"
    names = rng.choice(
        (
            ["review", "label"],
            ["text", "stars"],
            ["text", "text", "label"],
            ["text", "label", "label"],
            ["Text", "label"],
            ["\u200btext", "label"],
            ["text;label"],
            ["text"],
        )
    )
    again = rng.random() < 0.3
    if not again:
        rows.header = separator.join(names)
        return _refused(_file(rng, rows, f"{rows.suffix}: the columns are {names}"), 1)
    rows.rows.append(rng.choice(("", "\ufeff")) + rows.header)
    if rows.rows[-1].startswith('\ufeff"'):
        rows.rows[-1] = rows.header
    row = len(rows.rows) + 1
    return _refused(_file(rng, rows, f"{rows.suffix}: the header line twice"), row)


def _mutated(rng: random.Random) -> File:
    """A right file in which bytes are replaced, dropped or doubled: nobody knows what becomes."""
    file = _right(rng)
    data = bytearray(file.data)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        at = rng.randrange(len(data) + 1)
        length = rng.choice((0, 1, 1, 5))
        inserted = rng.choice((b"", rng.randbytes(1), b'"', b",", b"\n", b"\r", b"\t", b"{", b"\\"))
        data[at : at + length] = inserted
    return replace(file, data=bytes(data), about="bytes changed", examples=None, refused=None)


_KINDS: tuple[Callable[[random.Random], File], ...] = (
    _right, _right, _harmless, _long, _broken_row, _broken_row, _broken_row, _broken_value,
    _broken_value, _broken_value, _broken_bytes, _broken_file, _broken_header, _mutated, _mutated,
    _mutated,
)  # fmt: skip
