"""``Rows``: the examples that a model is trained on, which are none of those that judge it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ortrain.deploy.equivalence import GoldenSet
from ortrain.deploy.quantization.tuning.settings import FineTuning
from ortrain.errors import InputError
from ortrain.kinds import refused

Array = np.ndarray
Batch = Mapping[str, Array]

# Of those that judge: with so many among the training data, both are the same data.
_SAME = 0.5
_MOST = 1 << 31
_MASKS = ("attention_mask", "decoder_attention_mask")


@dataclass(frozen=True)
class Rows:
    """Training data.

    Attributes:
        batches: inputs by name.
        labels: of each batch; None without.
        task: that the data say.
        left_out: rows that were not taken because they are in the golden set.
    """

    batches: tuple[Batch, ...]
    labels: tuple[Array, ...] | None
    task: str | None
    left_out: int = 0

    @property
    def count(self) -> int:
        """How many rows there are."""
        return sum(map(GoldenSet.size_of, self.batches))

    @classmethod
    def of(cls, given: Any, golden: GoldenSet, settings: FineTuning) -> Rows:
        """The rows of some data that are not in the golden set.

        Two rows are the same where all inputs that both have hold the same numbers, padding by an
        attention mask aside; labels do not count.

        Args:
            given: a golden set, or what :meth:`GoldenSet.draw` takes.
            golden: that the result is judged on.
            settings: of the training.

        Raises:
            TypeError: the data are of another kind.
            InputError: there are none, or they are those of the golden set.
        """
        if given is golden:
            raise InputError(
                "the training data are the golden set itself",
                because="what a model was trained on cannot judge it",
                help="train on other examples",
            )
        if isinstance(given, str | bytes):
            raise refused("training_data", given, "a GoldenSet, a dataset or a list of dicts")
        data = given if isinstance(given, GoldenSet) else _drawn(given, golden, settings)
        names = _columns(data) & _columns(golden)
        judging: set[bytes] = set()
        if names:  # else the model takes one of them at most, and says what is missing
            judging = {key for batch in golden.batches for key in _keys(batch, names)}
        there: set[bytes] = set()
        batches: list[Batch] = []
        labels: list[Array] = []
        start = left_out = 0
        for batch in data.batches:
            keys = list(_keys(batch, names))
            own = None if data.labels is None else data.labels[start : start + len(keys)]
            start += len(keys)
            kept = np.array([key not in judging for key in keys], np.bool_)
            there.update(key for key in keys if key in judging)
            left_out += int((~kept).sum())
            if not kept.any():
                continue
            batches.append(batch if kept.all() else _some(batch, kept))
            if own is not None:
                labels.append(own[kept])
        if not batches or (there and len(there) >= _SAME * len(judging)):
            raise InputError(
                f"the training data have {len(there)} of the {len(judging)} different rows of the "
                "golden set",
                because="what a model was trained on cannot judge it",
                help="train on other examples",
            )
        known = None if data.labels is None else tuple(labels)
        return cls(tuple(batches), known, data.task or golden.task, left_out)


def _drawn(given: Any, golden: GoldenSet, settings: FineTuning) -> GoldenSet:
    try:
        return GoldenSet.draw(
            given,
            limit=_MOST,
            batch_size=settings.batch_size,
            batched=_are_batches(given, golden),
        )
    except InputError as error:
        if "nothing to draw" not in error.what:
            raise
        raise InputError(
            "the training data are empty", help="give rows, or leave training_data out"
        ) from error
    except ValueError as error:  # nothing tells
        raise InputError(
            "whether it is a row or a batch cannot be told of an element of the training data",
            because=str(error),
            help="name the columns as in the golden set, or give a GoldenSet",
        ) from error


def _are_batches(given: Any, golden: GoldenSet) -> bool | None:
    """Whether elements have as many axes as batches of the golden set; None where nothing tells."""
    first = given[0] if isinstance(given, Sequence) and given else None
    if not isinstance(first, Mapping):
        return None
    for name, array in golden.batches[0].items():
        if name in first:
            return bool(np.ndim(first[name]) == array.ndim)
    return None


def _columns(data: GoldenSet) -> set[str]:
    """Names that each batch has, masks aside."""
    return set.intersection(*({*batch} for batch in data.batches)) - {*_MASKS}


def _keys(batch: Batch, names: Collection[str]) -> Iterator[bytes]:
    """A digest of each row of a batch, by some of its columns."""
    count = GoldenSet.size_of(batch)
    masks = {name: batch[name] for name in _MASKS if name in batch}
    for row in range(count):
        digest = hashlib.blake2b(digest_size=16)
        for name in sorted(names):
            array = batch[name]
            one = array[row] if array.ndim and len(array) == count else array
            for mask in masks.values():
                if mask.ndim == 2 and one.ndim and one.shape[0] == mask.shape[1]:
                    one = one[mask[row] != 0]
                    break
            # The same ids may be int32 in one data set and int64 in the other.
            wide = one.astype(np.int64) if one.dtype.kind in "iub" else np.asarray(one)
            digest.update(f"{name} {wide.dtype.kind} {wide.shape} ".encode())
            digest.update(np.ascontiguousarray(wide).tobytes())
        yield digest.digest()


def _some(batch: Batch, kept: Array) -> Batch:
    count = len(kept)
    return {
        name: array[kept] if array.ndim and len(array) == count else array
        for name, array in batch.items()
    }
