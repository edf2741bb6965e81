"""Connections whose waits the kernel ends."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bcp._sockets import Wire

SIZE = 3_000_001


@pytest.fixture
def pair() -> Iterator[tuple[Wire, Wire]]:
    ends = [Wire(each) for each in socket.socketpair()]
    for each in ends:
        each.block(60.0)
    yield ends[0], ends[1]
    for each in ends:
        each.close()


def test_a_range_of_a_file_arrives(pair: tuple[Wire, Wire], tmp_path: Path) -> None:
    data = bytes(range(256)) * (SIZE // 256 + 1)
    (tmp_path / "a").write_bytes(data)
    with (tmp_path / "a").open("rb") as file:
        sends = threading.Thread(target=pair[0].push_file, args=(file.fileno(), 77, SIZE - 77))
        sends.start()
        pair[1].pull(memoryview(out := bytearray(SIZE - 77)))
        sends.join()
    assert out == data[77:SIZE]


def test_a_file_that_is_shorter_is_told(pair: tuple[Wire, Wire], tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    with (tmp_path / "a").open("rb") as file, pytest.raises(ConnectionResetError, match="3 bytes before the range"):
        pair[0].push_file(file.fileno(), 4, 9)
    pair[1].pull(memoryview(out := bytearray(6)))
    assert out == b"456789"


def test_silence_ends(pair: tuple[Wire, Wire], tmp_path: Path) -> None:
    """To read, to write, and to send a file to a reader that does not read."""
    for each in pair:
        each.block(0.05)
    with pytest.raises(TimeoutError, match="timed out"):
        pair[0].pull(memoryview(bytearray(1)))
    with pytest.raises(TimeoutError, match="timed out"):
        pair[0].push(memoryview(bytearray(100 * SIZE)))
    (tmp_path / "a").write_bytes(bytes(100 * SIZE))
    with (tmp_path / "a").open("rb") as file, pytest.raises(TimeoutError, match="timed out"):
        pair[1].push_file(file.fileno(), 0, 100 * SIZE)
