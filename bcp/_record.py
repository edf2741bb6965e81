"""Recordings: the events of all ranks, stored beside a checkpoint once nothing can go wrong with it any more.

A save is committed, or all ranks have their tensors, when the ranks share their records. From then on no error of the
operation counts: a rank that dies, a storage that fails and a defect of telemetry are log lines.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from datetime import UTC, datetime

import anyio

from bcp import errors
from bcp._agree import collective_operation
from bcp._deletion import delete_unnamed
from bcp._job import Job
from bcp._log import log
from bcp.errors import BcpError, CoverageError, ExistsError, InputError, MismatchError, MissingCodecError, PeerError
from bcp.events import LoadResult, SaveResult, ignore, observed_by
from bcp.format.metadata import METADATA_KEY, Metadata
from bcp.plan.shards import KINDS
from bcp.protocols import Agreement, Backend
from bcp.runtime.threads import in_thread
from bcp.state.placement import coordinates
from bcp.telemetry.encode import drained, figures_of, merged, packed, recording_of_failure
from bcp.telemetry.failures import failed_phase, failure_of
from bcp.telemetry.recording import FailureRecord, Recording
from bcp.telemetry.store import FOLDER, encode, outdated
from bcp.telemetry.watch import Watch

__all__ = ["Record", "recorded", "store_drained"]

REFUSALS = (InputError, ExistsError, MismatchError, CoverageError, MissingCodecError)
ERROR = re.compile(r"\b([A-Z]\w*Error): ")
"""Names the error in what a peer tells of it."""

SHARE_SECONDS = 5.0
STORE_SECONDS = 5.0
"""A failure waits as long for its record: a disk that is being filled takes seconds for one small file."""


class Record:
    """This rank's part in the recording of one save or load."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._is_settled = False
        self._is_gone = False
        self._is_reader = False
        self._messages: Sequence[bytes] = ()

    @asynccontextmanager
    async def forgiving(self, operation: AbstractAsyncContextManager[Agreement]) -> AsyncIterator[Agreement]:
        """Take part in an operation. Once :meth:`share` was called, errors of other ranks are logged and forgotten."""
        try:
            async with collective_operation(operation) as agreement:
                yield agreement
        except Exception as error:
            if not self._is_settled:
                await self._look(error)
                raise
            log.info("a rank was lost after the end", path=self._job.path, error=repr(error))

    def reads(self, metadata: Metadata) -> None:
        """Note which checkpoint this load reads: one that leaves out the optimizer is no part of a training job.

        Nothing is written beside files of another library.
        """
        options, optimizer = self._job.options, KINDS.index("optimizer")
        has_optimizer = bool((metadata.layout.tensors.kind == optimizer).any())
        leaves_it_out = options.record is None and has_optimizer and "optimizer" not in self._job.states
        self._is_reader = leaves_it_out or metadata.foreign is not None

    async def _look(self, error: Exception) -> None:
        """Find out if the checkpoint is still there: a record must not make the directory anew.

        Of a save only rank 0 looks. Rank 0 removes the files of all ranks afterwards, and an empty directory tells
        another rank nothing.
        """
        job = self._job
        if not self._is_told(error) or job.watch.tier == "memory":
            return
        with suppress(Exception), anyio.move_on_after(STORE_SECONDS, shield=True), observed_by(ignore):
            if job.watch.kind == "load":
                self._is_gone = await job.backend.version(METADATA_KEY) is None
            elif job.rank == 0 and failed_phase(job.watch) == "commit":  # all ranks have written their files
                self._is_gone = not await job.backend.list()

    async def share(self, agreement: Agreement, result: SaveResult | LoadResult) -> None:
        """Give rank 0 this rank's record. Call it as the last of all steps, when the operation has succeeded."""
        self._is_settled = True
        if self._job.options.record is False:
            return
        with anyio.move_on_after(SHARE_SECONDS):
            await agreement.gather_broadcast("telemetry", await self._packed(result), self._take)

    async def _packed(self, result: SaveResult | LoadResult) -> bytes:
        """Return this rank's record; empty if it cannot be made."""
        job = self._job
        try:
            return await in_thread(lambda: packed(job.watch, _place(job), _local_rank(), figures_of(result)))
        except Exception as error:  # noqa: BLE001 -- the save or load has succeeded
            log.info("a rank was not recorded", path=job.path, rank=job.rank, error=repr(error))
            return b""

    async def _take(self, messages: Sequence[bytes]) -> bytes:
        """Keep all ranks' records on rank 0, and let the ranks go."""
        self._messages = messages
        return b""

    @property
    def shared(self) -> Sequence[bytes]:
        """The records of all ranks, for :func:`store_drained`; on rank 0, behind :meth:`share`."""
        return self._messages

    async def store(self) -> None:
        """Write the file, on rank 0."""
        if any(self._messages) and not self._is_reader:
            await _store(self._job.backend, self._job.watch, self._messages)

    async def store_failure(self, error: Exception) -> None:
        """Write down why this rank's save or load failed, if this is the rank to tell it."""
        job = self._job
        if self._is_gone or self._is_reader or not self._is_told(error):
            return
        try:
            with anyio.move_on_after(STORE_SECONDS, shield=True) as scope, observed_by(ignore):
                await self._put_failure(failure_of(job.watch, error))
            if scope.cancelled_caught:
                log.info("the record of a failure took too long", path=job.path, rank=job.rank, seconds=STORE_SECONDS)
        except Exception as second:  # noqa: BLE001 -- the error of the save or load is on its way out
            log.info("a failure was not recorded", path=job.path, rank=job.rank, error=repr(second))

    async def _put_failure(self, failure: FailureRecord) -> None:
        job = self._job
        data = await in_thread(_encoded_failure, job, failure)
        if job.watch.kind == "load" and await _is_sealed(job.backend):
            return
        stem = job.watch.operation if job.watch.kind == "save" else secrets.token_hex(8)
        await job.backend.put(_key(job.watch, "failure", f"{stem}-{job.rank:05d}"), data)

    def _is_told(self, error: Exception) -> bool:
        """Return whether this rank writes down why it failed: not before all ranks have met."""
        job = self._job
        return job.options.record is not False and bool(job.watch.operation) and _tells(job.rank, error)


@asynccontextmanager
async def recorded(job: Job) -> AsyncIterator[Record]:
    """Leave a recording of a save or load that succeeds in the block, or a record of its failure."""
    record = Record(job)
    try:
        yield record
    except Exception as error:
        await record.store_failure(error)
        raise
    await record.store()


async def store_drained(
    backend: Backend, watch: Watch, messages: Sequence[bytes], *, handed: float, durable: float
) -> None:
    """Write the file of a save into memory, which agents have made durable; on rank 0.

    Args:
        backend: at the place of the checkpoint.
        watch: of the save.
        messages: :attr:`Record.shared` of the save.
        handed: seconds from the call until agents were to make it durable.
        durable: seconds from the call until rank 0 knew of the commit.

    """
    await _store(backend, watch, messages, lambda recording: drained(recording, handed, durable))


async def _store(
    backend: Backend, watch: Watch, messages: Sequence[bytes], edit: Callable[[Recording], Recording] | None = None
) -> None:
    """Write the file of a save or load that has succeeded, and delete the oldest files if there are too many.

    An error is forgotten. It may be part of a cycle, so nothing here leads to the state's tensors.
    """
    name = watch.operation if watch.kind == "save" else secrets.token_hex(8)
    try:
        with anyio.move_on_after(STORE_SECONDS) as scope, observed_by(ignore):
            if watch.kind == "load" and await _is_sealed(backend):
                return
            data = await in_thread(lambda: _encoded(watch, messages, edit))
            await backend.put(_key(watch, watch.kind, name), data)
            by_commit = watch.kind == "save" and watch.tier == "storage"
            if not by_commit and (old := outdated(await backend.list(FOLDER))):
                await delete_unnamed(backend, old)
        if scope.cancelled_caught:
            log.info("a recording took too long and is given up", path=watch.path, seconds=STORE_SECONDS)
    except Exception as error:  # noqa: BLE001 -- the save or load has succeeded
        log.info("no recording was stored", path=watch.path, error=repr(error))


def _encoded(watch: Watch, messages: Sequence[bytes], edit: Callable[[Recording], Recording] | None) -> bytes:
    recording = merged(watch, messages)
    return encode(recording if edit is None else edit(recording))


async def _is_sealed(backend: Backend) -> bool:
    """Whether somebody has taken all rights to write to the checkpoint; an administrator's write would succeed."""
    is_sealed = getattr(backend, "is_sealed", None)
    return is_sealed is not None and (await is_sealed(METADATA_KEY) or await is_sealed(f"{FOLDER}any"))


def _key(watch: Watch, kind: str, name: str) -> str:
    """Return the key of a file, as in ``telemetry/save-20260131T235959123Z-0123456789abcdef.arrow``."""
    moment = datetime.fromtimestamp(watch.time, UTC)
    return f"{FOLDER}{kind}-{moment:%Y%m%dT%H%M%S}{moment.microsecond // 1000:03d}Z-{name}.arrow"


def _place(job: Job) -> dict[str, int]:
    """Return this rank's coordinates; none if a framework does not tell them as expected."""
    try:
        return coordinates(job.states)
    except Exception as error:  # noqa: BLE001 -- a framework's private state
        log.debug("a rank's place in the topology is unknown", rank=job.rank, error=repr(error))
        return {}


def _local_rank() -> int:
    text = os.environ.get("LOCAL_RANK", "")
    return int(text) if text.isdecimal() else -1


def _tells(rank: int, error: Exception) -> bool:
    """Return whether this rank writes down a failure: the guilty one, and rank 0, or rank 1 if that is rank 0.

    Nobody does so if the call was refused: refused calls write nothing.
    """
    if _refuses(error):
        return False
    if isinstance(error, PeerError):
        return rank == (1 if error.rank == 0 else 0)
    return rank == 0 or not (isinstance(error, BcpError) and error.of_all_ranks)


def _refuses(error: Exception) -> bool:
    """Return whether an error, or the one that a peer tells of, says that the caller has to change something."""
    if not isinstance(error, PeerError):
        return isinstance(error, REFUSALS)
    name = ERROR.search(error.cause)
    kind = getattr(errors, name[1], None) if name else None
    return isinstance(kind, type) and issubclass(kind, REFUSALS)


def _encoded_failure(job: Job, failure: FailureRecord) -> bytes:
    return encode(recording_of_failure(job.watch, failure, _place(job), _local_rank()))
