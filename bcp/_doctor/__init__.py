"""``python -m bcp doctor``: checks from every rank the needs of a job, and prints the result on rank 0.

All ranks meet in the job's store, make their checks at once, and report to rank 0 there. Every step has a deadline, and
the process ends within the timeout, even if a call hangs.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import NoReturn

import anyio

from bcp._doctor.examination import examined
from bcp._doctor.meeting import RankPlace
from bcp._doctor.report import Times
from bcp.backends import resolve
from bcp.errors import InputError
from bcp.runtime.process import leave

__all__ = ["doctor"]


def doctor(path: str | None, timeout: float) -> int:
    """Examine the job of this process; return the exit status.

    Args:
        path: of storage for checkpoints, to be tried out; it is unchanged in the end.
        timeout: seconds after which this process ends at the latest.

    """
    try:
        place = RankPlace.of(os.environ)
        if path is not None:
            resolve(path)
    except InputError as error:
        print(f"bcp doctor: {error}", file=sys.stderr)  # noqa: T201 -- for the user
        return 2
    last = threading.Timer(timeout, _give_up, [place.rank, timeout])
    last.daemon = True
    last.start()
    healthy = anyio.run(_until_signal, place, path, Times(timeout, place.rank))
    last.cancel()
    return 0 if healthy else 1


async def _until_signal(place: RankPlace, path: str | None, times: Times) -> bool:
    """Examine the job; after a signal, tidy up and return False."""
    healthy = False
    async with anyio.create_task_group() as group:
        group.start_soon(_cancel_at_signal, group.cancel_scope)
        healthy = await examined(place, path, times)
        group.cancel_scope.cancel()
    return healthy


async def _cancel_at_signal(scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel()
            return


def _give_up(rank: int, timeout: float) -> NoReturn:
    """End a process that hangs in a call that cannot be cancelled, such as the look-up of a name."""
    print(f"bcp doctor: rank {rank} hangs, and ends after {timeout} s", file=sys.stderr, flush=True)  # noqa: T201 -- same
    leave(1)
