"""Examples of what calibrates or trains: datasets, loaders, lists, generators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from ortrain.deploy.equivalence.predictions import IGNORED
from ortrain.errors import InputError, listing
from ortrain.kinds import NONE, expect, expect_flag, expect_names, expect_whole, refused

Array = np.ndarray
Row = dict[str, Any]

_LABELS = ("labels", "label", "label_ids")
_POSITIONS = ("start_positions", "end_positions")


def draw(
    data: Iterable[Any],
    *,
    labels: str | Sequence[Any] | Array | None,
    limit: int,
    batch_size: int,
    seed: int | None,
    batched: bool | None,
    input_names: Sequence[str] | None,
    slices: Mapping[str, Sequence[int]],
    slice_columns: Sequence[str],
) -> dict[str, Any]:
    """What a golden set is made of; the arguments are those of ``GoldenSet.draw``."""
    expect("data", data, Iterable, "a dataset, a DataLoader or a list of dicts")
    for name, value in (("limit", limit), ("batch_size", batch_size)):
        expect_whole(name, value)
        if value < 1:
            raise ValueError(f"{name}={value}: expected a whole number from 1 up")
    expect_whole("seed", seed, NONE)
    if batched is not None:
        expect_flag("batched", batched)
    expect_names("slice_columns", slice_columns)
    expect_names("input_names", input_names, NONE)
    key = labels if isinstance(labels, str) else None
    rows: list[Row] = []
    indices: list[int] = []
    for index, row in _rows(data, seed, limit, batched, input_names):
        rows.append(row)
        indices.append(index)
        if len(rows) == limit:
            break
    if not rows:
        raise InputError("there is nothing to draw examples from", help="give data with examples")
    found = [_label(row, key, number) for number, row in enumerate(rows)]
    named = dict(_slices(rows, slice_columns))
    there = {index: number for number, index in enumerate(indices)}
    for name, members in slices.items():
        named[name] = [there[int(member)] for member in members if int(member) in there]
        if not named[name]:
            raise InputError(
                f"none of the {len(rows)} examples drawn is of the slice {name!r}",
                help=f"draw more than limit={limit}, or leave the slice out",
            )
    if labels is not None and key is None:
        given = np.asarray(labels)
        if given.ndim == 0 or max(indices) >= len(given):
            raise InputError(
                f"there are {given.size if given.ndim < 1 else len(given)} labels, and example "
                f"{max(indices)} was drawn",
                help="give one for each example of the data, in its order",
            )
        merged: Array | None = given[indices]
    else:
        merged = _merged(found)
    return {
        "batches": list(_batches(rows, batch_size)),
        "labels": merged,
        "slices": named,
    }


def _rows(
    data: Any,
    seed: int | None,
    limit: int,
    batched: bool | None,
    input_names: Sequence[str] | None,
) -> Iterator[tuple[int, Row]]:
    """Single examples, each with its place in the data."""
    if seed is not None:
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise TypeError(
                f"seed={seed}: {type(data).__name__} has no length and no index to draw by; leave "
                "the seed out, or give a list"
            )
        order = np.random.default_rng(seed).permutation(len(data))[:limit]
        # In the order of the data, as everything else.
        elements: Iterator[tuple[int, Any]] = ((int(i), data[int(i)]) for i in sorted(order))
    else:
        elements = enumerate(data)
    at = 0
    for place, element in elements:
        named = _named(element, input_names)
        if batched is None:
            batched = _is_batch(data, named)
        if not batched:
            yield place, named
            continue
        if seed is not None:
            raise TypeError(f"seed={seed}: elements are batches; leave the seed out")
        arrays = {name: _array(value) for name, value in named.items()}
        count = next((len(array) for array in arrays.values() if array.ndim), 0)
        for row in range(count):
            yield (
                at + row,
                {
                    name: array[row] if array.ndim and len(array) == count else array
                    for name, array in arrays.items()
                },
            )
        at += count


def _named(element: Any, input_names: Sequence[str] | None) -> Row:
    if isinstance(element, Mapping):
        return dict(element)
    if isinstance(element, tuple | list) and element:
        first, *rest = element
        if isinstance(first, Mapping):  # inputs and labels
            return {**first, **({"labels": rest[0]} if rest else {})}
        if input_names is not None:
            names = [*input_names, "labels"][: len(element)]
            if len(names) == len(element):
                return dict(zip(names, element, strict=True))
        raise TypeError(
            f"an element of data is a {type(element).__name__} of {len(element)}: name its inputs "
            "with input_names=, or give dicts"
        )
    raise refused("data", element, "dicts of arrays by names of inputs, or tuples of arrays")


def _is_batch(data: Any, element: Row) -> bool:
    """Whether an element is a batch, by where it comes from and by what it has."""
    if hasattr(data, "column_names") and hasattr(data, "features"):
        return False  # of datasets
    if hasattr(data, "batch_sampler") and hasattr(data, "collate_fn"):
        return getattr(data, "batch_size", None) is not None or data.batch_sampler is not None
    for name in _LABELS:
        if name in element and not _array(element[name]).ndim:
            return False
    for name in ("input_ids", "attention_mask"):
        if name in element:
            return _array(element[name]).ndim > 1
    for name in ("pixel_values", "pixel_mask"):
        if name in element:
            return _array(element[name]).ndim > (3 if name == "pixel_values" else 2)
    arrays = [_array(value) for value in element.values()]
    if any(not array.ndim for array in arrays) or len({len(array) for array in arrays}) > 1:
        return False
    raise ValueError(
        f"whether an element of data with {listing([*element])} is one example or a batch cannot "
        "be told: say batched=True or batched=False"
    )


def _array(value: Any) -> Array:
    if hasattr(value, "detach"):  # a tensor, of whatever device
        value = value.detach().cpu().numpy()
    try:
        return np.asarray(value)
    except ValueError:  # lists of different lengths
        return np.asarray(value, dtype=object)


def _label(row: Row, key: str | None, number: int) -> Array | None:
    """Takes the label out of a row."""
    if key is not None and key not in row:
        raise InputError(
            f"example {number} has no {key!r}",
            because=f"it has {listing([*row])}",
            help="name the key of the labels, or give labels for all examples",
        )
    both = [row.pop(name) for name in _POSITIONS if name in row]
    found = next((row.pop(name) for name in ([key] if key else _LABELS) if name in row), None)
    if found is not None:
        return _array(found)
    return np.asarray([int(_array(each)) for each in both]) if len(both) == 2 else None


def _merged(labels: Sequence[Array | None]) -> Array | None:
    """Labels of all examples as one array; those of tokens with -100 behind their end."""
    there = [label for label in labels if label is not None]
    if not there:
        return None
    if len(there) != len(labels):
        missing = next(number for number, label in enumerate(labels) if label is None)
        raise InputError(
            f"example {missing} has no label, and others have one",
            help="give labels for all examples, or for none",
        )
    ranks = {label.ndim for label in there}
    if len(ranks) != 1:
        raise InputError("labels are of different kinds", help="give labels of one shape")
    if ranks == {1} and len({len(label) for label in there}) > 1:
        found = np.full((len(there), max(map(len, there))), IGNORED, np.int64)
        for number, label in enumerate(there):
            found[number, : len(label)] = label
        return found
    return np.stack(there)


def _slices(rows: Sequence[Row], columns: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
    """The examples of each value of these columns, which are taken out of the rows."""
    for column in columns:
        members: dict[str, list[int]] = {}
        for number, row in enumerate(rows):
            if column not in row:
                raise InputError(
                    f"example {number} has no {column!r} to tell its slice by",
                    because=f"it has {listing([*row])}",
                    help="name a key that all examples have",
                )
            members.setdefault(f"{column}={row.pop(column)}", []).append(number)
        yield from sorted(members.items())


def _batches(rows: Sequence[Row], size: int) -> Iterator[dict[str, Array]]:
    """Neighbours of one shape in batches; texts and what else is no number is left out."""
    arrays = []
    for number, row in enumerate(rows):
        every = {name: _array(value) for name, value in row.items()}
        arrays.append({name: each for name, each in every.items() if each.dtype.kind in "biuf"})
        if not arrays[-1]:
            raise InputError(
                f"example {number} has no inputs of numbers",
                because=f"it has {listing([*row]) or 'nothing'}",
                help="give what the tokenizer or the processor makes of it",
            )
    start = 0
    while start < len(arrays):
        shapes = _shapes(arrays[start])
        alike = islice(arrays, start, start + size)
        end = start
        for each in alike:
            if _shapes(each) != shapes:
                break
            end += 1
        yield {name: np.stack([each[name] for each in arrays[start:end]]) for name in arrays[start]}
        start = end


def _shapes(row: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in row.items()}
