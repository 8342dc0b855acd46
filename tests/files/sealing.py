"""Seals as the contract has them, apart from the product's code."""

from __future__ import annotations

import zlib
from pathlib import Path

MARK = b"ortrain.crc32:"
UNSEALED = MARK.decode() + "00000000"


def sealed(content: bytes) -> bytes:
    """A file's content with the checksum in its last mark."""
    at = content.rindex(MARK) + len(MARK)
    content = content[:at] + b"00000000" + content[at + 8 :]
    return content[:at] + b"%08x" % zlib.crc32(content) + content[at + 8 :]


def seal(path: Path) -> None:
    """Seals a file that has a mark."""
    path.write_bytes(sealed(path.read_bytes()))
