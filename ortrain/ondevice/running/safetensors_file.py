"""safetensors with a seal: 8 bytes of length, a JSON header, the tensors.

The header is checked by the safetensors package. The tensors are read here, since their checksum is
computed as they come from the disk, which costs no second pass over them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import deserialize, safe_open

from ortrain.errors import InputError, SaveError
from ortrain.files import crc32, seal
from ortrain.files.regular import expect_regular
from ortrain.files.replacing import replacing

# As safetensors spells them. It knows more (BF16, F8_E4M3, …) that numpy has not.
DTYPES = {
    name: np.dtype(dtype)
    for name, dtype in (
        ("BOOL", np.bool_),
        ("U8", np.uint8),
        ("I8", np.int8),
        ("U16", np.uint16),
        ("I16", np.int16),
        ("F16", np.float16),
        ("U32", np.uint32),
        ("I32", np.int32),
        ("F32", np.float32),
        ("U64", np.uint64),
        ("I64", np.int64),
        ("F64", np.float64),
    )
}
SPELLINGS = {dtype: name for name, dtype in DTYPES.items()}

# The metadata's key of the seal.
CHECKSUM = "checksum"
# What stands before its digits. In a string of the user's the quotes would be escaped.
_MARK = re.compile(rb'"checksum"\s*:\s*"' + re.escape(seal.MARK))
_METADATA = "__metadata__"
_PREFIX = 8
# Bytes of a header that the safetensors package reads.
_LARGEST_HEADER = 100_000_000
# Parts from which on threads do them: starting these takes a fifth of a millisecond.
_MANY = 8


@dataclass(frozen=True)
class File:
    """What a file holds.

    Attributes:
        metadata: its strings.
        tensors: by name; writable, contiguous.
        is_sealed: whether it had a checksum, which then was right.
    """

    metadata: Mapping[str, str]
    tensors: dict[str, np.ndarray]
    is_sealed: bool


def read(uri: str | os.PathLike[str] | bytes | bytearray | memoryview, what: str) -> File:
    """Reads a file, and compares it with its checksum.

    Args:
        uri: a path, or the file's content.
        what: what to call the file in an error.

    Raises:
        InputError: its checksum is not that of its content, or numpy has not the dtype of a tensor.
        OSError, SafetensorError, ValueError: it is missing, cut off, or no such file.
    """
    if isinstance(uri, bytes | bytearray | memoryview):
        return _in_memory(bytes(uri), what)
    with expect_regular(uri).open("rb", buffering=0) as file:
        with safe_open(uri, framework="np"):
            pass  # the header is right, and the tensors fill the rest of the file
        head = file.read(_PREFIX)
        head += file.read(int.from_bytes(head, "little"))
        return _on_disk(file, head, what)


def _on_disk(file: BinaryIO, head: bytes, what: str) -> File:
    header = json.loads(head[_PREFIX:])
    metadata: dict[str, str] = header.pop(_METADATA, None) or {}
    ordered = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    tensors = {
        name: np.empty(row["shape"], _dtype(name, row["dtype"], what)) for name, row in ordered
    }
    at = _digits_at(head)
    checksum = None if at is None else seal.checksum_around(head, at)

    def fill(part: tuple[int, memoryview]) -> tuple[int, int]:
        place, memory = part
        _read_at(file, place, memory)
        return 0 if checksum is None else crc32.of(memory), len(memory)

    filled = _each(fill, len(head), tensors.values())
    if at is not None and checksum is not None:
        seal.compare(head[at : at + seal.DIGITS], crc32.joined(filled, checksum), what)
    return File(metadata, tensors, checksum is not None)


def _in_memory(content: bytes, what: str) -> File:
    views = dict(deserialize(content))  # checks the header
    end = _PREFIX + int.from_bytes(content[:_PREFIX], "little")
    at = _digits_at(content[:end])
    if at is not None:
        checksum = seal.checksum_around(content, at)
        seal.compare(content[at : at + seal.DIGITS], checksum, what)
    metadata = json.loads(content[_PREFIX:end]).get(_METADATA) or {}
    tensors = {
        name: np.frombuffer(bytearray(view["data"]), _dtype(name, view["dtype"], what)).reshape(
            view["shape"]
        )
        for name, view in views.items()
    }
    return File(metadata, tensors, at is not None)


def _digits_at(head: bytes) -> int | None:
    """Where the digits of the seal start, in prefix and header; None where there is none."""
    found = _MARK.search(head)
    return None if found is None else found.end()


def _dtype(name: str, spelling: str, what: str) -> np.dtype[Any]:
    if spelling not in DTYPES:
        raise InputError(
            f"{name!r} in the {what} is of dtype {spelling}",
            because="numpy has no such dtype",
            help="make the artifacts of a model in float32",
        )
    return DTYPES[spelling]


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _each(
    do: Callable[[tuple[int, memoryview]], tuple[int, int]],
    start: int,
    arrays: Iterable[np.ndarray],
) -> list[tuple[int, int]]:
    """What a function gives for each part of arrays that stand in a file from ``start`` on."""
    parts = []
    for array in arrays:
        for block in crc32.blocks(_bytes(array)):
            parts.append((start, block))
            start += len(block)
    if len(parts) < _MANY:
        return list(map(do, parts))
    with crc32.threads() as pool:
        return list(pool.map(do, parts))


def _read_at(file: BinaryIO, at: int, memory: memoryview) -> None:
    """Fills memory from a place in a file, whatever other threads read.

    Raises:
        ValueError: the file ends before.
    """
    while memory:
        if hasattr(os, "preadv"):
            count = os.preadv(file.fileno(), [memory], at)
        else:
            with Path(file.name).open("rb", buffering=0) as own:
                own.seek(at)
                count = own.readinto(memory) or 0
        if not count:
            raise ValueError(f"it ends at byte {at}")
        at, memory = at + count, memory[count:]


def write(
    path: str | os.PathLike[str],
    metadata: Mapping[str, str],
    tensors: Mapping[str, np.ndarray],
    what: str,
) -> None:
    """Replaces a file, as a whole or not at all.

    Args:
        path: of the file.
        metadata: its strings; the checksum comes to them.
        tensors: by name; contiguous, of dtypes that safetensors can spell.
        what: what to call the file in an error.

    Raises:
        SaveError: it could not be written.
    """
    header: dict[str, Any] = {_METADATA: {CHECKSUM: seal.UNSEALED, **metadata}}
    # The widest elements first: each tensor then starts at a multiple of its element's size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    at = 0
    for name, array in ordered:
        header[name] = {
            "dtype": SPELLINGS[array.dtype],
            "shape": array.shape,
            "data_offsets": (at, at + array.nbytes),
        }
        at += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _LARGEST_HEADER:
        raise SaveError(
            f"cannot save the {what} {os.fspath(path)}",
            because=f"names, shapes and properties take {len(text)} bytes, and safetensors reads "
            f"{_LARGEST_HEADER} at most",
            help="what was there before is unchanged; keep large properties in a file of their own",
        )
    head = len(text).to_bytes(_PREFIX, "little") + text
    with replacing(path, what) as file:
        file.write(head)
        file.flush()

        def put(part: tuple[int, memoryview]) -> tuple[int, int]:
            _write_at(file, *part)
            return crc32.of(part[1]), len(part[1])

        written = _each(put, len(head), (array for _, array in ordered))
        digits_at = _digits_at(head)
        assert digits_at is not None
        file.seek(digits_at)
        file.write(seal.digits(crc32.joined(written, crc32.of(head))))


def _write_at(file: BinaryIO, at: int, memory: memoryview) -> None:
    """Writes to a place in a file, whatever other threads write."""
    while memory:
        if hasattr(os, "pwrite"):
            count = os.pwrite(file.fileno(), memory, at)
        else:
            with Path(file.name).open("r+b", buffering=0) as own:
                own.seek(at)
                count = own.write(memory) or 0
        at, memory = at + count, memory[count:]
