"""Requests that fail are made again: with growing pauses, within bounds, and fewer at a time if the server is busy.

In one place for all stores, so that no client library below has to retry, and none does.

Calls of which some are made at a time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from random import SystemRandom
from typing import TypeVar

import anyio

from bcp._log import log
from bcp._text import hidden
from bcp.backends.objects.store import ConditionError, RequestError
from bcp.errors import BcpError, StorageError
from bcp.events import RequestEvent, RetryEvent, Status, emit, told
from bcp.protocols import RetryPolicy

__all__ = ["JITTER", "Limiter", "Retries", "in_turns"]

JITTER = SystemRandom()
"""Draws the lengths of pauses, and leaves the random states of the training loop as they are."""


T = TypeVar("T")
AT_ONCE = 16


async def in_turns(calls: Iterable[Callable[[], Awaitable[T]]]) -> list[T]:
    """Make calls, some at a time; return their results in order.

    A transient error does not end the other calls, so that the next attempt finds more of the work done. It is raised
    after them. Any other error ends those that have not begun.
    """
    waiting = list(enumerate(calls))[::-1]
    results: dict[int, T] = {}
    transient: list[RequestError] = []
    final: list[Exception] = []

    async def work() -> None:
        while waiting and not final:
            number, call = waiting.pop()
            try:
                results[number] = await call()
            except Exception as error:  # noqa: BLE001 -- raised below
                if isinstance(error, RequestError) and error.transient:
                    transient.append(error)
                else:
                    final.append(error)

    async with anyio.create_task_group() as group:
        for _ in range(min(AT_ONCE, len(waiting))):
            group.start_soon(work)
    if errors := final + transient:
        raise errors[0]
    return [results[number] for number in sorted(results)]


_Tell = Callable[[Status, str], None]
MIB = 1 << 20
FOREIGN_TRIES = 4
"""Attempts of a request whose answers cannot be understood."""

UNREACHED_SECONDS = 30.0
"""Deadline of a store that cannot be connected to and that no request has reached yet: its name may be wrong."""


class Limiter:
    """How many requests may be under way: additive increase, multiplicative decrease."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = float(most)
        self._most = most
        self._clock = clock
        self._busy = 0
        self._waiting: deque[anyio.Event] = deque()
        self._lowered = -1.0

    def __repr__(self) -> str:
        return f"<Limiter: {self._busy} of {self.limit:.1f} requests, {len(self._waiting)} wait>"

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Wait until there is room for one more request, and keep the room for the block."""
        await self._enter()
        try:
            yield
        finally:
            self._busy -= 1
            self._let_in()

    async def _enter(self) -> None:
        if not self._waiting and self._busy < max(int(self.limit), 1):
            self._busy += 1
            return
        turn = anyio.Event()
        self._waiting.append(turn)
        try:
            await turn.wait()
        except BaseException:
            if turn.is_set():  # it was let in, and does not come
                self._busy -= 1
                self._let_in()
            else:
                self._waiting.remove(turn)
            raise

    def _let_in(self) -> None:
        while self._waiting and self._busy < max(int(self.limit), 1):
            self._busy += 1
            self._waiting.popleft().set()

    def succeeded(self) -> None:
        """Take note of a success: one more request at a time for every round of them."""
        self.limit = min(self.limit + 1 / max(self.limit, 1.0), self._most)
        self._let_in()

    def slow_down(self) -> None:
        """Halve the limit; once a second, as many requests that are under way may say the same."""
        now = self._clock()
        if now - self._lowered >= 1.0:
            self._lowered = now
            self.limit = max(self.limit / 2, 1.0)


class Retries:
    """Makes the requests of one backend.

    Attributes:
        policy: its bounds.
        limiter: how many requests are under way.
        retries: how many attempts were made beyond the first ones.
    """

    def __init__(
        self,
        policy: RetryPolicy | None = None,
        *,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = policy or RetryPolicy()
        self.limiter = Limiter(self.policy.requests, clock)
        self.retries = 0
        self._successes = 0
        self._sleep = sleep
        self._clock = clock

    def __repr__(self) -> str:
        return f"<Retries: {self.retries} after {self._successes} successes, {self.limiter}>"

    async def __call__(
        self,
        description: str,
        attempt: Callable[[], Awaitable[T]],
        nbytes: int = 0,
        about: tuple[str, str, str] = ("", "", ""),
        answers: tuple[type[Exception], ...] = (FileNotFoundError, ConditionError),
    ) -> T:
        """Make a request until it succeeds.

        Args:
            description: the request in words, with store, object and bytes, for messages.
            attempt: makes it once. :class:`RequestError` says whether to try again. ``TimeoutError`` and
                ``ConnectionError`` are tried again, and a few times also foreign errors: as a rule, a proxy has made an
                answer that lacks something. Errors of bcp are final.
            nbytes: how many bytes it moves.
            about: store, operation and key, for events.
            answers: errors that this request may have as its answer; they are raised as they are.

        Raises:
            StorageError: it did not succeed within the policy's bounds; the last error is the cause.

        """
        began = self._clock()
        number = 0
        while True:
            number += 1
            try:
                async with self.limiter.one():
                    tell = partial(_tell, about, nbytes, number, time.monotonic())
                    with anyio.fail_after(self.policy.attempt_seconds + nbytes / MIB):
                        result = await attempt()
            except (RequestError, TimeoutError, ConnectionError) as error:
                await self._pause(description, _as_request(error), number, self._clock() - began, tell)
            except answers as error:
                tell("ok", told(error))
                raise
            except BcpError as error:
                tell("failed", told(error))
                raise
            except Exception as error:  # noqa: BLE001 -- whatever a client raises for an answer that nobody foresaw
                await self._pause(description, _as_foreign(error, number), number, self._clock() - began, tell)
            else:
                tell("ok", "")
                self._successes += 1
                self.limiter.succeeded()
                return result

    async def _pause(self, description: str, error: RequestError, number: int, lasted: float, tell: _Tell) -> None:
        """Wait before the next attempt, or raise if there is to be none."""
        if error.slow_down:
            self.limiter.slow_down()
        ceiling = min(self.policy.first_pause_seconds * 2 ** min(number - 1, 30), self.policy.longest_pause_seconds)
        pause = max(JITTER.uniform(0, ceiling), error.after or 0.0)
        spent = self.retries >= self.policy.allowance + self._successes // 10
        is_new = error.unreachable and not self._successes
        deadline = min(self.policy.deadline_seconds, UNREACHED_SECONDS) if is_new else self.policy.deadline_seconds
        if not error.transient or spent or lasted + pause > deadline:
            hint = "; no request has reached this store yet: check its endpoint" if is_new else ""
            tell("failed", error.said)
            raise _final(description, error, number, lasted, spent=spent, hint=hint) from error
        tell("again", error.said)
        self.retries += 1
        event = RetryEvent(description, number, pause, error.said, error.slow_down)
        self.policy.on_retry(event)
        emit(event)
        log.info("a storage request is made again", request=description, attempt=number, pause=pause, said=error.said)
        await self._sleep(pause)


def _tell(about: tuple[str, str, str], nbytes: int, number: int, started: float, status: Status, message: str) -> None:
    emit(RequestEvent(*about, nbytes, started, time.monotonic(), number, status, hidden(message)))


def _as_foreign(error: Exception, number: int) -> RequestError:
    """Return the error of an answer that cannot be understood; the first ones may succeed later."""
    is_again = number < FOREIGN_TRIES and not isinstance(error, OSError)
    made = RequestError(f"the answer is not understood: {type(error).__name__}: {error}", transient=is_again)
    made.__cause__ = error
    return made


def _as_request(error: Exception) -> RequestError:
    """Return the error as one that says whether to try again."""
    if isinstance(error, RequestError):
        return error
    message = "no answer in time" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
    made = RequestError(message, transient=True)
    made.__cause__ = error
    return made


def _final(
    description: str, error: RequestError, attempts: int, seconds: float, *, spent: bool, hint: str
) -> StorageError:
    """Return the error of a request that has failed for good, with its attempts and the server's words."""
    why = "; so many requests fail that no more is made again" if spent and error.transient else ""
    times = "once" if attempts == 1 else f"{attempts} times in {seconds:.1f} s"
    return StorageError(f"{description} failed, tried {times}: {error.said}{why}{hint}")
