"""The analysis of recordings: bottleneck, stragglers, storage, balance, overlap, and trends over the steps of a run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bcp.telemetry.columns import Columns, Floats, Ints, covered
from bcp.telemetry.findings import (
    Balance,
    Bottleneck,
    PhaseFigures,
    Request,
    StageFigures,
    Straggler,
    Summary,
    Trend,
    Verb,
)
from bcp.telemetry.recording import RankRecord, Recording

__all__ = ["summary_of", "trends_of"]

FACTOR = 1.5
FLOOR_SECONDS = 0.02
"""A straggler takes more than that many times the median, and so much longer than it."""

SHOWN = 32
"""Stragglers, the worst first."""

SLOWEST = 10
"""Requests to storage, the slowest first."""

CHANGED = 1.5
"""A trend is told if the newest value is so many times worse than the median of those before it."""

TREND_VALUES = 3
"""Fewer values make no trend that is told."""

NEAR = 0.05
"""Stages whose utilisations differ by less are compared by their queues."""

COLLECTIVE = frozenset({"plan", "write", "commit", "drain", "open", "read"})
"""Phases in which ranks wait for each other: all of them take long if one is slow."""

FIGURES = ("seconds", "blocking", "throughput", "retries")


def summary_of(recording: Recording) -> Summary:
    """Return the findings in a recording."""
    stages, requests, phases, budget = (
        Columns.of(recording.events, kind) for kind in ("stage", "request", "phase", "budget")
    )
    work = _Work.of(stages)
    seconds = _most(recording.ranks, "seconds")
    blocking = _most(recording.ranks, "blocking_seconds") if recording.background else seconds
    nbytes = sum(record.figures.get("nbytes", 0.0) for record in recording.ranks)
    ranks, counts = np.unique(requests.rank[requests.is_status("again")], return_counts=True)
    waits = covered(budget.start, budget.end, *_dense(budget.rank))
    return Summary(
        kind=recording.kind,
        path=recording.path,
        step=recording.step,
        operation=recording.operation,
        run=recording.run,
        world_size=recording.world_size,
        time=recording.time,
        failures=recording.failures,
        seconds=seconds,
        blocking=blocking,
        background=max(seconds - blocking, 0.0),
        released=_most(recording.ranks, "released_seconds"),
        nbytes=nbytes,
        throughput=nbytes / seconds if seconds > 0 else 0.0,
        phases=[_phase(phases, number) for number in range(len(phases.names))],
        stages=[_stage(stages, number, work) for number in range(len(stages.names))],
        bottleneck=_bottleneck(stages, work),
        stragglers=_stragglers(recording, stages, phases, work),
        verbs=_verbs(requests),
        slowest=_slowest(requests),
        retries=int(counts.sum()),
        retries_by_rank=dict(zip(ranks.tolist(), counts.tolist(), strict=True)),
        balance=_balance(recording.ranks),
        overlap=work.overlap,
        budget_wait=float(waits.max(initial=0.0)),
        dropped=recording.dropped,
    )


def trends_of(summaries: Sequence[Summary]) -> list[Trend]:
    """Return how figures change from save to save and from load to load; failures are left out.

    Args:
        summaries: oldest first.

    """
    return [
        _trend(kind, figure, series)
        for kind in ("save", "load")
        if len(series := [summary for summary in summaries if summary.kind == kind and not summary.failures]) > 1
        for figure in FIGURES
    ]


def _trend(kind: str, figure: str, summaries: Sequence[Summary]) -> Trend:
    values = [float(getattr(summary, figure)) for summary in summaries]
    usual, newest = statistics.median(values[:-1]), values[-1]
    if figure == "retries":  # mostly 0
        usual, newest = usual + 1, newest + 1
    ratio = newest / usual if usual > 0 else 1.0
    return Trend(
        kind=kind,
        figure=figure,
        steps=[summary.step for summary in summaries],
        times=[summary.time for summary in summaries],
        values=values,
        ratio=ratio,
        told=len(values) >= TREND_VALUES and (ratio < 1 / CHANGED if figure == "throughput" else ratio > CHANGED),
    )


# -- stages ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """The time that r ranks spend in s stages.

    Attributes:
        ranks: int64[r], their numbers.
        row: int64[n], which of the ranks each event is of.
        first: float64[r], when the first part entered a stage.
        last: float64[r], when the last one left one.
        wall: float64[s, r], seconds in which a stage had work.
        waited: float64[s, r], seconds that parts were in a stage's queue, added up.
    """

    ranks: Ints
    row: Ints
    first: Floats
    last: Floats
    wall: Floats
    waited: Floats

    @classmethod
    def of(cls, stages: Columns) -> _Work:
        """Add up the events of stages."""
        ranks, row = np.unique(stages.rank, return_inverse=True)
        count, many = len(ranks), len(stages.names)
        first, last = np.full(count, np.inf), np.full(count, -np.inf)
        np.minimum.at(first, row, stages.start)
        np.maximum.at(last, row, stages.end)
        group = stages.name * count + row
        wall = covered(stages.start, stages.end, group, many * count).reshape(many, count)
        waited = np.bincount(group, stages.waited, many * count).astype(np.float64).reshape(many, count)
        return cls(ranks, row, first, last, wall, waited)

    @property
    def spans(self) -> Floats:
        """float64[r]: seconds in which parts were under way."""
        return np.maximum(self.last - self.first, 1e-9)

    @property
    def utilisation(self) -> Floats:
        """float64[s, r]: share of these in which a stage had work."""
        return np.asarray(self.wall / self.spans)

    @property
    def overlap(self) -> float:
        """Seconds of all stages over seconds in which parts were under way, of a mean rank."""
        return float(self.utilisation.sum(axis=0).mean()) if len(self.ranks) else 0.0


def _stage(stages: Columns, number: int, work: _Work) -> StageFigures:
    mask = stages.name == number
    start, end, waited = stages.start[mask], stages.end[mask], stages.waited[mask]
    wall = float(covered(start, end, np.zeros(len(start), np.int64), 1)[0])
    nbytes = int(stages.nbytes[mask].sum())
    return StageFigures(
        name=stages.names[number],
        items=len(start),
        nbytes=nbytes,
        busy=float(stages.seconds[mask].sum()),
        wall=wall,
        waited=float(waited.sum()),
        longest_wait=float(waited.max()),
        utilisation=float(work.utilisation[number].mean()),
        throughput=nbytes / wall if wall > 0 else 0.0,
        errors=int((stages.is_status("failed") & mask).sum()),
    )


def _bottleneck(stages: Columns, work: _Work) -> Bottleneck | None:
    """Return the stage with the highest utilisation on the rank whose last part was through last."""
    if not len(stages):
        return None
    row = int(work.last.argmax())
    utilisation, span = work.utilisation[:, row], float(work.spans[row])
    waiting = work.waited[:, row] / span
    near = utilisation >= utilisation.max() - NEAR
    number = int(np.where(near, waiting, -1.0).argmax())
    rank, stage = int(work.ranks[row]), stages.names[number]
    return Bottleneck(
        stage=stage,
        rank=rank,
        seconds=span,
        utilisation=float(utilisation[number]),
        waiting=float(waiting[number]),
        reason=(
            f"{stage} had work for {utilisation[number]:.0%} of the {span:.3g} s in which parts of rank {rank} were "
            f"under way, and {waiting[number]:.1f} parts waited for it on average"
        ),
    )


# -- ranks ----------------------------------------------------------------------------------------


def _stragglers(recording: Recording, stages: Columns, phases: Columns, work: _Work) -> list[Straggler]:
    """Return the ranks that are much slower than the others, the worst first."""
    hosts = {record.rank: record.host for record in recording.ranks}
    stragglers = [
        Straggler(rank=rank, host=hosts.get(rank, ""), what=figure, seconds=seconds, median=median)
        for figure, times in _times(recording, stages, phases, work)
        for rank, seconds, median in _slow(times)
    ]
    return sorted(stragglers, key=lambda straggler: straggler.median - straggler.seconds)[:SHOWN]


def _times(
    recording: Recording, stages: Columns, phases: Columns, work: _Work
) -> Iterator[tuple[str, Mapping[int, float]]]:
    """Yield each figure by which ranks are compared, with the seconds of each rank."""
    ranks = work.ranks.tolist()
    called = min((record.started for record in recording.ranks), default=0.0)
    yield "call", {record.rank: record.started - called for record in recording.ranks}
    yield "end", dict(zip(ranks, (work.last - work.first.min(initial=np.inf)).tolist(), strict=True))
    for name, wall in zip(stages.names, work.wall.tolist(), strict=True):
        yield name, dict(zip(ranks, wall, strict=True))
    for number, name in enumerate(phases.names):
        if name not in COLLECTIVE:
            yield name, _of_phase(phases, number)


def _slow(times: Mapping[int, float]) -> Iterator[tuple[int, float, float]]:
    """Yield rank, seconds and the median of those that are much slower."""
    if len(times) > 1:
        median = statistics.median_low(times.values())
        for rank, seconds in times.items():
            if seconds > FACTOR * median and seconds > median + FLOOR_SECONDS:
                yield rank, seconds, median


def _of_phase(phases: Columns, number: int) -> dict[int, float]:
    """Return the seconds of each rank in a phase."""
    mask = phases.name == number
    ranks, row = np.unique(phases.rank[mask], return_inverse=True)
    return dict(zip(ranks.tolist(), np.bincount(row, phases.seconds[mask]).tolist(), strict=True))


def _phase(phases: Columns, number: int) -> PhaseFigures:
    times = _of_phase(phases, number)
    rank = max(times, key=times.__getitem__)
    return PhaseFigures(
        name=phases.names[number], seconds=times[rank], median=statistics.median(times.values()), rank=rank
    )


def _balance(ranks: Sequence[RankRecord]) -> Balance | None:
    nbytes = {record.rank: record.figures["nbytes"] for record in ranks if "nbytes" in record.figures}
    if not nbytes:
        return None
    rank, mean = max(nbytes, key=nbytes.__getitem__), statistics.fmean(nbytes.values())
    return Balance(most=nbytes[rank], mean=mean, rank=rank, ratio=nbytes[rank] / mean if mean > 0 else 1.0)


def _most(ranks: Sequence[RankRecord], figure: str) -> float:
    return max((record.figures.get(figure, 0.0) for record in ranks), default=0.0)


def _dense(ranks: Ints) -> tuple[Ints, int]:
    """Number the ranks from 0 on; also return how many there are."""
    distinct_ranks, row = np.unique(ranks, return_inverse=True)
    return row, len(distinct_ranks)


# -- storage --------------------------------------------------------------------------------------


def _verbs(requests: Columns) -> list[Verb]:
    again, failed, ok = (requests.is_status(status) for status in ("again", "failed", "ok"))
    totals, verbs = [], []
    for number, name in enumerate(requests.names):
        mask = requests.name == number
        seconds = requests.seconds[mask]
        p50, p90, p99 = np.percentile(seconds, (50, 90, 99)).tolist()
        totals.append(-float(seconds.sum()))
        verbs.append(
            Verb(
                name=name,
                count=len(seconds),
                nbytes=int(requests.nbytes[mask & ok].sum()),
                p50=p50,
                p90=p90,
                p99=p99,
                longest=float(seconds.max()),
                retries=int((again & mask).sum()),
                failures=int((failed & mask).sum()),
            )
        )
    return [verbs[index] for index in np.argsort(totals, kind="stable").tolist()]


def _slowest(requests: Columns) -> list[Request]:
    order = np.argsort(-requests.seconds, kind="stable")[:SLOWEST]
    return [
        Request(
            rank=row["rank"],
            verb=row["name"],
            key=row["item"],
            nbytes=row["nbytes"],
            start=row["start"],
            seconds=row["seconds"],
            attempt=row["attempt"],
            status=row["status"],
            said=row["said"],
        )
        for row in requests.table.take(order).to_pylist()
    ]
