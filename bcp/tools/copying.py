"""Copy a checkpoint byte for byte: every block compared with its checksum, the metadata last."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio

from bcp._deletion import Attempt, delete_dropped, delete_unnamed, read_committed, withdraw
from bcp._text import shown
from bcp.backends.place import Path, Place, place_of
from bcp.backends.small import get_small
from bcp.errors import BcpError, CorruptError, ExistsError, InputError, StorageError
from bcp.format.metadata import METADATA_KEY, Metadata, decode_metadata, operation_of, receipt_key
from bcp.format.receipt import decode_receipt, receipt_digest
from bcp.pipeline import Budget, Pipeline, Stage, unwrap_stage_errors
from bcp.plan.layout import named_files
from bcp.protocols import Backend, PartWriter, Version, at_once_of
from bcp.read.opening import read_metadata
from bcp.read.receipts import file_of
from bcp.read.windows import Window, windows_of, wrong_block
from bcp.runtime.threads import in_thread, in_thread_gc_paused
from bcp.tools.calls import Progress, called, ignore_progress

__all__ = ["CopyResult", "acopy", "copy"]

PART_BYTES = 32 << 20
"""Bytes that are read, compared and written at once; a store with 10,000 parts an object takes files of 320 GB."""


@dataclass(frozen=True, slots=True)
class CopyResult:
    """The outcome of :func:`bcp.tools.copy`.

    Attributes:
        path: of the copy, absolute.
        operation: id of the save that had made the checkpoint; the copy has the same.
        files: number of copied files, with the metadata.
        nbytes: bytes of the copied data files.
        seconds: how long it took.
    """

    path: str
    operation: str
    files: int
    nbytes: int
    seconds: float


def copy(
    source: Path,
    target: Path,
    *,
    role: str | None = None,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    progress: Progress = ignore_progress,
) -> CopyResult:
    """Copy a checkpoint byte for byte, between any two places.

    Every block is compared with its checksum on its way, so damage does not spread. The metadata are written last and
    in one step. A copy that fails or is killed leaves no committed checkpoint, and an older one at the target stays.
    Recordings are not copied.

    Args:
        source: the checkpoint, as for :class:`bcp.Checkpoint`.
        target: path or URL of the copy.
        role: the role of the checkpoint below both paths, if it was saved with one.
        overwrite: replace a committed checkpoint at the target, atomically.
        storage_options: for the file system of the source's URL.
        target_options: for the file system of the target's URL.
        progress: called with the bytes that are copied so far, and with all bytes.

    Returns:
        The number of copied files and bytes.

    Raises:
        InputError: source and target are one place.
        NotACheckpointError: there is no checkpoint at the source.
        ExistsError: a committed checkpoint is at the target, and ``overwrite`` is not set; or another save has
            committed there meanwhile.
        CorruptError: the source is damaged; the message names file and bytes. Nothing is committed.
        StorageError: storage failed. Nothing is committed.

    Example:
        >>> import torch
        >>> _ = bcp.save("ckpt/one", {"model": torch.nn.Linear(4, 2)}, overwrite=True)
        >>> result = bcp.tools.copy("ckpt/one", "ckpt/two", overwrite=True)
        >>> bool(bcp.Checkpoint("ckpt/two").verify())
        True

    """
    return called(
        lambda: acopy(
            source,
            target,
            role=role,
            overwrite=overwrite,
            storage_options=storage_options,
            target_options=target_options,
            progress=progress,
        ),
        f"copy {shown(str(source))} to {shown(str(target))}",
    )


async def acopy(
    source: Path,
    target: Path,
    *,
    role: str | None = None,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    progress: Progress = ignore_progress,
) -> CopyResult:
    """Do the same as :func:`copy` from a coroutine."""
    began = time.monotonic()
    origin, goal = place_of(source, role, storage_options), place_of(target, role, target_options)
    async with origin.opened, goal.opened:
        data = await read_metadata(origin.backend, origin.path)
        metadata = await in_thread_gc_paused(decode_metadata, data, f"{origin.path}/{METADATA_KEY}")
        if metadata.foreign is not None:
            raise InputError(
                f"{origin.path} was written by another library, and has no checksums: bcp.tools.import_files (bcp "
                "import) makes a copy of it with checksums"
            )
        version, replaced = await _check_target(origin, goal, metadata, overwrite=overwrite)
        stale = [key for info in await goal.backend.list() if operation_of(key := info.key) and key.count("/") == 1]
        copying = _Copying(origin.backend, goal.backend, metadata, progress)
        try:
            await copying.run()
            await _commit(goal, data, version, replaced, copying)
        except BaseException as error:
            if isinstance(error, CorruptError):
                await _say_if_replaced(error, origin, metadata)
            with anyio.CancelScope(shield=True):
                await delete_unnamed(goal.backend, copying.written, copying.attempt)
            raise
        commit = metadata.commit
        others = [key for key in stale if operation_of(key) not in commit.operations]
        await delete_unnamed(goal.backend, others, by=commit.operation)
        dropped = [key for key in stale if key not in (*others, *copying.written)]  # of the save before it was edited
        await delete_dropped(goal.backend, dropped, by=commit.operation)
    seconds = time.monotonic() - began
    return CopyResult(goal.path, metadata.commit.operation, len(copying.written) + 1, copying.done, seconds)


async def _say_if_replaced(error: CorruptError, origin: Place, metadata: Metadata) -> None:
    """Add a note if a save has replaced the source meanwhile, and deleted its files."""
    with suppress(BcpError):
        winner = (await read_committed(origin.backend)).operation
        if winner not in ("", metadata.commit.operation):
            error.add_note(f"Operation {winner} has replaced the checkpoint at {origin.path} meanwhile: copy again.")


async def _check_target(
    origin: Place, goal: Place, metadata: Metadata, *, overwrite: bool
) -> tuple[Version | None, str]:
    """Return version and operation of the target's metadata, which the copy replaces. Raise where it must not."""
    if origin.path == goal.path and repr(origin.backend) == repr(goal.backend):
        raise InputError(f"{origin.path} cannot be copied to itself; pass another target")
    version = await goal.backend.version(METADATA_KEY)
    if version is None:
        return None, ""
    if not overwrite:
        raise ExistsError(f"{goal.path} holds a committed checkpoint; pass overwrite=True (--overwrite) to replace it")
    there, operation = await read_committed(goal.backend), metadata.commit.operation
    if there.operation == operation:
        raise ExistsError(
            f"{goal.path} holds a copy of operation {operation} already, so there is nothing to do. `bcp verify` "
            "compares it with its checksums; remove it first if it is damaged"
        )
    return version, there.operation


@dataclass(slots=True)
class _Copying:
    """The copy of all files but the metadata.

    Attributes:
        origin: storage of the source.
        goal: storage of the target.
        metadata: of the source.
        progress: told after each part.
        written: keys of files in the target.
        done: bytes of data files so far.
        attempt: the request to commit, while its outcome is unknown: its files stay.
    """

    origin: Backend
    goal: Backend
    metadata: Metadata
    progress: Progress
    written: list[str] = field(default_factory=list)
    done: int = 0
    attempt: Attempt | None = None

    async def run(self) -> None:
        """Copy the files of one rank after the other: the data files, then their receipt."""
        commit, layout = self.metadata.commit, self.metadata.layout
        columns = (layout.file_rank.tolist(), layout.file_kind.tolist(), layout.file_nbytes.tolist())
        nbytes = {(rank, kind): size for rank, kind, size in zip(*columns, strict=True)}
        named = named_files(layout)
        for rank in range(layout.world_size):
            key = receipt_key(rank, commit.operation_of(rank))
            data = await self._receipt(key, rank)
            receipt = await in_thread_gc_paused(decode_receipt, data, key)
            for file in receipt.files:
                if (rank, file.kind) not in named:  # an edit has dropped it
                    continue
                name, checked = file_of(self.metadata, receipt, file.kind, nbytes.get((rank, file.kind)))
                await self._data_file(name, windows_of(name, checked, PART_BYTES), checked.stored_nbytes)
            self.written.append(key)
            await self.goal.put(key, data)

    async def _receipt(self, key: str, rank: int) -> bytes:
        try:
            data = bytes(await get_small(self.origin, key))
        except FileNotFoundError as error:
            raise CorruptError(f"{key} of the source is missing; restore it") from error
        if receipt_digest(data) != self.metadata.commit.receipt(rank):
            raise CorruptError(f"{key} of the source is not the receipt that was committed; restore it")
        return data

    async def _data_file(self, key: str, windows: list[Window], nbytes: int) -> None:
        """Copy a data file by parts, several at once."""
        workers = min(at_once_of(self.origin), at_once_of(self.goal))
        number = {window.name: index for index, window in enumerate(windows)}
        self.written.append(key)

        async def move(writer: PartWriter, window: Window) -> None:
            memory = memoryview(bytearray(window.nbytes))
            try:
                await self.origin.read_into(key, window.start, memory)
            except FileNotFoundError as error:
                raise CorruptError(f"{key} of the source is missing; restore it") from error
            if wrong := await in_thread(partial(wrong_block, window, memory)):
                raise CorruptError(f"the source is damaged: {wrong}")
            await writer.write_part(number[window.name], window.start, memory)
            self.done += window.nbytes
            self.progress(self.done, self._nbytes())

        start: Pipeline[Window, Window] = Pipeline()
        largest = max((window.nbytes for window in windows), default=1)
        with unwrap_stage_errors():
            async with self.goal.open_write(key, nbytes) as writer:
                graph = start.then(Stage("copy", partial(move, writer), workers=workers))
                await graph.run(windows, budget=Budget(max(largest, 1) * workers))

    def _nbytes(self) -> int:
        """Return the bytes of all data, for progress; headers are not counted."""
        return max(int(self.metadata.layout.file_nbytes.sum()), self.done)


async def _commit(goal: Place, data: bytes, version: Version | None, replaced: str, copying: _Copying) -> None:
    """Put the metadata, once all files are in the target.

    Raises:
        ExistsError: another save has committed there meanwhile.
        StorageError: storage failed, or a file is not there any more.

    """
    if gone := await _gone(goal, copying.written):
        raise StorageError(gone)
    commit = copying.metadata.commit
    copying.attempt = Attempt(commit.operation, replaced, is_sent=True, also=commit.operations)
    made = await goal.backend.put_if(METADATA_KEY, data, version)
    if made is None:
        if (await read_committed(goal.backend)).data != data:
            copying.attempt = None
            raise ExistsError(f"another save has committed at {goal.path} since the copy began; nothing was replaced")
        made = await goal.backend.version(METADATA_KEY)
    # a removal of an older copy of the same save may have deleted files in between
    if (gone := await _gone(goal, copying.written)) and await withdraw(goal.backend, {METADATA_KEY: made}):
        raise StorageError(gone)


async def _gone(goal: Place, keys: Sequence[str]) -> str:
    """Say which copied files are not in the target; "" if all are."""
    there = {info.key for info in await goal.backend.list()}
    gone = [key for key in keys if key not in there]
    more = f", and {len(gone) - 1} more" if len(gone) > 1 else ""
    return f"{goal.path}: {gone[0]} has gone since it was copied{more}; copy again" if gone else ""
