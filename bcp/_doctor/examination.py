"""The course of an examination on one rank, from its place in the job to its verdict."""

from __future__ import annotations

import socket
import sys
from collections.abc import Awaitable
from contextlib import suppress

import anyio

from bcp._doctor.dial import reason_of
from bcp._doctor.meeting import Meeting, ToldError, met
from bcp._doctor.place import Place
from bcp._doctor.reach import opened, reach, stated
from bcp._doctor.report import Finding, FoundError, Report
from bcp._doctor.screen import Job, ascii_only, screen, subject
from bcp._doctor.storage import Shelf, shelf_at, tidied, try_out
from bcp._doctor.times import Times, left
from bcp.errors import PeerError

__all__ = ["examined"]


async def examined(place: Place, path: str | None, times: Times) -> bool:
    """Examine the job, and return whether all is well.

    Rank 0 prints the screen. Another rank prints what it has found only where rank 0 cannot be told.
    """
    report = Report(place.rank)
    shelf = None if path is None else await _shelf(path, times, report)
    stated(report)
    try:
        meeting = await met(place, times)
    except ToldError:
        return _alone(Job(place), report)
    except FoundError as error:
        report.add(error.finding)
        _alone(Job(place), report)
        if error.tell is not None:
            await error.tell()
        return False
    report.store_seconds = meeting.store_seconds
    job = Job(place, meeting.names, meeting.host_of, meeting.seconds, path)
    try:
        async with opened(meeting, times, report):
            await _check(meeting, times, report, shelf)
            if place.rank:
                return await _judged(meeting, times, report)
            return await _judge(job, meeting, times, report, shelf)
    except PeerError as error:
        _lost(report, error)
        return _alone(job, report)


async def _shelf(path: str, times: Times, report: Report) -> Shelf | None:
    """Look at the storage path before any rank changes what is there."""
    try:
        return await shelf_at(path, left(times.met) / 2)
    except (TimeoutError, OSError) as error:
        cause = reason_of(error) if isinstance(error, OSError) and error.errno else "no answer"
        report.add(
            Finding("storage", f"cannot look at {path}: {cause}", "see whether its file system works on this host")
        )
        return None


async def _check(meeting: Meeting, times: Times, report: Report, shelf: Shelf | None) -> None:
    """Make the checks, all at once."""

    async def bounded(check: Awaitable[None]) -> None:
        try:
            await check
        except PeerError as error:
            _lost(report, error)

    async with anyio.create_task_group() as group:
        group.start_soon(bounded, reach(meeting, times, report))
        if shelf is not None:
            group.start_soon(bounded, try_out(shelf, meeting, times, report))


async def _judge(job: Job, meeting: Meeting, times: Times, report: Report, shelf: Shelf | None) -> bool:
    """Gather all reports, print the screen, and tell the others."""
    ranks = range(1, job.place.world_size)
    posted = await meeting.board.posted(times.reported, "report", ranks)
    unheard = [rank for rank in ranks if rank not in posted]
    if shelf is not None and unheard:
        await tidied(shelf, meeting, unheard, left(times.judged) / 2)
    result = screen(job, [report, *(Report.of(posted[rank]) for rank in sorted(posted))])
    print("\n".join(result.lines), flush=True)  # noqa: T201 -- this is the program's answer
    with suppress(PeerError):
        await meeting.board.post(times.judged, "verdict", 0, [result.healthy, unheard])
        await meeting.board.counted(times.judged, "gone", len(posted))  # the store may end with this process
    return result.healthy


async def _judged(meeting: Meeting, times: Times, report: Report) -> bool:
    """Report to rank 0, and return its verdict."""
    rank = meeting.place.rank
    await meeting.board.post(times.reported, "report", rank, report.data())
    verdict = (await meeting.board.posted(times.judged, "verdict", [0])).get(0)
    if verdict is None:
        report.add(Finding("store", "has no verdict of rank 0", "see what rank 0 prints"))
        return _alone(Job(meeting.place), report)
    healthy, unheard = verdict
    with suppress(PeerError):
        await meeting.board.count(times.judged, "seen")
        # A launcher may end all processes, and the store, as soon as one has ended
        await meeting.board.counted(times.judged, "seen", meeting.place.world_size - 1 - len(unheard))
        await meeting.board.count(times.judged, "gone")
    if rank in unheard:
        _print_findings(report)
    return bool(healthy)


def _lost(report: Report, error: PeerError) -> None:
    """Note once that the store is gone."""
    if not any(finding.check == "store" for finding in report.findings):
        do = "see whether rank 0 or torchrun's agent still runs there, and whether this host reaches it"
        report.add(Finding("store", f"has lost the store: {error}", do))


def _alone(job: Job, report: Report) -> bool:
    """Say what this rank knows, as it cannot know of others; return that all is not well."""
    if job.place.rank:
        _print_findings(report)
    else:
        print("\n".join(screen(job, [report]).lines), flush=True)  # noqa: T201 -- this is the program's answer
    return False


def _print_findings(report: Report) -> None:
    who = subject([report.rank], [socket.gethostname()])
    for finding in report.findings:
        do = f"; {finding.do}" if finding.do else ""
        print(ascii_only(f"bcp doctor: {finding.check}: {who} {finding.text}{do}"), file=sys.stderr, flush=True)  # noqa: T201 -- same
