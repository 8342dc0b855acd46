"""``ORTCalibrationDataReader``: batches of arrays from data of any kind."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ortrain.errors import InputError, listing
from ortrain.kinds import expect_whole, refused

Batch = dict[str, np.ndarray]


class ORTCalibrationDataReader:
    """Reads a ``datasets.Dataset``, a torch ``DataLoader`` or an iterable of mappings.

    Rows of one size are put together; a row of another size gets a batch of its own instead of
    padding, so that ranges are those of the data and do not depend on ``batch_size``. What is a
    batch already stays one.

    Args:
        dataset: the data; its elements are mappings from names to arrays, tensors or lists, or
            pairs of which the first is one.
        batch_size: how many rows are read before those of one size are put together.
        names: of the columns to read; by default all that are numbers.
        ranks: name → axes of a batch, by which rows are told from batches. Without one, rows are
            what a ``datasets.Dataset`` gives, and what has less than two axes in every column.

    Raises:
        TypeError: the data is of another kind.
        ValueError: ``batch_size`` is not 1 or more.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        names: Collection[str] | None = None,
        ranks: Mapping[str, int] | None = None,
    ) -> None:
        expect_whole("batch_size", batch_size)
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: expected 1 or more")
        if isinstance(dataset, str | bytes) or not (
            isinstance(dataset, Iterable) or hasattr(dataset, "__getitem__")
        ):
            raise refused(
                "dataset", dataset, "a datasets.Dataset, a DataLoader or an iterable of mappings"
            )
        self.dataset, self.batch_size = dataset, int(batch_size)
        self._names = None if names is None else frozenset(names)
        self._ranks = dict(ranks or {})
        self._batches: Iterator[Batch] | None = None

    def __iter__(self) -> Iterator[Batch]:
        held: list[Batch] = []
        for element in _elements(self.dataset):
            arrays = self._arrays(element)
            if self._is_batch(arrays):
                yield from _stacked(held)
                held = []
                yield arrays
                continue
            held.append(arrays)
            if len(held) == self.batch_size:
                yield from _stacked(held)
                held = []
        yield from _stacked(held)

    def get_next(self) -> Batch | None:
        """The next batch; None behind the last one, and then the first again."""
        if self._batches is None:
            self._batches = iter(self)
        found = next(self._batches, None)
        if found is None:
            self._batches = None
        return found

    def rewind(self) -> None:
        """Begins anew, where the data can be read again."""
        self._batches = None

    def _arrays(self, element: Any) -> Batch:
        if isinstance(element, tuple | list) and element and isinstance(element[0], Mapping):
            element = element[0]
        if not isinstance(element, Mapping):
            raise InputError(
                f"an element of the calibration data is a {type(element).__name__}",
                because="the inputs of a model have names",
                help="give mappings from the names of inputs to arrays",
            )
        arrays: Batch = {}
        for name, value in element.items():
            if self._names is not None and name not in self._names:
                continue
            array = _array(value, name, strict=self._names is not None)
            if array is not None:
                arrays[str(name)] = array
        if not arrays:
            wanted = "" if self._names is None else f"; wanted are {listing(sorted(self._names))}"
            raise InputError(
                "an element of the calibration data has nothing that a model takes",
                because=f"its columns are {listing(sorted(map(str, element)))}{wanted}",
                help="tokenize the data first, and name its columns as the model's inputs",
            )
        return arrays

    def _is_batch(self, arrays: Batch) -> bool:
        known = [(a.ndim, self._ranks[name]) for name, a in arrays.items() if name in self._ranks]
        if known:
            if all(rank == wanted for rank, wanted in known):
                return True
            if all(rank + 1 == wanted for rank, wanted in known):
                return False
            shapes = {name: a.shape for name, a in arrays.items()}
            raise InputError(
                f"an element of the calibration data has shapes {shapes}",
                because=f"the model's inputs have axes {self._ranks}",
                help="give batches with all of these axes, or rows with one less",
            )
        if hasattr(self.dataset, "column_names"):
            return False
        return all(array.ndim >= 2 for array in arrays.values())


def _elements(data: Any) -> Iterator[Any]:
    if hasattr(data, "__iter__"):
        yield from data
        return
    for index in range(len(data)):  # a torch Dataset need not end by an IndexError
        yield data[index]


def _array(value: Any, name: Any, *, strict: bool) -> np.ndarray | None:
    """The array of a column; None of a column that nobody asked for and that holds no numbers."""
    if hasattr(value, "detach"):  # a tensor of torch, which need not be installed
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":
            value = value.float()
        value = value.numpy()
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        array = np.empty(0, object)
    if array.dtype.kind in "biuf":
        return array
    if strict and array.dtype.kind in "OSU" and all(isinstance(t, str) for t in array.flat):
        return array.astype(object)  # texts, which onnxruntime takes so
    if strict:
        raise InputError(
            f"column {name!r} of the calibration data holds no numbers, or rows of several lengths",
            help="tokenize it; give rows one by one, or padded to one length",
        )
    return None


def _stacked(rows: list[Batch]) -> Iterator[Batch]:
    """Batches of those rows that have one shape, in the order in which shapes first come."""
    groups: dict[tuple[tuple[str, tuple[int, ...]], ...], list[Batch]] = {}
    for row in rows:
        key = tuple((name, array.shape) for name, array in sorted(row.items()))
        groups.setdefault(key, []).append(row)
    for same in groups.values():
        yield {name: np.stack([row[name] for row in same]) for name in same[0]}
