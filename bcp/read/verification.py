"""Compare all stored bytes of a checkpoint with its checksums, without a model and without torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from bcp._messages.tools import Damage, Examined
from bcp.backends.objects.retry import in_turns
from bcp.errors import BcpError, CorruptError
from bcp.format.metadata import METADATA_KEY, Metadata, operation_of
from bcp.format.receipt import FileReceipt
from bcp.interop.reading import at_once
from bcp.pipeline import Budget, Pipeline, Stage, unwrap_stage_errors
from bcp.plan.layout import check_segments, named_files
from bcp.protocols import Backend
from bcp.read.receipts import RANKS_AT_ONCE, fetch_receipts, file_of
from bcp.read.references import ReferringBackend
from bcp.read.shares import Share
from bcp.read.windows import Window, windows_of, wrong_block, wrong_rows
from bcp.runtime.threads import in_thread, in_thread_gc_paused
from bcp.telemetry.amounts import bytes_words

__all__ = ["Verification", "compare", "examine", "joined", "verification_of", "verify"]

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
    found = await examine(backend, metadata, Share(), fast=fast, workers=workers, told=lambda _: None)
    return verification_of(found, began)


def verification_of(found: Examined, began: float) -> Verification:
    """Return the findings as the caller gets them; ``began`` is the time of the monotonic clock at the beginning."""
    damage = tuple(each.words for each in found.damage)
    seconds = time.monotonic() - began
    return Verification(found.files, found.blocks, found.nbytes, seconds, damage, found.others, found.unverified)


async def examine(
    backend: Backend, metadata: Metadata, share: Share, *, fast: bool, workers: int, told: Callable[[int], object]
) -> Examined:
    """Look at a share of the files of a checkpoint.

    Readers take whole ranks of the saving job, and parts of the files of the last ranks. ``told`` is called with the
    bytes of each part that was compared.
    """
    if metadata.foreign is not None:
        sizes = dict(zip(metadata.foreign.key, metadata.foreign.nbytes.tolist(), strict=True))
        keys = share.of(sorted(sizes))  # a file may have several rows
        cut = await _cut(backend, {key: sizes[key] for key in keys})
        return Examined(files=len(keys), damage=tuple(cut), unverified=len(keys))
    sizes = {info.key: info.nbytes for info in await backend.list()}
    found = [await _at_first(metadata, sizes)] if share.reader == 0 else []
    rows, named = _rows_by_rank(metadata), named_files(metadata.layout)
    parts = list(share.parts(range(metadata.layout.world_size)))
    for first in range(0, len(parts), RANKS_AT_ONCE):
        ranks = parts[first : first + RANKS_AT_ONCE]
        looks = (partial(_files_of, backend, metadata, rank, rows.get(rank, {}), named, sizes) for rank, _ in ranks)
        windows: list[Window] = []
        for (_, part), (files, damage) in zip(ranks, await in_turns(looks), strict=True):
            found.append(Examined(files=len(files) if part.reader == 0 else 0, damage=tuple(damage)))
            windows += part.of([window for key, file in files for window in windows_of(key, file)])
        if not fast:
            found.append(await compare(backend, windows, workers, told))
    return joined(found)


def joined(found: Sequence[Examined]) -> Examined:
    """Join the findings of several shares: of a damaged file, the first damage counts."""
    damage: dict[str, Damage] = {}
    for each in sorted(chain.from_iterable(part.damage for part in found)):
        damage.setdefault(each.key, each)
    return Examined(
        files=sum(part.files for part in found),
        blocks=sum(part.blocks for part in found),
        nbytes=sum(part.nbytes for part in found),
        damage=tuple(damage.values()),
        others=tuple(chain.from_iterable(part.others for part in found)),
        unverified=sum(part.unverified for part in found),
    )


async def _at_first(metadata: Metadata, sizes: Mapping[str, int]) -> Examined:
    """Look at the table of contents, and at the names of all files."""
    operations = metadata.commit.operations
    others = tuple(key for key in sizes if operation_of(key) not in (None, *operations))
    damage = await in_thread_gc_paused(_check_layout, metadata)
    if others and not any(operation_of(key) in operations for key in sizes):
        names = sorted({name for key in others if (name := operation_of(key))})
        words = (
            f"metadata.arrow is of operation {metadata.commit.operation}, and all files are of "
            f"{', '.join(names[:SHOWN])}: it is older or newer than they are; put back the metadata.arrow of that save"
        )
        damage.append(Damage("", 0, words))
    return Examined(damage=tuple(damage), others=others)


async def _cut(backend: Backend, sizes: Mapping[str, int]) -> list[Damage]:
    """Read the last byte of each file; return those that are missing or too short."""

    async def look(key: str) -> Damage | None:
        try:
            await backend.read_into(key, max(sizes[key] - 1, 0), memoryview(bytearray(min(sizes[key], 1))))
        except (BcpError, OSError) as error:
            words = f"{key} had {sizes[key]} bytes when it was opened, and cannot be read to its end: {error}"
            return Damage(key, 0, words)
        return None

    return [damage for damage in await at_once(backend, sorted(sizes), look) if damage]


def _check_layout(metadata: Metadata) -> list[Damage]:
    """Look whether every byte range of every tensor lies inside of its file."""
    try:
        check_segments(metadata.layout)
    except ValueError as error:
        return [Damage(METADATA_KEY, 0, f"{METADATA_KEY}: {error}; restore it")]
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
) -> tuple[list[tuple[str, FileReceipt]], list[Damage]]:
    """Return the data files of a rank that can be read, and the damage of the others."""
    if (own := metadata.commit.receipt_key(rank)) not in sizes:
        return [], [Damage(own, 0, f"{own} is missing; restore it")]
    try:
        with unwrap_stage_errors():
            receipt = (await fetch_receipts(backend, metadata, [rank]))[rank]
    except CorruptError as error:
        return [], [Damage(own, 0, str(error))]
    found, damage = [], []
    for kind in sorted({*wanted, *(file.kind for file in receipt.files if (rank, file.kind) in named)}):
        key = metadata.commit.data_key(kind, rank)
        try:
            _, file = file_of(metadata, receipt, kind, wanted.get(kind))
        except CorruptError as error:
            damage.append(Damage(key, 0, str(error)))
            continue
        stored = receipt.key_of(file)
        if sizes.get(stored) == file.own_nbytes:
            words = await backend.lost(key) if file.kept and isinstance(backend, ReferringBackend) else ""
        elif stored in sizes:
            words = f"{stored} has {sizes[stored]} bytes, and was saved with {file.own_nbytes}; restore it"
        else:
            words = f"{stored} is missing, and was saved with {file.own_nbytes} bytes; restore it"
        if words:
            damage.append(Damage(key, 0, words))
        else:
            found.append((key, file))
    return found, damage


async def compare(backend: Backend, windows: Sequence[Window], workers: int, told: Callable[[int], object]) -> Examined:
    """Read windows, and compare them with their checksums."""
    damage: list[Damage] = []

    async def look(window: Window) -> None:
        memory = memoryview(bytearray(window.nbytes))
        try:
            await backend.read_into(window.key, window.start, memory)
            wrong = await in_thread(partial(wrong_block, window, memory))
            if wrong and isinstance(backend, ReferringBackend):
                wrong += await _elsewhere(backend, window, memory)
        except (BcpError, OSError) as error:
            wrong = f"{window.key} cannot be read: {error}"
        if wrong:
            damage.append(Damage(window.key, window.start, wrong))
        told(window.nbytes)

    largest = max((window.nbytes for window in windows), default=1)
    begin: Pipeline[Window, Window] = Pipeline()
    with unwrap_stage_errors():
        await begin.then(Stage("compare", look, workers=workers)).run(windows, budget=Budget(largest * workers))
    blocks = sum(window.rows.stop - window.rows.start for window in windows)
    return Examined(blocks=blocks, nbytes=sum(window.nbytes for window in windows), damage=tuple(damage))


async def _elsewhere(backend: ReferringBackend, window: Window, memory: memoryview) -> str:
    """Name the file of another step that has the first damaged block of a window; "" for the file's own blocks."""
    row = (await in_thread(wrong_rows, window, memory))[0]
    place = await backend.where(window.key, int(window.file.blocks.stored_start[row]))
    return f". These bytes lie in {place}, and all steps that refer to it are damaged" if place else ""
