"""The channel of an operation over a :class:`~bcp.coordinators.store.mailbox.Mailbox`, that is over a torch Store."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import anyio

from bcp.coordinators.messages import Abort, PeerInfo, agrees, error_of
from bcp.coordinators.operation import CardOf
from bcp.coordinators.store.mailbox import Mailbox
from bcp.coordinators.store.watch import Watch
from bcp.coordinators.store_client import Backoff

__all__ = ["StoreChannel"]

_FAREWELL_SECONDS = 5.0  # how long a rank that leaves tries to say so


class StoreChannel:
    """A :class:`~bcp.coordinators.operation.Channel`: a star around rank 0, made of keys that everyone polls."""

    def __init__(
        self, mailbox: Mailbox, hello: PeerInfo, world_size: int, timeout: float, *, left: deque[Mailbox]
    ) -> None:
        """Prepare; nothing is sent before :meth:`join`.

        Args:
            mailbox: this rank's access to the operation's keys.
            hello: who this rank is and what it is about to do.
            world_size: how many ranks take part.
            timeout: seconds that a rank may be late to join, or silent.
            left: mailboxes of operations that this rank has left and others had not; swept here, and added to.

        """
        self._mailbox = mailbox
        self._hello = hello
        self._world_size = world_size
        self._timeout = timeout
        self._left = left
        self._others = range(1, world_size) if hello.rank == 0 else range(1)
        self._steps = 0
        self._watch = Watch(mailbox, hello, self._others, timeout)

    def __repr__(self) -> str:
        return f"<StoreChannel of {self._mailbox!r}, step {self._steps}>"

    # -- coming and going ---------------------------------------------------------------------

    @property
    def verdict(self) -> Exception | None:
        """The error that ends the operation, once there is one."""
        return self._watch.verdict

    @property
    def secret(self) -> bytes:
        """None: who reads the store reads the cards, and would read a secret there as well."""
        return b""

    async def join(self) -> None:
        """Delete what earlier operations have left behind, find the others, then say hello."""
        await self._watch.call(self._sweep)
        await self._meet()
        self._watch.start()
        await self._watch.call(self._mailbox.join, self._hello)

    async def run(self, end: Callable[[], None]) -> None:
        """Watch until this rank leaves, or there is a verdict; then call ``end``."""
        await self._watch.run(end)

    def condemn(self, error: Exception) -> None:
        """Let this error be the verdict, unless there is one or this rank is leaving."""
        self._watch.condemn(error)

    def leave(self) -> None:
        """Look no more; there will be no verdict after this."""
        self._watch.leave()

    async def tell(self, abort: Abort) -> None:
        """Tell the others that the operation has ended."""
        await self._watch.tell(abort)

    async def farewell(self) -> None:
        """Leave; not for long, and whether or not this task is cancelled."""
        if await self._watch.say(self._mailbox.leave, seconds=_FAREWELL_SECONDS):
            self._left.append(self._mailbox)

    def _sweep(self) -> None:
        for _ in range(len(self._left)):
            with suppress(IndexError):  # an operation in another thread was quicker
                mailbox = self._left.popleft()
                if not mailbox.sweep():
                    self._left.append(mailbox)

    async def _meet(self) -> None:
        """Return once all ranks are there; blame the one that keeps this one waiting for longer than the timeout."""
        roll, started, backoff = self._mailbox.roll, anyio.current_time(), self._backoff()
        while True:
            met = await self._watch.call(self._mailbox.meet)
            if roll.heard is not None and roll.heard[0] == self._mailbox.number:
                raise self._watch.hear(roll.heard[1])
            if met:
                return
            waited = anyio.current_time() - started
            absent = roll.absent()
            if waited > self._timeout and absent is not None:
                raise await self._watch.blame_late(absent, waited)
            if waited > 2 * self._timeout:  # rank 0 is there, and will say whom it waits for; unless it died
                raise await self._watch.blame(0, f"rank 0 has not told that all are there after {waited:.1f} s")
            await backoff.sleep()

    # -- steps --------------------------------------------------------------------------------

    async def ask(self, verb: str, mine: bytes, *, common: bool) -> bytes:
        """Give rank 0 what is mine, and return its answer."""
        rank = self._hello.rank
        with self._step(verb) as number:
            message = _with_head([self._hello.what, verb], mine)
            await self._watch.call(self._mailbox.post, _in(number, rank), message)
            answer = f"{number}/out" if common else f"{number}/out/{rank}"
            await self._arrival({0: answer})
            return await self._watch.call(self._mailbox.take, answer, self._world_size - 1 if common else 1)

    async def gather(self, verb: str, mine: bytes) -> tuple[int, Sequence[bytes]]:
        """Return what every rank has given, by rank; on rank 0."""
        with self._step(verb) as number:
            names = {rank: _in(number, rank) for rank in self._others}
            await self._arrival(names)
            abort = await self._watch.call(
                self._mailbox.aborted
            )  # ranks may have given up since they sent: decide nothing
            if abort is not None:
                raise error_of(abort)
            gathered = [mine]
            for rank, message in enumerate(await self._watch.call(self._take_all, list(names.values())), start=1):
                head, data = _without_head(message)
                for theirs, ours in zip(head, [self._hello.what, verb], strict=True):
                    if not agrees(theirs, ours):
                        raise await self._watch.disagree(rank, theirs, ours)
                gathered.append(data)
            return number, gathered

    async def reply(self, number: int, answer: bytes) -> None:
        """Publish one answer for all."""
        if self._others:
            await self._watch.call(self._mailbox.post, f"{number}/out", answer)

    async def reply_each(self, number: int, answers: Sequence[bytes]) -> None:
        """Publish an answer for each."""
        await self._watch.call(self._post_all, {f"{number}/out/{rank}": answers[rank] for rank in self._others})

    async def cards(self, verb: str, mine: bytes) -> CardOf:
        """Publish this rank's card; those of others are looked up when they are wanted."""
        with self._step(verb):
            await self._watch.call(self._mailbox.publish, "card", mine)
        return self._card_of

    async def blame(self, rank: int, cause: str, *, sure: bool) -> Exception:
        """Tell all ranks that ``rank`` is to blame; a rank that fails itself aborts before it closes its sockets."""
        del sure  # the store has one order for all
        abort = await self._watch.call(self._mailbox.aborted)
        return await self._watch.blame(rank, cause) if abort is None else error_of(abort)

    async def _card_of(self, rank: int) -> bytes:
        backoff = self._backoff()
        while (card := await self._watch.call(self._mailbox.published, "card", rank)) is None:
            await backoff.sleep()
        return card

    @contextmanager
    def _step(self, verb: str) -> Iterator[int]:
        """Number the step, and let messages name it."""
        self._steps += 1
        self._watch.waits_for = f", while rank {self._hello.rank} was in {verb}"
        try:
            yield self._steps
        finally:
            self._watch.waits_for = ""

    async def _arrival(self, names: Mapping[int, str]) -> None:
        """Return once all payloads are there; ``names`` has them by the rank that sends each."""
        backoff = self._backoff()
        while names:
            left = self._watch.liveness.left & names.keys()  # before the look: who has left sends nothing any more
            if await self._watch.call(self._mailbox.posted, list(names.values())):
                break
            for rank in left:
                if not await self._watch.call(self._mailbox.posted, [names[rank]]):
                    raise await self._watch.blame(rank, f"{self._watch.name(rank)} has left early")
            await backoff.sleep()

    def _backoff(self) -> Backoff:
        return Backoff.of_store(self._world_size)

    def _post_all(self, payloads: Mapping[str, bytes]) -> None:
        """Publish payloads, in one call in a thread."""
        for name, data in payloads.items():
            self._mailbox.post(name, data)

    def _take_all(self, names: Sequence[str]) -> list[bytes]:
        return [self._mailbox.take(name) for name in names]


def _in(number: int, rank: int) -> str:
    return f"{number}/in/{rank}"


def _with_head(head: list[str], data: bytes) -> bytes:
    """Put some words before the bytes."""
    words = json.dumps(head).encode()
    return len(words).to_bytes(4, "big") + words + data


def _without_head(message: bytes) -> tuple[list[str], bytes]:
    """Return the words and the bytes."""
    end = 4 + int.from_bytes(message[:4], "big")
    return json.loads(message[4:end]), message[end:]
