"""Every host's leader dials every other one, and the ranks of a host dial their leader."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio

from bcp._doctor.dial import Door, UnreachedError, answering, knock, reason_of
from bcp._doctor.meeting import Meeting
from bcp._doctor.report import Finding, Report
from bcp._doctor.times import Times, left
from bcp._doctor.words import in_words
from bcp.coordinators.hosts import HINT, VARIABLE, interfaces, stated_address
from bcp.errors import InputError

__all__ = ["opened", "reach", "stated"]

_AT_ONCE = 64  # connections that are being made
_LONGEST_SECONDS = 5.0  # for one of them
_DO = f"let connections between the hosts pass, to all ports of net.ipv4.ip_local_port_range; {HINT}"


def stated(report: Report) -> None:
    """Check the address that the environment states; one that is wrong is put aside, so that the rest can be seen."""
    try:
        stated_address(None)
    except InputError as error:
        report.add(
            Finding("addresses", f"is told a wrong address: {error}", f"correct or unset {VARIABLE}", of_host=True)
        )
        del os.environ[VARIABLE]


@asynccontextmanager
async def opened(meeting: Meeting, times: Times, report: Report) -> AsyncIterator[None]:
    """Answer at this host's address during the block, if this rank leads the host; let the others know where."""
    async with AsyncExitStack() as stack:
        where = await _door(meeting, report, stack)
        if meeting.leads:
            await meeting.board.post(times.shown, "door", meeting.place.rank, where)
        yield


async def _door(meeting: Meeting, report: Report, stack: AsyncExitStack) -> tuple[str, int] | None:
    """Return the address and the port at which this rank answers; None if it cannot, or does not lead its host."""
    try:
        address = meeting.roll.address()
        if not meeting.leads:
            return None
        port = await stack.enter_async_context(answering(meeting.session, meeting.place.rank, address))
    except (InputError, OSError) as error:
        cause = reason_of(error) if isinstance(error, OSError) else error
        report.add(Finding("addresses", f"cannot listen: {cause}", of_host=True))
        return None
    report.address, report.interface = address, _interface(address)
    return address, port


def _interface(address: str) -> str:
    """Return the name of an address' interface, and the variable that has chosen it."""
    name = next((name for name, each in interfaces() if str(each.ip) == address), "")
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
    cards = await meeting.board.posted(times.shown, "door", names)
    if silent := [name for leader, name in names.items() if leader not in cards]:
        report.add(_broken(meeting, f"has not heard in time where {in_words('host', silent)} can be reached"))
    doors = [Door(leader, names[leader], *card) for leader, card in cards.items() if card is not None]
    doors.sort(key=lambda door: (door.rank < report.rank, door.rank))  # not all hosts dial the same one at once
    waiting = iter(doors)
    async with anyio.create_task_group() as group:
        for _ in range(_AT_ONCE):
            group.start_soon(_knock_at, waiting, meeting, times, report)
    if untried := sum(1 for _ in waiting):
        report.add(_broken(meeting, f"had no time to dial {untried} of {len(doors)} hosts"))


async def _knock_at(doors: Iterator[Door], meeting: Meeting, times: Times, report: Report) -> None:
    """Knock at one door after the other while there is time; other tasks take of them, too."""
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
