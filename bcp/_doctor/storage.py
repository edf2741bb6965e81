"""The check of storage: every rank writes a file, and every host looks for the files of the others.

The files are in a folder of their own, whose name no checkpoint has, and are gone at the end. Calls of a file system
whose server is gone may hang in the kernel. They run on a thread that the doctor can leave behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio

from bcp._doctor.dial import reason_of
from bcp._doctor.meeting import Meeting
from bcp._doctor.report import Report, Times, in_words, left, while_short
from bcp._messages.doctor import Finding, Trial
from bcp.backends import LocalBackend, child, resolve
from bcp.errors import BcpError
from bcp.protocols import Backend
from bcp.runtime.event_loop import Loop
from bcp.runtime.threads import in_thread

__all__ = ["TrialFolder", "aside", "shelf_at", "tidied", "try_out"]

T = TypeVar("T")

_loops: list[Loop] = []


async def aside(work: Coroutine[Any, Any, T], seconds: float) -> T:
    """Run a coroutine in an event loop on another thread; return its result.

    Work that does not end is left alone: its thread ends with the process, by :func:`bcp.runtime.process.leave`.

    Raises:
        TimeoutError: the work takes longer.

    """
    if not _loops:
        _loops.append(Loop())
    future = asyncio.run_coroutine_threadsafe(work, _loops[0].asyncio_loop)
    with anyio.fail_after(seconds):
        return await asyncio.wrap_future(future)


_AT_ONCE = 16  # files that are being read
_MOST_HOSTS = 64  # whose files one host looks for
_TIDY_SECONDS = 1.0  # at least, for the removal of a file
_SHARED = "give a path that is the same file system on all hosts, and mounted on all of them"
_WRITABLE = "give a path that all ranks may write to, or mend this one"


@dataclass(frozen=True, slots=True)
class TrialFolder:
    """The folder for the files.

    Attributes:
        path: the path that the user has given.
        backend: of the path, or of the folder above it that was there before.
    """

    path: str
    backend: Backend

    def key(self, session: str, rank: int) -> str:
        """Return the key of a rank's file."""
        return f".bcp-doctor-{session}/{rank}"

    def content(self, session: str, rank: int) -> bytes:
        """Return the content of a rank's file."""
        return f"bcp doctor {session} rank {rank}; may be deleted\n".encode()


async def shelf_at(path: str, seconds: float) -> TrialFolder:
    """Return the folder for the files. A path that does not exist will not exist in the end either.

    Raises:
        InputError: there is no storage backend for the path.
        TimeoutError: the file system hangs.

    """
    backend = resolve(path)
    return TrialFolder(
        path, await aside(in_thread(_from_above, backend), seconds) if isinstance(backend, LocalBackend) else backend
    )


def _from_above(backend: LocalBackend) -> Backend:
    """Return a backend whose root exists, so that it removes all folders that it makes. Blocks."""
    for folder in (backend.root, *backend.root.parents):
        if folder.exists():
            below = backend.root.relative_to(folder).as_posix()
            return backend if folder == backend.root else child(LocalBackend(folder), below)
    return backend


async def try_out(shelf: TrialFolder, meeting: Meeting, times: Times, report: Report) -> None:
    """Write this rank's file, look for those of other hosts if this rank leads one, and remove it."""
    rank, session = meeting.place.rank, meeting.session
    put = shelf.backend.put(shelf.key(session, rank), shelf.content(session, rank))
    try:
        wrote = await _done(put, left(times.shown), "write to", shelf, report)
        if meeting.leads:
            await _look(shelf, meeting, times, report, wrote=wrote)
    finally:
        with anyio.CancelScope(shield=True):
            # bcp/_deletion.py need not be asked: the doctor's own files are named by no metadata
            delete = shelf.backend.delete([shelf.key(session, rank)])
            await _done(delete, max(_TIDY_SECONDS, left(times.examined)), "delete its file in", shelf, report)


async def tidied(shelf: TrialFolder, meeting: Meeting, ranks: Sequence[int], seconds: float) -> None:
    """Remove the files of ranks that can no longer do so themselves."""
    with suppress(TimeoutError, BcpError):
        await aside(shelf.backend.delete([shelf.key(meeting.session, rank) for rank in ranks]), seconds)


async def _done(work: Coroutine[Any, Any, None], seconds: float, verb: str, shelf: TrialFolder, report: Report) -> bool:
    """Wait for one piece of work; add a finding and return False if it fails."""
    try:
        await aside(work, seconds)
    except TimeoutError:
        cause = f"no answer within {seconds:.1f} s"
    except Exception as error:  # noqa: BLE001 -- a backend of others may raise anything
        cause = _reason(error)
    else:
        return True
    report.add(Finding("storage", f"cannot {verb} {shelf.path}: {cause}", _WRITABLE))
    return False


def _reason(error: Exception) -> str:
    return reason_of(error) if isinstance(error, OSError) and error.errno else str(error)


# -- the files of other hosts -----------------------------------------------------------------


async def _look(shelf: TrialFolder, meeting: Meeting, times: Times, report: Report, *, wrote: bool) -> None:
    """Look for other hosts' files; return once no other host looks for this one's."""
    await meeting.board.post(times.shown, meeting.place.rank, Trial(wrote))
    written = await meeting.board.posted(times.shown, Trial, _others(meeting))
    leaders = [leader for leader, trial in written.items() if trial.wrote]
    names = dict(zip(meeting.leaders, meeting.names, strict=True))
    if silent := [names[leader] for leader in _others(meeting) if leader not in written]:
        text = f"has not heard in time whether {in_words('host', silent)} could write to {shelf.path}"
        report.add(Finding("storage", text, _WRITABLE, of_host=True))
    try:
        unseen, broken = await aside(_missed(shelf, meeting.session, leaders), left(times.looked))
    except TimeoutError:
        report.add(Finding("storage", f"cannot read in {shelf.path}: no answer", _WRITABLE, of_host=True))
    else:
        if unseen:
            files = f"the files of {while_short([names[leader] for leader in sorted(unseen)])}"
            report.add(Finding("storage", f"cannot see {files}: {shelf.path} is not shared", _SHARED, of_host=True))
        for leader, cause in broken.items():
            text = f"cannot read the file of {names[leader]} in {shelf.path}: {cause}"
            report.add(Finding("storage", text, _WRITABLE, of_host=True))
    await meeting.board.count(times.looked, "read")
    await meeting.board.counted(times.looked, "read", len(meeting.leaders))


def _others(meeting: Meeting) -> list[int]:
    """Return the leaders of the hosts whose files this one looks for: the first host, and the next ones in turn."""
    after = meeting.own_index + 1
    turn = [*meeting.leaders[after:], *meeting.leaders[: meeting.own_index]][:_MOST_HOSTS]
    return list(dict.fromkeys([*turn, *meeting.leaders[: min(1, meeting.own_index)]]))


async def _missed(shelf: TrialFolder, session: str, leaders: Sequence[int]) -> tuple[list[int], dict[int, str]]:
    """Read the files of leaders; return the leaders without a file, and the errors of the others."""
    unseen, broken = list[int](), dict[int, str]()

    async def read(waiting: Iterator[int]) -> None:
        for leader in waiting:
            try:
                content = bytes(await shelf.backend.get(shelf.key(session, leader)))
            except FileNotFoundError:
                unseen.append(leader)
            except Exception as error:  # noqa: BLE001 -- as above
                broken[leader] = _reason(error)
            else:
                if content != shelf.content(session, leader):
                    broken[leader] = f"it has {len(content)} bytes that are not those that were written"

    waiting = iter(leaders)
    async with anyio.create_task_group() as group:
        for _ in range(_AT_ONCE):
            group.start_soon(read, waiting)
    return unseen, broken
