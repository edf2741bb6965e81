"""Neighbouring blocks of a stored file, which are read and compared with their checksums at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bcp.format.checksums import digests
from bcp.format.receipt import FileReceipt

__all__ = ["WINDOW_BYTES", "Window", "windows_of", "wrong_block", "wrong_rows"]

WINDOW_BYTES = 8 << 20
"""Most bytes of a window, unless a single block is larger."""


@dataclass(frozen=True, slots=True)
class Window:
    """Neighbouring blocks of a file, as an item of a graph.

    Attributes:
        name: file and blocks, for messages.
        nbytes: stored bytes of these blocks.
        key: the file.
        file: its receipt.
        rows: the blocks, as rows of ``file.blocks``.
    """

    name: str
    nbytes: int
    key: str
    file: FileReceipt
    rows: slice

    @property
    def start(self) -> int:
        """First byte in the stored file."""
        return int(self.file.blocks.stored_start[self.rows.start])


def windows_of(
    key: str, file: FileReceipt, most: int = WINDOW_BYTES, *, begin: int = 0, end: int | None = None
) -> list[Window]:
    """Cut a file, or its blocks from ``begin`` to ``end``, into windows of about so many bytes."""
    lengths, windows, first = file.blocks.stored_length[begin:end], [], 0
    number = (np.cumsum(lengths) - lengths) // most
    for stop in [*(np.flatnonzero(np.diff(number)) + 1).tolist(), len(lengths)]:
        rows = slice(begin + first, begin + stop)
        nbytes = int(lengths[first:stop].sum())
        windows.append(Window(f"{key} blocks {rows.start} to {rows.stop}", nbytes, key, file, rows))
        first = stop
    return windows


def wrong_block(window: Window, memory: memoryview) -> str:
    """Name the first block whose checksum differs from that of the read bytes; empty for none."""
    blocks = window.file.blocks
    for row, digest in _differing(window, memory):
        start, length = int(blocks.stored_start[row]), int(blocks.stored_length[row])
        return (
            f"{window.key} is corrupt: bytes {start} to {start + length} have checksum {digest.hex()}, saved as "
            f"{blocks.checksum[row].hex()}; restore it"
        )
    return ""


def wrong_rows(window: Window, memory: memoryview) -> list[int]:
    """Return the blocks whose checksums differ from those of the read bytes, as rows of ``file.blocks``."""
    return [row for row, _ in _differing(window, memory)]


def _differing(window: Window, memory: memoryview) -> Iterator[tuple[int, bytes]]:
    """Yield row and checksum of the read bytes for each block that has another one."""
    blocks = window.file.blocks
    for row, digest in enumerate(digests([memory], blocks.stored_length[window.rows].tolist()), window.rows.start):
        if digest != blocks.checksum[row]:
            yield row, digest
