"""Golden sets of files: labelled text, tokenized by the model's own tokenizer, or arrays.

The row in a message counts the rows of the file from 1, the header line included.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ortrain.deploy.equivalence.label_classes import Classes
from ortrain.deploy.equivalence.predictions import IGNORED
from ortrain.deploy.equivalence.table import Row, json_lines, separated, value_of
from ortrain.deploy.model_folder import ModelFolder
from ortrain.errors import InputError, listing
from ortrain.extras import require
from ortrain.files.regular import expect_regular
from ortrain.kinds import NONE, expect, expect_names, expect_path, expect_whole, refused, shown

Array = np.ndarray

_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_SLICE = "slice:"


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
        rows = list(separated(file, _SEPARATORS[suffix], limit))
    elif suffix in _JSON_LINES:
        rows = list(json_lines(file, limit))
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
    labels = [value_of(file, row, label_column, "label") for row in rows] if has_labels else None
    slices: dict[str, list[int]] = {}
    for column in slice_columns:
        for index, row in enumerate(rows):
            value = value_of(file, row, column, "slice")
            slices.setdefault(f"{column}={value}", []).append(index)
    tokenizer = _tokenizer(folder)
    words = isinstance(texts[0][0], list)
    makes_text = _makes_text(folder.config)
    classes = Classes(file, folder.config)
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


def _arrays(file: Path, batch_size: int, limit: int | None) -> dict[str, Any]:
    expect_regular(file)
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


def _text(file: Path, row: Row, column: str) -> Any:
    value = value_of(file, row, column, "text")
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
