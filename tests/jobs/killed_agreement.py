"""One of four ranks that agree with each other, without bcp's saves around it; one of them is killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import anyio
from ranks import HOST
from torch import distributed as dist

from bcp.coordinators import GrpcCoordinator

SIZE = 4
NEVER = 3600.0
"""Seconds of silence after which a rank is given up: nobody here waits for them."""


def joined(rank: int, port: int) -> GrpcCoordinator:
    """Join the group; return this rank's coordinator."""
    store = dist.TCPStore(HOST, port, None, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", rank=rank, world_size=SIZE, store=store)
    return GrpcCoordinator.over(fanout=1)


async def join(gathered: Sequence[bytes]) -> bytes:
    return b"".join(gathered)


def outcome(error: Exception) -> list[object]:
    return [type(error).__name__, getattr(error, "rank", None), str(error)]


def within(rank: int, port: int, victim: int, folder: Path) -> None:
    """Kill the victim in the middle of the second operation; write down what came of it."""
    ranks = joined(rank, port)

    async def main() -> list[object]:
        async with ranks.begin("first", NEVER) as agreement:
            together = await agreement.gather_broadcast("commit", b"%d" % rank, join)
            received = [bytearray(1) for _ in range(SIZE)]
            await agreement.all_to_all([bytes([rank])] * SIZE, received)
        result = list[object]()
        try:
            async with ranks.begin("second", NEVER) as agreement:
                await agreement.gather_broadcast("all are here", b"", join)
                if rank == victim:
                    os.kill(os.getpid(), signal.SIGKILL)
                await agreement.gather_broadcast("commit", b"", join)
        except Exception as error:  # noqa: BLE001 -- the test looks at whatever it is
            result = outcome(error)
        return [together.decode(), b"".join(received).hex(), result]

    (folder / str(rank)).write_text(json.dumps(anyio.run(main)))
    os._exit(0)  # gloo waits for the dead rank otherwise


def between(rank: int, port: int, victim: int, folder: Path) -> None:
    """Kill the victim between two operations; write down what came of the next two."""
    ranks = joined(rank, port)

    async def main() -> list[object]:
        async with ranks.begin("first", NEVER) as agreement:
            await agreement.gather_broadcast("commit", b"", join)
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        result: list[object] = []
        for what in ("second", "third"):
            try:
                async with ranks.begin(what, NEVER) as agreement:
                    await agreement.gather_broadcast("commit", b"", join)
            except Exception as error:  # noqa: BLE001 -- the test looks at whatever it is
                result.append(outcome(error))
        return result

    (folder / str(rank)).write_text(json.dumps(anyio.run(main)))
    os._exit(0)
