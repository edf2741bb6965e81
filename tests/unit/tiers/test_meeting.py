"""Ranks that are left meet at the first agent that answers, and agree on who they are."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bcp._messages.tiers import Attended, Note, Post, Posted
from bcp.agent import board as agent_board
from bcp.agent.board import Board
from bcp.agent.serve import MemoryServer
from bcp.errors import BcpError, PeerError, StorageError
from bcp.tiers.folder import NodeFolder
from bcp.tiers.meeting import Meeting, MeetingNotes, MeetingPlace, close_coordinator, meet
from bcp.tiers.recovery import Hosts

TOKEN = b"the token of this job"
WORLD = 6
LONG, SHORT = 240.0, 0.2
SECONDS = 240.0


class Job:
    """The hosts of a job, two ranks on each, with an agent for each."""

    def __init__(self, root: Path) -> None:
        self.stack = ExitStack()
        self.folders = [NodeFolder(root / f"node-{node}") for node in range(WORLD // 2)]
        for folder in self.folders:
            folder.put_token(TOKEN)
        self.servers = [self.stack.enter_context(MemoryServer(folder, "127.0.0.1")) for folder in self.folders]
        self.members = {rank: self.folders[rank // 2].join(rank) for rank in range(WORLD)}

    def die(self, *ranks: int) -> None:
        for rank in ranks:
            self.members.pop(rank).close()

    def place(self, patience: float = LONG, name: str = "life-0") -> MeetingPlace:
        addresses = tuple(f"127.0.0.1:{server.address[1]}" for server in self.servers)
        return MeetingPlace(name, Hosts(("n0", "n1", "n2"), addresses), TOKEN, patience)

    async def meet(self, rank: int, patience: float = LONG) -> Meeting:
        return await meet(self.place(patience), Attended(rank, WORLD, 7, f"n{rank // 2}"))

    def met(self, *ranks: int) -> list[Meeting]:
        async def all_of_them() -> list[Meeting]:
            return await asyncio.gather(*map(self.meet, ranks))

        return asyncio.run(all_of_them())


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    with made.stack:
        yield made
        made.die(*made.members)


@pytest.mark.parametrize("left", [(0, 1, 2, 3, 4, 5), (1, 2, 3, 4), (4, 5), (3,)])
def test_all_that_live_meet_and_agree(left: Sequence[int], job: Job) -> None:
    """They come in any order, and have a coordinator of their own then."""
    job.die(*{*range(WORLD)} - {*left})

    async def gathered(rank: int) -> tuple[Meeting, bytes]:
        meeting = await job.meet(rank)
        ranks = meeting.coordinator(rank, "127.0.0.1", None)
        assert (ranks.rank, ranks.world_size) == (left.index(rank), len(left))

        async def joined(messages: Sequence[bytes]) -> bytes:
            return b" ".join(messages)

        async with ranks.begin("a test", SECONDS) as agreement:
            told = await agreement.gather_broadcast("ranks", str(rank).encode(), joined)
        await close_coordinator(ranks)
        return meeting, told

    async def all_of_them() -> list[tuple[Meeting, bytes]]:
        return await asyncio.gather(*map(gathered, reversed(left)))

    for meeting, told in asyncio.run(all_of_them()):
        assert meeting.ranks == left
        assert meeting.absent == tuple(rank for rank in range(WORLD) if rank not in left)
        assert told == " ".join(map(str, left)).encode()


def test_the_next_agent_that_answers(job: Job) -> None:
    """The agent of the first host has gone with it, as have two ranks."""
    job.die(0, 1)
    job.servers[0].__exit__()
    assert [each.ranks for each in job.met(2, 3, 4, 5)] == [(2, 3, 4, 5)] * 4


def test_no_agent_answers(job: Job) -> None:
    for server in job.servers:
        server.__exit__()
    with pytest.raises(StorageError, match=r"no agent answers.*host n0: .*host n2: .*Start agents with --listen"):
        job.met(1)
    place = MeetingPlace("life-0", Hosts(("n0",), ("",)), TOKEN, LONG)
    with pytest.raises(StorageError, match="host n0: its agent serves no other host"):
        asyncio.run(meet(place, Attended(0, WORLD, 7, "n0")))


def test_ranks_that_live_and_do_not_come(job: Job) -> None:
    """One rank does not wait for ever; who comes later hears of it."""
    job.die(1, 2, 4, 5)
    meeting = asyncio.run(job.meet(0, SHORT))
    assert (meeting.ranks, meeting.absent) == ((0,), (1, 2, 3, 4, 5))
    with pytest.raises(BcpError, match=r"rank 3 has come too late: ranks 0 have met without it.*longer patience"):
        job.met(3)


def test_the_first_one_dies_before_it_closes_the_meeting(job: Job) -> None:
    async def come() -> None:
        await MeetingNotes(job.place()).post("came/0", Attended(0, WORLD, 7, "n0").encode())
        await job.meet(3, SHORT)

    with pytest.raises(PeerError, match=r"rank 0 \(host n0\) came first, and has not closed the meeting") as caught:
        asyncio.run(come())
    assert caught.value.rank == 0


def test_an_agent_that_begins_anew_has_forgotten_the_meeting(job: Job) -> None:
    board = MeetingNotes(job.place())

    async def restarted() -> None:
        await board.post("came/0", b"first")
        assert board.notes == {"came/0": b"first"}
        port = job.servers[0].address[1]
        job.servers[0].__exit__()
        with MemoryServer(job.folders[0], "127.0.0.1", port):
            await board.post("came/1", b"second")

    with pytest.raises(StorageError, match="has begun anew and has forgotten the survivors that had come"):
        asyncio.run(restarted())


def test_notes_come_once_and_in_order(monkeypatch: Any) -> None:
    board = Board()
    monkeypatch.setattr(agent_board, "ANSWERED", 2)
    for key, value in (("a", b"1"), ("b", b"2"), ("a", b"3"), ("c", b"4")):
        board.post(Post("life-0", 0, key, value))
    first = board.post(Post("life-0", 0))
    assert first.notes == (Note("a", b"1"), Note("b", b"2"))
    assert board.post(Post("life-0", 2)).notes == (Note("c", b"4"),)
    assert board.post(Post("life-0", 9)).notes == ()
    assert board.post(Post("life-1", 0)) == Posted(first.board, ())
    assert Board().post(Post("life-0", 0)).board != first.board


def test_a_board_has_an_end(monkeypatch: Any) -> None:
    board = Board()
    monkeypatch.setattr(agent_board, "MOST_NOTES", 2)
    for key in ("a", "b", "b"):
        board.post(Post("life-0", 0, key))
    with pytest.raises(StorageError, match="has 2 notes already"):
        board.post(Post("life-0", 0, "c"))
    for number in range(1, agent_board.MOST_MEETINGS + 1):
        board.post(Post(f"life-{number}", 0, "a"))
    assert board.post(Post("life-0", 0)).notes == (), "the oldest one has made room"
