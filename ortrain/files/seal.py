"""Seals: a file holds the checksum of itself, so that damage to it is found where it is read.

A sealed file has the text ``ortrain.crc32:`` and eight hexadecimal digits in its metadata: the
CRC-32 of the whole file with these digits as zeros. Any format that has room for a string can have
one, and every program that does not know it reads the file as before. In an ONNX model it stands
first, so that a file whose end is missing still has it.

No other writer of protobuf puts it there: all write the fields of a message in the order of their
numbers, and the metadata's is beyond the graph's. So a model whose seal stands elsewhere, and does
not fit, was read and written again by another program: its checksum is that of another file. Damage
moves nothing.
"""

from __future__ import annotations

import mmap
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ortrain.errors import InputError, OrtrainWarning
from ortrain.files.crc32 import crc32
from ortrain.files.names import leads_out
from ortrain.files.regular import expect_regular
from ortrain.files.replacing import replace_file

MARK = b"ortrain.crc32:"
ORT_MARK = b"ortrain.ort32:"
"""That of a model in ORT format: of one that was converted, the other mark is the ONNX file's."""
DIGITS = 8
KEY = "ortrain.checksum"
"""The key of the seal in the metadata of an ONNX model."""
NONE = "none"
"""What stands there in a model that another program is going to write."""
DATA_KEY = "ortrain.checksum.data"
"""That of the checksum of the file beside it that has its weights, where there is one."""
DATA_MARK = b"ortrain.data.crc32:"
UNSEALED = MARK.decode() + "0" * DIGITS
"""The text as it is written before the checksum is known."""


def find(content: bytes | mmap.mmap, mark: bytes | None = None) -> int:
    """Where the digits of a seal start; -1 where there is none."""
    if mark is not None:
        at = content.find(mark)
    elif content[:2] == b"PK":  # a zip archive, which has it at its end
        at = content.rfind(MARK)
    else:
        at = -1 if content[4:8] == b"ORTM" else content.find(MARK)
        # Also where it is the sign of the format that is damaged.
        at = content.find(ORT_MARK) if at < 0 else at
    return at if at < 0 else at + len(mark or MARK)


def digits(checksum: int) -> bytes:
    """A checksum as it stands in a file."""
    return f"{checksum:08x}".encode()


def checksum_around(content: bytes | mmap.mmap, at: int) -> int:
    """The checksum of a file whose digits at a position are zeros."""
    with memoryview(content) as view:
        before = crc32(b"0" * DIGITS, crc32(view[:at]))
        return crc32(view[at + DIGITS :], before)


def seal(file: BinaryIO) -> None:
    """Writes the checksum of a file, open for reading and writing, after its mark."""
    file.flush()
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        at = find(content)
        assert at >= 0, "there is no mark to write the checksum to"
        checksum = checksum_around(content, at)
    file.seek(at)
    file.write(digits(checksum))
    file.flush()


def unsealed_data(name: str) -> str:
    """The text for a file beside a model, as it is written before the checksum is known."""
    return f'{DATA_MARK.decode()}{"0" * DIGITS} "{name}"'


def model_entry() -> bytes:
    """The seal as an entry of an ONNX model's metadata, to stand before all of the model."""
    key, value = KEY.encode(), UNSEALED.encode()
    row = bytes((0x0A, len(key))) + key + bytes((0x12, len(value))) + value
    return bytes((0x72, len(row))) + row  # ModelProto.metadata_props


_ENTRY = model_entry()[:-DIGITS]


def seal_ort_model(path: Path) -> None:
    """Seals a model in ORT format that was made of an ONNX model with a seal."""
    with path.open("r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            at = content.find(MARK)
        file.seek(at)
        file.write(ORT_MARK)
        seal(file)


def seal_model(path: Path, data: Path | None = None) -> None:
    """Seals an ONNX model without a seal, and the file beside it that has its weights."""
    model = path.read_bytes()
    with path.open("w+b") as file:
        file.write(model_entry())
        file.write(model)
        file.flush()
        if data is not None and data.is_file():
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                at = find(content, DATA_MARK)
            file.seek(at)
            file.write(digits(_file_checksum(data)))
        seal(file)


def seal_again(path: Path) -> bool:
    """Seals a file that was changed on purpose; False where it has no place for a seal.

    Raises:
        InputError: it is no regular file.
        OSError: it cannot be read.
        SaveError: it cannot be written.
    """
    content = expect_regular(path).read_bytes()
    at = find(content)
    if _is_rewritten(content, at):  # the seal gets its own place, from which later damage is known
        content, at = content[: at - len(_ENTRY)] + content[at + DIGITS :], -1
    if at < 0 and path.suffix == ".onnx":
        content = model_entry() + content
        at = find(content)
    if at < 0:
        return False
    if (beside := _data_beside(path, content)) is not None:
        place, data = beside
        content = content[:place] + digits(_file_checksum(data)) + content[place + DIGITS :]
    whole = digits(checksum_around(content, at))
    replace_file(path, [content[:at], whole, content[at + DIGITS :]], "sealed file")
    return True


def is_model_whole(path: str | os.PathLike[str], what: str, *, strict: bool = False) -> bool:
    """Whether an ONNX model, and the file with its weights, are what its seal says.

    Args:
        path: of the model.
        what: what to call it in the error.
        strict: whether a model that another program has written again is an error, too.

    Returns:
        False where it has no seal, or one that is of the file before it was written again.

    Raises:
        InputError: it has a seal, and it does not fit.
        OSError: it cannot be read.
    """
    with _mapped(path) as content:
        if not is_whole(content, what, strict=strict):
            return False
        beside = _data_beside(Path(path), content)
        written = b"" if beside is None else content[beside[0] : beside[0] + DIGITS]
    if beside is not None:
        compare(written, _file_checksum(beside[1]), f"file {beside[1]}")
    return True


def _data_beside(path: Path, content: bytes | mmap.mmap) -> tuple[int, Path] | None:
    """Where a model has the checksum of the file with its weights, and that file if it is there."""
    at = find(content, DATA_MARK)
    name = re.match(rb' "([^"]+)"', content[at + DIGITS : at + DIGITS + 300])
    if at < 0 or name is None:
        return None
    if leads_out(os.fsdecode(name[1])):
        return None
    data = path.parent / os.fsdecode(name[1])
    return (at, data) if data.is_file() else None  # what is missing is told by who looks for it


def is_file_whole(path: str | os.PathLike[str], what: str) -> bool:
    """Whether a file is what its seal says; as :func:`is_whole`.

    Raises:
        InputError: it has a seal, and it does not fit.
        OSError: it cannot be read.
    """
    with _mapped(path) as content:
        return is_whole(content, what)


def append_to_zip(file: BinaryIO) -> None:
    """Seals a zip archive, open for reading and writing: its comment, at the end, is the mark."""
    text = UNSEALED.encode()
    file.seek(-2, os.SEEK_END)  # the comment's length
    assert file.read(2) == bytes(2), "the archive has a comment already"
    file.seek(-2, os.SEEK_END)
    file.write(len(text).to_bytes(2, "little") + text)
    seal(file)


def _file_checksum(path: Path) -> int:
    with _mapped(path) as content, memoryview(content) as view:
        return crc32(view)


@contextmanager
def _mapped(path: str | os.PathLike[str]) -> Iterator[mmap.mmap | bytes]:
    """A file's content."""
    with expect_regular(path).open("rb") as file:
        if not os.fstat(file.fileno()).st_size:  # nothing cannot be mapped
            yield b""
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            yield content


def is_whole(content: bytes | mmap.mmap, what: str, *, strict: bool = False) -> bool:
    """Whether a file's content is what its seal says; as :func:`is_model_whole`.

    Raises:
        InputError: it has a seal, and it does not fit.
    """
    at = find(content)
    if at < 0:
        return False
    written, checksum = content[at : at + DIGITS], checksum_around(content, at)
    if written != digits(checksum) and _is_rewritten(content, at):
        told = f"the {what} was written again by another program"
        because = "its checksum is of the file before, so damage to it would not be found"
        remedy = "`ortrain check --seal` gives it one of its own"
        if strict:
            raise InputError(told, because=because, help=remedy)
        warnings.warn(f"{told}: {because}; {remedy}", OrtrainWarning, stacklevel=3)
        return False
    compare(written, checksum, what)
    return True


def _is_rewritten(content: bytes | mmap.mmap, at: int) -> bool:
    """Whether the seal of an ONNX model is an entry of its metadata at another place than ours."""
    # Every writer begins with the first field, the version of the format.
    return content[:1] == b"\x08" and content[at - len(_ENTRY) : at] == _ENTRY


def compare(written: bytes, checksum: int, what: str) -> None:
    """Raises where a file has another checksum than its seal says.

    Raises:
        InputError: so it is.
    """
    if written != digits(checksum):
        raise InputError(
            f"the {what} is damaged",
            because=f"its checksum is {written.decode(errors='replace')}, and that of its content "
            f"{digits(checksum).decode()}",
            help="take a whole copy of it, or make it anew; where another program has changed it "
            "on purpose, have `ortrain check --seal` seal it again",
        )


def warn_unsealed(what: str, remedy: str, stacklevel: int) -> None:
    """Says that damage to a file would not be found, since it is of before there were seals."""
    warnings.warn(
        f"the {what} has no checksum, as older ones: damage to it would not be found; {remedy}",
        OrtrainWarning,
        stacklevel=stacklevel + 1,
    )
