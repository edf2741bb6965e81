"""The ranks meet in the job's store: they call the roll, and learn who leads which host."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

import anyio

from bcp._doctor.board import Board
from bcp._doctor.place import Place
from bcp._doctor.report import Finding, FoundError
from bcp._doctor.store import opened_store, store_help
from bcp._doctor.times import Times, left
from bcp._doctor.words import in_words, ranks_in_words
from bcp.coordinators.hello import Abort
from bcp.coordinators.hosts import Host
from bcp.coordinators.roll import Roll
from bcp.coordinators.store_client import StoreClient
from bcp.errors import PeerError

__all__ = ["Meeting", "ToldError", "met"]

_PREFIX = "bcp-doctor"
_LAST_WORD_SECONDS = 0.5  # that rank 0 stays so that others hear why it ends, for up to 1,000 ranks
_CHECKS = 3  # calls of the store, of which the quickest counts


class ToldError(Exception):
    """Rank 0 has said that it ends, and why; it has told the user, too."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """The job, once all ranks are there.

    Attributes:
        place: this rank's.
        board: keys that only this session has.
        roll: knows this host's address.
        session: a number that only this session has.
        leaders: the lowest rank of each host, in order; on a rank that leads none, that of its own host alone.
        names: of the leaders' hosts, all different.
        host_of: the index of every rank's host; known on rank 0 alone.
        seconds: how long the ranks took to meet.
        store_seconds: how long the store takes to answer.
    """

    place: Place
    board: Board
    roll: Roll = field(repr=False)
    session: str
    leaders: list[int]
    names: list[str]
    host_of: tuple[int, ...]
    seconds: float
    store_seconds: float

    @property
    def leads(self) -> bool:
        """Whether this rank leads its host."""
        return self.place.rank in self.leaders

    @property
    def mine(self) -> int:
        """Return the index of this rank's host."""
        return self.leaders.index(self.place.rank) if self.leads else 0


async def met(place: Place, times: Times) -> Meeting:
    """Meet all ranks.

    Raises:
        FoundError: the store cannot be reached, or ranks are missing.
        ToldError: rank 0 has told that this is so.

    """
    began = time.monotonic()
    client = StoreClient(await opened_store(place, times))
    host_of: list[int] = []
    roll = Roll(client, _PREFIX, place.rank, place.world_size, texts=partial(_seats, host_of))
    answer = None
    try:
        with anyio.move_on_after(left(times.met)):
            answer = await roll.answered(_told)
        if answer is None:
            await _miss(place, times, client, roll)
        leaders, names = json.loads(answer.text)
        seconds = time.monotonic() - began
        times.meet()
        board = Board(client, roll.key(), place.world_size)
        store_seconds = await board.call(times.shown, partial(_answers_within, client))
    except PeerError as error:
        raise FoundError(Finding("store", f"has lost the store: {error}", store_help(place))) from error
    return Meeting(place, board, roll, answer.session, leaders, names, tuple(host_of), seconds, store_seconds)


def _told(_number: int, abort: Abort) -> NoReturn:
    raise ToldError(abort.message)


def _answers_within(client: StoreClient) -> float:
    """Return how long the store takes to answer, at its quickest. Blocks."""
    store, seconds = client.store, list[float]()
    for _ in range(_CHECKS):
        began = time.monotonic()
        store.check([_PREFIX])
        seconds.append(time.monotonic() - began)
    return min(seconds)


async def _miss(place: Place, times: Times, client: StoreClient, roll: Roll) -> NoReturn:
    """Say who has not come; on rank 0, to all who have."""
    waited = f"within {times.meeting_seconds:.0f} s"
    do = (
        "give more --timeout if the ranks start further apart; else see what the missing ones print, and where they run"
    )
    if place.rank != 0:
        raise FoundError(
            Finding("store", f"is in the store at {place.store}, and rank 0 has not answered {waited}", do)
        )
    present = await client.call(roll.present, seconds=times.meeting_seconds / 4)
    missing = [rank for rank in range(place.world_size) if rank not in present]
    names = sorted({host.name for host in present.values()})
    came = f"{len(present)} of {place.world_size} ranks came {waited}, from {in_words('host', names)}"
    text = f"misses {ranks_in_words(missing)}: {came}" if missing else f"has heard of all ranks, but not {waited}"

    async def tell() -> None:
        with suppress(PeerError):
            await client.call(roll.tell, 0, Abort(0, text), seconds=_LAST_WORD_SECONDS)
            if place.serves:
                await anyio.sleep(_LAST_WORD_SECONDS * max(1.0, place.world_size / 1000))

    raise FoundError(Finding("store", text, do), tell)


def _seats(host_of: list[int], hosts: Sequence[Host]) -> list[str]:
    """Return on rank 0 the text for each rank: the leaders of all hosts, or of its own if it leads none."""
    first: dict[str, int] = {}
    for rank, host in enumerate(hosts):
        first.setdefault(host.identity, rank)
    leaders = list(first.values())
    index = {identity: number for number, identity in enumerate(first)}
    host_of[:] = [index[host.identity] for host in hosts]
    often = Counter(hosts[leader].name for leader in leaders)
    names = [
        hosts[leader].name if often[hosts[leader].name] == 1 else f"{hosts[leader].name}@{leader}" for leader in leaders
    ]
    of_leaders = json.dumps([leaders, names])  # once: a list of all hosts for each host is long
    of_hosts = [json.dumps([[leader], [name]]) for leader, name in zip(leaders, names, strict=True)]
    return [of_leaders if leaders[mine] == rank else of_hosts[mine] for rank, mine in enumerate(host_of)]
