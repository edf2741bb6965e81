"""One rank of a job whose ranks agree over a tree; one of them kills itself in the middle of a save."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import killed_save
from torch.distributed import TCPStore

import bcp
from bcp.backends import resolve
from bcp.coordinators import GrpcCoordinator
from bcp.coordinators.tree.rendezvous import StoreRendezvous
from bcp.protocols import Agreement, Buffer
from bcp.testing.storage_fakes import FaultyBackend

LOOPBACK = "127.0.0.1"
SIZE = 5
FANOUT = 2  # so that rank 1 is an inner node: 0 has 1 and 2, 1 has 3 and 4
TIMEOUT = 3600.0  # seconds of silence: nobody waits for them
MOMENTS = ("gather", "upload", "commit")
STEPS = {"gather": "begin", "commit": "commit", "recording": "telemetry"}


class Deadly:
    """A coordinator whose rank dies in one step: rank 0 when all have given theirs, others when it begins."""

    def __init__(self, inner: GrpcCoordinator, step: str, die: Callable[[], None]) -> None:
        self.rank = inner.rank
        self.world_size = inner.world_size
        self._inner = inner
        self._step = step
        self._die = die

    def begin(self, operation: str, timeout: float) -> AbstractAsyncContextManager[Agreement]:
        inner = self._inner.begin(operation, timeout)

        @asynccontextmanager
        async def deadly() -> AsyncIterator[Agreement]:
            async with inner as agreement:
                yield _DeadlyAgreement(agreement, self._inner.rank, self._step, self._die)

        return deadly()


class _DeadlyAgreement:
    def __init__(self, inner: Agreement, rank: int, step: str, die: Callable[[], None]) -> None:
        self._inner = inner
        self._rank = rank
        self._step = step
        self._die = die

    async def gather_scatter(
        self, step: str, mine: bytes, divide: Callable[[Sequence[bytes]], Sequence[bytes]]
    ) -> bytes:
        return await self._inner.gather_scatter(step, mine, divide)

    async def gather_broadcast(
        self, step: str, mine: bytes, decide: Callable[[Sequence[bytes]], Awaitable[bytes]]
    ) -> bytes:
        if step != self._step:
            return await self._inner.gather_broadcast(step, mine, decide)
        if self._rank != 0:
            self._die()

        async def never(_gathered: Sequence[bytes]) -> bytes:
            self._die()
            return b""

        return await self._inner.gather_broadcast(step, mine, never)

    async def all_to_all(self, send: Sequence[Buffer], receive: Sequence[Buffer]) -> None:
        await self._inner.all_to_all(send, receive)

    async def bandwidth(self) -> float:
        return await self._inner.bandwidth()


def main(rank: int, port: int, job: str, directory: Path, victim: int | None, moment: str) -> None:
    """Save once, so that all know each other; save ``directory/ckpt`` then, and write down what came of it."""
    store = TCPStore(LOOPBACK, port, None, is_master=False, wait_for_workers=False)
    rendezvous = StoreRendezvous(store, job, rank, SIZE, FANOUT, LOOPBACK)
    ranks: Any = GrpcCoordinator(rank, SIZE, rendezvous)
    bcp.save(directory / f"{job}-older", killed_save.state(1), coordinator=ranks)

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    async def upload(_: str) -> None:
        if rank == victim and moment == "upload":
            die()

    backend = FaultyBackend(resolve(directory / "ckpt"), "write_part", upload, key="model")
    if rank == victim and moment != "upload":
        ranks = Deadly(ranks, STEPS[moment], die)
    options = bcp.SaveOptions(part_bytes=1 << 20, timeout=TIMEOUT, overwrite=True)
    outcome: list[Any] = ["saved", None, ""]
    try:
        bcp.save(backend, killed_save.state(SIZE), options=options, coordinator=ranks)
    except bcp.PeerError as error:
        outcome = ["PeerError", error.rank, str(error)]
    (directory / f"{job}-{rank}").write_text(json.dumps(outcome))
