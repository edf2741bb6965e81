"""A client in a process of its own, and the heartbeat that shows how long its event loop stood still."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from multiprocessing.connection import Connection as Pipe
from typing import Any, NamedTuple

from benchmarks.storage.clients import CLIENTS, Kit, Place
from benchmarks.storage.payload import Bytes, digest_of

__all__ = ["BEAT_SECONDS", "Cost", "Heart", "be_idle", "be_worker"]

BEAT_SECONDS = 0.002


class Cost(NamedTuple):
    """One transfer.

    Attributes:
        began: by the clock that all processes of a machine share.
        ended: by the same clock.
        cpu_seconds: of all threads of the process.
        stall_seconds: the longest time that the loop was late for a heartbeat.
    """

    began: float
    ended: float
    cpu_seconds: float
    stall_seconds: float


class Heart:
    """Beats on the running loop, and remembers when it was late.

    Attributes:
        late: ends of pauses, and how many seconds too long they were.
    """

    def __init__(self) -> None:
        self.late: list[tuple[float, float]] = []

    async def beat(self) -> None:
        """Beat until cancelled."""
        while True:
            began = time.perf_counter()
            await asyncio.sleep(BEAT_SECONDS)
            now = time.perf_counter()
            self.late.append((now, now - began - BEAT_SECONDS))

    def worst(self, began: float, ended: float) -> float:
        """Return the longest delay of beats that ended in a time, or began in it."""
        return max((late for end, late in self.late if began <= end and end - late <= ended), default=0.0)


@asynccontextmanager
async def _beating() -> AsyncIterator[Heart]:
    heart = Heart()
    task = asyncio.create_task(heart.beat())
    await asyncio.sleep(0)
    try:
        yield heart
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Worker:
    """Does with one client as it is told."""

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._found: Sequence[Bytes] = []

    async def transfer(self, kind: str, way: str, name: str) -> Cost:
        """Write or read the payload once."""
        self._found = []
        self._kit.forget()
        call: Any = (self._kit.writes if kind == "write" else self._kit.reads)[way]
        async with _beating() as heart:
            cpu, began = _cpu(), time.perf_counter()
            found = await call(name)
            ended, cpu = time.perf_counter(), _cpu() - cpu
            await asyncio.sleep(2 * BEAT_SECONDS)  # for the beat that was due at the end
        self._found = found or []
        return Cost(began, ended, cpu, heart.worst(began, ended))

    async def digest(self) -> int:
        """Return the digest of the bytes that were read last."""
        return digest_of(self._found)

    async def ways(self) -> dict[str, list[str]]:
        """Return the names of all ways."""
        return {"write": list(self._kit.writes), "read": list(self._kit.reads)}


def be_worker(pipe: Pipe, client: str, place: Place) -> None:
    """Be a client's process until the pipe is closed."""
    asyncio.run(_work(pipe, client, place))


async def _work(pipe: Pipe, client: str, place: Place) -> None:
    kit = await CLIENTS[client][0](place)
    try:
        worker = Worker(kit)
        with suppress(EOFError):
            while True:
                method, *args = await asyncio.to_thread(pipe.recv)
                pipe.send(await getattr(worker, method)(*args))
    finally:
        if kit.close is not None:
            await kit.close()


def be_idle(pipe: Pipe) -> None:
    """Be a process whose loop has nothing to do; answer how late its heart was in a time, until the pipe is closed."""
    asyncio.run(_idle(pipe))


async def _idle(pipe: Pipe) -> None:
    async with _beating() as heart:
        with suppress(EOFError):
            while True:
                began, ended = await asyncio.to_thread(pipe.recv)
                pipe.send(heart.worst(began, ended))
                heart.late.clear()
