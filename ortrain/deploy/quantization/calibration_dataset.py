"""Examples of a named data set, with the columns that a model takes."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Any

from ortrain.kinds import expect, expect_whole


def drawn(
    dataset_name: str,
    num_samples: int,
    dataset_config_name: str | None,
    dataset_split: str | None,
    preprocess_function: Callable[..., Any] | None,
    preprocess_batch: bool,
    seed: int,
    token: bool | str | None,
) -> Any:
    """Some examples; the arguments are those of ``ORTQuantizer.get_calibration_dataset``."""
    from datasets import Dataset, load_dataset

    expect("dataset_name", dataset_name, (str, os.PathLike), "a name or a folder")
    expect_whole("num_samples", num_samples)
    if num_samples < 1:
        raise ValueError(f"num_samples={num_samples}: expected 1 or more")
    found = load_dataset(
        os.fspath(dataset_name), name=dataset_config_name, split=dataset_split, token=token
    )
    if not isinstance(found, Dataset):
        raise ValueError(
            f"{dataset_name} has the splits {', '.join(found)}: give one as dataset_split"
        )
    chosen = min(num_samples, len(found))
    found = found.shuffle(seed=seed).select(range(chosen))
    if preprocess_function is not None:
        found = found.map(preprocess_function, batched=preprocess_batch)
    return found


def cleaned(dataset: Any, taken: Collection[str]) -> Any:
    """A ``datasets.Dataset`` without the columns that are not taken.

    Raises:
        TypeError: it is no ``datasets.Dataset``.
    """
    if not hasattr(dataset, "remove_columns"):
        expect("dataset", dataset, (), "a datasets.Dataset")
    return dataset.remove_columns([n for n in dataset.column_names if n not in taken])
