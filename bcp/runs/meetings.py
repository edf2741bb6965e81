"""The step at which all ranks stop, agreed on once one of them is alarmed, without a word in the steps before.

Alarm and talk: a thread of every rank waits for one key in the job's store. The first rank that is to end sets it. The
threads then tell each other where their ranks stand. The ranks stop one step after the foremost of them.

A rank that is told to stop *now* may already have let another one into the next step. There the other one waits for it
in a collective. So a rank waits for words of the others' threads only, never for their training: see :class:`Stand`.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store, distributed_c10d

from bcp._log import log
from bcp._messages.base import decode_either
from bcp._messages.running import Absence, Alarm, Departure, Standing, Stop
from bcp.coordinators.hosts import private_connection
from bcp.coordinators.store_client import STORE_ERRORS, StoreClient, compare_set_bytes, set_bytes
from bcp.errors import InputError, MessageError, PeerError
from bcp.runs.preemption import Preemption
from bcp.runtime.process import process_lock, process_rlock

__all__ = ["Meetings", "Stand", "meeting_place"]

_FOREVER = timedelta(days=20)  # poll() takes milliseconds in 31 bits
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05  # seconds between two looks: 1,000 ranks make 20,000 a second at most
_CONNECT_SECONDS = 300.0  # of a store whose name server is slow, as torch gives its own connections
_CLOSE_SECONDS = 1.0  # how long an end waits for other threads
_SLACK_SECONDS = 5.0  # of a store that is slow when time is up
_GONE = (0, "the job's store, which rank 0 serves as a rule, has gone: no common last step; restart the job")


def meeting_place(world_size: int) -> Store | None:
    """Return the store of the default process group; None for a single rank without one.

    Raises:
        InputError: several ranks have no process group.

    Example:
        >>> meeting_place(1) is None
        True

    """
    if not dist.is_available() or not dist.is_initialized():
        if world_size > 1:
            raise InputError(
                f"a run of {world_size} ranks agrees on its last step through the job's store: call "
                "torch.distributed.init_process_group() before resume()"
            )
        return None
    return distributed_c10d._get_default_store()  # noqa: SLF001 -- no public name


class Stand:
    """The step count of one rank and the count at which it stops: the rules alone, without threads and store.

    A rank counts its steps. Once alarmed, its thread publishes the count. All ranks stop at M, the largest published
    count plus one. A step that was counted before has the answer "go on", and is below M. A step that is counted later
    waits until M is known. Every thread publishes whatever its rank does, so that this wait is short.
    """

    __slots__ = ("count", "published", "step", "stop")

    def __init__(self) -> None:
        self.count = 0
        self.step: object = None
        self.published: int | None = None
        self.stop: int | None = None

    def arrive(self, step: int) -> bool | None:
        """Count a step that was not counted yet; return whether to stop at its end, None if M has to be known first."""
        if step != self.step:
            self.step = step
            self.count += 1
        if self.published is None or self.count <= self.published:
            return False
        return None if self.stop is None else self.count >= self.stop

    def publish(self) -> int:
        """Return the count that this rank publishes, for good."""
        if self.published is None:
            self.published = self.count
        return self.published


class Meetings:
    """Tells all ranks of a job when one of them is to end, and agrees with them on the step at whose end all stop.

    Attributes:
        rank: this rank.

    Example::

        meetings = Meetings(rank, world_size, meeting_place(world_size), "a7c1", preemption)
        for step in range(1, steps + 1):
            train(step)
            if meetings.at(step):   # at the same step on all ranks
                break
        meetings.close()

    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store | None,
        life: str,
        preemption: Preemption,
        *,
        timeout: float = 60.0,
        on_alarm: Callable[[], object] | None = None,
    ) -> None:
        """Install the preemption and begin to listen.

        Args:
            rank: this rank.
            world_size: how many ranks stop together.
            store: of the job, as from :func:`meeting_place`; None for a single rank. It is used through connections of
                our own.
            life: names this start of the job, the same on all ranks; a restart on the same store has another one.
            preemption: the source of this rank's alarms.
            timeout: seconds for the ranks to answer an alarm.
            on_alarm: called once in a thread, when this rank hears of an alarm, its own or another's. It must not
                block: the others are told after it.

        Raises:
            InputError: several ranks have no store, or the preemption is in use.

        """
        if world_size > 1 and store is None:
            raise InputError(
                f"{world_size} ranks have no store to agree on a last step; call torch.distributed.init_process_group"
            )
        self.rank, self._world_size, self._preemption = rank, world_size, preemption
        self._prefix, self._timeout, self._on_alarm = f"bcp/run/{life}", timeout, on_alarm
        self._store, self._pid = store, os.getpid()
        self._lock = process_rlock()  # a user's signal handler may call Run.stop()
        self._stand = Stand()
        self._reason: str | None = None
        self._deadline: float | None = None
        self._alone_after: int | None = 0 if world_size == 1 else None
        self._fault: PeerError | MessageError | None = None
        self._connected = threading.Event()
        self._known = threading.Event()
        self._closing = threading.Event()
        self._lost = self._left = False
        self._speaking = process_lock()  # held while a word is said: afterwards this rank may delete it
        self._thread: threading.Thread | None = None
        if store is not None:
            self._speaker = StoreClient(store, private_connection)
        preemption.install(self._asked)  # which may ask at once
        if world_size > 1:
            self._thread = threading.Thread(target=self._listen, args=(store,), name="bcp-meetings", daemon=True)
            self._thread.start()
        _open.add(self)

    def __repr__(self) -> str:
        stop = "" if self._stand.stop is None else f", stops at {self._stand.stop}"
        return f"<Meetings of rank {self.rank} of {self._world_size}: {self._stand.count} steps{stop}>"

    @property
    def reason(self) -> str | None:
        """Why the run ends, as ``"SIGTERM on rank 3"``; None before an alarm."""
        return self._reason

    @property
    def deadline(self) -> float | None:
        """``time.monotonic()`` at which the first rank is expected to be killed, as far as is known; else None."""
        known = [deadline for deadline in (self._deadline, self._preemption.deadline) if deadline is not None]
        return min(known, default=None)

    def at(self, step: int) -> bool:
        """Return whether the run ends with this step, the same on all ranks that call it for the same steps in order.

        It may be asked for the same step again, with the same answer. Every later step ends the run too.

        Raises:
            PeerError: a rank did not answer the alarm, so that no step could be agreed on.
            MessageError: the message of another rank could not be decoded.

        """
        with self._lock:
            answer = self._stand.arrive(step)
        if answer is None:
            if not self._known.wait(self._timeout + _SLACK_SECONDS):
                self._fail(PeerError(0, self._silence()))
            with self._lock:
                answer, fault = self._stand.arrive(step), self._fault
            if answer is None:
                raise fault or PeerError(0, self._silence())
        return answer

    def alarm(self, reason: str) -> None:
        """End the run on all ranks, as a signal would; any rank may call it, in any thread."""
        self._asked(reason)

    def close(self) -> None:
        """Stop listening, and put back the handlers of signals. Idempotent.

        The first rank that does so ends the meetings of all: a signal that comes later concerns the rank alone.
        """
        _open.discard(self)
        if self._closing.is_set() or os.getpid() != self._pid:
            return
        self._closing.set()
        self._preemption.close()
        if self._thread is None:
            return
        with suppress(PeerError):
            self._say_alarm(self._last_words(), seconds=_CLOSE_SECONDS)
            self._thread.join(_CLOSE_SECONDS)
            if self.rank == 0 and not self._lost:
                self._linger()

    # -- in any thread -----------------------------------------------------------------------------

    def _asked(self, reason: str) -> None:
        """Alarm all ranks."""
        text = reason if self._world_size == 1 else f"{reason} on rank {self.rank}"
        left = self._preemption.seconds_left() if self._preemption.deadline is not None else None
        self._hear(text, left)
        with self._lock:
            decided = self._decide_alone()
        if decided or self._closing.is_set() or self._known.is_set():
            return
        if self._lost:
            self._fail(PeerError(*_GONE))
            return
        try:
            self._say_alarm(Alarm(text, left), seconds=self._timeout)
        except PeerError as error:
            self._fail(error)

    def _hear(self, reason: str, seconds: float | None) -> None:
        """Remember an alarm; tell whoever wants to know of the first one."""
        with self._lock:
            first = self._reason is None
            self._reason = self._reason or reason
            if seconds is not None:
                deadline = time.monotonic() + seconds
                self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)
        if not first:
            return
        log.info("the run is to end", reason=reason, seconds_left=seconds, rank=self.rank)
        try:
            if self._on_alarm is not None:
                self._on_alarm()
        except Exception as error:  # noqa: BLE001 -- the meeting is more important
            log.error("on_alarm failed", error=repr(error))

    def _decide_alone(self) -> bool:
        """Stop after the next step if there is a reason and nobody to agree with; call it with the lock."""
        if self._reason is None or self._alone_after is None:
            return False
        self._learn(max(self._stand.publish(), self._alone_after) + 1)
        return True

    def _learn(self, stop: int) -> None:
        """Take the agreed count; call it with the lock."""
        self._stand.stop = stop
        self._known.set()

    def _fail(self, error: PeerError | MessageError) -> None:
        """Let :meth:`at` raise, unless a step is agreed on."""
        with self._lock:
            if self._stand.stop is None:
                self._stand.publish()
                self._fault = self._fault or error
        self._known.set()

    def _silence(self) -> str:
        return (
            f"rank {self.rank} could not agree on a last step within {self._timeout:.1f} s of an alarm "
            f"({self._reason}): the job's store does not answer; restart the job"
        )

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _last_words(self) -> Departure:
        return Departure(self.rank, self._stand.count)

    def _say_alarm(self, message: Alarm | Departure, seconds: float) -> None:
        """Set the key that all threads wait for, unless it is set, or this rank has left the store."""
        speaker, key = self._speaker, self._key("alarm")
        if not self._speaking.acquire(timeout=seconds):
            raise PeerError(0, self._silence())
        try:
            if not (self._left or self._lost):
                speaker.call_blocking(lambda: _set_first(speaker.store, key, message), seconds=seconds)
        finally:
            self._speaking.release()

    def _linger(self) -> None:
        """Wait a moment until no thread of any rank uses the store, which may end with this process."""
        speaker, over = self._speaker, self._key("over")
        deadline = time.monotonic() + _CLOSE_SECONDS
        while not speaker.call_blocking(lambda: speaker.store.check([over]), seconds=_CLOSE_SECONDS):
            if time.monotonic() > deadline:
                return
            time.sleep(_FIRST_PAUSE)
        speaker.call_blocking(lambda: speaker.store.delete_key(over), seconds=_CLOSE_SECONDS)

    # -- in the thread -----------------------------------------------------------------------------

    def _listen(self, store: Store) -> None:
        """Wait for the alarm or the end; agree."""
        try:
            line = private_connection(store)
            self._speaker.call_blocking(lambda: self._speaker.store, seconds=_CONNECT_SECONDS)  # not in an alarm
            self._connected.set()
            if self._closing.is_set():
                _set_first(line, self._key("alarm"), self._last_words())
            line.wait([self._key("alarm")], _FOREVER)
            message = decode_either(Alarm, Departure, line.get(self._key("alarm")))
            if isinstance(message, Departure):
                with self._lock:
                    self._alone_after = message.count
                    self._decide_alone()
            else:
                self._hear(message.reason, message.seconds)
                self._reason = message.reason  # the same on all ranks, though each may have had a signal
                self._agree(line)
            self._leave(line)
        except MessageError as error:
            self._lost = True
            self._fail(error)
        except (*STORE_ERRORS, PeerError) as error:
            self._lost = True
            log.debug("the store of the job has gone", rank=self.rank, error=repr(error))
            if self._reason is not None:
                self._fail(PeerError(*_GONE))

    def _agree(self, line: Store) -> None:
        """Publish where this rank stands; take the count that the last one of all ranks finds out."""
        with self._lock:
            stand = self._stand.publish()
        left = None if self._preemption.deadline is None else self._preemption.seconds_left()
        set_bytes(line, self._key(f"stand/{self.rank}"), Standing(stand, left).encode())
        if line.add(self._key("stood"), 1) == self._world_size:
            self._close_meeting(line, range(self._world_size))
        if not self._await_stop(line):
            if self._closing.is_set():
                return
            present = [rank for rank in range(self._world_size) if line.check([self._key(f"stand/{rank}")])]
            self._close_meeting(line, present)
        message = decode_either(Stop, Absence, line.get(self._key("stop")))
        if isinstance(message, Absence):
            self._fail(PeerError(message.rank, message.cause))
            return
        self._hear(str(self._reason), message.seconds)
        with self._lock:
            self._learn(message.count)

    def _await_stop(self, line: Store) -> bool:
        """Wait until the count is there; give up when time is up or this rank ends."""
        deadline, pause = time.monotonic() + self._timeout, _FIRST_PAUSE
        while not line.check([self._key("stop")]):
            if self._closing.wait(pause) or time.monotonic() > deadline:
                return line.check([self._key("stop")])
            pause = min(1.5 * pause, _LONGEST_PAUSE)
        return True

    def _close_meeting(self, line: Store, present: Sequence[int]) -> None:
        """Set the count for all ranks, or who is missing; the first word counts."""
        missing = sorted(set(range(self._world_size)) - set(present))
        if missing:
            message: Stop | Absence = Absence(missing[0], self._absence(missing))
        else:
            stands = Standing.decode_all(line.multi_get([self._key(f"stand/{rank}") for rank in present]))
            seconds = [stand.seconds for stand in stands if stand.seconds is not None]
            message = Stop(max(stand.count for stand in stands) + 1, min(seconds, default=None))
        compare_set_bytes(line, self._key("stop"), message.encode())

    def _absence(self, missing: Sequence[int]) -> str:
        """Say which ranks have not answered."""
        ranks = f"rank {missing[0]}" if len(missing) == 1 else f"rank {missing[0]} and {len(missing) - 1} more"
        return (
            f"{ranks} did not answer an alarm ({self._reason}) within {self._timeout:.1f} s, so that the ranks have no "
            "common last step: dead, or in a call that holds Python's lock; restart the job"
        )

    def _leave(self, line: Store) -> None:
        """Leave the store as it was; the last one deletes the keys."""
        with self._speaking:
            self._left = True
        if line.add(self._key("gone"), 1) < self._world_size:
            return
        for name in ("alarm", "stood", "stop", "gone", *(f"stand/{rank}" for rank in range(self._world_size))):
            line.delete_key(self._key(name))
        line.set(self._key("over"), "")


def _set_first(store: Store, key: str, message: Alarm | Departure) -> None:
    """Set a key unless it is set, and wake everybody who waits for it.

    The server of stores that torch has with ``USE_LIBUV=0`` wakes nobody after ``compare_set``.
    """
    set_bytes(store, key, compare_set_bytes(store, key, message.encode()))


_open: set[Meetings] = set()


def _close_at_exit() -> None:
    """End threads that wait in C++: one that comes back to a Python that is gone may abort."""
    for meetings in list(_open):
        meetings.close()


atexit.register(_close_at_exit)
