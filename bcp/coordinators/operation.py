"""One rank's part in one operation over a :class:`~bcp.coordinators.mailbox.Mailbox`."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

import anyio
from anyio import to_thread

from bcp.coordinators.mailbox import Abort, Hello, Mailbox
from bcp.coordinators.mesh import Mesh
from bcp.coordinators.watch import STORE_ERRORS, Watch, call_store, error_of
from bcp.errors import InputError, PeerError
from bcp.pipeline import in_thread
from bcp.protocols import Buffer

__all__ = ["Operation"]

_FAREWELL_SECONDS = 5.0  # how long a rank that leaves tries to say so
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05  # seconds between two looks for a payload; doubles


class Operation:
    """The context manager and the :class:`~bcp.protocols.Agreement` of one operation.

    A :class:`~bcp.coordinators.watch.Watch` runs beside the body. Its verdict cancels the body, and is raised where
    the context ends.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        hello: Hello,
        world_size: int,
        timeout: float,
        *,
        left: deque[Mailbox],
        address: Callable[[], str],
    ) -> None:
        """Prepare; nothing is sent before the context is entered.

        Args:
            mailbox: this rank's access to the operation's keys.
            hello: who this rank is and what it is about to do.
            world_size: how many ranks take part.
            timeout: seconds that a rank may be late to join, or silent.
            left: mailboxes of operations that this rank has left and others had not; swept here, and added to.
            address: returns this host's address in the job's network; called in a thread.

        """
        self._mailbox = mailbox
        self._hello = hello
        self._world_size = world_size
        self._timeout = timeout
        self._left = left
        self._others = range(1, world_size) if hello.rank == 0 else range(1)
        self._steps = 0
        self._address = address
        self._mesh: Mesh | None = None

    def __repr__(self) -> str:
        """Show what is being done and how far it is."""
        return f"<Operation {self._hello.what!r} of {self._hello}, step {self._steps}>"

    # -- the context --------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Say hello and start to watch."""
        self._watch = Watch(self._mailbox, self._hello, self._others, self._timeout)
        try:
            await call_store(self._join)
        except BaseException as error:
            await self._watch.tell(Abort(self._hello.rank, _describe(error)))
            await self._farewell()
            raise
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        self._group.start_soon(self._watch.run, self._group.cancel_scope.cancel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Tell the others of an error, stop watching, leave; then raise the verdict, if there is one."""
        cancelled = isinstance(error, anyio.get_cancelled_exc_class())
        self._watch.leave()
        if error is not None and self._watch.verdict is None and not isinstance(error, PeerError):
            await self._watch.tell(Abort(self._hello.rank, _describe(error)))
        if self._mesh is not None:
            self._mesh.close()
        try:
            # only a cancellation is the task group's business; other errors come out as they are, not in a group
            swallowed = await self._group.__aexit__(*((kind, error, traceback) if cancelled else (None, None, None)))
        finally:
            if self._mesh is not None:
                self._mesh.disconnect()
            await self._farewell()
        if self._watch.verdict is not None:
            if error is None or (cancelled and swallowed):
                raise self._watch.verdict from None
            error.add_note(f"meanwhile, the operation had ended: {self._watch.verdict}")
        return False

    def _join(self) -> None:
        """Delete what earlier operations have left behind, then say hello."""
        for _ in range(len(self._left)):
            with suppress(IndexError):  # an operation in another thread was quicker
                mailbox = self._left.popleft()
                if not mailbox.sweep():
                    self._left.append(mailbox)
        self._mailbox.join(self._hello)

    async def _farewell(self) -> None:
        """Leave, in the same manner."""
        with anyio.move_on_after(_FAREWELL_SECONDS, shield=True), suppress(*STORE_ERRORS):
            await to_thread.run_sync(self._mailbox.leave, abandon_on_cancel=True)
            self._left.append(self._mailbox)

    # -- the verbs ----------------------------------------------------------------------------

    async def divide(self, step: str, mine: bytes, divide: Callable[[Sequence[bytes]], Sequence[bytes]]) -> bytes:
        """Gather ``mine`` of every rank, let rank 0 call ``divide`` in a thread, give every rank its answer."""
        with self._step(f"divide {step!r}") as (number, verb):
            if self._hello.rank != 0:
                return await self._ask(number, verb, mine, f"{number}/out/{self._hello.rank}", readers=1)
            answers = await in_thread(divide, await self._gather(number, verb, mine))
            if len(answers) != self._world_size:
                raise InputError(f"{verb} gave {len(answers)} answers for {self._world_size} ranks; give one to each")
            await call_store(self._post_all, {f"{number}/out/{rank}": answers[rank] for rank in self._others})
            return answers[0]

    async def decide(self, step: str, mine: bytes, decide: Callable[[Sequence[bytes]], Awaitable[bytes]]) -> bytes:
        """Gather ``mine`` of every rank, let rank 0 await ``decide``, give all ranks the one answer."""
        with self._step(f"decide {step!r}") as (number, verb):
            if self._hello.rank != 0:
                return await self._ask(number, verb, mine, f"{number}/out", readers=self._world_size - 1)
            answer = await decide(await self._gather(number, verb, mine))
            if self._others:
                await call_store(self._mailbox.post, f"{number}/out", answer)
            return answer

    async def all_to_all(self, send: Sequence[Buffer], receive: Sequence[int]) -> Sequence[Buffer]:
        """Send bytes to every rank and receive bytes from every rank, over sockets of this operation."""
        if len(send) != self._world_size or len(receive) != self._world_size:
            raise InputError(
                f"{len(send)} buffers and {len(receive)} sizes for {self._world_size} ranks; give one each"
            )
        if memoryview(send[self._hello.rank]).nbytes != receive[self._hello.rank]:
            raise InputError(f"rank {self._hello.rank} expects of itself another number of bytes than it sends itself")
        with self._step("all_to_all"):
            if self._mesh is None:
                self._mesh = Mesh(self._hello.rank, await in_thread(self._address))
                self._group.start_soon(self._serve, self._mesh)
                await call_store(self._mailbox.publish, "card", self._mesh.card)
            try:
                return await self._mesh.exchange(send, receive, self._card_of)
            except PeerError as error:
                # a rank that fails aborts before it closes its sockets: what it says is the better message
                abort = await call_store(self._mailbox.aborted)
                if abort is not None:
                    raise error_of(abort) from error
                raise await self._watch.blame(error.rank, error.cause) from error

    async def _serve(self, mesh: Mesh) -> None:
        """Accept connections; if that fails, the operation does."""
        try:
            await mesh.serve()
        except Exception as error:  # noqa: BLE001 -- raised where the context ends
            self._watch.condemn(error)
            self._group.cancel_scope.cancel()

    async def _card_of(self, rank: int) -> bytes:
        """Return what a rank has published for those who connect to it."""
        pause = _FIRST_PAUSE
        while (card := await call_store(self._mailbox.published, "card", rank)) is None:
            await anyio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return card

    @contextmanager
    def _step(self, verb: str) -> Iterator[tuple[int, str]]:
        """Number the step, and let messages name it."""
        self._steps += 1
        self._watch.waits_for = f", while rank {self._hello.rank} was in {verb}"
        try:
            yield self._steps, verb
        finally:
            self._watch.waits_for = ""

    async def _ask(self, number: int, verb: str, mine: bytes, answer: str, readers: int) -> bytes:
        """Give rank 0 what is mine, and return its answer."""
        message = _with_head([self._hello.what, verb], mine)
        await call_store(self._mailbox.post, _in(number, self._hello.rank), message)
        await self._arrival({0: answer})
        return await call_store(self._mailbox.take, answer, readers)

    async def _gather(self, number: int, verb: str, mine: bytes) -> list[bytes]:
        """Return what every rank has given, by rank; on rank 0."""
        names = {rank: _in(number, rank) for rank in self._others}
        await self._arrival(names)
        abort = await call_store(self._mailbox.aborted)  # ranks may have given up since they sent; decide nothing then
        if abort is not None:
            raise error_of(abort)
        gathered = [mine]
        for rank, message in enumerate(await call_store(self._take_all, list(names.values())), start=1):
            head, data = _without_head(message)
            for theirs, ours in zip(head, [self._hello.what, verb], strict=True):
                if theirs != ours:
                    raise await self._watch.disagree(rank, theirs, ours)
            gathered.append(data)
        return gathered

    async def _arrival(self, names: Mapping[int, str]) -> None:
        """Return once all payloads are there; ``names`` has them by the rank that sends each."""
        pause = _FIRST_PAUSE
        while names:
            left = self._watch.liveness.left & names.keys()  # before the look: who has left sends nothing any more
            if await call_store(self._mailbox.posted, list(names.values())):
                break
            for rank in left:
                if not await call_store(self._mailbox.posted, [names[rank]]):
                    raise await self._watch.blame(rank, f"{self._watch.name(rank)} has left early")
            await anyio.sleep(pause)
            # 20 looks a second by each of 1,000 ranks are as many as one store answers; more ranks look less often
            pause = min(2 * pause, _LONGEST_PAUSE * max(1.0, self._world_size / 1000))

    def _post_all(self, payloads: Mapping[str, bytes]) -> None:
        """Publish payloads, in one call in a thread."""
        for name, data in payloads.items():
            self._mailbox.post(name, data)

    def _take_all(self, names: Sequence[str]) -> list[bytes]:
        """Return payloads, in one call in a thread."""
        return [self._mailbox.take(name) for name in names]


def _in(number: int, rank: int) -> str:
    """Return the name of what a rank gives in a step."""
    return f"{number}/in/{rank}"


def _with_head(head: list[str], data: bytes) -> bytes:
    """Put some words before the bytes."""
    words = json.dumps(head).encode()
    return len(words).to_bytes(4, "big") + words + data


def _without_head(message: bytes) -> tuple[list[str], bytes]:
    """Return the words and the bytes."""
    end = 4 + int.from_bytes(message[:4], "big")
    return json.loads(message[4:end]), message[end:]


def _describe(error: BaseException) -> str:
    """Return how an error is told to the other ranks."""
    if isinstance(error, anyio.get_cancelled_exc_class()):
        return "the operation was cancelled there"
    return f"{type(error).__name__}: {error}"
