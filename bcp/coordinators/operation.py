"""One rank's part in one operation, over any channel between the ranks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

import anyio

from bcp._messages.coordination import Abort, Card
from bcp._sockets import Tls
from bcp.coordinators.exchange import Exchange
from bcp.coordinators.mesh import Mesh
from bcp.coordinators.peers import PeerInfo, describe
from bcp.errors import InputError, PeerError
from bcp.protocols import Buffer, flat_view
from bcp.runtime.threads import in_thread

__all__ = ["CardOf", "Channel", "Operation"]

CardOf = Callable[[int], Awaitable[bytes]]
"""Returns the card that a rank publishes for the ranks that connect to it; waits until there is one."""


class Channel(Protocol):
    """The way in which the ranks of one operation talk.

    The verb names a step. The order of the calls of :meth:`ask` and :meth:`gather` numbers it.
    """

    @property
    def error(self) -> Exception | None:
        """The error that ends the operation here, once there is one."""

    @property
    def secret(self) -> bytes:
        """The secret of the job, which no card shows; empty if there is none. Known once :meth:`cards` returns."""

    async def join(self) -> None:
        """Tell the others that this rank has begun the operation."""

    async def run(self, end: Callable[[], None]) -> None:
        """Give signs of life, and watch the others, until :meth:`leave` or an error. Call ``end`` after an error."""

    def fail(self, error: Exception) -> None:
        """End the operation here with this error, unless it has ended or this rank is leaving."""

    def leave(self) -> None:
        """Stop watching the others; no error follows."""

    async def tell(self, abort: Abort) -> None:
        """Tell the others that the operation has ended. A cancelled task may call it, and it takes no long time."""

    async def say_goodbye(self) -> None:
        """Tell the others that this rank has left, in the same manner."""

    async def ask(self, verb: str, payload: bytes) -> bytes:
        """Send ``payload`` to rank 0, and return its answer. Rank 0 does not call it."""

    async def gather(self, verb: str, payload: bytes) -> tuple[int, Sequence[bytes]]:
        """Return the number of the step, and the bytes of every rank, by rank. Only rank 0 calls it."""

    async def reply(self, number: int, answer: bytes) -> None:
        """Send all ranks the one answer to step ``number``. Only rank 0 calls it."""

    async def reply_each(self, number: int, answers: Sequence[bytes]) -> None:
        """Send every rank its own answer to step ``number``. Only rank 0 calls it."""

    async def cards(self, verb: str, payload: bytes) -> CardOf:
        """Publish this rank's card, and return a function that looks up the others' cards. All ranks call it, once."""

    async def report_peer_failure(self, rank: int, cause: str, *, sure: bool) -> Exception:
        """End the operation for all ranks because of ``rank``, and return the error.

        The error is ``cause``, unless another rank was quicker. If this rank is not ``sure``, the others have some
        time to report a better cause.
        """


class Operation:
    """The context manager and the :class:`~bcp.protocols.Agreement` of one operation.

    A task watches the channel while the body runs. An error of the channel cancels the body, and the end of the
    context raises it.
    """

    def __init__(
        self,
        channel: Channel,
        info: PeerInfo,
        world_size: int,
        *,
        patience: float,  # seconds that a rank may be silent
        address: Callable[[], Awaitable[str]],  # returns this host's address, once the ranks have met
        tls: Tls | None = None,  # certificates for bulk data; None: plain TCP
    ) -> None:
        """Prepare the operation; nothing is sent before the context is entered."""
        self._channel = channel
        self._info = info
        self._world_size = world_size
        self._patience = patience
        self._address = address
        self._tls = tls
        self._mesh: Mesh | None = None
        self._exchange: Exchange | None = None

    def __repr__(self) -> str:
        return f"<Operation {self._info.operation!r} of {self._info}: {self._channel!r}>"

    # -- the context --------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        try:
            await self._channel.join()
        except BaseException as error:
            await self._channel.tell(self._abort(error))
            await self._channel.say_goodbye()
            raise
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        self._group.start_soon(self._channel.run, self._group.cancel_scope.cancel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        cancelled = isinstance(error, anyio.get_cancelled_exc_class())
        self._channel.leave()
        if error is not None and self._channel.error is None and not isinstance(error, PeerError):
            await self._channel.tell(self._abort(error))
        if self._mesh is not None:
            self._mesh.close()
        try:
            # only a cancellation is the task group's business; other errors come out as they are, not in a group
            swallowed = await self._group.__aexit__(*((kind, error, traceback) if cancelled else (None, None, None)))
        finally:
            if self._mesh is not None:
                self._mesh.disconnect()
            await self._channel.say_goodbye()
        if self._channel.error is not None:
            if error is None or (cancelled and swallowed):
                raise self._channel.error from None
            if error is not self._channel.error:
                error.add_note(f"meanwhile, the operation had ended: {self._channel.error}")
        return False

    def _abort(self, error: BaseException) -> Abort:
        return Abort(self._info.rank, f"{self._info}: {describe(error)}")

    # -- the verbs ----------------------------------------------------------------------------

    async def gather_scatter(
        self, step: str, payload: bytes, divide: Callable[[Sequence[bytes]], Sequence[bytes]]
    ) -> bytes:
        """Gather ``payload`` of every rank, let rank 0 call ``divide`` in a thread, give every rank its answer."""
        verb = f"gather_scatter {step!r}"
        if self._info.rank != 0:
            return await self._channel.ask(verb, payload)
        number, gathered = await self._channel.gather(verb, payload)
        answers = await in_thread(divide, gathered)
        if len(answers) != self._world_size:
            raise InputError(f"{verb} gave {len(answers)} answers for {self._world_size} ranks; give one to each")
        await self._channel.reply_each(number, answers)
        return answers[0]

    async def gather_broadcast(
        self, step: str, payload: bytes, decide: Callable[[Sequence[bytes]], Awaitable[bytes]]
    ) -> bytes:
        """Gather ``payload`` of every rank, let rank 0 await ``decide``, give all ranks the one answer."""
        verb = f"gather_broadcast {step!r}"
        if self._info.rank != 0:
            return await self._channel.ask(verb, payload)
        number, gathered = await self._channel.gather(verb, payload)
        answer = await decide(gathered)
        await self._channel.reply(number, answer)
        return answer

    async def all_to_all(self, send: Sequence[Buffer], receive: Sequence[Buffer]) -> None:
        """Send bytes to every rank and receive bytes from every rank, over sockets of this operation."""
        rank = self._info.rank
        if len(send) != self._world_size or len(receive) != self._world_size:
            raise InputError(
                f"{len(send)} buffers to send and {len(receive)} to fill for {self._world_size} ranks; give one each"
            )
        outgoing, incoming = [flat_view(data) for data in send], [flat_view(data) for data in receive]
        if len(outgoing[rank]) != len(incoming[rank]):
            raise InputError(f"rank {rank} expects of itself another number of bytes than it sends itself")
        incoming[rank][:] = outgoing[rank]
        exchange = await self._connected("all_to_all")
        await exchange.all_to_all(outgoing, incoming)

    async def bandwidth(self) -> float:
        """Measure how many bytes a second this rank sends to other hosts, over sockets of this operation."""
        exchange = await self._connected("bandwidth")
        return await exchange.bandwidth(self._world_size)

    async def report_failure(self, rank: int, cause: str) -> Exception:
        """Tell all ranks that the connection to ``rank`` has failed, unless they soon hear of a better cause."""
        return await self._channel.report_peer_failure(rank, cause, sure=False)

    async def _connected(self, verb: str) -> Exchange:
        """Return this rank's side of exchanges; the first call listens, and publishes the address."""
        if self._exchange is None:
            rank, channel = self._info.rank, self._channel
            address = await self._address()
            contexts = None if self._tls is None else await in_thread(self._tls.contexts)
            self._mesh = Mesh(
                rank, address, self._world_size, patience=self._patience, secret=lambda: channel.secret, tls=contexts
            )
            self._group.start_soon(self._serve, self._mesh)
            published = await channel.cards(verb, self._mesh.card)

            async def card_of(peer: int) -> Card:
                return Card.decode(await published(peer), peer)

            self._exchange = Exchange(self._mesh, card_of, channel.report_peer_failure)
        return self._exchange

    async def _serve(self, mesh: Mesh) -> None:
        """Accept connections; an error ends the operation."""
        try:
            await mesh.serve()
        except Exception as error:  # noqa: BLE001 -- raised where the context ends
            self._channel.fail(error)
            self._group.cancel_scope.cancel()
