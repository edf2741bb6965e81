"""The work of a reader worker process: it reads ahead, and keeps every token until it is consumed.

A worker computes nothing with torch, whose threads do not survive a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import threading
import traceback
from multiprocessing.connection import wait
from typing import Any, NamedTuple

from bcp.data.messages import Line, pack_states, unpack_states
from bcp.data.recipe import Recipe
from bcp.data.stream import Schedule, Streams
from bcp.errors import StageError

__all__ = ["Job", "run"]


class Job(NamedTuple):
    """The part of the work that all workers of a reader have in common.

    Attributes:
        recipe: sources and order.
        schedule: the reader's windows.
        prefetch: batches to read beyond the consumed frontier.
    """

    recipe: Recipe
    schedule: Schedule
    prefetch: int


def run(theirs: socket.socket, job: Job | None) -> None:
    """Serve a reader until it ends this process, or dies.

    The first message has the states of the units. Without a job in the arguments, a message before it has one, pickled.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the reader's to act on
    for notice in (signal.SIGTERM, signal.SIGUSR1):  # torchrun and SLURM signal the group; the last steps need batches
        signal.signal(notice, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    threading.Thread(target=_watch_parent, daemon=True).start()
    line = Line(theirs)
    if job is None and (message := line.receive()):
        try:
            job = pickle.loads(message.arrays["job"].data)  # noqa: S301 -- the socket pair's other end is the parent's
        except Exception as error:  # noqa: BLE001 -- the reader raises it
            _report(line, "the sources, which could not be unpickled", error)
            return
    if job and (message := line.receive()):
        _serve(line, Streams(job.recipe, job.schedule, unpack_states(message.arrays)), job.prefetch)


def _watch_parent() -> None:
    """End this process when its parent has died. Others may hold the socket's other end, so its end tells nothing."""
    parent, family = os.getppid(), multiprocessing.parent_process()
    sentinels = [family.sentinel] if family else []
    while os.getppid() == parent and not wait(sentinels, timeout=1.0):
        pass
    os._exit(1)


def _serve(line: Line, streams: Streams, prefetch: int) -> None:
    request: dict[str, Any] | None = None
    failed = False
    while True:
        if request and (failed or streams.taken >= request["taken"]):
            states = pack_states(streams.states())
            line.send_arrays("states", states, number=request["number"], consumed=streams.consumed)
            del states
            request = None
        elif failed or streams.taken >= streams.consumed + prefetch or line.has_message():
            message = line.receive()
            if message is None:
                return
            if message.words["kind"] == "consumed":
                streams.consume()
            else:
                request = message.words
        else:
            failed = not _take(line, streams)


def _take(line: Line, streams: Streams) -> bool:
    """Send the next batch, or why there is none."""
    try:
        windows = streams.take()
        arrays = {name: getattr(windows, name) for name in ("numbers", "tokens", "documents", "samples")}
        line.send_arrays("batch", arrays, live=windows.live)
    except Exception as error:  # noqa: BLE001 -- the reader raises it
        cause = error.__cause__ if isinstance(error, StageError) and error.__cause__ else error
        _report(line, error.item if isinstance(error, StageError) else "a batch", cause)
        return False
    return True


def _report(line: Line, item: str, cause: BaseException) -> None:
    """Send an error, which the reader raises; clipped, because a character takes up to 12 bytes of the packet."""
    line.send(
        "failure",
        item=item[:500],
        cause=f"{type(cause).__name__}: {cause}"[:1000],
        traceback="".join(traceback.format_exception(cause))[-8000:],
    )
