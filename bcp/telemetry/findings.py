"""Findings in recordings, as data: the parts of the summary of a save or load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bcp.telemetry.recording import FailureRecord

__all__ = [
    "Balance",
    "Bottleneck",
    "PhaseFigures",
    "Request",
    "StageFigures",
    "Straggler",
    "Summary",
    "Trend",
    "Verb",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFigures:
    """One phase.

    Attributes:
        name: its name.
        seconds: of the rank that took longest.
        median: of all ranks.
        rank: the one that took longest.
    """

    name: str
    seconds: float
    median: float
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFigures:
    """One stage, over all ranks.

    Attributes:
        name: its name.
        items: how many went through it.
        nbytes: bytes of these.
        busy: seconds that it worked on them, added up.
        wall: seconds in which at least one rank worked in it.
        waited: seconds that items were in its queue, added up.
        longest_wait: of one item.
        utilisation: share of the time in which a rank's parts were under way and this stage of the rank had work;
            the mean of all ranks.
        throughput: bytes a second of all ranks together, over ``wall``.
        errors: items that it failed on.
    """

    name: str
    items: int
    nbytes: int
    busy: float
    wall: float
    waited: float
    longest_wait: float
    utilisation: float
    throughput: float
    errors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """The stage that holds up the others.

    Attributes:
        stage: its name.
        rank: the rank that finished last.
        utilisation: share of that rank's time in which the stage had work.
        waiting: items in its queue on that rank, on average.
        seconds: time in which parts of that rank were under way.
        reason: the same in words.
    """

    stage: str
    rank: int
    seconds: float
    utilisation: float
    waiting: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that is much slower than the others.

    Attributes:
        rank: its number.
        host: its host.
        what: ``"call"``: it called later than the first rank; ``"end"``: its last part was through later; else the
            stage or phase in which it was slow.
        seconds: how long.
        median: of all ranks.
    """

    rank: int
    host: str
    what: str
    seconds: float
    median: float

    @property
    def ratio(self) -> float:
        """How many times the median."""
        return self.seconds / self.median if self.median > 0 else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """All requests to storage of one verb.

    Attributes:
        name: ``put``, ``part``, ``read`` or another verb.
        count: attempts.
        nbytes: bytes that those which went well moved.
        p50, p90, p99, longest: seconds of an attempt.
        retries: attempts that failed and were made again.
        failures: attempts that failed for good.
    """

    name: str
    count: int
    nbytes: int
    p50: float
    p90: float
    p99: float
    longest: float
    retries: int
    failures: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One attempt of a request to storage, with the columns of its event."""

    rank: int
    verb: str
    key: str
    nbytes: int
    start: float
    seconds: float
    attempt: int
    status: str
    said: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Bytes of the ranks.

    Attributes:
        most: of the rank with the most.
        mean: of all ranks.
        rank: the one with the most.
        ratio: most over mean; 1.0 is perfect.
    """

    most: float
    mean: float
    rank: int
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The findings in one recording.

    Attributes:
        kind, path, step, operation, run, world_size, time: of the recording.
        failures: of the recording.
        seconds: from the first rank's call to the end.
        blocking: seconds of these that training waited for; all of them if it was no background save.
        background: the rest.
        released: seconds until the memory of the hosts had the snapshot, where ``seconds`` are those until it was
            durable; 0.0 for a save without a memory tier.
        nbytes: bytes of all ranks together.
        throughput: bytes a second, over ``seconds``.
        phases: in the order in which they began.
        stages: in the order in which they began.
        bottleneck: None without stages.
        stragglers: the worst first.
        verbs: those with most seconds first.
        slowest: the slowest requests, the slowest first.
        retries: attempts of requests that failed and were made again.
        retries_by_rank: the same, of the ranks that have any.
        balance: None without figures.
        overlap: busy seconds of all stages over the seconds with parts in the graph, of a mean rank. It is 1.0 if
            stages run one after the other, and more if they overlap.
        budget_wait: seconds that parts waited for staging memory, on the rank that waited longest.
        dropped: events that are not in the recording.
    """

    kind: str
    path: str
    step: int | None
    operation: str
    run: str
    world_size: int
    time: float
    failures: Sequence[FailureRecord]
    seconds: float
    blocking: float
    background: float
    released: float
    nbytes: float
    throughput: float
    phases: Sequence[PhaseFigures]
    stages: Sequence[StageFigures]
    bottleneck: Bottleneck | None
    stragglers: Sequence[Straggler]
    verbs: Sequence[Verb]
    slowest: Sequence[Request]
    retries: int
    retries_by_rank: Mapping[int, int]
    balance: Balance | None
    overlap: float
    budget_wait: float
    dropped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """One figure over the saves, or the loads, of a run.

    Attributes:
        kind: ``"save"`` or ``"load"``.
        figure: a field of :class:`Summary`.
        steps: the steps; None if unknown.
        times: of the recordings.
        values: of the figure, oldest first.
        ratio: the newest value over the median of those before it; 1.0 if there are none.
        told: whether the newest value is much worse.
    """

    kind: str
    figure: str
    steps: Sequence[int | None]
    times: Sequence[float]
    values: Sequence[float]
    ratio: float
    told: bool
