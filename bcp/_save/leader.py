"""Rank 0's part of a save: refuse or open, divide, commit, sweep (paper sec. 3.3, 5.2).

Each step is made from the one before: :class:`Opened`, :class:`Surveyed`, :class:`Planned`, :class:`Committing`,
:class:`Done`. If every rank has the plan already, :class:`Planned` follows :class:`Opened`.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

from bcp._agree import gather_broadcast, gather_scatter, nothing_in
from bcp._deletion import TRIES, Committed, delete_unnamed, pause, read_committed, swept
from bcp._job import Earlier, Permit, SaveJob
from bcp._log import log
from bcp._messages.planning import Base, EqualBlocks, Opening, Written
from bcp._save.bases import find_base
from bcp._save.failures import CleanUp, check_not_replaced, put_back
from bcp._save.replicas import find_differing
from bcp._save.samples import balanced
from bcp._version import __version__
from bcp._written import check_written, data_nbytes, decode_written
from bcp.errors import BcpError, ExistsError, StorageError
from bcp.format.layout_file import decode_layout
from bcp.format.metadata import (
    METADATA_KEY,
    Commit,
    encode_layout,
    encode_metadata,
    operation_of,
    receipt_key,
)
from bcp.options import SaveOptions
from bcp.plan.units import all_have_nothing, check_shared
from bcp.plan.write import divide_save
from bcp.plan.write.survey import DIGEST_BYTES, Survey, encode_shares, survey_tables
from bcp.protocols import Agreement, Backend, ObjectInfo, Sweeper, Unfinished, Version
from bcp.runtime.cache import LruCache
from bcp.runtime.threads import in_thread_gc_paused
from bcp.telemetry.store import FOLDER as TELEMETRY
from bcp.telemetry.store import outdated

__all__ = [
    "BLOCK_BYTES",
    "EQUAL",
    "HELLO_BYTES",
    "Committing",
    "Done",
    "Opened",
    "Opening",
    "Planned",
    "Surveyed",
    "Target",
    "broadcast_step",
    "commit_save",
    "open_save",
    "scatter_step",
]

BLOCK_BYTES = 1 << 20

HELLO_BYTES = 2 * DIGEST_BYTES
"""Bytes of a rank's first message before its claims: the key of its plan, and the sum of its replicas' digests."""

EQUAL = b""
"""Rank 0's answer if all replicas have equal digests."""

_layouts: LruCache[bytes, bytes] = LruCache(16)
Step = TypeVar("Step")


async def broadcast_step(
    agreement: Agreement,
    name: str,
    rank: int,
    own_message: bytes | BcpError,
    take: Callable[[Sequence[bytes]], Awaitable[tuple[Step, bytes]]] | None,
) -> tuple[bytes, Step | None]:
    """Gather the messages of all ranks, let rank 0 take its next step, and send its answer to all ranks.

    ``own_message`` is this rank's message, or its error. ``take`` runs on rank 0 only, and returns the step and the
    answer. It is None on a rank that cannot take the step. Returns the answer, and the step on rank 0 or None
    elsewhere.
    """
    step: Step | None = None

    async def answer(messages: Sequence[bytes]) -> bytes:
        nonlocal step
        if take is None:
            raise _not_leading(name, rank)
        step, reply = await take(messages)
        return reply

    return await gather_broadcast(agreement, name, rank, own_message, answer), step


async def scatter_step(
    agreement: Agreement,
    name: str,
    rank: int,
    own_message: bytes,
    take: Callable[[Sequence[bytes]], tuple[Step, Sequence[bytes]]] | None,
) -> tuple[bytes, Step | None]:
    """Take rank 0's next step like :func:`broadcast_step`, but in a thread, and with an answer for each rank."""
    step: Step | None = None

    def answer(messages: Sequence[bytes]) -> Sequence[bytes]:
        nonlocal step
        if take is None:
            raise _not_leading(name, rank)
        step, replies = take(messages)
        return replies

    return await gather_scatter(agreement, name, rank, own_message, answer), step


def _not_leading(name: str, rank: int) -> BcpError:
    return BcpError(f"the coordinator let rank {rank} answer in step {name!r}; only rank 0 may")


@dataclass(frozen=True, slots=True)
class Target:
    """The destination of a save.

    It leads to no tensor, because the frames of an error's traceback keep it until the next garbage collection.
    """

    path: str  # where the checkpoint goes, for messages
    backend: Backend  # stores the bytes there
    options: SaveOptions  # how to save
    trace: str  # trace context of rank 0; empty for none
    permit: Permit | None  # asked whether the save may go on; None: it may
    metrics: Mapping[str, float]  # numbers that the commit carries
    compares: bool  # whether ranks compare their replicas
    names: Sequence[int] | None = None  # numbers of the ranks, for messages; None: as they count
    earlier: Earlier | None = None  # checkpoints to which the save may refer; None: to none
    beside: Backend | None = None  # view of the destination that knows what is beside it; None: the backend

    @classmethod
    def of(cls, job: SaveJob, *, compares: bool = False) -> Target:
        """Return the target of a save."""
        return cls(
            job.path,
            job.backend,
            job.options,
            job.watch.trace,
            job.permit,
            job.metrics,
            compares,
            job.names,
            job.earlier,
            job.beside,
        )


async def open_save(target: Target, framework: str, hellos: Sequence[bytes]) -> tuple[Opened, bytes]:
    """Refuse to harm a checkpoint; else say whether the plan that everyone has still holds.

    A hello has the key of a rank's plan, the sum of its replicas' digests, and its claims of shared parts.

    Raises ExistsError if a checkpoint is there, and may not be overwritten. Raises InputError if no rank has a state.
    """
    if target.permit is not None:
        await target.permit.begin()
    old_version = await target.backend.version(METADATA_KEY)
    if old_version is not None and not target.options.overwrite:
        raise ExistsError(
            f"{target.path} holds a committed checkpoint; pass overwrite=True to replace it, or save elsewhere"
        )
    shared = [hello[HELLO_BYTES:] for hello in hellos]
    if all_have_nothing(shared):
        raise nothing_in(len(hellos))
    check_shared(shared)
    policy = target.options.retries
    old = Committed() if old_version is None else await read_committed(target.backend, policy)
    key = hellos[0][:DIGEST_BYTES]
    layout = _layouts.get(key) or b""
    cached = bool(layout) and all(hello[:DIGEST_BYTES] == key for hello in hellos)
    differs = cached and target.compares and not balanced([hello[DIGEST_BYTES:HELLO_BYTES] for hello in hellos])
    opening = Opening(secrets.token_hex(8), cached, old_version, target.trace, target.compares, differs)
    return Opened(target, framework, opening, layout, old), opening.encode()


@dataclass(frozen=True, slots=True)
class Opened:
    """The save has an id, and harms no checkpoint."""

    target: Target  # the destination
    framework: str  # name of the planner on rank 0
    opening: Opening  # the answer to all ranks
    layout: bytes  # encoded layout of the plan that rank 0 has already; empty for none
    old: Committed  # the metadata that the save is to replace

    async def survey(self, hellos: Sequence[bytes]) -> tuple[Surveyed, bytes]:
        """Group ranks with equal tables, and ask one rank of each group for its table."""
        find = partial(survey_tables, balance=self.target.options.balance, block_bytes=BLOCK_BYTES)
        survey = await in_thread_gc_paused(find, hellos)
        return Surveyed(self, survey), survey.encode()


@dataclass(frozen=True, slots=True)
class Surveyed:
    """Rank 0 knows which ranks hold equal tables."""

    opened: Opened  # the step before
    survey: Survey  # the groups of ranks with equal tables

    def divide(self, messages: Sequence[bytes]) -> tuple[Planned, Sequence[bytes]]:
        """Plan the save: dedup, balance, offsets, exact cover."""
        target = self.opened.target
        balance, names = target.options.balance, target.names
        division = divide_save(self.survey, messages, balance=balance, block_bytes=BLOCK_BYTES, names=names)
        layout = encode_layout(division.layout)
        _layouts.put(self.survey.key, layout)
        return Planned(self.opened, layout), encode_shares(division)


@dataclass(frozen=True, slots=True)
class Planned:
    """Every rank knows its writes."""

    opened: Opened  # the first step
    layout: bytes  # the unchanging part of the metadata, encoded
    base: Base | None = None  # the earlier checkpoint to which the save may refer

    async def find_base(self, messages: Sequence[bytes]) -> tuple[Planned, bytes]:
        """Choose the earlier checkpoint to which the save may refer, if there is any."""
        earlier = self.opened.target.earlier
        if earlier is None:
            return self, b""
        base = await find_base(earlier, self.layout, EqualBlocks.decode_all(messages))
        return replace(self, base=base), b"" if base is None else base.encode()

    async def compare(self, sums: Sequence[bytes]) -> tuple[None, bytes]:
        """Say whether the replicas of all ranks are equal; ``sums`` are those of their digests."""
        return None, EQUAL if balanced(sums) else b"differ"

    async def find_differing(self, messages: Sequence[bytes]) -> tuple[None, bytes]:
        """Name the tensors and values whose replicas differ.

        Raises StateError if the save is to be refused then.
        """
        target = self.opened.target
        layout = await in_thread_gc_paused(decode_layout, self.layout)
        refuse = target.options.replicas == "error"
        find = partial(find_differing, layout=layout, path=target.path, refuse=refuse)
        return None, (await in_thread_gc_paused(find, messages)).encode()

    async def commit(self, undo: CleanUp, messages: Sequence[bytes]) -> tuple[Done, bytes]:
        """Write the metadata, last of all: from here on the checkpoint exists (paper sec. 5.2, integrity check).

        Files of other saves are listed before and deleted after. A listed save began before this commit, so it found
        other metadata than this save's and cannot commit any more. A save that begins later loses nothing. All ranks
        have written their files by then. An upload of this save that is still open is unknown to its rank: the answer
        to its beginning was lost.

        Raises:
            ExistsError: another job has committed here since the save began.
            StorageError: files of this save are missing, or storage failed.
        """
        committing = await self.check(messages)
        done = await committing.put(undo)
        await done.sweep()
        return done, b""

    async def check(self, messages: Sequence[bytes]) -> Committing:
        """List all objects, once; among them has to be every file that a rank says it has written."""
        target, opening = self.opened.target, self.opened.opening
        written = await in_thread_gc_paused(decode_written, messages)
        listed = await target.backend.list()
        try:
            encoded = bool(target.options.codecs)
            await check_written(target.backend, target.path, written, listed, opening.operation, encoded=encoded)
        except StorageError as error:
            await check_not_replaced(target.backend, target.path, opening.operation, opening.version, error)
            raise
        return Committing(self, written, listed, await self._unfinished())

    async def _unfinished(self) -> Sequence[Unfinished]:
        target, operation = self.opened.target, self.opened.opening.operation
        try:
            return await target.backend.unfinished() if isinstance(target.backend, Sweeper) else []
        except StorageError as error:  # nothing is swept then; the commit needs none of it
            log.warning("unfinished files were not listed", path=target.path, operation=operation, error=repr(error))
            return []


@dataclass(frozen=True, slots=True)
class Committing:
    """All files of the save are in storage."""

    planned: Planned  # the step before
    written: Sequence[Written]  # the receipt and the files of every rank
    listed: Sequence[ObjectInfo]  # all objects under the path, those of other saves included
    unfinished: Sequence[Unfinished]  # uploads under the path that nobody has finished

    async def put(self, undo: CleanUp) -> Done:
        """Put the metadata, if they are still the ones that this save found.

        Only a read tells who has committed if storage does not say that it has carried the request out.
        """
        opened = self.planned.opened
        target, opening = opened.target, opened.opening
        if target.permit is not None:
            await target.permit.commit()
        if target.earlier is not None and (gone := await target.earlier.gone(self._refers())):
            raise StorageError(f"{gone}. Nothing is committed; the next save stores everything")
        undo.send(opened.old.operation)
        data = encode_metadata(self.planned.layout, self._record())
        try:
            version = await target.backend.put_if(METADATA_KEY, data, opening.version)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the request may have been carried out
            version = await undo.settle(target.backend, opening.version, error)
        if version is None:
            version = await undo.settle(target.backend, opening.version)
        await self._check_place(version)
        await self._check_bases(version)
        all_nbytes = await in_thread_gc_paused(data_nbytes, self.written)
        return Done(self, all_nbytes)

    def _record(self) -> Commit:
        opened = self.planned.opened
        options = opened.target.options
        return Commit(
            operation=opened.opening.operation,
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
            framework=opened.framework,
            codecs=tuple(codec.name for codec in options.codecs),
            part_bytes=options.part_bytes,
            version=__version__,
            receipts=b"".join(written.digest for written in self.written),
            metrics={name: value for name, value in opened.target.metrics.items() if math.isfinite(value)},
            user=options.metadata,
            refers=self._refers(),
            since_full=self.planned.base.since_full if self._refers() and self.planned.base is not None else 0,
        )

    def _refers(self) -> tuple[int, ...]:
        """Return the steps to which the files of any rank refer.

        Packed files that lack nothing refer to none. The base stands for them: readers have to know their form.
        """
        steps = {step for written in self.written for step in written.refers}
        if self.planned.base is not None and any(written.packed for written in self.written):
            steps = steps or {self.planned.base.step}
        return tuple(sorted(steps))

    async def _check_bases(self, version: Version) -> None:
        """Take the commit back if a checkpoint to which it refers has gone meanwhile.

        Whoever deletes a checkpoint first withdraws or replaces its metadata, and then looks for commits that refer to
        it. So one of the two sees the other.
        """
        opened = self.planned.opened
        target, operation = opened.target, opened.opening.operation
        if target.earlier is None:
            return
        try:
            gone = await target.earlier.gone(self._refers())
        except StorageError as error:  # storage has carried the commit out before
            log.warning("bases were not looked at again", path=target.path, operation=operation, error=repr(error))
            return
        if gone and not await put_back(target.backend, opened.old, version):
            raise StorageError(f"{gone}. The commit was taken back; the next save stores everything")

    async def _check_place(self, version: Version) -> None:
        """Check that the metadata was put beside the data: somebody may have moved the directory away meanwhile."""
        opened = self.planned.opened
        target, operation = opened.target, opened.opening.operation
        try:
            is_there = await self._finds_receipt()
        except StorageError as error:  # storage has carried the commit out before
            log.warning("a commit was not looked at again", path=target.path, operation=operation, error=repr(error))
            return
        if is_there or await put_back(target.backend, opened.old, version):
            return
        raise StorageError(
            f"{target.path}: the files of operation {operation} disappeared during its commit; it is not "
            "committed there. The directory was deleted or moved away: save again"
        )

    async def _finds_receipt(self) -> bool:
        """Return whether the receipt of rank 0 is there; a store that does not find it is asked again."""
        opened = self.planned.opened
        backend, key = opened.target.backend, receipt_key(0, opened.opening.operation)
        for number in range(TRIES):
            await pause(opened.target.options.retries, number)
            try:
                await backend.get(key)
            except FileNotFoundError:
                if await backend.list(key):
                    return True
            else:
                return True
        return False


@dataclass(frozen=True, slots=True)
class Done:
    """The checkpoint exists."""

    committing: Committing  # the step before
    all_nbytes: int  # bytes that all ranks wrote into data files

    async def sweep(self) -> None:
        """Delete the files of the replaced checkpoint and of saves that cannot commit any more."""
        opened = self.committing.planned.opened
        target, operation = opened.target, opened.opening.operation
        listed, unfinished = self.committing.listed, self.committing.unfinished
        left = [upload for upload in unfinished if _is_of_a_save(upload.key) or upload.key == METADATA_KEY]
        left += [upload for upload in unfinished if upload.key.startswith(TELEMETRY)]
        stale = [info.key for info in listed if _is_of_a_save(info.key) and operation_of(info.key) != operation]
        keys = stale + outdated(listed)
        if keys or left:
            with swept(target.path, operation):
                policy = target.options.retries
                is_needed = None if target.permit is None else False  # a run keeps such steps, and saves beside them
                await delete_unnamed(
                    target.backend,
                    keys,
                    by=operation,
                    unfinished=left,
                    policy=policy,
                    beside=target.beside,
                    is_needed=is_needed,
                )


def _is_of_a_save(key: str) -> bool:
    return operation_of(key) is not None and key.count("/") == 1


async def commit_save(
    agreement: Agreement, planned: Planned | None, rank: int, written: bytes, undo: CleanUp
) -> int | None:
    """Commit the save once every rank has told, by :func:`encode_written`, that its files are durable.

    ``planned`` is rank 0's step, and None on other ranks. ``undo`` is told that the files may belong to a checkpoint.
    Returns on rank 0 the bytes that all ranks wrote into data files; None on other ranks.
    """
    commit = None if planned is None else partial(planned.commit, undo)
    _, done = await broadcast_step(agreement, "commit", rank, written, commit)
    return None if done is None else done.all_nbytes
