"""What happened, as frozen data. Nothing in here does anything; observers decide what to make of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

__all__ = ["LoadReport", "Observer", "RetryEvent", "SaveReport", "StageEvent", "ignore"]


@dataclass(frozen=True, slots=True)
class StageEvent:
    """One item went through one stage.

    Attributes:
        stage: name of the stage.
        item: name of the item, as it entered the pipeline.
        nbytes: bytes of the item, as counted by the byte budget.
        started: ``time.monotonic()`` when the stage's function was called, in seconds.
        ended: the same when it returned.
    """

    stage: str
    item: str
    nbytes: int
    started: float
    ended: float


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


Observer = Callable[[StageEvent], None]
"""Called on the event loop, once for each item and stage; must be quick and must not raise."""


def ignore(event: object) -> None:
    """Be the observer that nobody asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """What one rank did in one save.

    Attributes:
        path: where the checkpoint is, as given by the caller.
        operation: id of the save; part of every file name it wrote.
        rank: this rank.
        world_size: how many ranks saved together.
        nbytes: bytes that this rank wrote into data files (headers included, after codecs).
        state_nbytes: bytes of the tensors that this rank holds, replicas included.
        dedup_saved_bytes: bytes that this rank holds and did not have to write, because another replica did.
        seconds: from the call until the checkpoint was committed.
        blocking_seconds: from the call until training could go on, with ``async_checkpoint=True``. Without it, training
            waits for all of ``seconds``.
        step_wait_seconds: how long optimizer steps waited for a lazy snapshot, in addition.
        stage_seconds: wall seconds from the first start to the last end of each stage.
        budget_wait_seconds: how long parts waited for staging memory; 0.0 unless the budget is below the state.
        plan_cached: whether the layout was unchanged, so that only digests were exchanged.
        files: keys that this rank wrote, relative to ``path``.
        retries: how many requests to storage were made again.
        threads: how many threads bcp had in this process at the end, those of other saves and loads included.
        streams: how many streams of its own it had on accelerators: one for each device, for the life of the process.
        pinned_nbytes: the most bytes of page-locked host memory that it had while this save borrowed some.
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
class LoadReport:
    """What one rank did in one load.

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
        missing: names that the target has and the checkpoint lacks (``strict=False`` only).
        unexpected: names that the checkpoint has and the target lacks (``strict=False`` only).
        unmatched: kinds of which this rank wanted names and the checkpoint has none of them (``strict=False`` only); a
            :class:`~bcp.errors.NothingLoadedWarning` names them as well.
        retries: how many requests to storage were made again.
        threads: how many threads bcp had in this process at the end, those of other saves and loads included.
        streams: how many streams of its own it had on accelerators: one for each device, for the life of the process.
        pinned_nbytes: the most bytes of page-locked host memory that it had while this load borrowed some.
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

    @property
    def throughput(self) -> float:
        """Bytes per second that arrived in this rank's tensors."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0
