"""The meeting of the ranks of a job that are left when others have died: at an agent, without a process group.

Each survivor leaves a note at the first agent that answers, in the order of the hosts. The first one to come asks all
agents which ranks live, and closes the meeting when all of these have come. The notes before the closing one are the
survivors, the same for all of them. Then they make a coordinator of their own, whose addresses are notes, too.

Survivors that cannot reach each other meet apart. That does no harm: each save has files of its own, and counts only if
its shards cover all tensors.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

import anyio

from bcp._log import log
from bcp._messages.tiers import Attended, Living, Post, Posted
from bcp._sockets import Tls, proof
from bcp.coordinators.local import SoloCoordinator
from bcp.coordinators.tree.rendezvous import Invitation, KnownPlaces, Tree
from bcp.errors import BcpError, PeerError, StorageError
from bcp.protocols import Coordinator
from bcp.runtime.imports import importing
from bcp.tiers.peer import PeerMemory
from bcp.tiers.recovery import Hosts
from bcp.tiers.wire import LIVING, split_address

__all__ = ["Meeting", "MeetingNotes", "MeetingPlace", "close_coordinator", "meet"]

CAME, CLOSED, AT = "came/", "closed", "at/"
PAUSE_SECONDS = 0.1
REFUSED_SECONDS = 3.0
"""How long an agent that refuses connections is tried again: its parent may just start it anew."""

LEAST_SECONDS = 5.0
"""Of silence, after which an agent counts as gone; hosts are busy when ranks die."""

LATE = 2
"""After so many times its patience, a rank does not wait any more for the one that closes the meeting."""

FANOUT = 16


@dataclass(frozen=True, slots=True)
class MeetingPlace:
    """Facts that all survivors know before they meet.

    Attributes:
        name: of the meeting, other than those of other lives of the job.
        hosts: of the job.
        token: the job's secret.
        patience: seconds to wait for ranks that live and have not come.
    """

    name: str
    hosts: Hosts
    token: bytes
    patience: float

    def reach(self, address: str) -> PeerMemory:
        """Return an agent, which counts as gone after half of the patience."""
        return PeerMemory(split_address(address), self.token, seconds=max(self.patience / 2, LEAST_SECONDS))

    async def living(self, silent: dict[str, float]) -> set[int] | None:
        """Return the ranks that live, as the agents tell that answer; None if one may just be starting anew.

        ``silent`` gets the addresses of agents that do not answer, and since when.
        """
        ranks: set[int] = set()

        async def ask(name: str, address: str) -> None:
            agent, began = self.reach(address), time.monotonic()
            try:
                ranks.update(Living.decode(bytes(await agent.get(LIVING))).ranks)
                silent.pop(address, None)
            except (BcpError, OSError) as error:
                if address not in silent:
                    log.warning("an agent does not tell which ranks live on its host", host=name, reason=str(error))
                silent.setdefault(address, began)
            finally:
                await agent.aclose()

        async with anyio.create_task_group() as group:
            for name, address in zip(self.hosts.names, self.hosts.addresses, strict=True):
                if address and time.monotonic() - silent.get(address, math.inf) <= REFUSED_SECONDS:
                    group.start_soon(ask, name, address)
        now = time.monotonic()
        return None if any(now - since <= REFUSED_SECONDS for since in silent.values()) else ranks


class MeetingNotes:
    """The notes of one meeting, at the first agent that answers.

    Attributes:
        notes: those that are known, in the order in which they came.
    """

    def __init__(self, place: MeetingPlace) -> None:
        """Take the place; nothing is sent yet."""
        self._place, self._address, self._id = place, "", ""
        self.notes: dict[str, bytes] = {}

    async def post(self, key: str = "", value: bytes = b"") -> None:
        """Leave a note, unless its key is there, and learn of all others.

        Raises:
            StorageError: no agent answers, or the one of this meeting has gone or has begun anew.

        """
        while True:
            posted = await self._posted(Post(self._place.name, len(self.notes), key, value))
            if self._id not in ("", posted.board):
                raise StorageError(
                    f"the agent at {self._address} has begun anew and has forgotten the survivors that had come: let "
                    "all of them call save_survivors() again"
                )
            self._id = posted.board
            self.notes |= {note.key: note.value for note in posted.notes}
            if not posted.notes or key in self.notes:
                return

    async def found(self, key: str) -> bytes:
        """Wait for a note."""
        while key not in self.notes:
            await self.post()
            await anyio.sleep(PAUSE_SECONDS)
        return self.notes[key]

    async def _posted(self, post: Post) -> Posted:
        if self._address:
            return await self._asked(self._address, post)
        reasons = []
        for name, address in zip(self._place.hosts.names, self._place.hosts.addresses, strict=True):
            if not address:
                reasons.append(f"host {name}: its agent serves no other host")
                continue
            try:
                posted = await self._asked(address, post)
            except StorageError as error:
                reasons.append(f"host {name}: {error}")
            else:
                self._address = address
                return posted
        raise StorageError(
            f"no agent answers, so that survivors cannot meet: {'; '.join(reasons)}. Start agents with --listen, and "
            "let all survivors call save_survivors() again"
        )

    async def _asked(self, address: str, post: Post) -> Posted:
        """Ask an agent; one that refuses the connection is asked again for a while."""
        until = time.monotonic() + REFUSED_SECONDS
        while True:
            agent = self._place.reach(address)
            try:
                return await agent.post(post)
            except StorageError as error:
                if not isinstance(error.__cause__, ConnectionError) or time.monotonic() > until:
                    raise
            finally:
                await agent.aclose()  # an agent has few places
            await anyio.sleep(PAUSE_SECONDS)


@dataclass(frozen=True, slots=True)
class Meeting:
    """The survivors, the same for all of them.

    Attributes:
        place: where they have met.
        board: has their notes.
        came: the survivors, in the order of their ranks.
    """

    place: MeetingPlace
    board: MeetingNotes
    came: Sequence[Attended]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The survivors' ranks in the job."""
        return tuple(each.rank for each in self.came)

    @property
    def absent(self) -> tuple[int, ...]:
        """The other ranks of the job."""
        return tuple(sorted({*range(self.came[0].world_size)} - {*self.ranks}))

    def coordinator(self, rank: int, address: str, tls: Tls | None) -> Coordinator:
        """Return a coordinator of the survivors, who are ranks 0, 1, ... there.

        Args:
            rank: of this process in the job.
            address: of this host, without a port, at which the other hosts reach it.
            tls: certificates of the job; None if it has none.

        """
        if len(self.came) == 1:
            return SoloCoordinator()
        with importing:
            from bcp.coordinators.tree.coordinator import GrpcCoordinator  # noqa: PLC0415 -- imports gRPC

        number = self.ranks.index(rank)
        places = Tree.of([each.node for each in self.came], FANOUT).places()
        facts = (self.place.name, self.ranks)
        secret = proof(self.place.token, "survivors", *facts).hex()
        session = sha256(repr(facts).encode()).hexdigest()[:16]
        rendezvous = _NotedRendezvous(self.board, Invitation(places[number], secret, session), address)
        return GrpcCoordinator(number, len(self.came), rendezvous, tls)


async def meet(place: MeetingPlace, own: Attended) -> Meeting:
    """Find the other survivors. Collective among them.

    Raises:
        StorageError: no agent answers, or it has gone meanwhile.
        PeerError: the rank that came first does not close the meeting.
        BcpError: this rank came when the meeting was closed.

    """
    board, began, silent = MeetingNotes(place), time.monotonic(), dict[str, float]()
    await board.post(f"{CAME}{own.rank}", own.encode())
    while CLOSED not in board.notes:
        came, waited = _came(board.notes), time.monotonic() - began
        if came[0].rank == own.rank:  # it closes the meeting
            living = await place.living(silent)
            if (living is not None and living <= {each.rank for each in came}) or waited > place.patience:
                await board.post(CLOSED)
                continue
        elif waited > LATE * place.patience:
            raise PeerError(
                came[0].rank,
                f"rank {came[0].rank} (host {came[0].node}) came first, and has not closed the meeting of the "
                f"survivors in {waited:.0f} s: let all of them call save_survivors() again",
            )
        await anyio.sleep(PAUSE_SECONDS)
        await board.post()
    came = sorted(_came(board.notes), key=lambda each: each.rank)
    if own.rank not in {each.rank for each in came}:
        others = ", ".join(str(each.rank) for each in came)
        raise BcpError(
            f"rank {own.rank} has come too late: ranks {others} have met without it, and may have saved step "
            f"{came[0].step}. Pass a longer patience"
        )
    return Meeting(place, board, came)


def _came(notes: Mapping[str, bytes]) -> list[Attended]:
    """Return those who had come when the meeting was closed, in the order in which they came."""
    keys = [*notes]
    keys = keys[: keys.index(CLOSED)] if CLOSED in notes else keys
    return [Attended.decode(notes[key]) for key in keys if key.startswith(CAME)]


async def close_coordinator(ranks: Coordinator) -> None:
    """Close a coordinator that was made for survivors."""
    if not isinstance(ranks, SoloCoordinator):
        await ranks.aclose()  # type: ignore[attr-defined]  # of GrpcCoordinator, whose import is late


class _NotedRendezvous(KnownPlaces):
    """A rendezvous of ranks that tell their addresses by notes at an agent."""

    def __init__(self, board: MeetingNotes, invitation: Invitation, address: str) -> None:
        self._board, self._invitation = board, invitation
        self._host = f"[{address}]" if ":" in address else address

    def __repr__(self) -> str:
        return f"<notes of survivors, {self._host} is number {self._invitation.place.rank}>"

    def bind_address(self) -> str:
        """Return this host's address, and any port."""
        return f"{self._host}:0"

    async def publish(self, port: int, door: str) -> None:
        """Publish this rank's address."""
        del door  # its text may be too long for a note
        await self._board.post(f"{AT}{self._invitation.place.rank}", f"{self._host}:{port}".encode())

    async def address_of(self, rank: int) -> str:
        """Wait until a rank listens, and return its address."""
        return (await self._board.found(f"{AT}{rank}")).decode()

    async def door_of(self, rank: int) -> str:
        """Return an empty text: no door is published."""
        del rank
        return ""
