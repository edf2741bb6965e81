"""Copy a checkpoint byte for byte: every block compared with its checksum, the metadata last."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import anyio
import anyio.lowlevel

from bcp._deletion import Attempt, delete_dropped, delete_unnamed, read_committed, swept, withdraw
from bcp._messages.tools import Copied
from bcp._text import shown
from bcp.backends.place import Path, Place, place_of
from bcp.backends.small import get_small
from bcp.errors import CorruptError, ExistsError, InputError, StorageError
from bcp.format.metadata import METADATA_KEY, Metadata, decode_metadata, operation_of, whole_metadata
from bcp.format.receipt import FileReceipt, Receipt, decode_receipt, encode_receipt, receipt_digest
from bcp.options import LoadOptions, timeout_of
from bcp.plan.layout import named_files
from bcp.protocols import Coordinator, Sweeper, Unfinished, Version
from bcp.read.opening import read_metadata
from bcp.read.receipts import file_of
from bcp.read.replaced import say_if_replaced
from bcp.read.source import Source
from bcp.runtime.threads import in_thread_gc_paused
from bcp.tools.calls import Progress, called, counting, ignore_progress, say_what_is_left
from bcp.tools.checked_copy import copy_data_file
from bcp.tools.sharing import Ranks, sharing

__all__ = ["CopyResult", "acopy", "copy"]


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
    coordinator: Coordinator | None = None,
    progress: Progress = ignore_progress,
) -> CopyResult:
    """Copy a checkpoint byte for byte, between any two places.

    Every block is compared with its checksum on its way, so damage does not spread. The metadata are written last and
    in one step. A copy that fails or is killed leaves no committed checkpoint, and an older one at the target stays.
    Recordings are not copied. The copy refers to no other checkpoint: blocks that the source has kept by reference are
    copied, too.

    The ranks of a job share the files: call the function on all of them. Rank 0 commits once all files are there. After
    a failure of any rank, nothing is committed, and the files of all ranks are deleted.

    Args:
        source: the checkpoint, as for :class:`bcp.Checkpoint`.
        target: path or URL of the copy.
        role: the role of the checkpoint below both paths, if it was saved with one.
        overwrite: replace a committed checkpoint at the target, atomically.
        storage_options: for the file system of the source's URL.
        target_options: for the file system of the target's URL.
        coordinator: of several ranks that share the work, as for :func:`bcp.save`. None: the ranks of this job.
        progress: called with the bytes that this rank has copied, and with those of its share.

    Returns:
        The number of files and bytes that all ranks have copied.

    Raises:
        InputError: source and target are one place; or another rank has other arguments, or another checkpoint.
        NotACheckpointError: there is no checkpoint at the source.
        ExistsError: a committed checkpoint is at the target, and ``overwrite`` is not set; or another save has
            committed there meanwhile.
        CorruptError: the source is damaged; the message names file and bytes. Nothing is committed.
        PeerError: another rank failed. Nothing is committed.
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
            coordinator=coordinator,
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
    coordinator: Coordinator | None = None,
    progress: Progress = ignore_progress,
) -> CopyResult:
    """Do the same as :func:`copy` from a coroutine."""
    began = time.monotonic()
    async with sharing("copy", coordinator, timeout_of(None)) as ranks, AsyncExitStack() as stack:

        async def opened() -> _Copying:
            places = (
                place_of(source, role, storage_options, cold="run"),
                place_of(target, role, target_options, cold="run"),
            )
            for place in places:
                await stack.enter_async_context(place.opened)
            return await _Copying.of(*places, ranks, progress, overwrite=overwrite)

        copying = await ranks.agreed(opened(), str)
        await ranks.led("target", copying.check_target)
        try:
            async with say_if_replaced(copying.origin):
                await copying.run()
            copied = await ranks.merged(Copied(tuple(copying.written), copying.nbytes), _joined)
            copying.is_whole = True
            await ranks.led("commit", lambda: copying.commit(copied.keys))
        except BaseException as error:
            is_over = anyio.current_effective_deadline() == -math.inf
            with (
                anyio.CancelScope(shield=True),
                say_what_is_left(error, f"Files of the copy may be left in {copying.goal.path}"),
            ):
                await copying.undo()
            if is_over:  # another rank has failed, and rank 0 may have deleted what was being written here
                await anyio.lowlevel.checkpoint_if_cancelled()
            raise
        if ranks.rank == 0:
            await copying.sweep(copied.keys)
    seconds = time.monotonic() - began
    return CopyResult(copying.goal.path, copying.operation, len(copied.keys) + 1, copied.nbytes, seconds)


@dataclass(slots=True)
class _Copying:
    """One rank's part of a copy.

    Attributes:
        origin: the open source.
        goal: the target.
        data: the metadata of the source, encoded.
        ranks: those that share the work.
        told: called with the bytes of each part.
        overwrite: whether a committed checkpoint may be replaced.
        written: keys of this rank's files in the target.
        nbytes: bytes of data files so far.
        is_whole: the files of all ranks are there, so rank 0 may have sent the request to commit.
        stale: keys of older saves in the target, on rank 0.
        known: keys of the copied save that were in the target before, on rank 0.
        version: of the metadata that the copy replaces, on rank 0.
        replaced: their operation; "" for none.
        attempt: the request to commit, on rank 0, while its outcome is unknown: the files stay.
    """

    origin: Source
    goal: Place
    data: bytes
    ranks: Ranks
    told: Callable[[int], object]
    overwrite: bool
    written: list[str] = field(default_factory=list)
    nbytes: int = 0
    is_whole: bool = False
    stale: Sequence[str] = ()
    known: Sequence[str] = ()
    version: Version | None = None
    replaced: str = ""
    attempt: Attempt | None = None

    @classmethod
    async def of(cls, origin: Place, goal: Place, ranks: Ranks, progress: Progress, *, overwrite: bool) -> _Copying:
        """Read the metadata of the source."""
        data = await read_metadata(origin.backend, origin.path)
        metadata = await in_thread_gc_paused(decode_metadata, data, f"{origin.path}/{METADATA_KEY}")
        if metadata.foreign is not None:
            raise InputError(
                f"{origin.path} was written by another library, and has no checksums: bcp.tools.import_files (bcp "
                "import) makes a copy of it with checksums"
            )
        total = -(-int(metadata.layout.file_nbytes.sum()) // ranks.world_size)  # headers are not counted
        source = Source.of(origin.backend, origin.path, metadata, LoadOptions())
        return cls(source, goal, data, ranks, counting(progress, total), overwrite)

    def __str__(self) -> str:
        return f"{self.origin.path} of operation {self.operation} to {self.goal.path}, overwrite={self.overwrite}"

    @property
    def metadata(self) -> Metadata:
        """Metadata of the source."""
        return self.origin.metadata

    @property
    def operation(self) -> str:
        """Id of the save that had made the checkpoint."""
        return self.metadata.commit.operation

    # -- before and after, on rank 0 ---------------------------------------------------------------

    async def check_target(self) -> None:
        """Look at the checkpoint that the copy replaces. Raises where it must not."""
        origin, goal = self.origin, self.goal
        if origin.path == goal.path and repr(origin.backend) == repr(goal.backend):
            raise InputError(f"{origin.path} cannot be copied to itself; pass another target")
        self.version = await goal.backend.version(METADATA_KEY)
        if self.version is not None:
            if not self.overwrite:
                raise ExistsError(
                    f"{goal.path} holds a committed checkpoint; pass overwrite=True (--overwrite) to replace it"
                )
            self.replaced = (await read_committed(goal.backend)).operation
            if self.replaced == self.operation:
                raise ExistsError(
                    f"{goal.path} holds a copy of operation {self.operation} already, so there is nothing to do. "
                    "`bcp verify` compares it with its checksums; remove it first if it is damaged"
                )
        there, operations = await self._files(lambda _: True), self.metadata.commit.operations
        self.stale = [key for key in there if operation_of(key) not in operations]
        self.known = [key for key in there if operation_of(key) in operations]

    async def sweep(self, keys: Sequence[str]) -> None:
        """Delete the files of older saves, and those that the save had before it was edited."""
        backend, dropped = self.goal.backend, sorted(set(self.known).difference(keys))
        with swept(self.goal.path, self.operation):
            if self.stale:
                await delete_unnamed(backend, self.stale, by=self.operation)
            await delete_dropped(backend, dropped, by=self.operation)

    async def _files(self, chosen: Callable[[str], bool]) -> list[str]:
        """List the files of saves in the target whose operation is chosen."""
        keys = [info.key for info in await self.goal.backend.list() if info.key.count("/") == 1]
        return [key for key in keys if (operation := operation_of(key)) and chosen(operation)]

    async def commit(self, keys: Sequence[str]) -> None:
        """Put the metadata, once the files of all ranks are in the target.

        Raises:
            ExistsError: another save has committed there meanwhile.
            StorageError: storage failed, or a file is not there any more.

        """
        backend = self.goal.backend
        if gone := await _gone(self.goal, keys):
            raise StorageError(gone)
        data, also = await self._whole_metadata(), self.metadata.commit.operations
        self.attempt = Attempt(self.operation, self.replaced, is_sent=True, also=also)
        made = await backend.put_if(METADATA_KEY, data, self.version)
        if made is None:
            if (await read_committed(backend)).data != data:
                self.attempt = None
                raise ExistsError(
                    f"another save has committed at {self.goal.path} since the copy began; nothing was replaced"
                )
            made = await backend.version(METADATA_KEY)
        # a removal of an older copy of the same save may have deleted files in between
        if (gone := await _gone(self.goal, keys)) and await withdraw(backend, {METADATA_KEY: made}):
            raise StorageError(gone)

    # -- after a failure -----------------------------------------------------------------------------

    async def undo(self) -> None:
        """Delete the files of this rank, unless they may be committed.

        Rank 0 knows, and deletes those of all ranks. Before, it also deletes those of a rank that has died.
        """
        if self.is_whole and self.ranks.rank:
            return
        backend, operations = self.goal.backend, self.metadata.commit.operations
        if self.ranks.rank or self.ranks.world_size == 1:
            await delete_unnamed(backend, self.written, self.attempt)
            return
        left: list[Unfinished] = []
        if isinstance(backend, Sweeper):  # a rank may have died in a write
            left = [each for each in await backend.unfinished() if operation_of(each.key) in operations]
        keys = await self._files(lambda operation: operation in operations)
        await delete_unnamed(backend, keys, self.attempt, unfinished=left)

    # -- the files -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Copy this rank's share: files of one saving rank after the other, the data files before their receipt."""
        commit, layout = self.metadata.commit, self.metadata.layout
        columns = (layout.file_rank.tolist(), layout.file_kind.tolist(), layout.file_nbytes.tolist())
        nbytes = {(rank, kind): size for rank, kind, size in zip(*columns, strict=True)}
        named = named_files(layout)
        for rank, part in self.ranks.share.parts(range(layout.world_size)):
            key = commit.receipt_key(rank)
            data = await self._receipt(key, rank)
            receipt = await in_thread_gc_paused(decode_receipt, data, key)
            # an edit may have dropped a file
            for file in part.of([file for file in receipt.files if (rank, file.kind) in named]):
                name, checked = file_of(self.metadata, receipt, file.kind, nbytes.get((rank, file.kind)))
                await self._data_file(name, checked)
            if part.reader == 0:
                self.written.append(key)
                await self.goal.backend.put(key, await self._whole(data, receipt))

    async def _receipt(self, key: str, rank: int) -> bytes:
        try:
            data = bytes(await get_small(self.origin.backend, key))
        except FileNotFoundError as error:
            raise CorruptError(f"{key} of the source is missing; restore it") from error
        if receipt_digest(data) != self.metadata.commit.receipt(rank):
            raise CorruptError(f"{key} of the source is not the receipt that was committed; restore it")
        return data

    async def _whole(self, data: bytes, receipt: Receipt) -> bytes:
        """Return the receipt of the copy, whose files are all whole."""
        return await in_thread_gc_paused(encode_receipt, receipt.whole()) if self.metadata.commit.refers else data

    async def _whole_metadata(self) -> bytes:
        """Return the metadata of the copy, which refers to no other checkpoint."""
        if not self.metadata.commit.refers:
            return self.data
        found = []
        for rank in range(self.metadata.layout.world_size):
            key = self.metadata.commit.receipt_key(rank)
            data = await self._receipt(key, rank)
            receipt = await in_thread_gc_paused(decode_receipt, data, key)
            found.append(receipt_digest(await self._whole(data, receipt)))
        where = f"{self.origin.path}/{METADATA_KEY}"
        return await in_thread_gc_paused(whole_metadata, self.data, where, b"".join(found))

    async def _data_file(self, key: str, file: FileReceipt) -> None:
        """Copy a data file, and count its bytes."""

        def told(nbytes: int) -> None:
            self.nbytes += nbytes
            self.told(nbytes)

        self.written.append(key)
        await copy_data_file(self.origin.backend, key, self.goal.backend, key, file, told)


def _joined(copied: Sequence[Copied]) -> Copied:
    return Copied(tuple(chain.from_iterable(each.keys for each in copied)), sum(each.nbytes for each in copied))


async def _gone(goal: Place, keys: Sequence[str]) -> str:
    """Say which copied files are not in the target; "" if all are."""
    there = {info.key for info in await goal.backend.list()}
    gone = [key for key in keys if key not in there]
    more = f", and {len(gone) - 1} more" if len(gone) > 1 else ""
    return f"{goal.path}: {gone[0]} has gone since it was copied{more}; copy again" if gone else ""
