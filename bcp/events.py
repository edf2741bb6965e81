"""Events of saves and loads as frozen data, the way to their observer, and the results at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, get_args

from bcp._text import hidden

__all__ = [
    "LOST",
    "OWN_HOST",
    "PHASES",
    "REBUILT",
    "STORED",
    "TIER_HAPPENINGS",
    "BudgetEvent",
    "Event",
    "LoadResult",
    "Observer",
    "PhaseEvent",
    "RequestEvent",
    "RetryEvent",
    "SaveResult",
    "StageEvent",
    "StageStart",
    "Status",
    "TierEvent",
    "TierHappening",
    "emit",
    "ignore",
    "observed_by",
    "told",
]


PHASES = frozenset({"plan", "snapshot", "write", "commit", "drain", "open", "read", "finish"})
"""Phases of saves and loads. Every other name in a :class:`PhaseEvent` is one of :func:`bcp.telemetry.measure`."""

Status = Literal["ok", "again", "failed"]
"""Result of one attempt of a request: answered, repeated after a failure, or failed for good."""


@dataclass(frozen=True, slots=True)
class PhaseEvent:
    """One phase of a save or load is over.

    Attributes:
        phase: of a save ``plan``, ``snapshot``, ``write`` and ``commit``; of a load ``open``, ``plan``, ``read`` and
            ``finish``; else a name that was given to :func:`bcp.telemetry.measure`.
        started: ``time.monotonic()`` at its beginning, in seconds.
        ended: the same at its end.
        error: type and message of the error that ended it; empty if it went well.
    """

    phase: str
    started: float
    ended: float
    error: str = ""


@dataclass(frozen=True, slots=True)
class BudgetEvent:
    """One item entered the pipeline, once there was staging memory for it.

    Attributes:
        item: name of the item.
        nbytes: bytes that it borrows from the byte budget until it leaves the last stage.
        started: ``time.monotonic()`` when it asked for them, in seconds.
        ended: the same when it had them.
        onward: name of the stage whose queue it goes into.
    """

    item: str
    nbytes: int
    started: float
    ended: float
    onward: str = ""


@dataclass(frozen=True, slots=True)
class StageStart:
    """One stage takes one item out of its queue.

    Attributes:
        stage: name of the stage.
        item: name of the item, as it entered the pipeline.
        nbytes: bytes of the item, as counted by the byte budget.
        queued: ``time.monotonic()`` when the item came into the stage's queue, in seconds.
        started: the same when the stage's function was called.
    """

    stage: str
    item: str
    nbytes: int
    queued: float
    started: float


@dataclass(frozen=True, slots=True)
class StageEvent:
    """One item went through one stage.

    Attributes:
        stage: name of the stage.
        item: name of the item, as it entered the pipeline.
        nbytes: bytes of the item, as counted by the byte budget.
        started: ``time.monotonic()`` when the stage's function was called, in seconds.
        ended: the same when it returned or raised.
        waited: seconds that the item was in the stage's queue before.
        error: type and message of the error that the stage raised; empty if it went well.
        onward: name of the stage whose queue it goes into; empty behind the last stage, and after an error.
    """

    stage: str
    item: str
    nbytes: int
    started: float
    ended: float
    waited: float = 0.0
    error: str = ""
    onward: str = ""


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """Storage answered one attempt of a request, or failed.

    Attributes:
        store: the storage without any secret, as in ``gs://bucket/run`` or ``/mnt/run``.
        operation: ``put``, ``get``, ``part``, ``read``, ``list`` or another verb of the backend.
        key: the object's key, relative to the store; the first one of several.
        nbytes: bytes that the request moves.
        started: ``time.monotonic()`` at its beginning, in seconds. Pauses before it and its place in line are not part
            of it.
        ended: the same at its end.
        attempt: number of the attempt; the first one is 1.
        status: ``"ok"``: the store has answered, if only that there is no such object; ``"again"``: it failed and is
            made again; ``"failed"``.
        said: the error in the server's or the client's words; empty if it went well.
    """

    store: str
    operation: str
    key: str
    nbytes: int
    started: float
    ended: float
    attempt: int = 1
    status: Status = "ok"
    said: str = ""


@dataclass(frozen=True, slots=True)
class RetryEvent:
    """A request to storage failed, and is made again after a pause.

    Attributes:
        request: the request in words, with store, object and bytes.
        attempt: number of the attempt that failed; the first one is 1.
        pause: seconds until the next one.
        said: the server's or the client's words.
        slow_down: whether the server asked for fewer requests.
    """

    request: str
    attempt: int
    pause: float
    said: str
    slow_down: bool


TierHappening = Literal[
    "released",
    "copied",
    "draining",
    "durable",
    "superseded",
    "refused",
    "left",
    "damaged",
    "unwatched",
    "full",
    "unreachable",
    "drifted",
    "stale",
    "passed_over",
    "read",
]
"""What can happen to a snapshot in the memory of the hosts; see :class:`TierEvent`."""

TIER_HAPPENINGS: tuple[TierHappening, ...] = get_args(TierHappening)

LOST: frozenset[TierHappening] = frozenset({"superseded", "refused", "left", "damaged"})
"""Ends of a snapshot that was on its way to storage, and will never be durable."""

OWN_HOST, REBUILT, STORED = "this host", "parity", "storage"
"""Places that a resumption reads a snapshot from; all others are names of hosts."""


@dataclass(frozen=True, slots=True)
class TierEvent:
    """Something has happened to a snapshot in the memory of the hosts, as this rank sees it.

    A save into memory has two ends. ``released`` is the first one, and ``durable`` the second. The second one, and all
    that happens on the way to it, come after the save has returned.

    Attributes:
        what: one of these:

            - ``released``: all ranks have marked their files, so that all of them may die;
            - ``copied``: all hosts that were to copy it have done so; told in the next save;
            - ``draining``: it is to become durable, and agents have it;
            - ``durable``: agents have committed it;
            - ``superseded``: newer snapshots came before storage had it, so that it never becomes durable;
            - ``refused``: another save has committed a checkpoint at its place;
            - ``left``: a later life of the job has not gone on from it;
            - ``damaged``: a file has changed in memory, so that it never becomes durable;
            - ``unwatched``: this process waits no more, as for a run that is closed, and agents go on with it;
            - ``full``: the file system in memory has no room for it;
            - ``unreachable``: a host cannot fetch its copies from another one, and goes on trying;
            - ``drifted``: two replicas of a file have differed, and the copy is the owner's; told in the next save;
            - ``stale``: a resumption has passed it over;
            - ``passed_over``: a copy of a file was damaged or did not answer, so that the next copy was read;
            - ``read``: a resumption has read bytes from one place.
        step: of the training; None if it is not known.
        operation: id of the save; empty if it is not known.
        moment: ``time.monotonic()`` when this rank has learnt of it, in seconds.
        seconds: from the call of the save until then; None if this process has not made the save.
        nbytes: bytes of this rank's files, or those that were read.
        place: the copy, host or file system; else empty.
        said: the reason; else empty.
    """

    what: TierHappening
    step: int | None
    operation: str
    moment: float
    seconds: float | None = None
    nbytes: int = 0
    place: str = ""
    said: str = ""


Event = PhaseEvent | BudgetEvent | StageStart | StageEvent | RequestEvent | RetryEvent | TierEvent
"""Everything that an observer may get."""

Observer = Callable[[Event], None]
"""Called once for each event of one save or load on this rank, as soon as it has happened.

A :class:`TierEvent` may come after the end of the save.

It is called on the event loop, or on the thread of a storage client, so it must be quick. An error that it raises is
logged, and it is not called again.
"""


def ignore(event: object) -> None:
    """Ignore an event: the default observer."""


_observer: ContextVar[Observer] = ContextVar("bcp observer", default=ignore)


def emit(event: Event) -> None:
    """Pass an event to the observer of the save or load that runs this code, if there is one."""
    _observer.get()(event)


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Let everything in the block, in its tasks and in its threads, tell that observer."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def told(error: BaseException) -> str:
    """Return type and message of an error, as events have them; of the one that it carries, if it is a mere carrier."""
    carried = getattr(error, "carried", None) or error
    return f"{type(carried).__name__}: {hidden(str(carried))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """The figures of one save on one rank.

    Attributes:
        path: where the checkpoint is, as given by the caller.
        operation: id of the save; part of every file name it wrote.
        rank: this rank.
        world_size: how many ranks saved together.
        nbytes: bytes that this rank wrote into data files (headers included, after codecs).
        state_nbytes: bytes of the tensors that this rank holds, replicas included.
        dedup_saved_bytes: bytes that this rank holds and did not have to write, because another replica did.
        seconds: from the call until the checkpoint was committed.
        blocking_seconds: from the call until training could go on, in a background save. Without it, training waits for
            all of ``seconds``.
        step_wait_seconds: how long optimizer steps waited for a lazy snapshot, in addition.
        stage_seconds: wall seconds from the first start to the last end of each stage.
        budget_wait_seconds: how long parts waited for staging memory; 0.0 unless the budget is below the state.
        plan_cached: whether the layout was unchanged, so that only digests were exchanged.
        files: keys that this rank wrote, relative to ``path``.
        retries: how many requests to storage were made again.
        threads: how many threads bcp had in this process at the end, those of other saves and loads included.
        streams: how many streams of its own it had on accelerators: one for each device, for the life of the process.
        pinned_nbytes: the most bytes of page-locked host memory that it had while this save borrowed some.

    Example::

        result = bcp.save("ckpt/step-200", states)
        print(f"{result.nbytes} bytes in {result.seconds:.1f} s; stages: {dict(result.stage_seconds)}")

    """

    path: str
    operation: str
    rank: int
    world_size: int
    nbytes: int
    state_nbytes: int
    dedup_saved_bytes: int
    seconds: float
    blocking_seconds: float
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    step_wait_seconds: float = 0.0
    budget_wait_seconds: float = 0.0
    plan_cached: bool = False
    files: tuple[str, ...] = ()
    retries: int = 0
    threads: int = 0
    streams: int = 0
    pinned_nbytes: int = 0

    @property
    def throughput(self) -> float:
        """Bytes per second that this rank wrote, from the call to the commit."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """The figures of one load on one rank.

    Attributes:
        path: where the checkpoint is, as given by the caller.
        operation: id of the save that is being loaded.
        rank: this rank.
        world_size: how many ranks loaded together.
        saved_world_size: how many ranks had saved it.
        nbytes: bytes that were put into this rank's tensors.
        read_nbytes: bytes that this rank read from data files.
        received_nbytes: bytes that other ranks read and sent to this one.
        seconds: from the call until all ranks were done.
        stage_seconds: wall seconds from the first start to the last end of each stage.
        missing: names that the target has and the checkpoint lacks (``strict=False`` only); also those that a module
            expects and its own ``state_dict()`` leaves out.
        unexpected: names that the checkpoint has and the target lacks (``strict=False`` only); also those that
            ``state_dict()`` of this rank's module makes and its ``load_state_dict()`` does not take.
        unmatched: kinds without a common name between checkpoint and target (``strict=False`` only); a
            :class:`~bcp.errors.NothingLoadedWarning` names them as well.
        retries: how many requests to storage were made again.
        threads: how many threads bcp had in this process at the end, those of other saves and loads included.
        streams: how many streams of its own it had on accelerators: one for each device, for the life of the process.
        pinned_nbytes: the most bytes of page-locked host memory that it had while this load borrowed some.
        unverified: whether the files are those of another library, which have no checksums.

    Example::

        result = bcp.load("ckpt/step-100", states)
        print(f"{result.nbytes} bytes loaded, {result.read_nbytes} read, {result.received_nbytes} received")

    """

    path: str
    operation: str
    rank: int
    world_size: int
    saved_world_size: int
    nbytes: int
    read_nbytes: int
    received_nbytes: int
    seconds: float
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()
    retries: int = 0
    threads: int = 0
    streams: int = 0
    pinned_nbytes: int = 0
    unverified: bool = False

    @property
    def throughput(self) -> float:
        """Bytes per second that arrived in this rank's tensors."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0
