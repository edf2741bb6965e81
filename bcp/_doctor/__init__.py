"""``python -m bcp doctor``: checks from every rank what a job needs, and says on rank 0 how it is.

All ranks meet in the job's store, make their checks at once, and report to rank 0 there. Every step has a deadline, and
the process ends within the timeout, whatever hangs.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from typing import NoReturn

import anyio

from bcp._doctor.examination import examined
from bcp._doctor.meeting import RankPlace
from bcp._doctor.report import Times
from bcp.backends import resolve
from bcp.errors import InputError

__all__ = ["doctor", "leave"]


def doctor(path: str | None, timeout: float) -> int:
    """Examine the job of which this process is a rank; return the exit status.

    Args:
        path: of storage for checkpoints, to be tried out; nothing of it is changed in the end.
        timeout: seconds after which this process ends, if it has not ended before.

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


def leave(status: int) -> NoReturn:
    """End the process at once: threads that hang, in a file system or in a store, are not waited for."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status)


async def _until_signal(place: RankPlace, path: str | None, times: Times) -> bool:
    """Examine the job; where a signal asks for the end, tidy up and say that all is not well."""
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
    """End a process in which something hangs that cannot be cancelled, as the look-up of a name does."""
    print(f"bcp doctor: rank {rank} hangs, and ends after {timeout} s", file=sys.stderr, flush=True)  # noqa: T201 -- same
    leave(1)
