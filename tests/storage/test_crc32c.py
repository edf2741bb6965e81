from __future__ import annotations

from random import Random

import google_crc32c
import pytest

from bcp.backends.objects.parts import checksum, combined, encoded


def test_the_crc_of_a_concatenation_follows_from_those_of_its_pieces() -> None:
    rng = Random(1)  # noqa: S311 -- no secret
    for _ in range(100):
        pieces = [rng.randbytes(rng.choice([0, 1, 2, 3, 100, 4096, 70_001])) for _ in range(rng.randrange(7))]
        known = [(google_crc32c.value(piece), len(piece)) for piece in pieces]
        assert combined(known) == google_crc32c.value(b"".join(pieces))


def test_pieces_of_many_gigabytes() -> None:
    zeros, crc = bytes(1 << 20), 0
    for _ in range(64):
        crc = google_crc32c.extend(crc, zeros)
    quarter = (google_crc32c.value(bytes(16 << 20)), 16 << 20)
    assert combined([quarter] * 4) == crc
    half = (combined([(crc, 64 << 20)] * 1024), 64 << 30)
    assert combined([half, half]) == combined([(crc, 64 << 20)] * 2048)


@pytest.mark.anyio
@pytest.mark.parametrize("nbytes", [0, 1, 1000, 1 << 20])
async def test_any_buffer_has_one(nbytes: int) -> None:
    data = Random(nbytes).randbytes(nbytes)  # noqa: S311 -- no secret
    for buffer in (data, bytearray(data), memoryview(bytearray(data)).toreadonly()):
        assert await checksum(memoryview(buffer)) == google_crc32c.value(data)


def test_they_are_written_as_google_writes_them() -> None:
    assert encoded(google_crc32c.value(b"abcdef")) == "U7zv8Q=="  # fake-gcs-server's answer
