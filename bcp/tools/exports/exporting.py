"""The course of an export: open, plan, agree, write files in turn, and the index last."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypedDict

import anyio

from bcp._agree import capture_error, collective_operation, gather_broadcast, no_answer, refuse_on_all_ranks
from bcp._messages.planning import FileNames
from bcp._plain import plain
from bcp.backends.place import Path
from bcp.coordinators import coordinator as coordinator_for
from bcp.errors import BcpError, InputError
from bcp.format.container import digest
from bcp.options import LoadOptions, timeout_of
from bcp.protocols import REFUSED, Agreement, Coordinator
from bcp.read.checkpoint import AsyncCheckpoint, Checkpoint
from bcp.read.facts import check_nbytes
from bcp.read.replaced import say_if_replaced
from bcp.runtime import bridge as _bridge
from bcp.stages.load import require_codecs
from bcp.tools.calls import Progress, called, ignore_progress
from bcp.tools.exports.last_files import LastFiles, SmallFiles, no_files, say_what_is_left
from bcp.tools.exports.result import ExportResult
from bcp.tools.exports.streamed import Elements, Fixed, TargetFile
from bcp.tools.exports.target import Target
from bcp.tools.exports.writing import write_file

__all__ = ["ExportKeywords", "Format", "Plan", "Source", "arun", "run"]

BUDGET_BYTES = 256 << 20

Source = Path | Checkpoint | AsyncCheckpoint
"""A path, a URL or a backend as for :class:`bcp.Checkpoint`, or an open checkpoint."""


class ExportKeywords(TypedDict, total=False):
    """Keywords that all exports take.

    Attributes:
        role: the role of the checkpoint below the path, if it was saved with one.
        overwrite: replace older files of the same kind in the target. False by default. Older files with tensors are
            deleted from a folder before the first new file is written. Small files beside them, such as
            ``config.json``, are replaced at the end, and come back after a failure. A single file is replaced at the
            end.
        budget_bytes: memory for data on the way; 256 MiB by default. Tensors may be larger. A checkpoint with codecs
            takes one encoded part at least.
        progress: called with the bytes that this rank has written and those that it is going to write, on the event
            loop: by :func:`print` or a progress bar, for instance.
        options: how to read the checkpoint, as for :class:`bcp.Checkpoint`.
        storage_options: for the file system of the checkpoint's URL, and of the folder ``like`` of an export to Hugging
            Face.
        target_options: for the file system of the target's URL.
        coordinator: of several ranks that share the work, as for :func:`bcp.save`. Rank r of n writes every n-th file,
            and rank 0 the index. None: the ranks of this job.
    """

    role: str | None
    overwrite: bool
    budget_bytes: int
    progress: Progress | None
    options: LoadOptions | None
    storage_options: Mapping[str, Any] | None
    target_options: Mapping[str, Any] | None
    coordinator: Coordinator | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The files of an export.

    Attributes:
        files: files with tensors, which ranks write in turn.
        tensors: how many tensors the files have.
        last: makes small files with their names. Rank 0 alone calls it, and writes these files in this order once all
            others are there.
    """

    files: Sequence[TargetFile]
    tensors: int
    last: Callable[[], Awaitable[SmallFiles]] = no_files

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the files with tensors."""
        return tuple(file.key for file in self.files)

    def message(self, operation: str) -> bytes:
        """Return a digest of all facts that ranks must share: the operation of the checkpoint, and every piece.

        The small files are left out: rank 0 alone makes them.
        """
        facts: list[object] = [operation, self.keys]
        for piece in chain.from_iterable(file.pieces for file in self.files):
            if isinstance(piece, Fixed):
                facts.append(digest(piece.data))
            else:  # the bytes of a sealed piece follow from the elements
                facts.append(piece if isinstance(piece, Elements) else piece.nbytes)
        return digest(repr(facts).encode())


PlanOf = Callable[[AsyncCheckpoint], Awaitable[Plan]]


@dataclass(frozen=True, slots=True)
class Format:
    """A format with the arguments of one export to it.

    Attributes:
        name: of the format, for messages.
        target: opens the target.
        plan: lays out the files, once the checkpoint is open.
    """

    name: str
    target: Callable[[], Target]
    plan: PlanOf


@dataclass(frozen=True, slots=True)
class _Export:
    """An export that has its place among the operations of all ranks."""

    name: str  # names the call in messages
    begin: Callable[[], Awaitable[ExportResult]]


@dataclass(frozen=True, slots=True)
class _Job:
    """The checked arguments of an export."""

    name: str
    source: AsyncCheckpoint
    is_mine: bool  # the checkpoint was opened for this export
    target: Target
    plan: PlanOf
    overwrite: bool
    budget_bytes: int
    progress: Progress
    rank: int
    world_size: int
    timeout: float
    began: float = field(default_factory=time.monotonic)


def _prepare(source: Source, form: Format, keywords: ExportKeywords, *, is_async: bool) -> _Export:
    """Check the arguments of an export, and take this rank's place. Raises only if other ranks cannot be told.

    ``is_async``: the caller is a coroutine, so that it may pass an AsyncCheckpoint.
    """
    _check_names(keywords)
    ranks, options = coordinator_for(keywords.get("coordinator")), keywords.get("options")
    try:
        job = _checked(source, form, keywords, ranks, is_async=is_async)
    except Exception as error:  # noqa: BLE001 -- raised again once the other ranks were told
        return _refused(form.name, ranks, timeout_of(options), error)
    operation = ranks.begin(f"{job.name} with world_size={ranks.world_size}", job.timeout)
    return _Export(job.name, lambda: _export(job, operation))


def _refused(name: str, ranks: Coordinator, timeout: float, error: Exception) -> _Export:
    """Take this rank's place only to tell the other ranks of an error, and to raise it."""
    operation, errors = ranks.begin(REFUSED, timeout), [error]
    return _Export(f"export to {name}", lambda: refuse_on_all_ranks(operation, "plan", ranks.rank, errors.pop()))


def _check_names(keywords: ExportKeywords) -> None:
    unknown = sorted(set(keywords) - set(ExportKeywords.__annotations__))
    if unknown:
        raise TypeError(
            f"an export has no keyword {unknown[0]!r}; it takes {', '.join(ExportKeywords.__annotations__)}"
        )


def _checked(source: Source, form: Format, keywords: ExportKeywords, ranks: Coordinator, *, is_async: bool) -> _Job:
    """Check the arguments."""
    budget_bytes, progress = keywords.get("budget_bytes", BUDGET_BYTES), keywords.get("progress")
    check_nbytes("budget_bytes", budget_bytes)
    if progress is not None and not callable(progress):
        raise InputError(f"progress={progress!r} cannot be called; pass a function of two numbers of bytes")
    role, options = keywords.get("role"), keywords.get("options")
    is_open = isinstance(source, Checkpoint | AsyncCheckpoint)
    if is_open and (role is not None or options is not None):
        raise InputError("role= and options= are for a path; an open checkpoint has its own: leave them out")
    if isinstance(source, AsyncCheckpoint) and not is_async:
        raise InputError(
            "an AsyncCheckpoint belongs to its event loop; pass a bcp.Checkpoint, or await the function whose name "
            "begins with 'a'"
        )
    checkpoint = _opened_already(source)
    if checkpoint is None:
        storage_options = keywords.get("storage_options")
        checkpoint = AsyncCheckpoint(source, role=role, options=options, storage_options=storage_options)  # type: ignore[arg-type]  # a path
    target = form.target()
    return _Job(
        name=f"export of {checkpoint.path} to {form.name} {target.path}",
        source=checkpoint,
        is_mine=not is_open,
        target=target,
        plan=form.plan,
        overwrite=bool(keywords.get("overwrite", False)),
        budget_bytes=budget_bytes,
        progress=progress or ignore_progress,
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timeout_of(options),
    )


def _opened_already(source: Source) -> AsyncCheckpoint | None:
    """Return the asynchronous twin of an open checkpoint; None for a path."""
    if isinstance(source, Checkpoint):
        return source._inner  # noqa: SLF001 -- an export reads by the same door
    return source if isinstance(source, AsyncCheckpoint) else None


# -- the course --------------------------------------------------------------------------------------


async def _export(job: _Job, operation: AbstractAsyncContextManager[Agreement]) -> ExportResult:
    """Export on this rank."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(job.target.opened)
        if job.is_mine:
            stack.push_async_callback(job.source.aclose)
        agreement = await stack.enter_async_context(collective_operation(operation))
        plan, last = await _agreed_plan(job, agreement)
        await _write_all(job, plan, last, agreement)
    nbytes = sum(file.data_nbytes for file in plan.files)
    files = (*plan.keys, *last.names)
    return ExportResult(job.target.path, files, plan.tensors, nbytes, time.monotonic() - job.began)


async def _agreed_plan(job: _Job, agreement: Agreement) -> tuple[Plan, LastFiles]:
    """Lay out the files, the same on all ranks; rank 0 makes room for them. Nothing was written if this raises."""
    planned = await capture_error(_planned(job))

    async def make_room(messages: Sequence[bytes]) -> bytes:
        if len(set(messages)) > 1:
            rank = next(rank for rank, message in enumerate(messages) if message != messages[0])
            raise InputError(
                f"{job.name}: rank {rank} has planned other files than rank 0; pass the same arguments on all ranks, "
                "and export a checkpoint that no save replaces meanwhile"
            )
        names: list[str] = []
        if isinstance(planned, _Planned):
            names = [name for name, _ in planned.last]
            keys = frozenset((*planned.plan.keys, *names))
            await job.target.make_room(keys, job.source.source, overwrite=job.overwrite)
        return FileNames(names).encode()

    own_message = planned.message if isinstance(planned, _Planned) else planned
    answer = await gather_broadcast(agreement, "plan", job.rank, own_message, make_room)
    if not isinstance(planned, _Planned):
        raise planned  # all ranks know of it, so that the line above has raised it already
    names = FileNames.decode(answer, sender=0).names
    return planned.plan, LastFiles(job.target.backend, names, planned.last, may_replace=job.overwrite)


@dataclass(frozen=True, slots=True)
class _Planned:
    """The files that this rank has laid out."""

    plan: Plan
    message: bytes  # equal on all ranks
    last: SmallFiles  # none but on rank 0


async def _planned(job: _Job) -> _Planned:
    """Open the checkpoint, and lay out the files."""
    await job.source.open()
    commit = job.source.metadata.commit
    require_codecs(commit.codecs, job.source.source.options.codecs)
    plan = await job.plan(job.source)
    return _Planned(plan, plan.message(commit.operation), () if job.rank else await plan.last())


async def _write_all(job: _Job, plan: Plan, last: LastFiles, agreement: Agreement) -> None:
    """Write this rank's files; once all ranks have theirs, rank 0 writes the last ones.

    After a failure, a rank deletes the files that it has begun, unless rank 0 may have written the last ones already.
    Rank 0 deletes those of all ranks: a rank that has died deletes none. A single file is left alone. It appears whole,
    in place of an older one, and the other ranks have no part in it.
    """
    begun: list[str] = []
    try:
        failure = await capture_error(_write(job, plan.files[job.rank :: job.world_size], begun))
        await gather_broadcast(agreement, "done", job.rank, b"" if failure is None else failure, no_answer)
        if job.rank:
            begun.clear()  # from here on rank 0 answers for them
        await gather_broadcast(agreement, "finish", job.rank, b"", last.write)
    except BaseException as error:
        if not job.target.is_file and not last.are_there:
            with anyio.CancelScope(shield=True):
                with say_what_is_left(error, job.target.path):
                    await job.target.backend.delete(begun if job.rank else plan.keys)
                with say_what_is_left(error, job.target.path):
                    await last.undo()
        raise


async def _write(job: _Job, files: Sequence[TargetFile], begun: list[str]) -> None:
    """Write files, one after the other; note the key of each before it can be there."""
    done, total = 0, sum(file.data_nbytes for file in files)

    def told(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        job.progress(done, total)

    source = job.source.source
    async with say_if_replaced(source):
        for file in files:
            begun.append(file.key)
            await write_file(source, job.target.backend, file, job.budget_bytes, told)


# -- the two ways to call it ---------------------------------------------------------------------------


def run(source: Source, form: Format, keywords: ExportKeywords) -> ExportResult:
    """Export a checkpoint on bcp's own event loop; block meanwhile."""
    export = _prepare(source, form, keywords, is_async=False)
    return called(export.begin, export.name)


async def arun(source: Source, form: Format, keywords: ExportKeywords) -> ExportResult:
    """Export from a coroutine: on bcp's own event loop, or on the caller's loop for the caller's AsyncCheckpoint."""
    export = _prepare(source, form, keywords, is_async=True)
    try:
        if isinstance(source, AsyncCheckpoint):
            return await export.begin()
        exporting = _bridge.start(lambda _: export.begin(), name=export.name)
        await exporting.astarted()  # until its end: a cancellation ends the export, too
        return await exporting
    except BcpError as error:
        raise plain(error) from error.__cause__
