"""A connection to a torch Store whose calls end within the caller's time limit.

A call of a TCPStore client cannot be cancelled, and torch's own timeouts do not end it. Connecting to a dead server
takes twice the process group's timeout. A server that is stopped lets clients connect and never answers, so every call
but ``set`` blocks for ever (torch 2.13). So each client calls its store in one daemon thread. It is abandoned when it
does not come back in time. The thread reads no tensor memory, and does not keep the process alive.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, TypeVarTuple
from weakref import WeakSet

import anyio
from torch.distributed import FileStore, PrefixStore, Store, TCPStore

from bcp.errors import PeerError
from bcp.runtime.process import process_lock

__all__ = ["STORE_ERRORS", "Backoff", "StoreClient", "compare_set_bytes", "innermost", "set_bytes"]


@dataclass(slots=True)
class Backoff:
    """Pauses between attempts, which double until they are as long as the longest."""

    pause: float  # seconds of the next one
    longest: float  # the limit; it may be changed between two pauses

    @classmethod
    def of_store(cls, world_size: int) -> Backoff:
        """Return the pauses of each of ``world_size`` ranks between two looks at a store."""
        # 20 looks a second by each of 1,000 ranks are as many as one store answers; more ranks look less often
        return cls(0.001, 0.05 * max(1.0, world_size / 1000))

    async def sleep(self) -> None:
        """Pause."""
        await anyio.sleep(self.pause)
        self.pause = min(2 * self.pause, self.longest)


T = TypeVar("T")
Ts = TypeVarTuple("Ts")

STORE_ERRORS = (RuntimeError, OSError)
"""Errors of a store: torch's DistStoreError and DistNetworkError are RuntimeErrors."""

_LEAST_SECONDS = 1.0  # a store that answers after less is slow, not dead, whatever the operation's timeout
_LOOKS = 10  # parts of a wait: a process that was itself stopped loses one of them, not all
_EXIT_SECONDS = 5.0
"""Longest wait of the end of the process for calls: a thread that returns from torch's C++ during it may abort the
process. One job aborted so with a limit of 1 s, on an overloaded host."""

_clients: WeakSet[StoreClient] = WeakSet()


class _Call(Generic[T]):
    """One call of a store, and its outcome."""

    def __init__(self, function: Callable[[], T]) -> None:
        self.ended = Future[None]()  # cancelled if the call was given up before it began
        self.began = 0.0  # time.monotonic() when the thread came to it
        self.outcome: list[tuple[T, None] | tuple[None, Exception]] = []  # who pops it has the only reference
        self._function = function

    def run(self) -> None:
        if self.ended.set_running_or_notify_cancel():
            try:
                self.outcome.append((self._function(), None))
            except Exception as error:  # noqa: BLE001 -- raised again by who waits
                self.outcome.append((None, error))
            del self._function
            self.ended.set_result(None)


class StoreClient:
    """A store, and the one thread that calls it; connects at the first call.

    Calls run one after another, as in a TCPStore's client. A call that hangs holds up the later ones, and each of these
    waits for its own time limit. There is never a second thread.
    """

    def __init__(self, shared: Store, connect: Callable[[Store], Store] = lambda store: store) -> None:
        """Prepare the client. ``connect(shared)`` runs in the thread, before the first call and after an error.

        A TCPStore's client whose connection broke never works again, and torch does not make a new one.
        """
        self.shared = shared  # only its host and port are read
        self.name = _name_of(shared)  # for messages, with host, port and server
        self._connect = connect
        self._store: Store | None = None
        self._lock = process_lock()
        self._waiting: deque[_Call[Any]] = deque()
        self._current: _Call[Any] | None = None
        self._given_up: _Call[Any] | None = None
        self._thread: threading.Thread | None = None
        _clients.add(self)

    @classmethod
    def of(cls, store: Store | StoreClient) -> StoreClient:
        """Return a client of this store, on which nobody else should wait; return a client unchanged."""
        return store if isinstance(store, StoreClient) else cls(store)

    def __repr__(self) -> str:
        state = "not connected" if self._store is None else "connected"
        return f"<StoreClient of {self.name}: {state}, {len(self._waiting)} calls wait>"

    @property
    def store(self) -> Store:
        """The store itself, for functions that run in the thread; connects if there is no connection yet."""
        if self._store is None:
            self._store = self._connect(self.shared)
        return self._store

    @property
    def stuck(self) -> bool:
        """Whether a call that a caller has given up is still under way: the next one would have to wait for it."""
        return self._given_up is not None and self._given_up is self._current

    async def call(self, function: Callable[[*Ts], T], *args: *Ts, seconds: float | None = None) -> T:
        """Call a blocking function of the store in the thread and return its result.

        A caller that is cancelled, or has waited for ``seconds``, abandons the call. A call that has not begun is
        never made. A call that has begun ends by itself, and its result is dropped. No caller waits for ever.
        Raises PeerError if the store failed, or did not answer in time. The error names rank 0, which usually serves
        the store.
        """
        started = time.monotonic()
        call = self._submit(partial(function, *args))
        waiter = asyncio.wrap_future(call.ended)
        try:
            await _wait(waiter, seconds)
            if not call.ended.done():
                self._given_up = self._current
                raise PeerError(0, self._silence(time.monotonic() - started))
        finally:
            self._leave(call)
            waiter.cancel()
        return self._result(call, started)

    def call_blocking(self, function: Callable[[*Ts], T], *args: *Ts, seconds: float) -> T:
        """Call a blocking function as :meth:`call` does, from code that is not async."""
        started = time.monotonic()
        call = self._submit(partial(function, *args))
        with suppress(TimeoutError):
            call.ended.result(seconds)
            return self._result(call, started)
        self._leave(call)
        raise PeerError(0, self._silence(seconds))

    def silence(self, seconds: float) -> str:
        """Return the cause of an error if the call under way has lasted for ``seconds``, else an empty text."""
        current = self._current
        lasted = 0.0 if current is None else time.monotonic() - current.began
        return self._silence(lasted) if lasted >= seconds else ""

    def _silence(self, seconds: float) -> str:
        return (
            f"{self.name} has not answered for {seconds:.1f} s: its server is dead, stopped or cut off from this host; "
            "restart the job if it does not come back"
        )

    def _made(self, function: Callable[[], T]) -> T:
        """Call a function in the thread; an error of the store ends the connection."""
        try:
            return function()
        except STORE_ERRORS:
            self._store = None
            raise

    def _result(self, call: _Call[T], started: float) -> T:
        """Return the result of a call, or raise its error as one of bcp's."""
        result, error = call.outcome.pop()
        if error is None:
            return result  # type: ignore[return-value]  # the first of the two forms of an outcome
        try:
            if not isinstance(error, STORE_ERRORS):
                raise error
            cause = (
                f"{self.name} failed after {time.monotonic() - started:.1f} s: {type(error).__name__}: {error}; "
                "its server has probably died: restart the job if it does not come back"
            )
            raise PeerError(0, cause) from error
        finally:
            del error  # it would hold this frame and the frame it

    # -- the thread ---------------------------------------------------------------------------

    def _submit(self, function: Callable[[], T]) -> _Call[T]:
        """Queue a call for the thread; start the thread if there is none."""
        call = _Call(partial(self._made, function))
        with self._lock:
            self._waiting.append(call)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="bcp-store", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError as error:
                    self._waiting.remove(call)
                    self._thread = None
                    raise PeerError(0, f"no thread can be had to call {self.name}: {error}") from error
        return call

    def _leave(self, call: _Call[Any]) -> None:
        """Abandon a call; one that has not begun is never made."""
        if call.ended.cancel():
            with self._lock, suppress(ValueError):
                self._waiting.remove(call)

    def _work(self) -> None:
        """Make the queued calls; end when there is none."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = self._current = None
                    return
                call = self._waiting.popleft()
                call.began, self._current = time.monotonic(), call
            call.run()

    def settle(self, seconds: float) -> None:
        """Wait until no call is under way, for ``seconds`` at most."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)


def innermost(store: Store) -> Store:
    """Return the store inside of all prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def set_bytes(store: Store, key: str, value: bytes) -> None:
    """Set a key to bytes, which torch's stores take, though their stubs ask for a text."""
    store.set(key, value)  # type: ignore[arg-type]  # see above


def compare_set_bytes(store: Store, key: str, value: bytes) -> bytes:
    """Set a key to bytes unless it is set; return its value."""
    return bytes(store.compare_set(key, "", value))  # type: ignore[arg-type]  # see set_bytes


async def _wait(waiter: asyncio.Future[None], seconds: float | None) -> None:
    """Wait for a call, for ``seconds`` of this process's own time at most."""
    if seconds is None:
        await asyncio.wait([waiter])
        return
    for _ in range(_LOOKS):
        done, _ = await asyncio.wait([waiter], timeout=max(seconds, _LEAST_SECONDS) / _LOOKS)
        if done:
            return


def _name_of(store: Store) -> str:
    """Return the name of a store, with its server."""
    inner = innermost(store)
    if isinstance(inner, TCPStore):
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        is_agents = agent and os.environ.get("MASTER_PORT") == str(inner.port)
        server = "by torchrun's agent on that host" if is_agents else "as a rule by the process of rank 0"
        return f"the store at {inner.host}:{inner.port} (served {server})"
    if isinstance(inner, FileStore):
        return f"the store in the file {inner.path}"  # type: ignore[attr-defined]  # torch's stub lacks it
    return f"the store ({type(inner).__name__})"


def _settle_at_exit() -> None:
    """Wait for calls under way: a thread that returns after the end of the interpreter may abort in C++."""
    deadline = time.monotonic() + _EXIT_SECONDS
    for client in list(_clients):
        client.settle(max(deadline - time.monotonic(), 0.0))


atexit.register(_settle_at_exit)
