"""The channel of an operation over the tree: the caller's side, on the caller's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import anyio

from bcp._messages.coordination import Abort
from bcp.coordinators.operation import CardOf
from bcp.coordinators.peers import PeerInfo, error_of
from bcp.coordinators.tree.frames import Frame, Kind, Values
from bcp.coordinators.tree.loop import CoordinatorLoop
from bcp.coordinators.tree.node import Node
from bcp.coordinators.tree.operation_state import OperationState
from bcp.coordinators.tree.relay import LocalMember
from bcp.errors import InputError

__all__ = ["GrpcChannel"]

_BEAT_SECONDS = 5.0  # the longest pause between two signs of life; a tenth of the timeout where that is shorter
_GOODBYE_SECONDS = 1.0  # how long a rank that leaves waits until what it said is on its way
_REPORT_SECONDS = 2.0  # how long a rank whose bulk data broke waits for the tree's word on why


class GrpcChannel:
    """A :class:`~bcp.coordinators.operation.Channel` over this rank's node, which runs on another loop.

    Signs of life come from the caller's loop: a rank whose own loop is stuck falls silent, although its node runs on.
    """

    def __init__(
        self, node: Node, loop: CoordinatorLoop, number: int, info: PeerInfo, world_size: int, timeout: float
    ) -> None:
        """Prepare the channel; nothing is sent before :meth:`join`.

        A rank may be late to join, or silent, for ``timeout`` seconds.
        """
        self.error: Exception | None = None
        self._node = node
        self._loop = loop
        self._number = number
        self._info = info
        self._world_size = world_size
        self._timeout = timeout
        self._beat = min(_BEAT_SECONDS, timeout / 10)
        self._steps = 0
        self._answers: dict[int, asyncio.Future[bytes | Values]] = {}
        self._leaving = False
        self._news: asyncio.Event

    def __repr__(self) -> str:
        return f"<GrpcChannel of operation {self._number}, step {self._steps}, error {self.error!r}>"

    @property
    def secret(self) -> bytes:
        """The job's token."""
        return self._node.secret

    # -- coming and going ---------------------------------------------------------------------

    async def join(self) -> None:
        """Begin the operation on this rank's node."""
        self._news = asyncio.Event()
        caller_loop = asyncio.get_running_loop()
        call_soon = caller_loop.call_soon if self._loop.is_here else caller_loop.call_soon_threadsafe

        def call_here(function: Callable[..., None], *args: object) -> None:
            with suppress(RuntimeError):  # the caller's loop is closed: nobody waits any more
                call_soon(function, *args)

        member = LocalMember(
            operation=self._info.operation,
            timeout=self._timeout,
            beat=self._beat,
            hand_over=partial(call_here, self._take_answer),
            end=partial(call_here, self._take_end),
        )
        self._loop.post(self._node.begin, self._number, member)

    async def run(self, end: Callable[[], None]) -> None:
        """Give signs of life until this rank leaves or the operation ends; in the latter case call ``end``."""
        while not self._leaving and self.error is None:
            with anyio.move_on_after(self._beat) as pause:
                await self._news.wait()
            if pause.cancelled_caught:
                self._act(lambda state: state.beat(asyncio.get_running_loop().time()))
        if self.error is not None:
            end()

    def fail(self, error: Exception) -> None:
        """End the operation here with this error, unless it has ended or this rank is leaving."""
        if self.error is None and not self._leaving:
            self.error = error
            self._news.set()

    def leave(self) -> None:
        """Stop watching the others; no error follows."""
        self._leaving = True
        self._news.set()

    async def tell(self, abort: Abort) -> None:
        """Tell the others that the operation has ended."""
        with suppress(InputError):
            self._act(lambda state: state.end(abort))

    async def say_goodbye(self) -> None:
        """Leave, and wait shortly until all frames of this rank are sent: its process may end now."""
        with suppress(InputError), anyio.move_on_after(_GOODBYE_SECONDS, shield=True):
            self._act(OperationState.leave)
            await asyncio.shield(asyncio.wrap_future(self._loop.run(self._node.flushed())))

    # -- steps --------------------------------------------------------------------------------

    async def ask(self, verb: str, payload: bytes) -> bytes:
        """Send ``payload`` to rank 0, and return its answer."""
        _, answer = await self._give(verb, payload)
        return answer if isinstance(answer, bytes) else answer.members()[0]

    async def gather(self, verb: str, payload: bytes) -> tuple[int, Sequence[bytes]]:
        """Return the number of the step, and on rank 0 the bytes of every rank, by rank."""
        number, values = await self._give(verb, payload)
        gathered = [b""] * self._world_size
        if isinstance(values, Values) and self._node.place is not None:
            for rank, member in zip(self._node.place.order, values.members(), strict=True):
                gathered[rank] = member
        return number, gathered

    async def reply(self, number: int, answer: bytes) -> None:
        """Send all ranks the one answer."""
        frame = Frame(Kind.DOWN, self._number, number, answer)
        self._act(lambda state: state.reply(number, frame, None))

    async def reply_each(self, number: int, answers: Sequence[bytes]) -> None:
        """Send every rank its own answer."""
        order = () if self._node.place is None else self._node.place.order
        values = Values.of(answers[rank] for rank in order)
        frame = Frame(Kind.EACH, self._number, number)
        self._act(lambda state: state.reply(number, frame, values))

    async def cards(self, verb: str, payload: bytes) -> CardOf:
        """Gather the cards of all ranks, and send them to all."""
        if self._info.rank == 0:
            number, gathered = await self.gather(verb, payload)
            cards = gathered
            await self.reply(number, Values.of(gathered).pack())
        else:
            cards = Values.unpack(await self.ask(verb, payload), self._world_size).members()

        async def card_of(rank: int) -> bytes:
            return cards[rank]

        return card_of

    async def report_peer_failure(self, rank: int, cause: str, *, sure: bool) -> Exception:
        """Report a peer's failure, unless the tree tells another cause soon.

        The tree's word sets out before the sockets close, but is slower than these.
        """
        with anyio.move_on_after(0 if sure else _REPORT_SECONDS):
            await self._end()
        self._act(lambda state: state.report_peer_failure(rank, cause))
        return await self._end()

    async def _end(self) -> Exception:
        """Wait for the error that ends the operation, and return it."""
        while self.error is None:
            await self._news.wait()
        return self.error

    async def _give(self, verb: str, message: bytes) -> tuple[int, bytes | Values]:
        """Take part in the next step, and return its number and its result."""
        self._steps += 1
        number = self._steps
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._act(lambda state: state.give(number, verb, bytes(message)))
            return number, await answer
        finally:
            del self._answers[number]

    # -- from the node ------------------------------------------------------------------------

    def _act(self, action: Callable[[OperationState], None]) -> None:
        self._loop.post(self._node.act, self._number, action)

    def _take_answer(self, number: int, answer: bytes | Values) -> None:
        future = self._answers.get(number)
        if future is not None and not future.done():
            future.set_result(answer)

    def _take_end(self, abort: Abort) -> None:
        self.fail(error_of(abort))
