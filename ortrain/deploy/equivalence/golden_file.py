"""Golden sets of files: labelled text, tokenized by the model's own tokenizer, or arrays.

The row in a message counts the rows of the file from 1, the header line included.
"""

from __future__ import annotations

import csv
import io
import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ortrain.deploy.equivalence.predictions import IGNORED
from ortrain.deploy.model_folder import ModelFolder
from ortrain.errors import InputError, listing
from ortrain.extras import require
from ortrain.kinds import NONE, expect, expect_names, expect_path, expect_whole, refused, shown

Array = np.ndarray

_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_SLICE = "slice:"


@dataclass(frozen=True)
class _Row:
    """A row of a file with its number, from 1."""

    number: int
    values: Mapping[str, Any]


def read(
    path: str | os.PathLike[str],
    model: str | os.PathLike[str],
    *,
    text_column: str | tuple[str, str],
    label_column: str,
    slice_columns: Sequence[str],
    batch_size: int,
    max_length: int | None,
    limit: int | None,
) -> dict[str, Any]:
    """What a golden set is made of; the arguments are those of ``GoldenSet.from_file``."""
    expect_path("path", path)
    expect_path("model", model)
    columns: Any = (text_column,) if isinstance(text_column, str) else text_column
    expect("text_column", columns, tuple, "the name of a column, or a pair of them")
    if not 1 <= len(columns) <= 2 or not all(isinstance(name, str) for name in columns):
        raise refused("text_column", text_column, "the name of a column, or a pair of them")
    expect("label_column", label_column, str, "the name of a column")
    expect_names("slice_columns", slice_columns)
    expect_whole("batch_size", batch_size)
    for name, value in (("batch_size", batch_size), ("max_length", max_length), ("limit", limit)):
        expect_whole(name, value, NONE)
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}: expected a whole number from 1 up")
    file = Path(path)
    suffix = file.suffix.lower()
    if not file.is_file():
        raise InputError(f"there is no file {file}", help="give the file of the golden set")
    if suffix == ".npz":
        if slice_columns:
            raise InputError(
                f"{file} has no columns to tell slices by",
                help=f"give an array {_SLICE}NAME of indices, or of one bool for each example",
            )
        return _arrays(file, batch_size, limit)
    if suffix in _SEPARATORS:
        rows = list(_separated(file, _SEPARATORS[suffix], limit))
    elif suffix in _JSON_LINES:
        rows = list(_json_lines(file, limit))
    else:
        raise InputError(
            f"{file} has the unknown format {suffix!r}",
            help="convert it to .csv, .tsv, .jsonl (text) or .npz (arrays)",
        )
    if not rows:
        raise InputError(f"{file} has no examples", help="give a file with one example a row")
    folder = ModelFolder.open(model)
    texts = [[_text(file, row, column) for column in columns] for row in rows]
    # A name that was given has to be there; without the usual one there are no labels.
    has_labels = label_column != "label" or any(label_column in row.values for row in rows)
    labels = [_value(file, row, label_column, "label") for row in rows] if has_labels else None
    slices: dict[str, list[int]] = {}
    for column in slice_columns:
        for index, row in enumerate(rows):
            value = _value(file, row, column, "slice")
            slices.setdefault(f"{column}={value}", []).append(index)
    tokenizer = _tokenizer(folder)
    words = isinstance(texts[0][0], list)
    makes_text = _makes_text(folder.config)
    classes = _Classes(file, folder.config)
    batches: list[dict[str, Array]] = []
    found: list[Any] = []
    for start in range(0, len(rows), batch_size):
        part = slice(start, start + batch_size)
        encoded = _encoded(tokenizer, texts[part], words, max_length, file, rows[start].number)
        batch = {name: np.asarray(array) for name, array in encoded.items()}
        batches.append(batch)
        if makes_text == "decoder" and labels is None:
            found += [ids[mask != 0] for ids, mask in _with_masks(batch)]
        elif makes_text == "both" and labels is not None:
            targets = [[_text(file, row, label_column)] for row in rows[part]]
            target = _encoded(tokenizer, targets, False, max_length, file, rows[start].number)
            answer = {name: np.asarray(array) for name, array in target.items()}
            found += [ids[mask != 0] for ids, mask in _with_masks(answer)]
            batch["decoder_input_ids"] = _shifted(answer["input_ids"], folder.config)
        elif labels is not None:
            for index, (row, label) in enumerate(zip(rows[part], labels[part], strict=True)):
                if words:
                    text = texts[start + index][0]
                    found.append(classes.of_words(row, label, text, encoded, index))
                else:
                    found.append(classes.of(row, label))
    of_tokens = words or bool(makes_text)
    return {
        "batches": batches,
        "labels": _stacked(found, of_tokens) if found else None,
        "slices": dict(sorted(slices.items())),
        "id2label": {} if makes_text else classes.names,
    }


def _makes_text(config: Mapping[str, Any]) -> str:
    """Whether a model writes text, by its decoder alone or by what an encoder has read."""
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return "decoder"
    if config.get("is_encoder_decoder") and name.endswith(("ForConditionalGeneration", "MTModel")):
        return "both"
    return ""


def _with_masks(batch: Mapping[str, Array]) -> Iterator[tuple[Array, Array]]:
    ids = batch["input_ids"]
    yield from zip(ids, batch.get("attention_mask", np.ones_like(ids)), strict=True)


def _shifted(ids: Array, config: Mapping[str, Any]) -> Array:
    """What a decoder has read where it writes each of these tokens."""
    start = config.get("decoder_start_token_id")
    if not isinstance(start, int):
        start = config.get("pad_token_id") or 0
    return np.concatenate([np.full_like(ids[:, :1], start), ids[:, :-1]], axis=1)


class _Classes:
    """The classes that labels of a file are of.

    Args:
        file: for errors.
        config: of the model.
    """

    def __init__(self, file: Path, config: Mapping[str, Any]) -> None:
        self.file = file
        known = config.get("id2label")
        known = known if isinstance(known, Mapping) else {}
        self.names = {int(key): str(name) for key, name in known.items() if str(key).isdecimal()}
        self._numbers = {name: number for number, name in self.names.items()}
        problem = config.get("problem_type")
        self._are_numbers = problem == "regression" or (problem is None and len(known) == 1)
        self._are_several = problem == "multi_label_classification"

    def of(self, row: _Row, label: Any) -> Any:
        """A label as a number, or as zeros and ones where an example may have several."""
        if self._are_numbers:
            return self._number(row, label)
        if self._are_several:
            given = label.split("|") if isinstance(label, str) else label
            if not isinstance(given, list):
                raise self._wrong(row, label, "a list of classes, or a text with | between them")
            flags = [0] * len(self.names)
            for each in given:
                if each != "":
                    flags[self._class(row, each)] = 1
            return flags
        return self._class(row, label)

    def of_words(
        self, row: _Row, label: Any, words: Sequence[str], encoded: Any, index: int
    ) -> list[int]:
        """Labels of tokens: that of a word for its first one, -100 for all others."""
        if not isinstance(label, list) or len(label) != len(words):
            raise self._wrong(row, label, f"a list of {len(words)} labels, one for each word")
        numbers = [self._class(row, each) for each in label]
        found, last = [], None
        for word in encoded.word_ids(index):
            found.append(IGNORED if word is None or word == last else numbers[word])
            last = word
        return found

    def _class(self, row: _Row, label: Any) -> int:
        # As `ortrain train` names classes: 4 is the class of the name "4", where there is one.
        if isinstance(label, str | int) and str(label) in self._numbers:
            return self._numbers[str(label)]
        number = label if isinstance(label, int) and not isinstance(label, bool) else -1
        text = label.strip() if isinstance(label, str) else ""
        if text.isascii() and text.isdecimal() and len(text) < 19:
            number = int(text)
        if number >= 0 and (number in self.names or not self.names):
            return number
        expected = listing([f"{number} or {name!r}" for number, name in self.names.items()])
        raise self._wrong(row, label, expected or "the number of a class")

    def _number(self, row: _Row, label: Any) -> float:
        try:
            found = float(label)
            if not np.isfinite(found) or isinstance(label, bool):
                raise ValueError
        except (TypeError, ValueError):
            raise self._wrong(
                row, label, "a finite number: the model is one of regression"
            ) from None
        return found

    def _wrong(self, row: _Row, label: Any, expected: str) -> InputError:
        return InputError(
            f"{self.file}, row {row.number}: the label {shown(label)} is none of the model's",
            because=f"expected {expected}",
            help="correct the row, or give the model that the labels are of",
        )


def _arrays(file: Path, batch_size: int, limit: int | None) -> dict[str, Any]:
    try:
        with np.load(file, allow_pickle=False) as archive:
            found = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(
            f"{file} cannot be read as arrays",
            because=str(error),
            help="write it with numpy.savez, without arrays of Python objects",
        ) from error
    labels = found.pop("labels", None)
    members = {
        name.removeprefix(_SLICE): found.pop(name) for name in [*found] if name.startswith(_SLICE)
    }
    counts = {name: len(array) for name, array in found.items() if array.ndim}
    if not counts or not max(counts.values()):
        raise InputError(f"{file} has no examples", help="give arrays named as the model's inputs")
    if labels is not None:
        counts["labels"] = len(labels) if labels.ndim else 0
    if len(set(counts.values())) > 1:
        told = listing([f"{name} has {count}" for name, count in counts.items()], 8)
        raise InputError(
            f"arrays of {file} have different numbers of examples",
            because=told,
            help="give arrays whose first axis is the example",
        )
    total = next(iter(counts.values()))
    count = total if limit is None else min(total, limit)
    slices = {}
    for name, given in members.items():
        if given.dtype.kind == "b" and given.shape == (total,):
            given = np.flatnonzero(given)
        slices[name] = [int(index) for index in given.reshape(-1) if limit is None or index < count]
    return {
        "batches": [
            {
                name: array[start : min(start + batch_size, count)] if array.ndim else array
                for name, array in found.items()
            }
            for start in range(0, count, batch_size)
        ],
        "labels": None if labels is None else labels[:count],
        "slices": slices,
    }


def _decoded(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{file} is not text in UTF-8", because=str(error), help="convert the file to UTF-8"
        ) from error
    except OSError as error:
        raise InputError(f"{file} cannot be read", because=str(error)) from error


def _separated(file: Path, separator: str, limit: int | None) -> Iterator[_Row]:
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
            yield _Row(number, dict(zip(names, fields, strict=True)))
            given += 1
            if given == limit:
                return
    except csv.Error as error:
        raise InputError(
            f"{file}: {error}", help="a quotation mark inside quoted text is written twice"
        ) from error
    finally:
        csv.field_size_limit(before)


def _json_lines(file: Path, limit: int | None) -> Iterator[_Row]:
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
        yield _Row(number, values)
        given += 1
        if given == limit:
            return


def _value(file: Path, row: _Row, column: str, what: str) -> Any:
    if column not in row.values:
        raise InputError(
            f"{file}, row {row.number}: there is no {what} {column!r}",
            because=f"it has {listing([*row.values])}",
            help=f"name the column of the {what}, or complete the row",
        )
    return row.values[column]


def _text(file: Path, row: _Row, column: str) -> Any:
    value = _value(file, row, column, "text")
    words = isinstance(value, list) and value and all(isinstance(each, str) for each in value)
    if not isinstance(value, str) and not words:
        raise InputError(
            f"{file}, row {row.number}: {column!r} is {shown(value)}, and no text",
            help="give a text, or a list of words",
        )
    return value


def _tokenizer(folder: ModelFolder) -> Any:
    require("hf", "a golden set of text")
    import transformers

    if not any(
        path.name.startswith(("tokenizer", "vocab", "spiece", "sentencepiece"))
        for path in folder.companions()
    ):
        # transformers would make an empty tokenizer of config.json alone.
        raise InputError(
            f"{folder.path} has no tokenizer",
            because=f"beside the model there are {listing([p.name for p in folder.companions()])}",
            help="copy the files of the tokenizer there, or give the golden set as .npz",
        )
    try:
        return transformers.AutoTokenizer.from_pretrained(folder.path)
    except Exception as error:  # of tokenizers, json, or by the file that is damaged
        raise InputError(
            f"the tokenizer in {folder.path} cannot be loaded",
            because=str(error) or type(error).__name__,
            help="take a whole copy of the folder",
        ) from error


def _encoded(
    tokenizer: Any,
    texts: Sequence[Sequence[Any]],
    words: bool,
    max_length: int | None,
    file: Path,
    row: int,
) -> Any:
    longest = max_length or min(int(tokenizer.model_max_length), 1 << 20)
    # A tokenizer that does not know says 1e30; what does not fit is told by the model.
    options = {"truncation": True, "max_length": longest} if longest < 1 << 20 else {}
    columns = list(zip(*texts, strict=True))
    try:
        return tokenizer(
            *(list(column) for column in columns),
            padding=len(texts) > 1,
            is_split_into_words=words,
            return_tensors="np",
            **options,
        )
    except Exception as error:
        raise InputError(
            f"{file}: the tokenizer refuses the texts from row {row} on",
            because=str(error) or type(error).__name__,
            help="give texts of one kind, and a tokenizer with a token for padding or batches of 1",
        ) from error


def _stacked(labels: Sequence[Any], tokens: bool) -> Array:
    if not tokens:
        return np.asarray(labels)
    found = np.full((len(labels), max(map(len, labels))), IGNORED, np.int64)
    for number, row in enumerate(labels):
        found[number, : len(row)] = row
    return found
