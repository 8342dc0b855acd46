"""Checksums of parts are put together to that of the whole."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from ortrain.files.crc32 import BLOCK, crc32, joined


@pytest.mark.parametrize("length", [0, 1, 7, 8 * BLOCK - 1, 8 * BLOCK, 9 * BLOCK + 3])
def test_large_and_small_buffers_have_the_checksum_of_zlib(length: int) -> None:
    data = np.random.default_rng(length).bytes(length)
    assert crc32(data) == zlib.crc32(data)
    assert crc32(data, 0x12345678) == zlib.crc32(data, 0x12345678)


def test_parts_of_any_length_are_joined() -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        parts = [generator.bytes(int(n)) for n in generator.integers(0, 3000, 4)]
        start = zlib.crc32(b"before")
        found = joined(((zlib.crc32(part), len(part)) for part in parts), start)
        assert found == zlib.crc32(b"before" + b"".join(parts))


def test_the_vector_of_the_catalogues() -> None:
    assert crc32(b"123456789") == 0xCBF43926
