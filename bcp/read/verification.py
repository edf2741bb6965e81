"""Compare all stored bytes of a checkpoint with its checksums, without a model and without torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from bcp.errors import BcpError, CorruptError
from bcp.format.checksums import digests
from bcp.format.metadata import Metadata, operation_of, receipt_key
from bcp.format.receipt import FileReceipt
from bcp.pipeline import Budget, Pipeline, Stage, unwrap_stage_errors
from bcp.plan.layout import check_segments
from bcp.protocols import Backend
from bcp.read.receipts import fetch_receipts, file_of
from bcp.runtime.threads import in_thread, in_thread_gc_paused
from bcp.telemetry.amounts import bytes_words

__all__ = ["Verification", "verify"]

WINDOW_BYTES = 8 << 20
"""Bytes that are read and compared at once."""

SHOWN = 20


@dataclass(frozen=True, slots=True)
class Verification:
    """The outcome of :meth:`bcp.Checkpoint.verify`. True if nothing is damaged.

    Attributes:
        files: data files that were looked at.
        blocks: blocks that were compared with their checksums; 0 if ``fast``.
        nbytes: bytes of these blocks.
        seconds: how long it took.
        damage: a sentence for each damaged file, receipt or table of contents, with its key.
        others: keys of data files and receipts that other saves have left here. They do no harm.
    """

    files: int
    blocks: int
    nbytes: int
    seconds: float
    damage: tuple[str, ...]
    others: tuple[str, ...] = field(default=())

    def __bool__(self) -> bool:
        return not self.damage

    def __str__(self) -> str:
        done = f"{self.files:,} files, {self.blocks:,} blocks, {bytes_words(self.nbytes)} in {self.seconds:.1f} s"
        if self.others:
            done += f"; {len(self.others):,} files of other saves"
        more = [f"and {len(self.damage) - SHOWN:,} more"] if len(self.damage) > SHOWN else []
        return "\n".join([f"{'sound' if self else 'DAMAGED'}: {done}", *self.damage[:SHOWN], *more])


@dataclass(frozen=True, slots=True)
class _Window:
    """Blocks of a file that are compared together, as an item of a graph."""

    name: str
    nbytes: int
    key: str
    file: FileReceipt
    rows: slice


async def verify(backend: Backend, metadata: Metadata, *, fast: bool, workers: int) -> Verification:
    """Look at all files of a checkpoint; see :meth:`bcp.Checkpoint.verify`."""
    began = time.monotonic()
    sizes = {info.key: info.nbytes for info in await backend.list()}
    operation = metadata.commit.operation
    others = tuple(key for key in sizes if operation_of(key) not in (None, operation))
    damage = await in_thread_gc_paused(_check_layout, metadata)
    files = blocks = nbytes = 0
    rows = _rows_by_rank(metadata)
    for rank in range(metadata.layout.world_size):
        found, said = await _files_of(backend, metadata, rank, rows.get(rank, {}), sizes)
        damage += said
        files += len(found)
        if not fast:
            windows = [window for key, file in found for window in _windows(key, file)]
            damage += await _compare(backend, windows, workers)
            blocks += sum(window.rows.stop - window.rows.start for window in windows)
            nbytes += sum(window.nbytes for window in windows)
    if damage and others and not any(operation_of(key) == operation for key in sizes):
        names = sorted({name for key in others if (name := operation_of(key))})
        damage.insert(
            0,
            f"metadata.arrow is of operation {operation}, and all files are of {', '.join(names[:SHOWN])}: it is older "
            "or newer than they are; put back the metadata.arrow of that save",
        )
    return Verification(files, blocks, nbytes, time.monotonic() - began, tuple(damage), others)


def _check_layout(metadata: Metadata) -> list[str]:
    """Look whether every byte range of every tensor lies inside of its file."""
    try:
        check_segments(metadata.layout)
    except ValueError as error:
        return [f"metadata.arrow: {error}; restore it"]
    return []


def _rows_by_rank(metadata: Metadata) -> Mapping[int, Mapping[int, int]]:
    """Return the data files of each rank: kinds with the number of bytes of their data."""
    layout = metadata.layout
    rows: dict[int, dict[int, int]] = {}
    columns = (layout.file_rank.tolist(), layout.file_kind.tolist(), layout.file_nbytes.tolist())
    for rank, kind, nbytes in zip(*columns, strict=True):
        rows.setdefault(rank, {})[kind] = nbytes
    return rows


async def _files_of(
    backend: Backend, metadata: Metadata, rank: int, wanted: Mapping[int, int], sizes: Mapping[str, int]
) -> tuple[list[tuple[str, FileReceipt]], list[str]]:
    """Return the data files of a rank that can be read, and what is wrong with the others."""
    if receipt_key(rank, metadata.commit.operation) not in sizes:
        return [], [f"{receipt_key(rank, metadata.commit.operation)} is missing; restore it"]
    try:
        with unwrap_stage_errors():
            receipt = (await fetch_receipts(backend, metadata, [rank]))[rank]
    except CorruptError as error:
        return [], [str(error)]
    found, damage = [], []
    for kind in sorted({*wanted, *(file.kind for file in receipt.files)}):
        try:
            key, file = file_of(metadata, receipt, kind, wanted.get(kind))
        except CorruptError as error:
            damage.append(str(error))
            continue
        if sizes.get(key) == file.stored_nbytes:
            found.append((key, file))
        elif key in sizes:
            damage.append(f"{key} has {sizes[key]} bytes, and was saved with {file.stored_nbytes}; restore it")
        else:
            damage.append(f"{key} is missing, and was saved with {file.stored_nbytes} bytes; restore it")
    return found, damage


def _windows(key: str, file: FileReceipt) -> list[_Window]:
    """Cut a file into neighbouring blocks that are compared together."""
    lengths, windows, first = file.blocks.stored_length, [], 0
    number = (np.cumsum(lengths) - lengths) // WINDOW_BYTES
    for stop in [*(np.flatnonzero(np.diff(number)) + 1).tolist(), len(lengths)]:
        rows = slice(first, stop)
        nbytes = int(lengths[rows].sum())
        windows.append(_Window(f"{key} blocks {first} to {stop}", nbytes, key, file, rows))
        first = stop
    return windows


async def _compare(backend: Backend, windows: Sequence[_Window], workers: int) -> list[str]:
    """Read windows, and compare them with their checksums; return a sentence for each file with damage."""
    damage: dict[str, tuple[int, str]] = {}  # by key: the first window with damage

    async def look(window: _Window) -> None:
        memory = memoryview(bytearray(window.nbytes))
        start = int(window.file.blocks.stored_start[window.rows.start])
        try:
            await backend.read_into(window.key, start, memory)
            wrong = await in_thread(partial(_wrong_block, window, memory))
        except (BcpError, OSError) as error:
            wrong = f"{window.key} cannot be read: {error}"
        if wrong:
            damage[window.key] = min(damage.get(window.key, (start, wrong)), (start, wrong))

    largest = max((window.nbytes for window in windows), default=1)
    begin: Pipeline[_Window, _Window] = Pipeline()
    with unwrap_stage_errors():
        await begin.then(Stage("compare", look, workers=workers)).run(windows, budget=Budget(largest * workers))
    return [damage[key][1] for key in sorted(damage)]


def _wrong_block(window: _Window, memory: memoryview) -> str:
    """Name the first block whose checksum differs; empty for none."""
    blocks = window.file.blocks
    for row, digest in enumerate(digests([memory], blocks.stored_length[window.rows].tolist()), window.rows.start):
        if digest != blocks.checksum[row]:
            start, length = int(blocks.stored_start[row]), int(blocks.stored_length[row])
            return (
                f"{window.key} is corrupt: bytes {start} to {start + length} have checksum {digest.hex()}, saved as "
                f"{blocks.checksum[row].hex()}; restore it"
            )
    return ""
