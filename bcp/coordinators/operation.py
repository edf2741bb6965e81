"""One rank's part in one operation over a :class:`~bcp.coordinators.mailbox.Mailbox`."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Self, TypeVar, TypeVarTuple

import anyio
from anyio import to_thread

from bcp.coordinators.liveness import Liveness
from bcp.coordinators.mailbox import Abort, Hello, Mailbox
from bcp.coordinators.mesh import Mesh
from bcp.errors import InputError, PeerError
from bcp.pipeline import in_thread
from bcp.protocols import Buffer

__all__ = ["Operation"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_LOOK_SECONDS = 0.25  # how often a rank looks for an abort; the others' bodies end about as soon
_BEAT_SECONDS = 1.0  # the longest pause between two signs of life; a tenth of the timeout where that is shorter
_FAREWELL_SECONDS = 5.0  # how long a rank that leaves tries to say so
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05  # seconds between two looks for a payload; doubles
_STORE_ERRORS = (RuntimeError, OSError)  # torch's DistStoreError and DistNetworkError are RuntimeErrors


class Operation:
    """The context manager and the :class:`~bcp.protocols.Agreement` of one operation.

    A background task gives signs of life and looks for those of others: rank 0 watches everyone, everyone watches
    rank 0 and the abort. What it finds is the *verdict*: it cancels the body, and is raised where the context ends.
    Because the task runs on the event loop, a rank whose loop is stuck falls silent, as it should.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        hello: Hello,
        world_size: int,
        timeout: float,
        *,
        left: deque[Mailbox],
        addresses: Callable[[], Sequence[str]],
    ) -> None:
        """Prepare; nothing is sent before the context is entered.

        Args:
            mailbox: this rank's access to the operation's keys.
            hello: who this rank is and what it is about to do.
            world_size: how many ranks take part.
            timeout: seconds that a rank may be late to join, or silent.
            left: mailboxes of operations that this rank has left and others had not; swept here, and added to.
            addresses: returns this host's addresses, as the other ranks may see them; called in a thread.

        """
        self._mailbox = mailbox
        self._hello = hello
        self._world_size = world_size
        self._timeout = timeout
        self._left = left
        self._others = range(1, world_size) if hello.rank == 0 else range(1)
        self._hellos: dict[int, Hello] = {}
        self._verdict: Exception | None = None
        self._told = False
        self._waits_for = ""
        self._steps = 0
        self._beats = 0
        self._addresses = addresses
        self._mesh: Mesh | None = None

    def __repr__(self) -> str:
        """Show what is being done and how far it is."""
        return f"<Operation {self._hello.what!r} of {self._hello}, step {self._steps}>"

    # -- the context --------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Say hello and start to watch."""
        self._leaving = anyio.Event()
        self._liveness = Liveness(self._others, anyio.current_time())
        try:
            await self._call(self._join)
        except BaseException as error:
            await self._tell(Abort(self._hello.rank, _describe(error)))
            await self._farewell()
            raise
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        self._group.start_soon(self._watch)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Tell the others of an error, stop watching, leave; then raise the verdict, if there is one."""
        cancelled = isinstance(error, anyio.get_cancelled_exc_class())
        self._leaving.set()
        if error is not None and self._verdict is None and not isinstance(error, PeerError):
            await self._tell(Abort(self._hello.rank, _describe(error)))
        if self._mesh is not None:
            self._mesh.close()
        try:
            # only a cancellation is the task group's business; other errors come out as they are, not in a group
            swallowed = await self._group.__aexit__(*((kind, error, traceback) if cancelled else (None, None, None)))
        finally:
            if self._mesh is not None:
                self._mesh.disconnect()
            await self._farewell()
        if self._verdict is not None:
            if error is None or (cancelled and swallowed):
                raise self._verdict from None
            error.add_note(f"meanwhile, the operation had ended: {self._verdict}")
        return False

    def _join(self) -> None:
        """Delete what earlier operations have left behind, then say hello."""
        for _ in range(len(self._left)):
            with suppress(IndexError):  # an operation in another thread was quicker
                mailbox = self._left.popleft()
                if not mailbox.sweep():
                    self._left.append(mailbox)
        self._mailbox.join(self._hello)

    async def _tell(self, abort: Abort) -> None:
        """Tell the others that the operation has ended; not for long, and whether or not this task is cancelled."""
        if not self._told:
            self._told = True
            with anyio.move_on_after(_FAREWELL_SECONDS, shield=True), suppress(*_STORE_ERRORS):
                await to_thread.run_sync(self._mailbox.abort, abort, abandon_on_cancel=True)

    async def _farewell(self) -> None:
        """Leave, in the same manner."""
        with anyio.move_on_after(_FAREWELL_SECONDS, shield=True), suppress(*_STORE_ERRORS):
            await to_thread.run_sync(self._mailbox.leave, abandon_on_cancel=True)
            self._left.append(self._mailbox)

    # -- watching -----------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Give signs of life and look for those of others, until this rank leaves or the operation ends."""
        beat_seconds = min(_BEAT_SECONDS, self._timeout / 10)
        next_beat = anyio.current_time()
        while not self._leaving.is_set():
            due = anyio.current_time() >= next_beat
            if due:
                next_beat = anyio.current_time() + beat_seconds
            try:
                await self._look(beat=due)
            except Exception as error:  # noqa: BLE001 -- whatever it is, the body must not go on unwatched
                self._verdict = self._verdict or error
            if self._verdict is not None:
                self._group.cancel_scope.cancel()
                return
            with anyio.move_on_after(min(_LOOK_SECONDS, beat_seconds)):
                await self._leaving.wait()

    async def _look(self, *, beat: bool) -> None:
        """Look once; sets the verdict if there is one."""
        signs, abort = await self._call(partial(self._exchange_signs, beat=beat))
        if self._leaving.is_set():  # the abort may be our own
            return
        if abort is not None:
            self._told = True
            self._verdict = _error_of(abort)
            return
        now = anyio.current_time()
        for rank, sign in signs.items():
            self._liveness.note(rank, sign, now)
        self._verdict = await self._disagreement() or await self._lost(now)

    def _exchange_signs(self, *, beat: bool) -> tuple[Mapping[int, bytes | None], Abort | None]:
        """Give a sign, and read those of others; the abort last, since a rank that fails aborts before it leaves."""
        signs: Mapping[int, bytes | None] = {}
        if beat:
            self._beats += 1
            self._mailbox.beat(self._beats)
            signs = self._mailbox.beats(self._liveness.watched)
            for rank in signs.keys() - self._hellos.keys():
                if signs[rank] is not None:
                    self._hellos[rank] = self._mailbox.hello(rank)
        return signs, self._mailbox.aborted()

    async def _disagreement(self) -> InputError | None:
        """Tell all ranks if one of them is doing something else."""
        for other in self._hellos.values():
            if other.what != self._hello.what:
                return await self._disagree(other.rank, other.what, self._hello.what)
        return None

    async def _disagree(self, rank: int, theirs: str, mine: str) -> InputError:
        """Tell all ranks that ``rank`` is doing something else than this one, and return the error to raise."""
        message = (
            f"the ranks are doing different things: rank {self._hello.rank}: {mine}; rank {rank}: {theirs}; "
            "every rank has to make the same calls of bcp in the same order, with the same paths"
        )
        await self._tell(Abort(rank, message, disagreement=True))
        return InputError(message)

    async def _lost(self, now: float) -> PeerError | None:
        """Tell all ranks if one of them is late or silent."""
        lost = self._liveness.lost(self._timeout, now)
        if lost is None:
            return None
        rank, seconds, joined = lost
        if joined:
            cause = f"{self._hellos.get(rank, f'rank {rank}')} has given no sign of life for {seconds:.1f} s"
        else:
            cause = f"rank {rank} has not begun it {seconds:.1f} s after rank {self._hello.rank}"
        return await self._blame(rank, cause)

    async def _blame(self, rank: int, cause: str) -> PeerError:
        """Tell all ranks that ``rank`` is to blame, and return the error to raise."""
        cause = f"{cause}, in {self._hello.what!r}{self._waits_for}; see the log of rank {rank}"
        await self._tell(Abort(rank, cause))
        return PeerError(rank, cause)

    # -- the verbs ----------------------------------------------------------------------------

    async def divide(self, step: str, mine: bytes, divide: Callable[[Sequence[bytes]], Sequence[bytes]]) -> bytes:
        """Gather ``mine`` of every rank, let rank 0 call ``divide`` in a thread, give every rank its answer."""
        with self._step(f"divide {step!r}") as (number, verb):
            if self._hello.rank != 0:
                return await self._ask(number, verb, mine, f"{number}/out/{self._hello.rank}", readers=1)
            answers = await in_thread(divide, await self._gather(number, verb, mine))
            if len(answers) != self._world_size:
                raise InputError(f"{verb} gave {len(answers)} answers for {self._world_size} ranks; give one to each")
            await self._call(self._post_all, {f"{number}/out/{rank}": answers[rank] for rank in self._others})
            return answers[0]

    async def decide(self, step: str, mine: bytes, decide: Callable[[Sequence[bytes]], Awaitable[bytes]]) -> bytes:
        """Gather ``mine`` of every rank, let rank 0 await ``decide``, give all ranks the one answer."""
        with self._step(f"decide {step!r}") as (number, verb):
            if self._hello.rank != 0:
                return await self._ask(number, verb, mine, f"{number}/out", readers=self._world_size - 1)
            answer = await decide(await self._gather(number, verb, mine))
            if self._others:
                await self._call(self._mailbox.post, f"{number}/out", answer)
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
                self._mesh = Mesh(self._hello.rank, await in_thread(self._addresses))
                self._group.start_soon(self._serve, self._mesh)
                await self._call(self._mailbox.publish, "card", self._mesh.card)
            try:
                return await self._mesh.exchange(send, receive, self._card_of)
            except PeerError as error:
                # a rank that fails aborts before it closes its sockets: what it says is the better message
                abort = await self._call(self._mailbox.aborted)
                if abort is not None:
                    raise _error_of(abort) from error
                raise await self._blame(error.rank, error.cause) from error

    async def _serve(self, mesh: Mesh) -> None:
        """Accept connections; if that fails, the operation does."""
        try:
            await mesh.serve()
        except Exception as error:  # noqa: BLE001 -- raised where the context ends
            self._verdict = self._verdict or error
            self._group.cancel_scope.cancel()

    async def _card_of(self, rank: int) -> bytes:
        """Return what a rank has published for those who connect to it."""
        pause = _FIRST_PAUSE
        while (card := await self._call(self._mailbox.published, "card", rank)) is None:
            await anyio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return card

    @contextmanager
    def _step(self, verb: str) -> Iterator[tuple[int, str]]:
        """Number the step, and let messages name it."""
        self._steps += 1
        self._waits_for = f", while rank {self._hello.rank} was in {verb}"
        try:
            yield self._steps, verb
        finally:
            self._waits_for = ""

    async def _ask(self, number: int, verb: str, mine: bytes, answer: str, readers: int) -> bytes:
        """Give rank 0 what is mine, and return its answer."""
        head = verb.encode()
        await self._call(self._mailbox.post, _in(number, self._hello.rank), len(head).to_bytes(4, "big") + head + mine)
        await self._arrival({0: answer})
        return await self._call(self._mailbox.take, answer, readers)

    async def _gather(self, number: int, verb: str, mine: bytes) -> list[bytes]:
        """Return what every rank has given, by rank; on rank 0."""
        names = {rank: _in(number, rank) for rank in self._others}
        await self._arrival(names)
        gathered = [mine]
        for rank, message in enumerate(await self._call(self._take_all, list(names.values())), start=1):
            end = 4 + int.from_bytes(message[:4], "big")
            if (theirs := message[4:end].decode()) != verb:
                raise await self._disagree(rank, theirs, verb)
            gathered.append(message[end:])
        return gathered

    async def _arrival(self, names: Mapping[int, str]) -> None:
        """Return once all payloads are there; ``names`` has them by the rank that sends each."""
        pause = _FIRST_PAUSE
        while names:
            left = self._liveness.left & names.keys()  # before the look: a rank that has left sends nothing any more
            if await self._call(self._mailbox.posted, list(names.values())):
                return
            for rank in left:
                if not await self._call(self._mailbox.posted, [names[rank]]):
                    raise await self._blame(rank, f"{self._hellos.get(rank, f'rank {rank}')} has left early")
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

    async def _call(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call a blocking function of the mailbox in a thread; a store that is gone is rank 0's end."""
        try:
            return await in_thread(function, *args)
        except _STORE_ERRORS as error:
            cause = (
                f"the store does not answer: {error}; it usually lives in the process of rank 0, which may have died"
            )
            raise PeerError(0, cause) from error


def _in(number: int, rank: int) -> str:
    """Return the name of what a rank gives in a step."""
    return f"{number}/in/{rank}"


def _error_of(abort: Abort) -> InputError | PeerError:
    """Return the error that an abort is for a rank that is told of it."""
    return InputError(abort.message) if abort.disagreement else PeerError(abort.rank, abort.message)


def _describe(error: BaseException) -> str:
    """Return how an error is told to the other ranks."""
    if isinstance(error, anyio.get_cancelled_exc_class()):
        return "the operation was cancelled there"
    return f"{type(error).__name__}: {error}"
