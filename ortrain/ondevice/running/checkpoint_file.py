"""The checkpoint as a file: safetensors, with what training needs to know in its metadata.

See docs/ondevice-contract.md for the keys.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from safetensors import SafetensorError

from ortrain.errors import InputError, listing
from ortrain.files import seal
from ortrain.ondevice.running import safetensors_file
from ortrain.ondevice.running.safetensors_file import DTYPES, SPELLINGS

FORMAT = "ortrain.checkpoint"
VERSION = 2

Uri = str | os.PathLike[str] | bytes | bytearray | memoryview
Property = int | float | str

# Faults that an error tells.
MOST_NAMED = 3

# What counts: updates, and the seed of the next run.
_COUNTS = range(-(1 << 63), 1 << 63)

_MAKE_ANEW = "take a whole copy of it, or make it anew with generate_artifacts"


@dataclass(frozen=True)
class Spec:
    """Name, dtype and shape of a tensor; of a parameter also whether it is trained."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    requires_grad: bool = False

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass
class Content:
    """What a checkpoint holds.

    Attributes:
        parameters: in the models' order.
        buffers: likewise.
        states: those of the optimizer; empty where there is none.
        texts: the metadata that describes the three, as it stands in the file, since ``model`` is a
            hash of the strings.
        tensors: by name; writable, contiguous, of the machine's byte order.
        properties: the user's.
        step: updates done; None where the file does not say.
        seed: that of the next run; likewise.
        learning_rate: likewise.
    """

    parameters: list[Spec]
    buffers: list[Spec]
    states: list[Spec]
    texts: dict[str, str]
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    properties: dict[str, Property] = field(default_factory=dict)
    step: int | None = None
    seed: int | None = None
    learning_rate: float | None = None

    def nominal(self) -> Content:
        """The same without the parameters' values, and without what training has counted."""
        return replace(
            self,
            tensors={spec.name: self.tensors[spec.name] for spec in self.buffers},
            step=None,
            seed=None,
            learning_rate=None,
        )


def new(
    parameters: Mapping[str, tuple[np.ndarray, bool]],
    buffers: Mapping[str, np.ndarray],
    states: Sequence[Mapping[str, Any]] = (),
    adapters: Sequence[Mapping[str, Any]] = (),
) -> Content:
    """The checkpoint before training.

    Args:
        parameters: in the models' order: the value, and whether it is trained.
        buffers: likewise.
        states: those of the optimizer, as they stand in the metadata.
        adapters: those of the model, likewise.

    Raises:
        InputError: a tensor is of a dtype that a checkpoint cannot hold.
    """
    rows: dict[str, list[Any]] = {
        "parameters": [
            {**_row(name, array), "requires_grad": trained}
            for name, (array, trained) in parameters.items()
        ],
        "buffers": [_row(name, array) for name, array in buffers.items()],
        "states": list(states),
    }
    texts = {key: json.dumps(value, separators=(",", ":")) for key, value in rows.items()}
    texts["model"] = model_hash(texts["parameters"], texts["buffers"])
    if adapters:
        texts["adapters"] = json.dumps(list(adapters), separators=(",", ":"))
    weights, running, moments = (
        [_spec(row, "of this model") for row in listed] for listed in rows.values()
    )
    tensors = {name: array for name, (array, _) in parameters.items()} | dict(buffers)
    return Content(weights, running, moments, texts, tensors)


def _row(name: str, array: np.ndarray) -> dict[str, Any]:
    if array.dtype not in SPELLINGS:
        raise InputError(
            f"{name!r} is of dtype {array.dtype}, which a checkpoint cannot hold",
            help="make the artifacts of a model in float32",
        )
    return {"name": name, "dtype": SPELLINGS[array.dtype], "shape": list(array.shape)}


def source_name(uri: Uri) -> str:
    """What to call a file or bytes in an error."""
    if isinstance(uri, bytes | bytearray | memoryview):
        return f"({memoryview(uri).nbytes} bytes)"
    return os.fspath(uri)


# -- reading -------------------------------------------------------------------------------------


def read(uri: Uri) -> Content:
    """Reads a checkpoint.

    Args:
        uri: a path, or the file's content.

    Raises:
        InputError: it is missing, cut off, no checkpoint, of a newer version, or its tensors are
            not those that it lists.
    """
    name = source_name(uri)
    try:
        file = safetensors_file.read(uri, f"checkpoint {name}")
    except InputError:
        raise
    except (OSError, RecursionError, SafetensorError, ValueError) as error:
        raise InputError(
            f"cannot read the checkpoint {name}",
            because=str(error),
            help=f"it is missing, cut off, or no safetensors file: {_MAKE_ANEW}",
        ) from error
    content = _parsed(file.metadata, name, file.is_sealed)
    faults = _faults(content, file.metadata.get("nominal") == "true", file.tensors)
    if faults:
        raise InputError(
            f"the checkpoint {name} is not whole",
            because=listing(faults, MOST_NAMED),
            help=_MAKE_ANEW,
        )
    if not file.is_sealed:
        seal.warn_unsealed(f"checkpoint {name}", "save it again to give it one", 3)
    content.tensors = file.tensors
    return content


def _parsed(metadata: Mapping[str, str], name: str, is_sealed: bool) -> Content:
    """What the metadata says.

    Raises:
        InputError: it is not that of a checkpoint, or of a newer version.
    """
    if metadata.get("format") != FORMAT:
        raise InputError(
            f"{name} is no checkpoint of on-device training",
            because=f"its metadata does not say that its format is {FORMAT!r}",
            help="give the file `checkpoint` of generate_artifacts; other safetensors files hold "
            "weights alone",
        )
    try:
        version = _integer(metadata["version"])
        if version > VERSION:
            raise InputError(
                f"the checkpoint {name} has version {version}",
                because=f"this ortrain knows versions up to {VERSION}",
                help="update ortrain",
            )
        if version < 1:
            raise ValueError(f"its version is {version}")
        if version > 1 and not is_sealed:
            raise ValueError("its checksum is missing")
        texts = {key: metadata[key] for key in ("parameters", "buffers", "states", "model")}
        if "adapters" in metadata:
            texts["adapters"] = metadata["adapters"]
        parameters, buffers, states = (
            [_spec(row, name) for row in json.loads(texts[key])]
            for key in ("parameters", "buffers", "states")
        )
        if texts["model"] != model_hash(texts["parameters"], texts["buffers"]):
            raise ValueError("'model' is not the hash of 'parameters' and 'buffers'")
        rate = float(metadata["learning_rate"]) if "learning_rate" in metadata else None
        if rate is not None and not math.isfinite(rate):
            raise ValueError(f"its learning rate is {rate}")
        return Content(
            parameters,
            buffers,
            states,
            texts,
            properties=_properties(metadata.get("properties", "{}")),
            step=_count(metadata, "step"),
            seed=_count(metadata, "seed"),
            learning_rate=rate,
        )
    except InputError:
        raise
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        because = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise InputError(
            f"the metadata of the checkpoint {name} is damaged", because=because, help=_MAKE_ANEW
        ) from error


def _integer(text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,20}", text):
        raise ValueError(f"{text[:40]!r} is no whole number")
    return int(text)


def _count(metadata: Mapping[str, str], key: str) -> int | None:
    """A number that training counts; None where the metadata does not say."""
    count = _integer(metadata[key]) if key in metadata else None
    if count is not None and count not in _COUNTS:
        raise ValueError(f"its {key} is {count}")
    return count


def _spec(row: Mapping[str, Any], checkpoint: str) -> Spec:
    if row["dtype"] not in DTYPES:
        raise InputError(
            f"{row['name']!r} in the checkpoint {checkpoint} is of dtype {row['dtype']}",
            because="numpy has no such dtype",
            help="make the artifacts of a model in float32",
        )
    shape = tuple(int(size) for size in row["shape"])
    return Spec(
        str(row["name"]), DTYPES[row["dtype"]], shape, bool(row.get("requires_grad", False))
    )


def _properties(text: str) -> dict[str, Property]:
    properties = json.loads(text)
    for key, value in properties.items():
        if type(value) not in (int, float, str):
            raise ValueError(f"the property {key!r} is {value!r}, neither a number nor a string")
    return properties


def _faults(content: Content, nominal: bool, listed: Mapping[str, np.ndarray]) -> list[str]:
    """What is wrong with the tensors of a file, by what its metadata says."""
    states = content.states if any(spec.name in listed for spec in content.states) else []
    expected = [*content.parameters, *content.buffers, *states]
    faults = []
    for spec in expected:
        if spec.name not in listed:
            if not nominal:
                faults.append(f"{spec.name} is missing")
            continue
        found = listed[spec.name]
        if found.dtype != spec.dtype or found.shape != spec.shape:
            told = f"{found.dtype} {list(found.shape)}"
            faults.append(f"{spec.name} is {told}, and should be {spec}")
    known = {spec.name for spec in expected}
    faults += [f"{name} is not in its list of tensors" for name in listed if name not in known]
    return faults


# -- writing -------------------------------------------------------------------------------------


def write(content: Content, path: str | os.PathLike[str]) -> None:
    """Replaces a checkpoint by another, as a whole or not at all.

    Args:
        content: tensors may be missing.
        path: of the file.

    Raises:
        SaveError: it could not be written.
    """
    metadata = {"format": FORMAT, "version": str(VERSION), **content.texts}
    metadata["properties"] = _object(content.properties)
    if content.step is not None:
        metadata["step"] = str(content.step)
    if content.seed is not None:
        metadata["seed"] = str(content.seed)
    if content.learning_rate is not None:
        metadata["learning_rate"] = repr(content.learning_rate)
    if content.parameters and not any(s.name in content.tensors for s in content.parameters):
        metadata["nominal"] = "true"
    safetensors_file.write(path, metadata, content.tensors, "checkpoint")


def model_hash(parameters: str, buffers: str) -> str:
    """What tells checkpoints of one model from those of another."""
    return hashlib.sha256(f"{parameters}\n{buffers}".encode()).hexdigest()


def _object(properties: Mapping[str, Property]) -> str:
    """A JSON object. It has no infinity, but numbers too large for a float are read as such."""
    rows = []
    for key, value in properties.items():
        text = json.dumps(value)
        if isinstance(value, float) and math.isinf(value):
            text = "1e999" if value > 0 else "-1e999"
        rows.append(f"{json.dumps(key)}: {text}")
    return f"{{{', '.join(rows)}}}"
