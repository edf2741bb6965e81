"""Signs of life in one operation, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import TypeVar, TypeVarTuple

import anyio

from bcp.coordinators.messages import Abort, Heartbeats, PeerInfo, agrees, different, error_of
from bcp.coordinators.store.mailbox import Mailbox
from bcp.errors import InputError, PeerError

__all__ = ["Watch"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_LOOK_SECONDS = 0.25  # how often a rank looks for an abort; the others' bodies end about as soon
_BEAT_SECONDS = 1.0  # the longest pause between two signs of life; a tenth of the timeout where that is shorter
_TELL_SECONDS = 5.0  # how long a rank tries to tell the others that the operation has ended


class Watch:
    """Gives signs of life and looks for those of others: rank 0 watches everyone, everyone watches rank 0.

    What it finds is the *verdict*: the error that ends the operation here. It runs on the event loop, so a rank
    whose loop is stuck falls silent, as it should.

    Attributes:
        verdict: the error that ends the operation, once there is one.
        hellos: what the ranks said that have been seen.
        liveness: when they were seen.
        waits_for: what this rank is doing just now, for messages; begins with a comma, or is empty.
    """

    def __init__(self, mailbox: Mailbox, hello: PeerInfo, others: Iterable[int], timeout: float) -> None:
        self.verdict: Exception | None = None
        self.hellos: dict[int, PeerInfo] = {}
        self.liveness = Heartbeats(others, 0.0)
        self.waits_for = ""
        self._mailbox = mailbox
        self._hello = hello
        self._timeout = timeout
        self._told = False
        self._beats = 0
        self._leaving = anyio.Event()

    def __repr__(self) -> str:
        return f"<Watch of {self._hello}: {self.liveness!r}, verdict {self.verdict!r}>"

    def start(self) -> None:
        """Count the seconds from now on."""
        self.liveness = Heartbeats(self.liveness.watched, anyio.current_time())

    def name(self, rank: int) -> str:
        """Name a rank, with host and process where they are known."""
        return str(self.hellos[rank]) if rank in self.hellos else self._mailbox.roll.name(rank)

    def leave(self) -> None:
        """Look no more; there will be no verdict after this."""
        self._leaving.set()

    async def call(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call a function of the mailbox; a store that does not answer within the timeout is rank 0's end."""
        return await self._mailbox.roll.client.call(function, *args, seconds=self._timeout)

    async def say(self, function: Callable[[*Ts], object], *args: *Ts, seconds: float) -> bool:
        """Do the same for a last word, whether or not this task is cancelled; return whether it was said.

        A store that has just been given up is not asked again.
        """
        client = self._mailbox.roll.client
        if client.stuck:
            return False
        with anyio.CancelScope(shield=True), suppress(PeerError):
            await client.call(function, *args, seconds=min(seconds, self._timeout))
            return True
        return False

    async def run(self, end: Callable[[], None]) -> None:
        """Watch until this rank leaves, or there is a verdict; then call ``end``."""
        beat_seconds = min(_BEAT_SECONDS, self._timeout / 10)
        next_beat = anyio.current_time()
        while not self._leaving.is_set():
            due = anyio.current_time() >= next_beat
            if due:
                next_beat = anyio.current_time() + beat_seconds
            try:
                await self._look(beat=due)
            except Exception as error:  # noqa: BLE001 -- whatever it is, the body must not go on unwatched
                self.condemn(error)
            if self.verdict is not None:
                end()
                return
            with anyio.move_on_after(min(_LOOK_SECONDS, beat_seconds)):
                await self._leaving.wait()

    def condemn(self, error: Exception) -> None:
        """Let this error be the verdict, unless there is one or this rank is leaving."""
        if self.verdict is None and not self._leaving.is_set():
            self.verdict = error

    async def _look(self, *, beat: bool) -> None:
        """Look once; sets the verdict if there is one."""
        signs, abort = await self.call(partial(self._exchange_signs, beat=beat))
        if self._leaving.is_set():  # the abort may be our own
            return
        if abort is not None:
            self.verdict = self.hear(abort)
            return
        now = anyio.current_time()
        for rank, sign in signs.items():
            self.liveness.note(rank, sign, now)
        self.verdict = self.verdict or await self._disagreement() or await self._lost(now)

    def _exchange_signs(self, *, beat: bool) -> tuple[Mapping[int, bytes | None], Abort | None]:
        """Give a sign, and read those of others; the abort last, since a rank that fails aborts before it leaves."""
        signs: Mapping[int, bytes | None] = {}
        if beat:
            self._beats += 1
            self._mailbox.beat(self._beats)
            signs = self._mailbox.beats(self.liveness.watched)
            for rank in signs.keys() - self.hellos.keys():
                if signs[rank] is not None:
                    self.hellos[rank] = self._mailbox.hello(rank)
        return signs, self._mailbox.aborted()

    async def _disagreement(self) -> InputError | None:
        """Tell all ranks if one of them is doing something else."""
        for other in self.hellos.values():
            if not agrees(other.what, self._hello.what):
                return await self.disagree(other.rank, other.what, self._hello.what)
        return None

    async def disagree(self, rank: int, theirs: str, mine: str) -> InputError:
        """Tell all ranks that ``rank`` is doing something else than this one, and return the error to raise."""
        abort = different(self._hello.rank, mine, rank, theirs)
        await self.tell(abort)
        return InputError(abort.message)

    async def _lost(self, now: float) -> PeerError | None:
        """Tell all ranks if one of them is late or silent."""
        lost = self.liveness.lost(self._timeout, now)
        if lost is None:
            return None
        rank, seconds, joined = lost
        if not joined:
            return await self.blame_late(rank, seconds)
        return await self.blame(rank, f"{self.name(rank)} has given no sign of life for {seconds:.1f} s")

    async def blame_late(self, rank: int, seconds: float) -> PeerError:
        """Do as :meth:`blame` for a rank that has not begun."""
        return await self.blame(
            rank, f"{self.name(rank)} has not begun it {seconds:.1f} s after rank {self._hello.rank}"
        )

    async def blame(self, rank: int, cause: str) -> PeerError:
        """Tell all ranks that ``rank`` is to blame, and return the error to raise."""
        cause = f"{cause}, in {self._hello.what!r}{self.waits_for}; see the log of rank {rank}"
        await self.tell(Abort(rank, cause))
        return PeerError(rank, cause)

    def hear(self, abort: Abort) -> Exception:
        """Take note that another rank has ended the operation, and return the error to raise."""
        self._told = True
        return error_of(abort)

    async def tell(self, abort: Abort) -> None:
        """Tell the others that the operation has ended; not for long, and whether or not this task is cancelled."""
        if not self._told:
            self._told = True
            await self.say(self._mailbox.abort, abort, seconds=_TELL_SECONDS)
