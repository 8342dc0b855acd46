"""The wire format of protocol buffers, as far as an ONNX file needs it to be taken apart.

A message is a row of fields. What is not looked into keeps its bytes: reading gives views into the
file, and writing gives a list of chunks, so that tensors are never copied.

Source: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

Chunks = list[bytes | memoryview]

_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5


class Field(NamedTuple):
    """One field of a message.

    Attributes:
        number: which field it is.
        value: of an integer; 0 for others.
        content: the bytes of a string, message or number; empty for an integer.
        whole: the field as it stands in the message, with number and length.
    """

    number: int
    value: int
    content: memoryview
    whole: memoryview

    def text(self) -> str:
        """The content of a string."""
        return str(self.content, "utf-8")


def fields(message: memoryview) -> Iterator[Field]:
    """The fields of a message, in order.

    Raises:
        ValueError: it is cut off, or not a message.
    """
    at = 0
    while at < len(message):
        start = at
        key, at = _read_varint(message, at)
        number, kind = key >> 3, key & 7
        value, size = 0, 0
        if kind == _VARINT:
            value, at = _read_varint(message, at)
        elif kind == _BYTES:
            size, at = _read_varint(message, at)
        elif kind in (_FIXED_32, _FIXED_64):
            size = 4 if kind == _FIXED_32 else 8
        else:
            raise ValueError(f"byte {start} starts a field of the unknown kind {kind}")
        if not number or at + size > len(message):
            raise ValueError(
                f"the field at byte {start} does not end within the {len(message)} bytes"
            )
        yield Field(number, value, message[at : at + size], message[start : at + size])
        at += size


def _read_varint(message: memoryview, at: int) -> tuple[int, int]:
    """An integer of seven bits a byte, the lowest first; and where the next field starts."""
    value = shift = 0
    while at < len(message) and shift < 64:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError(f"the number that ends at byte {at} is cut off")


def integer(number: int, value: int) -> bytes:
    """A field with an integer from 0 up."""
    return _varint(number << 3 | _VARINT) + _varint(value)


def nested(number: int, content: Sequence[bytes | memoryview]) -> Chunks:
    """A field with bytes, a string or a message."""
    return [_varint(number << 3 | _BYTES) + _varint(size(content)), *content]


def size(chunks: Sequence[bytes | memoryview]) -> int:
    """Bytes of all chunks."""
    return sum(len(chunk) for chunk in chunks)


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)
