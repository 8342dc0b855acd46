"""What a session takes: names, dtypes and axes of its inputs, and batches in that form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from ortrain.errors import InputError, listing


class Described(NamedTuple):
    """One input.

    Attributes:
        dtype: of its arrays; None where it takes no array.
        rank: number of axes; None where it is not known.
        sizes: a number for each axis, or the name of an open one, or None.
    """

    dtype: np.dtype[Any] | None
    rank: int | None
    sizes: tuple[Any, ...]


Inputs = Mapping[str, Described]

# Texts are objects to onnxruntime.
_DTYPES: dict[str, Any] = {
    "bfloat16": ir.DataType.BFLOAT16.numpy(),
    "double": "float64",
    "float": "float32",
    "string": object,
}


def described(session: Any) -> dict[str, Described]:
    """The inputs of a session of onnxruntime, by name."""
    found = {}
    for value in session.get_inputs():
        sizes, dtype = value.shape, None
        if value.type.startswith("tensor("):
            kind = value.type.removeprefix("tensor(").removesuffix(")")
            dtype = np.dtype(_DTYPES.get(kind, kind))
        found[value.name] = Described(
            dtype,
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
        name: (
            batch[name]
            if each.dtype is None
            else np.asarray(batch[name], dtype=each.dtype, order="C")
        )
        for name, each in inputs.items()
    }
