"""The record of a save or load that failed: which rank, phase, stage, part and file, and why."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from functools import lru_cache

from bcp._text import hidden
from bcp.errors import BcpError, CorruptError, PeerError, StageError, StorageError
from bcp.events import PhaseEvent, RequestEvent, StageEvent
from bcp.telemetry.recording import FailureRecord
from bcp.telemetry.watch import Watch

__all__ = ["failed_phase", "failure_of", "host_name"]

MOST_TENSORS = 8
MOST_ERRORS = 16
MOST_NOTES = 32
MOST_TEXT = 4000
"""Characters of one message or note."""


def failure_of(watch: Watch, error: BaseException) -> FailureRecord:
    """Return the facts of the end of a save or load on this rank.

    Call it while the watch is running: at its end the names of the tensors are forgotten. It raises nothing of its own
    accord, makes no request, and does not change the error.

    Args:
        watch: of the save or load.
        error: the error that ended it.

    """
    chain = list(_chain(error))
    stage, item = _stage(watch, chain)
    file, tensors = watch.contents(item) if item else ("", ())
    request = _request(watch, chain)
    return FailureRecord(
        rank=watch.rank,
        host=host_name(),
        guilty=_guilty(watch, error),
        time=time.time(),
        phase=failed_phase(watch),
        stage=stage,
        item=item,
        tensors=tuple(tensors[:MOST_TENSORS]),
        file=file if request is None else request.key,
        attempt=0 if request is None else request.attempt,
        errors=tuple((type(exception).__name__, _cut(str(exception))) for exception in chain),
        notes=tuple(_cut(str(note)) for exception in chain for note in getattr(exception, "__notes__", ()))[
            :MOST_NOTES
        ],
    )


def failed_phase(watch: Watch) -> str:
    """Return the phase that failed; empty if none did."""
    return next((event.phase for event in reversed(watch.events) if isinstance(event, PhaseEvent) and event.error), "")


@lru_cache(1)
def host_name() -> str:
    """Return the name of this host."""
    return socket.gethostname()


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause, and so on; each once, and none that merely carries another one."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen and len(seen) < MOST_ERRORS:
        seen.add(id(error))
        if not hasattr(error, "carried"):
            yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _guilty(watch: Watch, error: BaseException) -> int | None:
    """Return the rank to blame: none if all ranks have agreed on the error."""
    if isinstance(error, PeerError):
        return error.rank
    agreed = isinstance(error, BcpError) and error.of_all_ranks
    return None if agreed and watch.world_size > 1 else watch.rank


def _stage(watch: Watch, chain: list[BaseException]) -> tuple[str, str]:
    """Return the stage that failed first, and its item; two empty strings if no stage failed."""
    for event in watch.events:
        if isinstance(event, StageEvent) and event.error:
            return event.stage, event.item
    return next(
        ((exception.stage, exception.item) for exception in chain if isinstance(exception, StageError)), ("", "")
    )


def _request(watch: Watch, chain: list[BaseException]) -> RequestEvent | None:
    """Return the last request that failed for good, if storage is to blame at all."""
    if not any(isinstance(exception, StorageError | CorruptError) for exception in chain):
        return None
    requests = (event for event in reversed(watch.events) if isinstance(event, RequestEvent))
    return next((event for event in requests if event.status == "failed"), None)


def _cut(text: str) -> str:
    text = hidden(text)
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]} ... ({len(text)} characters)"
