"""The digests of marked files: made once on each host, and kept in a receipt beside the files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from bcp.backends.small import get_small
from bcp.errors import CheckpointError, CorruptError
from bcp.format.checksums import digests
from bcp.format.metadata import data_key, receipt_key
from bcp.format.receipt import Blocks, FileReceipt, Receipt, decode_receipt, encode_receipt
from bcp.pipeline import Budget, Pipeline, Stage, unwrap_stage_errors
from bcp.protocols import Backend
from bcp.read.windows import Window, windows_of
from bcp.runtime.threads import in_thread

__all__ = ["PART_BYTES", "blank_of", "digested", "is_of", "key_of", "read_window", "run_windows"]

T = TypeVar("T")

PART_BYTES = 8 << 20
"""Bytes that are read, compared and sent at once."""

AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Digested:
    """The digests of the blocks of a window."""

    window: Window
    checksums: tuple[bytes, ...]


async def digested(files: Backend, blank: Receipt) -> bytes:
    """Return the receipt of a rank, encoded; digest its files, unless that was done before.

    Args:
        files: the memory of a host that has them.
        blank: the receipt with zeros for digests.

    Raises:
        CorruptError: a file is missing, or has another size.

    """
    key = receipt_key(blank.rank, blank.operation)
    try:
        data = bytes(await get_small(files, key))
        if is_of(decode_receipt(data, key), blank):
            return data
    except (FileNotFoundError, CheckpointError):
        pass
    made = [await _digested_file(files, blank, file) for file in blank.files]
    data = encode_receipt(replace(blank, files=made))
    await files.put(key, data)
    return data


def key_of(receipt: Receipt, file: FileReceipt) -> str:
    """Return the key of a data file of a rank."""
    return data_key(file.kind, receipt.rank, receipt.operation, encoded=bool(file.codecs))


async def read_window(files: Backend, window: Window) -> memoryview:
    """Read a window of a marked file.

    Raises:
        CorruptError: the file is missing, or is shorter.

    """
    memory = memoryview(bytearray(window.nbytes))
    try:
        await files.read_into(window.key, window.start, memory)
    except FileNotFoundError as error:
        raise CorruptError(f"{window.key} has gone from {files!r}, though its mark is there") from error
    return memory


async def run_windows(graph: Pipeline[Window, T], windows: Sequence[Window]) -> list[T]:
    """Run windows through a graph, with memory for a few."""
    largest = max((window.nbytes for window in windows), default=1)
    with unwrap_stage_errors():
        return await graph.run(windows, budget=Budget(max(largest, PART_BYTES) * AT_ONCE))


def is_of(receipt: Receipt, blank: Receipt) -> bool:
    """Whether a receipt differs from a blank one in nothing but digests."""
    return (
        (receipt.rank, receipt.operation, receipt.objects) == (blank.rank, blank.operation, blank.objects)
        and len(receipt.files) == len(blank.files)
        and all(map(_is_alike, receipt.files, blank.files))
    )


def blank_of(receipt: Receipt) -> Receipt:
    """Return a receipt with zeros for digests."""
    files = [
        replace(file, blocks=replace(file.blocks, checksum=[bytes(16)] * len(file.blocks))) for file in receipt.files
    ]
    return replace(receipt, files=files)


def _is_alike(file: FileReceipt, other: FileReceipt) -> bool:
    """Whether two files differ in nothing but digests."""
    ours, theirs = file.blocks, other.blocks
    return (
        (file.kind, file.data_start, file.nbytes, file.stored_nbytes, file.codecs)
        == (other.kind, other.data_start, other.nbytes, other.stored_nbytes, other.codecs)
        and np.array_equal(ours.stored_length, theirs.stored_length)
        and np.array_equal(ours.raw_length, theirs.raw_length)
    )


async def _digested_file(files: Backend, blank: Receipt, file: FileReceipt) -> FileReceipt:
    windows = windows_of(key_of(blank, file), file, PART_BYTES)

    async def run(window: Window) -> Digested:
        memory = await read_window(files, window)
        return Digested(window, await in_thread(_digests, window, memory))

    start: Pipeline[Window, Window] = Pipeline()
    done = await run_windows(start.then(Stage("digest", run, workers=2)), windows)
    checksums = [checksum for each in done for checksum in each.checksums]
    return replace(file, blocks=Blocks.build(file.blocks.stored_length, file.blocks.raw_length, checksums))


def _digests(window: Window, memory: memoryview) -> tuple[bytes, ...]:
    return tuple(digests([memory], window.file.blocks.stored_length[window.rows].tolist()))
