"""The examination on one rank, from its place in the job to its verdict.

Every host's leader dials every other leader, and the ranks of a host dial their leader.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import anyio

from bcp._doctor.dial import Door, UnreachedError, answering, knock, reason_of
from bcp._doctor.meeting import Meeting, RankPlace, ToldError, met
from bcp._doctor.report import FoundError, Report, Times, in_words, left
from bcp._doctor.screen import Job, ascii_only, screen, subject
from bcp._doctor.storage import TrialFolder, shelf_at, tidied, try_out
from bcp._messages.doctor import DoorSign, Finding, RankReport, WholeVerdict
from bcp.coordinators.hosts import HINT, VARIABLE, interfaces, stated_address
from bcp.errors import InputError, MessageError, PeerError

__all__ = ["examined", "reach"]

_AT_ONCE = 64  # connections that are being made
_LONGEST_SECONDS = 5.0  # for one of them
_DO = f"let connections between the hosts pass, to all ports of net.ipv4.ip_local_port_range; {HINT}"


def stated(report: Report) -> None:
    """Check the address that the environment states; unset a wrong one, so that the other checks can run."""
    try:
        stated_address(None)
    except InputError as error:
        report.add(
            Finding("addresses", f"is told a wrong address: {error}", f"correct or unset {VARIABLE}", of_host=True)
        )
        del os.environ[VARIABLE]


@asynccontextmanager
async def opened(meeting: Meeting, times: Times, report: Report) -> AsyncIterator[None]:
    """Answer at this host's address during the block, if this rank leads the host; publish the address."""
    async with AsyncExitStack() as stack:
        where = await _door(meeting, report, stack)
        if meeting.leads:
            await meeting.board.post(times.shown, meeting.place.rank, where)
        yield


async def _door(meeting: Meeting, report: Report, stack: AsyncExitStack) -> DoorSign:
    """Return the address and port at which this rank answers; empty if it cannot, or does not lead its host."""
    try:
        address = meeting.roll.address()
        if not meeting.leads:
            return DoorSign()
        port = await stack.enter_async_context(answering(meeting.session, meeting.place.rank, address))
    except (InputError, OSError) as error:
        cause = reason_of(error) if isinstance(error, OSError) else error
        report.add(Finding("addresses", f"cannot listen: {cause}", of_host=True))
        return DoorSign()
    report.address, report.interface = address, _interface(address)
    return DoorSign(address, port)


def _interface(address: str) -> str:
    """Return the name of an address' interface, and the variable that has chosen it."""
    name = next((name for name, interface in interfaces() if str(interface.ip) == address), "")
    if os.environ.get(VARIABLE):
        return f"{name}, by {VARIABLE}"
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        text = os.environ.get(variable, "")
        if name and not text.startswith("^") and name.startswith(tuple(filter(None, text.lstrip("=").split(",")))):
            return f"{name}, by {variable}"
    return name


async def reach(meeting: Meeting, times: Times, report: Report) -> None:
    """Dial the leaders of all other hosts, or the leader of this one."""
    names = {leader: name for leader, name in zip(meeting.leaders, meeting.names, strict=True) if leader != report.rank}
    cards = await meeting.board.posted(times.shown, DoorSign, names)
    if silent := [name for leader, name in names.items() if leader not in cards]:
        report.add(_broken(meeting, f"has not heard in time where {in_words('host', silent)} can be reached"))
    doors = [
        Door(leader, names[leader], card.address, card.port)
        for leader, card in cards.items()
        if card.address is not None and card.port is not None
    ]
    doors.sort(key=lambda door: (door.rank < report.rank, door.rank))  # not all hosts dial the same one at once
    waiting = iter(doors)
    async with anyio.create_task_group() as group:
        for _ in range(_AT_ONCE):
            group.start_soon(_knock_at, waiting, meeting, times, report)
    if untried := sum(1 for _ in waiting):
        report.add(_broken(meeting, f"had no time to dial {untried} of {len(doors)} hosts"))


async def _knock_at(doors: Iterator[Door], meeting: Meeting, times: Times, report: Report) -> None:
    """Knock at one door after the other while there is time; other tasks take from the same doors."""
    while left(times.looked) and (door := next(doors, None)) is not None:
        try:
            way = await knock(meeting.session, door, min(_LONGEST_SECONDS, left(times.looked)))
        except UnreachedError as error:
            report.add(_broken(meeting, str(error)))
        else:
            report.ways += 1
            report.slowest = max(report.slowest, way.seconds)
            if door.rank == 0:
                report.clock = way


def _broken(meeting: Meeting, text: str) -> Finding:
    return Finding("reach", text, _DO, of_host=meeting.leads)


async def examined(place: RankPlace, path: str | None, times: Times) -> bool:
    """Examine the job, and return whether it is healthy.

    Rank 0 prints the screen. Another rank prints its own findings only if it cannot report them to rank 0.
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
    except (PeerError, MessageError) as error:
        _lost(report, error)
        return _alone(job, report)


async def _shelf(path: str, times: Times, report: Report) -> TrialFolder | None:
    """Look at the storage path before any rank changes it."""
    try:
        return await shelf_at(path, left(times.met) / 2)
    except (TimeoutError, OSError) as error:
        cause = reason_of(error) if isinstance(error, OSError) and error.errno else "no answer"
        report.add(
            Finding("storage", f"cannot look at {path}: {cause}", "see whether its file system works on this host")
        )
        return None


async def _check(meeting: Meeting, times: Times, report: Report, shelf: TrialFolder | None) -> None:
    """Run all checks at once."""

    async def bounded(check: Awaitable[None]) -> None:
        try:
            await check
        except (PeerError, MessageError) as error:
            _lost(report, error)

    async with anyio.create_task_group() as group:
        group.start_soon(bounded, reach(meeting, times, report))
        if shelf is not None:
            group.start_soon(bounded, try_out(shelf, meeting, times, report))


async def _judge(job: Job, meeting: Meeting, times: Times, report: Report, shelf: TrialFolder | None) -> bool:
    """Gather all reports, print the screen, and send the verdict to the others."""
    ranks = range(1, job.place.world_size)
    posted, spoiled = await meeting.board.readable(times.reported, RankReport, ranks)
    for error in spoiled.values():
        _lost(report, error)
    unheard = [rank for rank in ranks if rank not in posted and rank not in spoiled]
    if shelf is not None and unheard:
        await tidied(shelf, meeting, unheard, left(times.judged) / 2)
    result = screen(job, [report, *(Report.of(posted[rank]) for rank in sorted(posted))])
    print("\n".join(result.lines), flush=True)  # noqa: T201 -- this is the program's answer
    with suppress(PeerError):
        await meeting.board.post(times.judged, 0, WholeVerdict(result.healthy, tuple(unheard)))
        await meeting.board.counted(times.judged, "gone", len(posted))  # the store may end with this process
    return result.healthy


async def _judged(meeting: Meeting, times: Times, report: Report) -> bool:
    """Report to rank 0, and return its verdict."""
    rank = meeting.place.rank
    await meeting.board.post(times.reported, rank, report.message())
    verdict = (await meeting.board.posted(times.judged, WholeVerdict, [0])).get(0)
    if verdict is None:
        report.add(Finding("store", "has no verdict of rank 0", "see what rank 0 prints"))
        return _alone(Job(meeting.place), report)
    with suppress(PeerError):
        await meeting.board.count(times.judged, "seen")
        # A launcher may end all processes, and the store, as soon as one has ended
        await meeting.board.counted(times.judged, "seen", meeting.place.world_size - 1 - len(verdict.unheard))
        await meeting.board.count(times.judged, "gone")
    if rank in verdict.unheard:
        _print_findings(report)
    return verdict.healthy


def _lost(report: Report, error: PeerError | MessageError) -> None:
    """Add the finding that the store is lost, once, or that another rank runs another bcp."""
    if isinstance(error, MessageError):
        report.add(Finding("versions", f"cannot read a message: {error}", "install the same bcp on all hosts"))
        return
    if not any(finding.check == "store" for finding in report.findings):
        do = "see whether rank 0 or torchrun's agent still runs there, and whether this host reaches it"
        report.add(Finding("store", f"has lost the store: {error}", do))


def _alone(job: Job, report: Report) -> bool:
    """Print this rank's own findings, without those of others; return False."""
    if job.place.rank:
        _print_findings(report)
    else:
        print("\n".join(screen(job, [report]).lines), flush=True)  # noqa: T201 -- this is the program's answer
    return False


def _print_findings(report: Report) -> None:
    name = subject([report.rank], [socket.gethostname()])
    for finding in report.findings:
        do = f"; {finding.do}" if finding.do else ""
        print(ascii_only(f"bcp doctor: {finding.check}: {name} {finding.text}{do}"), file=sys.stderr, flush=True)  # noqa: T201 -- same
