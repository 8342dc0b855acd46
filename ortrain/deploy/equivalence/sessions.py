"""A model as what answers the batches of a golden set: the sessions of its files in order."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnxruntime

from ortrain.deploy.model_folder import ModelFolder
from ortrain.errors import ExecutionError, InputError, listing

Array = np.ndarray
Batch = Mapping[str, Array]

_TYPES: Mapping[str, type[np.generic]] = {
    "tensor(bool)": np.bool_,
    "tensor(double)": np.float64,
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int16)": np.int16,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(int8)": np.int8,
    "tensor(string)": np.str_,
    "tensor(uint16)": np.uint16,
    "tensor(uint32)": np.uint32,
    "tensor(uint64)": np.uint64,
    "tensor(uint8)": np.uint8,
}
# What comes from an encoder is the input of a decoder under another name.
_FROM_ENCODER = {"encoder_hidden_states": "last_hidden_state"}
_PAST = ("past_key_values.", "past.", "past_")
WITH_CACHE = " with its cache"
"""Behind the names of outputs of the second run of a decoder."""


@dataclass(frozen=True)
class Port:
    """An input or output of a file as it declares it.

    Attributes:
        name: its own.
        dtype: of its elements; None for one that numpy has not.
        shape: sizes, names of open dimensions, None for what is not declared.
    """

    name: str
    dtype: type[np.generic] | None
    shape: tuple[int | str | None, ...]


@dataclass
class File:
    """One ONNX file with its session.

    Attributes:
        role: what it is in its folder: the name without suffix, ``model`` or ``decoder_model``.
        path: of the file.
        session: of onnxruntime.
        inputs: it takes.
        outputs: it gives.
        filled: names of inputs that the golden set did not have and that follow from others.
    """

    role: str
    path: Path
    session: onnxruntime.InferenceSession
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    filled: set[str] = field(default_factory=set)

    @classmethod
    def open(cls, path: Path, role: str, provider: str, threads: int | None) -> File:
        """Loads a file.

        Raises:
            ExecutionError: onnxruntime cannot load it.
        """
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if threads is not None:
            options.intra_op_num_threads = threads
        try:
            session = onnxruntime.InferenceSession(path, options, providers=[provider])
        except Exception as error:  # onnxruntime has no common base of its errors
            raise ExecutionError(
                f"onnxruntime {onnxruntime.__version__} cannot load {path}", because=str(error)
            ) from error
        if session.get_providers()[0] != provider:
            raise ExecutionError(
                f"onnxruntime does not run {path} with {provider}",
                because=f"it took {session.get_providers()[0]} instead",
                help="install an onnxruntime with this provider and the libraries that it needs",
            )
        inputs, outputs = (
            tuple(Port(each.name, _TYPES.get(each.type), tuple(each.shape)) for each in ports)
            for ports in (session.get_inputs(), session.get_outputs())
        )
        return cls(role, path, session, inputs, outputs)

    def run(self, feeds: Batch, where: str) -> dict[str, Array]:
        """The outputs by name.

        Args:
            feeds: all inputs.
            where: which batch it is, for the error.

        Raises:
            ExecutionError: onnxruntime cannot run it.
            InputError: an output is no tensor.
        """
        names = [port.name for port in self.outputs]
        try:
            found = self.session.run(names, dict(feeds))
        except Exception as error:
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feeds.items())
            raise ExecutionError(
                f"onnxruntime cannot run {self.path}",
                where=f"{where}: {shapes}",
                because=str(error),
                help="if it is the golden set, give it the sizes that the model takes",
            ) from error
        for name, value in zip(names, found, strict=True):
            if not isinstance(value, np.ndarray):
                raise InputError(
                    f"the output {name} of {self.path} is no tensor but a {type(value).__name__}",
                    help="export the model without it: only tensors can be compared",
                )
        return dict(zip(names, found, strict=True))


@dataclass(frozen=True)
class Answer:
    """What one run of a file has given.

    Attributes:
        file: that ran.
        feeds: its inputs.
        outputs: its outputs.
        step: empty, or which run of the file it was, where it ran twice.
    """

    file: File
    feeds: Batch
    outputs: dict[str, Array]
    step: str = ""


@dataclass
class Runnable:
    """A model, ready to answer.

    Attributes:
        files: in the order in which they run: an encoder before what reads from it.
    """

    files: tuple[File, ...]

    def answer(self, batch: Batch, where: str) -> Iterator[Answer]:
        """What each file answers to a batch; a decoder that has a cache also with it filled.

        Args:
            batch: of a golden set.
            where: which one it is, for errors.

        Raises:
            InputError: an input is missing or of another type.
            ExecutionError: onnxruntime cannot run a file.
        """
        so_far: dict[str, Array] = {}
        for file in self.files:
            feeds = _feeds(file, batch, so_far, where)
            outputs = file.run(feeds, where)
            so_far.update(outputs)
            yield Answer(file, feeds, outputs)
            further = _continued(file, feeds, outputs)
            if further is not None:
                yield Answer(file, further, file.run(further, where), WITH_CACHE)


def opened(
    before: ModelFolder, after: ModelFolder, provider: str, threads: int | None
) -> tuple[Runnable, Runnable]:
    """Both models, file by file.

    Raises:
        InputError: their files do not belong together.
        ExecutionError: onnxruntime cannot load one.
    """
    pairs = sorted(_pairs(before, after).items(), key=lambda pair: _rank(pair[0]))
    found = []
    for folder, side in ((before, 0), (after, 1)):
        files = []
        for old, new in pairs:
            name = (old, new)[side]
            role = old.removesuffix(".onnx")
            files.append(File.open(folder.path / name, role, provider, threads))
        found.append(Runnable(tuple(files)))
    return found[0], found[1]


def _pairs(before: ModelFolder, after: ModelFolder) -> dict[str, str]:
    """Names of the files before → those after."""
    if len(before.files) == len(after.files) == 1:
        return {before.files[0]: after.files[0]}
    stems = sorted((name.removesuffix(".onnx") for name in before.files), key=len, reverse=True)
    found: dict[str, str] = {}
    for name in after.files:
        own = name.removesuffix(".onnx")
        stem = next((s for s in stems if own == s or own.startswith(f"{s}_")), None)
        if stem is None:
            raise InputError(
                f"{after.path / name} belongs to no file of {before.path}",
                because=f"that has {listing(before.files)}",
                help="name it for the file that it was made of, with a suffix behind _, or give "
                "the two files",
            )
        if (other := found.setdefault(f"{stem}.onnx", name)) != name:
            raise InputError(
                f"{after.path} has two files for {stem}.onnx: {other} and {name}",
                help="give the one that is meant",
            )
    if missing := [name for name in before.files if name not in found]:
        raise InputError(
            f"{after.path} has no file for {listing(missing)} of {before.path}",
            help="give the files that are meant",
        )
    return found


def _rank(name: str) -> tuple[int, str]:
    """Encoders come first, then what starts without a cache, then what continues with one."""
    return (0 if "encoder" in name else 2 if "with_past" in name else 1, name)


def _feeds(file: File, batch: Batch, so_far: Batch, where: str) -> Batch:
    found: dict[str, Array] = {}
    if "with_past" in file.role and "decoder_input_ids" not in batch:
        batch = _one_more(batch)
    for port in file.inputs:
        array = _given(file, port, batch, so_far)
        if array is None:
            array = _filled(file, port, {**batch, **found}, so_far)
            if array is not None:
                file.filled.add(port.name)
        if array is None:
            raise InputError(
                f"the golden set has no input {port.name!r}, which {os.fspath(file.path)} takes",
                where=where,
                because=f"it has {listing(sorted(batch), 8)}",
                help="name the arrays as the inputs of the model: "
                + listing([each.name for each in file.inputs], 8),
            )
        found[port.name] = _cast(file, port, array, where)
    return found


def _given(file: File, port: Port, batch: Batch, so_far: Batch) -> Array | None:
    """What the golden set, or a file before, has for an input."""
    decodes = "decoder" in file.role
    if decodes and port.name == "input_ids" and "decoder_input_ids" in batch:
        tokens = batch["decoder_input_ids"]
        return tokens[:, -1:] if "with_past" in file.role else tokens
    if decodes and port.name == "input_ids" and "last_hidden_state" in so_far:
        file.filled.add("decoder_input_ids")  # the encoder's own, which both models read
    if decodes and port.name == "encoder_attention_mask" and port.name not in batch:
        return batch.get("attention_mask")
    if port.name in _FROM_ENCODER and port.name not in batch:
        return so_far.get(_FROM_ENCODER[port.name])
    return batch.get(port.name)


def _filled(file: File, port: Port, known: Batch, so_far: Batch) -> Array | None:
    """An input that follows from others, as those of a cache that is empty."""
    ids = known.get("input_ids")
    if port.name == "use_cache_branch":
        return np.zeros(1, np.bool_)
    if ids is None:
        return None
    if port.name == "token_type_ids":
        return np.zeros(ids.shape, np.int64)
    if port.name == "position_ids":
        mask = known.get("attention_mask")
        if mask is None or mask.shape[1] < ids.shape[1]:
            return np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        # Of a mask that also covers a cache, those at its end.
        return np.maximum(np.cumsum(mask, axis=1) - 1, 0)[:, -ids.shape[1] :]
    if port.name.startswith(_PAST):
        if "with_past" in file.role:
            return _present(port.name, so_far)
        if port.dtype is None:
            return None
        # [batch, heads, past, size]: the first open size is the batch, any other one is empty.
        sizes = [len(ids), *(each if isinstance(each, int) else 0 for each in port.shape[1:])]
        return np.zeros(sizes, port.dtype)
    return None


def _present(past: str, outputs: Batch) -> Array | None:
    """The output that becomes an input of a cache in the next step."""
    for prefix in _PAST:
        present = outputs.get("present" + past.removeprefix(prefix.rstrip("._")))
        if past.startswith(prefix) and present is not None:
            return present
    return None


def _continued(file: File, feeds: Batch, outputs: Batch) -> Batch | None:
    """The inputs of one more token behind those that were read with an empty cache.

    None where the file has no cache, or not one that its outputs fill.
    """
    past = [name for name in file.filled if name.startswith(_PAST)]
    if not past or "input_ids" not in feeds:
        return None
    found = dict(_one_more(feeds))
    for name in past:
        present = _present(name, outputs)
        if present is None:
            return None
        found[name] = present
    if "use_cache_branch" in feeds:
        found["use_cache_branch"] = np.ones(1, np.bool_)
    return found


def _one_more(batch: Batch) -> Batch:
    """A batch as it goes on behind what a cache has: with its last token once more.

    Which token it is does not matter, as both models read it.
    """
    ids = batch.get("input_ids")
    if ids is None:
        return batch
    found = {**batch, "input_ids": ids[:, -1:]}
    mask = batch.get("attention_mask")
    if mask is not None and mask.shape == ids.shape:
        found["attention_mask"] = np.concatenate([mask, np.ones_like(mask[:, :1])], axis=1)
        places = np.cumsum(mask, axis=1)[:, -1:]
    else:
        places = np.full((len(ids), 1), ids.shape[1])
    if "position_ids" in batch:
        found["position_ids"] = places.astype(np.int64)
    if "token_type_ids" in batch:
        found["token_type_ids"] = batch["token_type_ids"][:, -1:]
    return found


def _cast(file: File, port: Port, array: Array, where: str) -> Array:
    """An array as an input takes it, where no value changes its meaning."""
    if port.dtype is None:
        raise InputError(
            f"the input {port.name!r} of {os.fspath(file.path)} has a type that numpy has not",
            help="compare models whose inputs are numbers",
        )
    wanted = np.dtype(port.dtype)
    if array.dtype == wanted:
        return array
    if wanted.kind == "U" and array.dtype.kind in "UO":
        return array
    kinds = {"i": "iub", "u": "iub", "b": "b", "f": "f"}
    if array.dtype.kind in kinds.get(wanted.kind, ""):
        cast = array.astype(wanted)
        if wanted.kind in "fb" or np.array_equal(cast, array):
            return cast
    if wanted.kind == "b" and array.dtype.kind in "iu" and not ((array != 0) & (array != 1)).any():
        return array.astype(np.bool_)
    raise InputError(
        f"the input {port.name!r} of {os.fspath(file.path)} takes {wanted}, and the golden set has "
        f"{array.dtype}",
        where=where,
        help=f"convert the array to {wanted}",
    )
