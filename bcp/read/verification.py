"""Compare all stored bytes of a checkpoint with its checksums, without a model and without torch."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from bcp.backends.objects.retry import in_turns
from bcp.errors import BcpError, CorruptError
from bcp.format.metadata import Metadata, operation_of, receipt_key
from bcp.format.receipt import FileReceipt
from bcp.interop.reading import at_once
from bcp.pipeline import Budget, Pipeline, Stage, unwrap_stage_errors
from bcp.plan.layout import check_segments, named_files
from bcp.protocols import Backend
from bcp.read.receipts import RANKS_AT_ONCE, fetch_receipts, file_of
from bcp.read.windows import Window, windows_of, wrong_block
from bcp.runtime.threads import in_thread, in_thread_gc_paused
from bcp.telemetry.amounts import bytes_words

__all__ = ["Verification", "verify"]

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
        unverified: files of another library. They have no checksums, and only the byte that was their last at the
            opening was read again.
    """

    files: int
    blocks: int
    nbytes: int
    seconds: float
    damage: tuple[str, ...]
    others: tuple[str, ...] = field(default=())
    unverified: int = 0

    def __bool__(self) -> bool:
        return not self.damage

    def __str__(self) -> str:
        done = f"{self.files:,} files, {self.blocks:,} blocks, {bytes_words(self.nbytes)} in {self.seconds:.1f} s"
        if self.others:
            done += f"; {len(self.others):,} files of other saves"
        if not self.blocks and not self.unverified:
            done = f"sizes and receipts of {self.files:,} files; no data was read"
        if self.unverified:
            done = f"{self.unverified:,} files without checksums; only their ends were read"
        more = [f"and {len(self.damage) - SHOWN:,} more"] if len(self.damage) > SHOWN else []
        outcome = ("unverified" if self.unverified else "sound") if self else "DAMAGED"
        return "\n".join([f"{outcome}: {done}", *self.damage[:SHOWN], *more])


async def verify(backend: Backend, metadata: Metadata, *, fast: bool, workers: int) -> Verification:
    """Look at all files of a checkpoint; see :meth:`bcp.Checkpoint.verify`."""
    began = time.monotonic()
    if metadata.foreign is not None:
        sizes = dict(zip(metadata.foreign.key, metadata.foreign.nbytes.tolist(), strict=True))
        cut = await _cut(backend, sizes)
        return Verification(len(sizes), 0, 0, time.monotonic() - began, tuple(cut), unverified=len(sizes))
    sizes = {info.key: info.nbytes for info in await backend.list()}
    operations = metadata.commit.operations
    others = tuple(key for key in sizes if operation_of(key) not in (None, *operations))
    damage = await in_thread_gc_paused(_check_layout, metadata)
    files = blocks = nbytes = 0
    rows, named = _rows_by_rank(metadata), named_files(metadata.layout)
    for first in range(0, metadata.layout.world_size, RANKS_AT_ONCE):
        ranks = range(first, min(first + RANKS_AT_ONCE, metadata.layout.world_size))
        looks = (partial(_files_of, backend, metadata, rank, rows.get(rank, {}), named, sizes) for rank in ranks)
        found = [(files_of_rank, said) for files_of_rank, said in await in_turns(looks)]
        damage += [sentence for _, said in found for sentence in said]
        files += sum(len(files_of_rank) for files_of_rank, _ in found)
        if not fast:
            windows = [window for own, _ in found for key, file in own for window in windows_of(key, file)]
            damage += await _compare(backend, windows, workers)
            blocks += sum(window.rows.stop - window.rows.start for window in windows)
            nbytes += sum(window.nbytes for window in windows)
    if damage and others and not any(operation_of(key) in operations for key in sizes):
        names = sorted({name for key in others if (name := operation_of(key))})
        damage.insert(
            0,
            f"metadata.arrow is of operation {metadata.commit.operation}, and all files are of "
            f"{', '.join(names[:SHOWN])}: it is older or newer than they are; put back the metadata.arrow of that save",
        )
    return Verification(files, blocks, nbytes, time.monotonic() - began, tuple(damage), others)


async def _cut(backend: Backend, sizes: Mapping[str, int]) -> list[str]:
    """Read the last byte of each file; return a sentence for each that is missing or too short."""

    async def look(key: str) -> str:
        try:
            await backend.read_into(key, max(sizes[key] - 1, 0), memoryview(bytearray(min(sizes[key], 1))))
        except (BcpError, OSError) as error:
            return f"{key} had {sizes[key]} bytes when it was opened, and cannot be read to its end: {error}"
        return ""

    return [words for words in await at_once(backend, sorted(sizes), look) if words]


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
    backend: Backend,
    metadata: Metadata,
    rank: int,
    wanted: Mapping[int, int],
    named: Collection[tuple[int, int]],
    sizes: Mapping[str, int],
) -> tuple[list[tuple[str, FileReceipt]], list[str]]:
    """Return the data files of a rank that can be read, and what is wrong with the others."""
    if (key := receipt_key(rank, metadata.commit.operation_of(rank))) not in sizes:
        return [], [f"{key} is missing; restore it"]
    try:
        with unwrap_stage_errors():
            receipt = (await fetch_receipts(backend, metadata, [rank]))[rank]
    except CorruptError as error:
        return [], [str(error)]
    found, damage = [], []
    for kind in sorted({*wanted, *(file.kind for file in receipt.files if (rank, file.kind) in named)}):
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


async def _compare(backend: Backend, windows: Sequence[Window], workers: int) -> list[str]:
    """Read windows, and compare them with their checksums; return a sentence for each file with damage."""
    damage: dict[str, tuple[int, str]] = {}  # by key: the first window with damage

    async def look(window: Window) -> None:
        memory = memoryview(bytearray(window.nbytes))
        start = window.start
        try:
            await backend.read_into(window.key, start, memory)
            wrong = await in_thread(partial(wrong_block, window, memory))
        except (BcpError, OSError) as error:
            wrong = f"{window.key} cannot be read: {error}"
        if wrong:
            damage[window.key] = min(damage.get(window.key, (start, wrong)), (start, wrong))

    largest = max((window.nbytes for window in windows), default=1)
    begin: Pipeline[Window, Window] = Pipeline()
    with unwrap_stage_errors():
        await begin.then(Stage("compare", look, workers=workers)).run(windows, budget=Budget(largest * workers))
    return [damage[key][1] for key in sorted(damage)]
