"""Rank 0's part of a save: refuse or open, divide, commit, sweep (paper sec. 3.3, 5.2).

:class:`SaveLeader` holds its steps. Before the commit, :func:`check_written` compares the files that each rank says it
has written with storage. :func:`not_replaced` raises the true reason of a failure if another job has committed to the
same path. A failed save removes its own files, unless they may belong to a checkpoint (:func:`undone_on_error`).
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

import anyio

from bcp._job import SaveJob
from bcp._log import log
from bcp._messages.planning import Opening, Written
from bcp._version import __version__
from bcp.errors import BcpError, CheckpointError, CorruptError, ExistsError, StorageError
from bcp.format.metadata import (
    METADATA_KEY,
    Commit,
    data_key,
    decode_metadata,
    encode_layout,
    encode_metadata,
    operation_of,
    receipt_key,
)
from bcp.format.receipt import Receipt
from bcp.options import SaveOptions
from bcp.plan.cache import PlanCache
from bcp.plan.units import check_shared
from bcp.plan.write import divide_save
from bcp.plan.write.survey import DIGEST_BYTES, Survey, encode_shares, survey_tables
from bcp.protocols import Backend, ObjectInfo, Sweeper, Unfinished, Version
from bcp.runtime.threads import in_thread_gc_paused
from bcp.stages.items import WriteItem
from bcp.telemetry.store import FOLDER as TELEMETRY
from bcp.telemetry.store import outdated

__all__ = [
    "BLOCK_BYTES",
    "CleanUp",
    "Opening",
    "SaveLeader",
    "check_written",
    "data_nbytes",
    "encode_written",
    "not_replaced",
    "taken",
    "undone_on_error",
]


@asynccontextmanager
async def not_replaced(backend: Backend, path: str, operation: str, found: Version | None) -> AsyncIterator[None]:
    """Raise ExistsError in place of a storage error if another job has committed meanwhile.

    A commit deletes the files of older saves, so writes of a save that cannot commit any more may fail in any way.
    """
    try:
        yield
    except StorageError as error:
        await check_not_replaced(backend, path, operation, found, error)
        raise


async def check_not_replaced(
    backend: Backend, path: str, operation: str, found: Version | None, error: StorageError
) -> None:
    """Raise ExistsError because of ``error`` if the metadata is not the one that this save found."""
    try:
        now = await backend.version(METADATA_KEY)
    except BcpError:  # storage does not answer at all; the first error says why
        return
    if now not in (found, None):
        raise await taken(backend, path, operation, found) from error


async def taken(backend: Backend, path: str, operation: str, found: Version | None) -> CheckpointError | StorageError:
    """Return the error of a save whose place another job has taken."""
    advice = "this save was not committed. Give every job a path of its own, or save again with overwrite=True"
    try:
        data = await backend.get(METADATA_KEY)
    except FileNotFoundError:
        return StorageError(
            f"{path}: the checkpoint that operation {operation} was to replace was deleted or moved away meanwhile; "
            "this save was not committed. Save again"
        )
    if await backend.version(METADATA_KEY) == found:
        return ExistsError(f"another job is committing a checkpoint at {path}, as is operation {operation}; {advice}")
    try:
        winner = f"operation {(await in_thread_gc_paused(decode_metadata, data, path)).commit.operation}"
    except CheckpointError:
        winner = "an operation with metadata that cannot be read"
    return ExistsError(
        f"another job committed a checkpoint at {path}, {winner}, while operation {operation} was saving there; "
        f"{advice}"
    )


_FILE = struct.Struct("<BQ")  # code of the kind, bytes as stored
_SHOWN = 3


def encode_written(receipt: Receipt, digest: bytes, nbytes: int) -> bytes:
    """Return a rank's message for the commit: digest and size of its receipt, and its files' sizes."""
    files = [_FILE.pack(file.kind, file.stored_nbytes) for file in receipt.files]
    return Written(digest, nbytes, b"".join(files)).encode()


def receipt_digests(messages: Sequence[bytes]) -> bytes:
    """Return the digests of all ranks' receipts, in the order of the ranks."""
    return b"".join(written.digest for written in Written.decode_all(messages))


def data_nbytes(messages: Sequence[bytes]) -> int:
    """Return the bytes that all ranks wrote into data files."""
    return sum(stored for written in Written.decode_all(messages) for _, stored in _FILE.iter_unpack(written.files))


async def check_written(
    backend: Backend,
    path: str,
    messages: Sequence[bytes],
    listed: Sequence[ObjectInfo],
    operation: str,
    *,
    encoded: bool,
) -> None:
    """Check that every file is there, with its size.

    A list may be older than the files: clients of a file server keep names and sizes for a while. So a file that the
    list does not have as it was written is read before it counts as missing.

    Raises:
        StorageError: a file is missing or has another size; names the first ones.

    """
    wrong = await in_thread_gc_paused(_differences, messages, listed, operation, encoded)
    lost = [info async for info in _lost(backend, wrong)]
    if lost:
        raise StorageError(
            f"{path}: files of operation {operation} are not there as they were written: "
            f"{', '.join(f'{info.key} ({info.nbytes} bytes)' for info in lost)}. The save was not committed. They were "
            "deleted, cut or moved away while it ran; find out by whom, and save again"
        )


def _differences(
    messages: Sequence[bytes],
    listed: Sequence[ObjectInfo],
    operation: str,
    encoded: bool,  # noqa: FBT001 -- for a thread
) -> list[ObjectInfo]:
    """Return the written files that the list does not have as they are."""
    sizes = {info.key: info.nbytes for info in listed}
    written = (
        info
        for rank, written in enumerate(Written.decode_all(messages))
        for info in _files(rank, written, operation, encoded=encoded)
    )
    return [info for info in written if sizes.get(info.key) != info.nbytes]


def _files(rank: int, written: Written, operation: str, *, encoded: bool) -> Iterator[ObjectInfo]:
    yield ObjectInfo(receipt_key(rank, operation), written.nbytes)
    for kind, stored in _FILE.iter_unpack(written.files):
        yield ObjectInfo(data_key(kind, rank, operation, encoded=encoded), stored)


async def _lost(backend: Backend, wrong: Sequence[ObjectInfo]) -> AsyncIterator[ObjectInfo]:
    """Yield the first few files that are not as they were written."""
    count = 0
    for info in wrong:
        if not await _ends_there(backend, info):
            yield info
            count += 1
            if count == _SHOWN:
                return


async def _ends_there(backend: Backend, info: ObjectInfo) -> bool:
    """Return whether an object has that many bytes, by reading the last one and one behind it."""
    try:
        await backend.read_into(info.key, max(info.nbytes - 1, 0), memoryview(bytearray(min(info.nbytes, 1))))
    except (FileNotFoundError, CorruptError):
        return False
    try:
        await backend.read_into(info.key, info.nbytes, memoryview(bytearray(1)))
    except CorruptError:
        return True
    except FileNotFoundError:
        return False
    return False


BLOCK_BYTES = 1 << 20
_layouts: PlanCache[bytes] = PlanCache(16)


@dataclass(slots=True)
class SaveLeader:
    """The coordinator's side of a save (paper sec. 3.3); its methods run on rank 0 only.

    Attributes:
        path: where the checkpoint goes, for messages.
        backend: the same, for bytes.
        world_size: how many ranks save together.
        options: how to save.
        trace: trace context of this rank; empty for none.
        framework: name of the planner; known when this rank has taken stock.
        found: version of the metadata that was there when the save began; None for none.
        key: of the plan.
        plan: who holds the same as whom; known where there is no plan yet.
        layout: encoded; the unchanging part of the metadata.
        committing: the metadata has been written, or may have been; false again if another job's was there first.
        operation: id of the save.
        all_nbytes: bytes that all ranks wrote into data files; known once the save is committed.
    """

    path: str
    backend: Backend
    world_size: int
    options: SaveOptions
    trace: str = ""
    framework: str = ""
    found: Version | None = None
    key: bytes = b""
    plan: Survey = field(init=False)
    layout: bytes = b""
    committing: bool = False
    operation: str = field(default_factory=lambda: secrets.token_hex(8))
    all_nbytes: int | None = None

    async def open(self, hellos: Sequence[bytes]) -> bytes:
        """Refuse to harm a checkpoint; else say whether the plan that everyone has still holds."""
        self.found = await self.backend.version(METADATA_KEY)
        if self.found is not None and not self.options.overwrite:
            raise ExistsError(
                f"{self.path} holds a committed checkpoint; pass overwrite=True to replace it, or save elsewhere"
            )
        check_shared([hello[DIGEST_BYTES:] for hello in hellos])
        self.key = hellos[0][:DIGEST_BYTES]
        self.layout = _layouts.get(self.key) or b""
        cached = bool(self.layout) and all(hello[:DIGEST_BYTES] == self.key for hello in hellos)
        return Opening(self.operation, cached, self.found, self.trace).encode()

    async def survey(self, hellos: Sequence[bytes]) -> bytes:
        """Group ranks with equal tables, and ask one rank of each group for its table."""
        self.plan = await in_thread_gc_paused(self._survey, hellos)
        self.key = self.plan.key
        return self.plan.encode()

    def _survey(self, hellos: Sequence[bytes]) -> Survey:
        return survey_tables(hellos, balance=self.options.balance, block_bytes=BLOCK_BYTES)

    def divide(self, messages: Sequence[bytes]) -> Sequence[bytes]:
        """Plan the save: dedup, balance, offsets, exact cover."""
        division = divide_save(self.plan, messages, balance=self.options.balance, block_bytes=BLOCK_BYTES)
        self.layout = encode_layout(division.layout)
        _layouts.put(self.key, self.layout)
        return encode_shares(division)

    async def commit(self, messages: Sequence[bytes]) -> bytes:
        """Write the metadata, last of all: from here on the checkpoint exists (paper sec. 5.2, integrity check).

        Files of other saves are listed before and deleted after. A listed save began before this commit, so it found
        other metadata than this save's and cannot commit any more. A save that begins later loses nothing. All ranks
        have written their files by then. So an upload of this save that is still open is one that nobody knows of: the
        answer to its beginning was lost.

        Raises:
            ExistsError: another job has committed here since the save began.
            StorageError: files of this save are missing, or storage failed.

        """
        listed = await self._listed(messages)
        unfinished = await self._unfinished()
        record = Commit(
            operation=self.operation,
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
            framework=self.framework,
            codecs=tuple(codec.name for codec in self.options.codecs),
            part_bytes=self.options.part_bytes,
            version=__version__,
            receipts=receipt_digests(messages),
        )
        self.committing = True
        version = await self.backend.put_if(METADATA_KEY, encode_metadata(self.layout, record), self.found)
        if version is None:
            self.committing = False
            raise await taken(self.backend, self.path, self.operation, self.found)
        await self._check_place(version)
        self.all_nbytes = await in_thread_gc_paused(data_nbytes, messages)
        await self._sweep(listed, unfinished)
        return b""

    async def _listed(self, messages: Sequence[bytes]) -> Sequence[ObjectInfo]:
        """List all objects, once; among them has to be every file that a rank says it has written."""
        listed = await self.backend.list()
        try:
            await check_written(
                self.backend, self.path, messages, listed, self.operation, encoded=bool(self.options.codecs)
            )
        except StorageError as error:
            await check_not_replaced(self.backend, self.path, self.operation, self.found, error)
            raise
        return listed

    async def _unfinished(self) -> Sequence[Unfinished]:
        try:
            return await self.backend.unfinished() if isinstance(self.backend, Sweeper) else []
        except StorageError as error:  # nothing is swept then; the commit needs none of it
            log.warning("unfinished files were not listed", path=self.path, operation=self.operation, error=repr(error))
            return []

    async def _check_place(self, version: Version) -> None:
        """Check that the metadata was put beside the data: somebody may have moved the directory away meanwhile."""
        try:
            await self.backend.get(receipt_key(0, self.operation))
        except FileNotFoundError as error:
            now = await self.backend.version(METADATA_KEY)
            if now not in (version, None):
                return  # the next save has replaced this one already
            if now is not None:
                await self.backend.delete([METADATA_KEY])  # it names files that are not there
            raise StorageError(
                f"{self.path}: the files of operation {self.operation} disappeared during its commit; it is not "
                "committed there. The directory was deleted or moved away: save again"
            ) from error

    async def _sweep(self, listed: Sequence[ObjectInfo], unfinished: Sequence[Unfinished]) -> None:
        """Delete the files of the replaced checkpoint and of saves that cannot commit any more."""

        def stale(key: str) -> bool:
            return _is_of_a_save(key) and operation_of(key) != self.operation

        try:
            left = [upload for upload in unfinished if _is_of_a_save(upload.key) or upload.key == METADATA_KEY]
            left += [upload for upload in unfinished if upload.key.startswith(TELEMETRY)]
            if left and isinstance(self.backend, Sweeper):
                await self.backend.discard(left)
            keys = [info.key for info in listed if stale(info.key)] + outdated(listed)
            if keys:
                await self.backend.delete(keys)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the checkpoint is committed
            log.warning("old files were not deleted", path=self.path, operation=self.operation, error=repr(error))


def _is_of_a_save(key: str) -> bool:
    return operation_of(key) is not None and key.count("/") == 1


CLEAN_UP_SECONDS = 30.0


class CleanUp:
    """The files that a failed save removes. Only rank 0 knows whether the metadata may be there already.

    So every other rank cleans up after itself until it has told rank 0 that its part is done, and rank 0 cleans
    up for all until it writes the metadata. The next save to the path sweeps the files that are left then.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._keys: list[str] = []
        self._operation = ""

    def begin(self, operation: str, items: Sequence[WriteItem]) -> None:
        """Note the files that this rank is about to write."""
        self._operation = operation
        self._keys = [*dict.fromkeys(item.key for item in items), receipt_key(self._rank, operation)]

    def leave_to_rank_0(self) -> None:
        """Note that from here on this rank's files may belong to a checkpoint."""
        if self._rank:
            self._keys = []

    async def keys(self, backend: Backend, *, committing: bool) -> list[str]:
        """Return the files to remove."""
        if not self._keys or committing:
            return []
        if self._rank:
            return self._keys
        return [info.key for info in await backend.list() if operation_of(info.key) == self._operation]


@asynccontextmanager
async def undone_on_error(job: SaveJob, root: SaveLeader) -> AsyncIterator[CleanUp]:
    """Remove the written files if the save fails or is cancelled, within some seconds; then raise the same error."""
    undo = CleanUp(job.rank)
    try:
        yield undo
    except BaseException:
        with anyio.move_on_after(CLEAN_UP_SECONDS, shield=True):
            try:
                keys = await undo.keys(job.backend, committing=root.committing)
                if keys:
                    await job.backend.delete(keys)
            except Exception as error:  # noqa: BLE001 -- the save's own error is on its way out
                log.warning("files of a failed save were not deleted", path=job.path, error=repr(error))
        raise
