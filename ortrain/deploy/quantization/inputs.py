"""What a session takes: names, dtypes and axes of its inputs, and batches in that form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ortrain.errors import InputError, listing


class Described(NamedTuple):
    """One input.

    Attributes:
        dtype: of its arrays.
        rank: number of axes; None where it is not known.
        sizes: a number for each axis, or the name of an open one, or None.
    """

    dtype: np.dtype[Any]
    rank: int | None
    sizes: tuple[Any, ...]


Inputs = Mapping[str, Described]

_DTYPES = {"float": "float32", "double": "float64"}


def described(session: Any) -> dict[str, Described]:
    """The inputs of a session of onnxruntime, by name."""
    found = {}
    for value in session.get_inputs():
        kind = value.type.removeprefix("tensor(").removesuffix(")")
        sizes = value.shape
        found[value.name] = Described(
            np.dtype(_DTYPES.get(kind, kind)),
            None if sizes is None else len(sizes),
            tuple(sizes or ()),
        )
    return found


def fed(batch: Mapping[str, np.ndarray], inputs: Inputs) -> dict[str, np.ndarray]:
    """Of a batch what a session takes, in its dtypes.

    Raises:
        InputError: an input is missing.
    """
    if missing := [name for name in inputs if name not in batch]:
        raise InputError(
            f"the data has no {listing(missing)}",
            because=f"its columns are {listing(sorted(batch))}",
            help="name the columns as the model's inputs",
        )
    return {
        name: np.ascontiguousarray(batch[name], dtype=each.dtype) for name, each in inputs.items()
    }
