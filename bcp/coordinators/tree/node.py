"""One rank's node in the tree: its connections, and the operations that pass through it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from bcp._messages.coordination import Abort
from bcp._sockets import Tls
from bcp.coordinators.peers import PeerInfo, describe
from bcp.coordinators.store_client import Backoff
from bcp.coordinators.tree.frames import ACKNOWLEDGING, Frame, Kind, pack_number
from bcp.coordinators.tree.link import Link, Traffic
from bcp.coordinators.tree.operation_state import OperationState
from bcp.coordinators.tree.relay import LocalMember
from bcp.coordinators.tree.rendezvous import Invitation, Place, Rendezvous
from bcp.coordinators.tree.server import Server, behind, credentials_of
from bcp.coordinators.tree.transport import RefusedError, Renewal, dial
from bcp.errors import InputError, PeerError
from bcp.runtime.threads import in_thread

__all__ = ["Node"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 2.0  # seconds between two attempts to connect; doubles
_GIVEN_UP_PAUSE = 5.0  # seconds between two attempts to reach a parent that has been given up
_GOODBYE_SECONDS = 5.0  # how long a node that closes waits for its neighbours to have read all
_STRANGER_SECONDS = 1.0  # how long it waits for neighbours that have never connected and have to be told something
_BACK_SECONDS = 10.0  # how long a neighbour whose connection broke has to come back; it dials again at once
_LEAST_DIAL_SECONDS, _MOST_DIAL_SECONDS = 2.0, 30.0  # how long a parent has to answer beside a silent edge; doubles
_MOST_OPERATIONS = 1024  # operations that are kept for a rank that has not begun them


class Node:
    """Passes on the frames of its subtree, whether or not its own rank takes part just then.

    Everything here runs on the coordinators' loop, so there are no locks. Connections are made when the first operation
    begins. A broken one is made again when the next operation begins. Beside a silent one, the child dials anew.
    """

    def __init__(self, info: PeerInfo, rendezvous: Rendezvous, tls: Tls | None) -> None:
        self.rank = info.rank
        self.place: Place | None = None
        self.secret = b""  # the job's token, known with the place
        self._info = info
        self._rendezvous = rendezvous
        self._tls = tls
        self._name = secrets.token_hex(8)
        self._links: dict[int, Link] = {}
        self._operations: dict[int, OperationState] = {}
        self._next = 0
        self._over: set[int] = set()
        self._all_over = 0  # every operation below this number is over
        self._server: Server | None = None
        self._driver: asyncio.Task[None] | None = None
        self._announcing: set[asyncio.Task[None]] = set()
        self._mute = False
        self._closing: asyncio.Task[None] | None = None
        self._placed = asyncio.Event()
        self._dial: Callable[..., Coroutine[Any, Any, bool]]  # dials the parent
        self._talking: asyncio.Task[bool]  # the conversation over the connection to the parent
        self._renewing: asyncio.Task[bool] | None = None  # the attempt to renew that connection
        self._conversations: set[asyncio.Task[bool]] = set()  # these, and one over a silent connection that is to end

    def __repr__(self) -> str:
        up = sum(link.connection is not None for link in self._links.values())
        return f"<Node of {self._info}: {up} of {len(self._links)} edges up, {len(self._operations)} operations>"

    @property
    def traffic(self) -> Mapping[int, Traffic]:
        """Traffic of each edge, by neighbour."""
        return {rank: link.traffic for rank, link in list(self._links.items())}

    # -- this node's own rank -----------------------------------------------------------------

    def begin(self, number: int, member: LocalMember) -> None:
        """Let this node's rank begin an operation."""
        if self._closing is not None:
            member.end(Abort(self.rank, f"the coordinator of {self._info} was closed"))
            return
        self._next = max(self._next, number + 1)
        for link in self._links.values():
            if link.given_up:
                self._await(link, min(_BACK_SECONDS, member.timeout), link.given_up)
        if self._driver is None:
            self._driver = asyncio.create_task(self._drive(), name=f"bcp coordinator of rank {self.rank}")
        now = asyncio.get_running_loop().time()
        self.act(number, lambda state: state.begin(member, now))

    def act(self, number: int, action: Callable[[OperationState], None]) -> None:
        """Apply ``action`` to an operation; an error of it ends the operation."""
        state = self._operations.get(number)
        if state is None:
            if self._is_over(number):
                return
            state = self._operations[number] = OperationState(number, self)
        try:
            action(state)
        except Exception as error:  # noqa: BLE001 -- nobody else would hear of it
            state.end(Abort(self.rank, f"{self._info}: {describe(error)}"))
        self._tidy(state)

    async def placed(self) -> None:
        """Return once this node has its place in the tree."""
        await self._placed.wait()

    async def flushed(self) -> None:
        """Wait until the transport has all sent frames of the neighbours with a connection."""
        for link in list(self._links.values()):
            await link.flushed()

    async def aclose(self) -> None:
        """Say goodbye to the neighbours, wait shortly until they have read all, and close everything."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name=f"bcp coordinator of rank {self.rank} closes")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        abort = Abort(self.rank, f"the coordinator of {self._info} was closed")
        for state in list(self._operations.values()):
            if state.member is not None and not state.left:
                state.end(abort)
        with suppress(TimeoutError):
            async with asyncio.timeout(_GOODBYE_SECONDS):
                await asyncio.gather(*map(self._part_from, self._links.values()))
        for task in (self._driver, *self._announcing):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        if self._server is not None:
            await self._server.aclose()

    async def _part_from(self, link: Link) -> None:
        """Wait until a neighbour has read all; one that has still to connect may have to hear of an abort."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_STRANGER_SECONDS):
                while link.peer is None and not link.empty:
                    await link.changed()
        if link.connection is not None:
            link.send(0, Frame(Kind.BYE).pack())
        while link.connection is not None:
            await link.changed()

    # -- for the operations -------------------------------------------------------------------

    def send(self, rank: int, frame: Frame) -> None:
        """Send a neighbour a frame."""
        if rank == self._parent:
            # a parent that refuses this rank, or that has said goodbye, is asked again at the next operation only
            self._mute = self._mute and frame.kind is not Kind.JOIN
            if self._mute:
                return
        link = self._links[rank]
        if frame.kind is Kind.ABORT:
            link.drop(frame.operation)  # a neighbour that hears it late must not finish a step first
        if frame.kind in ACKNOWLEDGING:
            frame = Frame(frame.kind, frame.operation, body=link.said())
        link.send(frame.operation, frame.pack())

    def name(self, rank: int) -> str:
        """Return a rank's name, with host and process if they are known."""
        return str(self._links.get(rank, f"rank {rank}"))

    def connected(self, rank: int) -> bool:
        """Return whether there is a connection to a neighbour."""
        return self._links[rank].connection is not None

    def quiet(self, rank: int) -> float:
        """Return the seconds since anything came over the connection to a neighbour; 0 without a connection."""
        link = self._links[rank]
        return 0.0 if link.connection is None else time.monotonic() - link.heard

    def renew(self, rank: int) -> None:
        """Dial anew beside a silent connection, if it is that to the parent; a child dials anew itself."""
        link = self._links[rank]
        if rank == self._parent and link.series and self._renewing is None and self._closing is None:
            self._renewing = asyncio.create_task(
                self._redial(link), name=f"bcp coordinator of rank {self.rank} redials"
            )

    def trouble(self, rank: int) -> str:
        """Return the reason why a rank has no connection, as the end of a message; may be empty."""
        return self._links[rank].trouble if rank in self._links else ""

    def absent(self) -> int | None:
        """Return a rank that has not come and for which the tree waits, if one is known."""
        return self._rendezvous.absent()

    def silence(self, seconds: float) -> str:
        """Return the cause if the way to ranks without a connection was silent for ``seconds``, else an empty text."""
        return self._rendezvous.silence(seconds)

    def announce(self, number: int, abort: Abort) -> None:
        """Tell those who have no place in the tree yet that an operation has ended."""
        task = asyncio.create_task(self._announce(number, abort))
        self._announcing.add(task)
        task.add_done_callback(self._announcing.discard)

    async def _announce(self, number: int, abort: Abort) -> None:
        with suppress(PeerError):  # the store is gone: nobody can be told
            await self._rendezvous.announce(number, abort)

    # -- the neighbours -----------------------------------------------------------------------

    def receive(self, rank: int, data: bytes) -> bool:
        """Take a neighbour's frame; return False after its last one. Raises FrameError or MessageError."""
        link = self._links[rank]
        whole = link.received(data)
        if link.owes_a_word:
            self.send(rank, Frame(Kind.HEARD))
        if whole is None:
            for state in self._operations.values():
                state.sign(rank)
            return True
        frame = Frame.unpack(whole)
        self._take_word(link, frame)
        if frame.kind not in (Kind.BYE, Kind.HEARD):
            self._take(rank, frame)
        return frame.kind is not Kind.BYE

    def _take(self, rank: int, frame: Frame) -> None:
        """Take a frame of an operation. Raises FrameError or MessageError."""
        number = frame.operation
        if self._is_over(number):
            if frame.kind in (Kind.JOIN, Kind.UP):
                self.send(rank, Frame(Kind.OLD, number, body=pack_number(self._next)))
            return
        known = self._operations.get(number)
        if known is None:
            if frame.kind is Kind.OLD:
                return
            if len(self._operations) >= _MOST_OPERATIONS:
                abort = Abort(self.rank, f"{self._info} is {len(self._operations)} operations behind rank {rank}")
                self.send(rank, Frame(Kind.ABORT, number, body=abort.encode()))
                return
            known = self._operations[number] = OperationState(number, self)
        known.take(rank, frame)
        self._tidy(known)

    def _take_word(self, link: Link, frame: Frame) -> None:
        """Take the acknowledgement in a frame, and answer a question. Raises FrameError."""
        if frame.kind in ACKNOWLEDGING and frame.body:
            link.acknowledge(frame.body)
        asked, link.asked = link.asked, frame.kind is Kind.ASK
        if link.asked:
            self.send(link.rank, Frame(Kind.HEARD))
            if asked:  # the answer to the first question has not arrived
                self.renew(link.rank)

    def lost(self, rank: int, connection: object, reason: str | None) -> None:
        """Record that a connection has ended, and end the operations under way."""
        link = self._links[rank]
        if link.connection is not connection:
            return
        self._mute = self._mute or (reason is None and rank == self._parent)
        link.down("" if reason is None else f"; the connection to it broke: {reason}")
        if self._closing is not None:
            return
        cause = f"{link} has closed its coordinator" if reason is None else f"the connection to {link} broke: {reason}"
        if reason is not None:
            self._await(link, _BACK_SECONDS, f"{cause}, and it has not come back")
        self._lose(rank, cause)

    def _await(self, link: Link, seconds: float, cause: str) -> None:
        """Give a neighbour some time to come back, or to be reached again after a long outage."""
        link.awaited = broke = object()
        asyncio.get_running_loop().call_later(seconds, self._give_up, link, broke, cause)

    def _give_up(self, link: Link, broke: object, cause: str) -> None:
        """Declare a neighbour dead that has not come back: it died between two operations."""
        if link.awaited is broke and self._closing is None:
            link.awaited, link.given_up = None, cause
            self._lose(link.rank, cause)

    def _lose(self, rank: int, cause: str) -> None:
        for state in list(self._operations.values()):
            state.lose(rank, cause)
            self._tidy(state)

    @property
    def _parent(self) -> int | None:
        return None if self.place is None else self.place.parent

    # -- operations ---------------------------------------------------------------------------

    def _is_over(self, number: int) -> bool:
        return number < self._all_over or number in self._over

    def _tidy(self, state: OperationState) -> None:
        """Forget an operation that is over on this rank and its neighbours."""
        if state.over and self._operations.pop(state.number, None) is not None:
            self._over.add(state.number)
            while self._all_over in self._over:
                self._over.remove(self._all_over)
                self._all_over += 1

    def _end_all(self, abort: Abort) -> None:
        """End all operations that this node's rank has begun."""
        for state in list(self._operations.values()):
            if state.member is not None:
                state.end(abort)

    def _heard(self, number: int, abort: Abort) -> None:
        if not self._is_over(number):
            self._operations.setdefault(number, OperationState(number, self)).end(abort, source=abort.rank)

    # -- connections --------------------------------------------------------------------------

    async def _drive(self) -> None:
        """Find this rank's place, serve its children, and stay connected to its parent."""
        try:
            invitation = await self._rendezvous.invitation(self._heard)
            if self.place is None:
                self.secret = invitation.token.encode()
                self._take_place(invitation.place, invitation.hosts)
            if invitation.place.children and self._server is None:
                await self._serve(invitation)
            if invitation.place.parent is not None:
                await self._stay_connected(self._links[invitation.place.parent], invitation)
        except PeerError as error:
            self._driver = None  # the next operation tries again
            self._end_all(Abort(error.rank, error.cause))
        except InputError as error:
            self._driver = None
            self._end_all(Abort(self.rank, str(error), disagreement=True))
        except Exception as error:  # noqa: BLE001 -- told to those who wait for it
            self._driver = None
            self._end_all(Abort(self.rank, f"{self._info}: {describe(error)}"))

    def _take_place(self, place: Place, hosts: Mapping[int, str]) -> None:
        """Become a part of the tree, and send all that waited for this."""
        self._links = {rank: Link(rank, hosts.get(rank, "")) for rank in place.neighbours}
        self.place = place
        self._placed.set()
        for state in list(self._operations.values()):
            state.resume()
            self._tidy(state)

    async def _serve(self, invitation: Invitation) -> None:
        """Start to listen, and publish the address for the children."""
        server = Server(self._info, invitation, self._links, receive=self.receive, lost=self.lost)
        port = await server.start(await in_thread(self._rendezvous.bind_address), self._tls)
        self._server = server
        await self._rendezvous.publish(port, "" if self._tls else server.door)

    async def _stay_connected(self, link: Link, invitation: Invitation) -> None:
        """Connect to the parent whenever there is a frame for it, and at once after the connection broke."""
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        while True:
            while link.empty and link.awaited is None and not link.given_up:
                await link.changed()
            try:
                connected = await self._converse(link, invitation)
            except RefusedError as error:
                self._end_all(Abort(self.rank, str(error), disagreement=True))
                link.down(link.trouble)
                self._mute = True
                continue
            if connected:
                backoff.pause = _FIRST_PAUSE
            else:
                backoff.longest = _GIVEN_UP_PAUSE if link.given_up else _LONGEST_PAUSE
                await backoff.sleep()

    async def _converse(self, link: Link, invitation: Invitation) -> bool:
        """Connect to the parent, and talk until there is no connection; return whether there was any.

        A conversation over a connection that has fallen silent gives way to one over a new connection.
        """
        self._dial = partial(self._dial_parent, link, invitation)
        self._talking = self._conversation(self._dial())
        try:
            while not self._talking.done():
                await asyncio.wait([self._talking])
            return self._talking.result()
        finally:
            self._renewing = None
            for task in self._conversations:
                task.cancel()
            if self._conversations:
                await asyncio.wait(self._conversations)

    def _conversation(self, work: Coroutine[Any, Any, bool]) -> asyncio.Task[bool]:
        task = asyncio.create_task(work, name=f"bcp coordinator of rank {self.rank} talks")
        self._conversations.add(task)
        task.add_done_callback(self._conversations.discard)
        return task

    async def _dial_parent(self, link: Link, invitation: Invitation, renewal: Renewal | None = None) -> bool:
        address = await self._rendezvous.address_of(link.rank)
        address = behind(await self._rendezvous.door_of(link.rank)) or address
        return await dial(
            address,
            self._tls,
            self._info,
            credentials_of(invitation, self._name),
            invitation.token,
            link,
            receive=self.receive,
            lost=self.lost,
            renewal=renewal,
        )

    async def _redial(self, link: Link) -> bool:
        """Dial anew until a new connection takes the place of the silent one, or that one speaks or breaks.

        Return whether there was a new connection; by then it has ended.
        """
        silent, began, redialler = link.connection, time.monotonic(), self._renewing
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        patience = _LEAST_DIAL_SECONDS
        try:
            while link.connection is silent and (link.heard < began or link.asked):
                begin = partial(self._change_over, link, silent, redialler)
                if await self._dial(Renewal(patience, begin, self._talking.cancel)):
                    return True
                patience = min(2 * patience, _MOST_DIAL_SECONDS)
                await backoff.sleep()
        except RefusedError:
            if self._talking is redialler:
                raise
        finally:
            if self._renewing is redialler:
                self._renewing = None
        return False

    def _change_over(self, link: Link, silent: object, redialler: asyncio.Task[bool] | None, resumes: bool) -> bool:  # noqa: FBT001 -- as Renewal.begin
        """Make a redialler's connection the one to talk over; return False if the silent one has broken meanwhile."""
        if link.connection is not silent or redialler is None:
            return False
        if not resumes:
            self.lost(link.rank, silent, "the other side has lost it")
        self._talking, self._renewing = redialler, None
        return True
