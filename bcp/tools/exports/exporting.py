"""The course of an export: open, plan, agree, write files in turn, and the index last."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypedDict

import anyio

from bcp._messages.tools import LastNames
from bcp._plain import plain
from bcp._text import shown
from bcp.backends.place import Path
from bcp.errors import BcpError, InputError
from bcp.format.container import digest
from bcp.options import LoadOptions, timeout_of
from bcp.protocols import Coordinator
from bcp.read.checkpoint import AsyncCheckpoint, Checkpoint
from bcp.read.facts import check_nbytes
from bcp.read.replaced import say_if_replaced
from bcp.runtime import bridge as _bridge
from bcp.stages.load import require_codecs
from bcp.tools.calls import Progress, called, counting, ignore_progress, say_what_is_left
from bcp.tools.exports.last_files import LastFiles, SmallFiles, no_files
from bcp.tools.exports.result import ExportResult
from bcp.tools.exports.streamed import Elements, Fixed, TargetFile
from bcp.tools.exports.target import Target
from bcp.tools.exports.writing import write_file
from bcp.tools.sharing import Ranks, sharing

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

    @property
    def nbytes(self) -> int:
        """Bytes of the elements in all files, without headers."""
        return sum(file.data_nbytes for file in self.files)

    def digest(self) -> str:
        """Return a digest of every piece of the files with tensors, in hexadecimal digits.

        The small files are left out: rank 0 alone makes them.
        """
        facts: list[object] = [self.keys]
        for piece in chain.from_iterable(file.pieces for file in self.files):
            if isinstance(piece, Fixed):
                facts.append(digest(piece.data))
            else:  # the bytes of a sealed piece follow from the elements
                facts.append(piece if isinstance(piece, Elements) else piece.nbytes)
        return digest(repr(facts).encode()).hex()


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
    plan: Callable[[AsyncCheckpoint], Awaitable[Plan]]


@dataclass(frozen=True, slots=True)
class _Job:
    """This rank's part of an export: checked, open and laid out.

    Attributes:
        ckpt: the open checkpoint.
        target: the open target.
        plan: the files, the same on all ranks.
        last: the small files at the end; none but on rank 0.
        ranks: those that share the work.
        keywords: those of the call.
    """

    ckpt: AsyncCheckpoint
    target: Target
    plan: Plan
    last: LastFiles
    ranks: Ranks
    keywords: ExportKeywords

    def __str__(self) -> str:
        plan = self.plan
        files = f"{len(plan.files)} files with {plan.nbytes} bytes of tensors, with digest {plan.digest()}"
        overwrite = _may_overwrite(self.keywords)
        return f"{self.ckpt.path} of operation {self.ckpt.operation} to {self.target.path}, {overwrite=}, {files}"

    async def make_room(self) -> None:
        """Delete older files, if the export may replace them. Raises as :meth:`Target.make_room`; rank 0 calls it."""
        keys = frozenset((*self.plan.keys, *self.last.names))
        await self.target.make_room(keys, self.ckpt.source, overwrite=_may_overwrite(self.keywords))

    async def write_all(self) -> tuple[str, ...]:
        """Write this rank's files; once all ranks have theirs, rank 0 writes the last ones. Return the names of these.

        After a failure, a rank deletes the files that it has begun, unless rank 0 may have written the last ones
        already. Rank 0 deletes those of all ranks: a rank that has died deletes none. A single file is left alone. It
        appears whole, in place of an older one, and the other ranks have no part in it.
        """
        begun: list[str] = []
        try:
            await self._write(begun)
            names = (await self.ranks.merged(LastNames(self.last.names), lambda of_ranks: of_ranks[0])).names
            if self.ranks.rank:
                begun.clear()  # from here on rank 0 answers for them
            await self.ranks.led("finish", self.last.write)
        except BaseException as error:
            if not self.target.is_file and not self.last.are_there:
                with anyio.CancelScope(shield=True):
                    await self._undo(begun, error)
            raise
        return names

    async def _undo(self, begun: Sequence[str], error: BaseException) -> None:
        """Delete the files that this rank answers for; note in the error what fails."""
        is_first = self.ranks.rank == 0
        words = f"Files of the export may be left in {self.target.path}, and older ones may be missing"
        with say_what_is_left(error, words):
            await self.target.backend.delete(self.plan.keys if is_first else begun)
        with say_what_is_left(error, words):
            await self.last.undo()
        if is_first and self.ranks.world_size > 1:  # another rank may have died in a write
            with say_what_is_left(error, words):
                await self.target.discard(self.plan.keys)

    async def _write(self, begun: list[str]) -> None:
        """Write this rank's files, one after the other; note the key of each before it can be there."""
        files = self.ranks.share.of(self.plan.files)
        progress = self.keywords.get("progress") or ignore_progress
        told = counting(progress, sum(file.data_nbytes for file in files))
        source, budget_bytes = self.ckpt.source, self.keywords.get("budget_bytes", BUDGET_BYTES)
        async with say_if_replaced(source):
            for file in files:
                begun.append(file.key)
                await write_file(source, self.target.backend, file, budget_bytes, told)


def _may_overwrite(keywords: ExportKeywords) -> bool:
    return bool(keywords.get("overwrite", False))


async def _opened(
    source: Source, form: Format, keywords: ExportKeywords, ranks: Ranks, stack: AsyncExitStack, *, is_async: bool
) -> _Job:
    """Check the arguments, open the checkpoint and the target, and lay out the files."""
    _check(source, keywords, is_async=is_async)
    target = form.target()
    await stack.enter_async_context(target.opened)
    ckpt = source._inner if isinstance(source, Checkpoint) else source  # noqa: SLF001 -- an export reads by the same door
    if isinstance(ckpt, AsyncCheckpoint):
        await ckpt.open()
    else:
        role, options = keywords.get("role"), keywords.get("options")
        ckpt = AsyncCheckpoint(ckpt, role=role, options=options, storage_options=keywords.get("storage_options"))
        await stack.enter_async_context(ckpt)
    require_codecs(ckpt.metadata.commit.codecs, ckpt.source.options.codecs)
    plan = await form.plan(ckpt)
    files = () if ranks.rank else await plan.last()
    last = LastFiles(target.backend, files, may_replace=_may_overwrite(keywords))
    return _Job(ckpt, target, plan, last, ranks, keywords)


def _check(source: Source, keywords: ExportKeywords, *, is_async: bool) -> None:
    """Raise InputError for arguments that cannot be any. ``is_async``: the caller is a coroutine."""
    check_nbytes("budget_bytes", keywords.get("budget_bytes", BUDGET_BYTES))
    progress = keywords.get("progress")
    if progress is not None and not callable(progress):
        raise InputError(f"progress={progress!r} cannot be called; pass a function of two numbers of bytes")
    has_own = keywords.get("role") is not None or keywords.get("options") is not None
    if has_own and isinstance(source, Checkpoint | AsyncCheckpoint):
        raise InputError("role= and options= are for a path; an open checkpoint has its own: leave them out")
    if isinstance(source, AsyncCheckpoint) and not is_async:
        raise InputError(
            "an AsyncCheckpoint belongs to its event loop; pass a bcp.Checkpoint, or await the function whose name "
            "begins with 'a'"
        )


def _begin(
    source: Source, form: Format, keywords: ExportKeywords, *, is_async: bool
) -> Callable[[], Awaitable[ExportResult]]:
    """Take this rank's place among the operations of all ranks; return the export.

    Raises:
        TypeError: an export has no such keyword. Other ranks are not told.

    """
    if unknown := sorted(set(keywords) - set(ExportKeywords.__annotations__)):
        raise TypeError(
            f"an export has no keyword {unknown[0]!r}; it takes {', '.join(ExportKeywords.__annotations__)}"
        )
    began, timeout = time.monotonic(), timeout_of(keywords.get("options"))
    shared = sharing(f"export to {form.name}", keywords.get("coordinator"), timeout)

    async def export() -> ExportResult:
        async with shared as ranks, AsyncExitStack() as stack:
            job = await ranks.agreed(_opened(source, form, keywords, ranks, stack, is_async=is_async), str)
            await ranks.led("target", job.make_room)
            files = (*job.plan.keys, *await job.write_all())
        return ExportResult(job.target.path, files, job.plan.tensors, job.plan.nbytes, time.monotonic() - began)

    return export


# -- the two ways to call it ---------------------------------------------------------------------------


def run(source: Source, form: Format, keywords: ExportKeywords) -> ExportResult:
    """Export a checkpoint on bcp's own event loop; block meanwhile."""
    return called(_begin(source, form, keywords, is_async=False), _name(source, form))


async def arun(source: Source, form: Format, keywords: ExportKeywords) -> ExportResult:
    """Export from a coroutine: on bcp's own event loop, or on the caller's loop for the caller's AsyncCheckpoint."""
    export = _begin(source, form, keywords, is_async=True)
    try:
        if isinstance(source, AsyncCheckpoint):
            return await export()
        exporting = _bridge.start(lambda _: export(), name=_name(source, form))
        await exporting.astarted()  # until its end: a cancellation ends the export, too
        return await exporting
    except BcpError as error:
        raise plain(error) from error.__cause__


def _name(source: Source, form: Format) -> str:
    """Return the name of the call, for messages."""
    path = source.path if isinstance(source, Checkpoint | AsyncCheckpoint) else str(source)
    return f"export of {shown(path)} to {form.name}"
