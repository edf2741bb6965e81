"""Findings in words: sentences beside figures, and the text of a report for terminals.

A recording may be forged, so no character of its texts reaches a terminal unless it is printable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from bcp.telemetry.findings import Straggler, Summary, Trend
from bcp.telemetry.recording import FailureRecord

__all__ = ["Block", "clean", "failure_lines", "highlights", "plain", "sections", "sentences", "title"]

SHOWN = 5
"""Stragglers, requests and tensors in a text."""

INNER = frozenset({"snapshot"})
"""Phases inside of others."""

LONG = 0.2
"""Share of the time of a phase that is named."""

MOST = 0.5
"""Share of the time with parts in the graph, from which on a stage is named."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_STEP = 1024.0
_WHAT = {"call": "called late", "end": "finished late"}


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a text: a headline, and lines or a table below it.

    Attributes:
        head: the headline.
        is_bad: whether it tells of a failure.
        lines: plain text.
        columns: headlines of the table's columns.
        rows: the table.
    """

    head: str
    is_bad: bool = False
    lines: Sequence[str] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


def clean(text: str) -> str:
    """Return a text in one line, without characters that command a terminal."""
    return "".join(character if character.isprintable() else " " for character in text)


def title(summary: Summary) -> str:
    """Name a save or load, as in ``save of step 300, 2026-01-31 23:59:59 UTC, 8 ranks``."""
    step = "" if summary.step is None else f" of step {summary.step}"
    ranks = f"{summary.world_size} rank{'s' * (summary.world_size > 1)}"
    return clean(f"{summary.kind}{step}, {_moment(summary.time)}, {ranks}")


def sentences(summary: Summary) -> list[str]:
    """Return the findings of one save or load as sentences, the most important first."""
    lines = [line for failure in summary.failures for line in failure_lines(failure)[:1]]
    if not summary.failures:
        lines += _two_ends(summary)
        lines += _bottleneck(summary)
        lines += [f"Straggler: {_straggler(straggler)}." for straggler in summary.stragglers[:SHOWN]]
    more = len(summary.stragglers) - SHOWN
    if more > 0 and not summary.failures:
        lines.append(f"{more} more comparisons name stragglers.")
    if summary.retries:
        ranks = ", ".join(f"rank {rank}: {count}" for rank, count in _most(summary.retries_by_rank)[:SHOWN])
        lines.append(f"Storage: {summary.retries} requests failed and were made again ({ranks}).")
    if summary.dropped:
        lines.append(f"{summary.dropped} events are not in this recording.")
    return [clean(line) for line in lines]


def highlights(summaries: Sequence[Summary], trends: Sequence[Trend]) -> list[str]:
    """Return what a reader of many recordings should know first: trends, and the newest save's and load's findings."""
    lines = [f"{_trend(trend)}." for trend in trends if trend.told]
    sound = [summary for summary in summaries if not summary.failures]
    for kind in ("save", "load"):
        newest = next((summary for summary in reversed(sound) if summary.kind == kind), None)
        if newest is not None and len(summaries) > 1:
            lines += [f"{title(newest)}: {sentence}" for sentence in sentences(newest)[:1]]
    return [clean(line) for line in lines]


def failure_lines(failure: FailureRecord) -> list[str]:
    """Return one rank's words on a failure: the headline, then the details."""
    guilty = "an unknown rank" if failure.guilty is None else f"rank {failure.guilty}"
    where = f" in phase {failure.phase}" if failure.phase else ""
    where += f", stage {failure.stage}, on {failure.item}" if failure.stage else ""
    errors = list(failure.errors)
    if len(errors) > 1 and errors[0][0] == "StageError":  # says no more than its cause and the stage
        errors.pop(0)
    first = ": ".join(errors[0]) if errors else "no error is known"
    lines = [f"Failure of {guilty}{where}: {first}", f"told by rank {failure.rank} (host {failure.host})"]
    if failure.tensors:
        lines.append(f"tensors: {', '.join(failure.tensors)}")
    if failure.file:
        lines.append(f"file: {failure.file}" + (f", attempt {failure.attempt}" if failure.attempt else ""))
    lines += [f"caused by {': '.join(error)}" for error in errors[1:]]
    lines += [f"note: {note}" for note in failure.notes]
    return [clean(line) for line in lines]


def sections(summaries: Sequence[Summary], trends: Sequence[Trend]) -> Iterator[Block]:
    """Yield the text of a report: failures, the newest save and load, trends, and a line for each recording."""
    for summary in reversed(summaries):
        if summary.failures:
            head, *lines = failure_lines(summary.failures[0])
            others = (" ".join(failure_lines(failure)[1::-1]) for failure in summary.failures[1:])
            yield Block(f"FAILED {title(summary)}: {head}", is_bad=True, lines=[*lines, *others])
    sound = [summary for summary in summaries if not summary.failures]
    for kind in ("save", "load"):
        newest = next((summary for summary in reversed(sound) if summary.kind == kind), None)
        if newest is not None:
            yield from _details(newest)
    told = [_trend(trend) for trend in trends if trend.told]
    if told:
        yield Block("Trends", lines=told)
    if len(sound) > 1:
        yield Block("All", columns=("", "seconds", "blocking", "bytes/s", "retries"), rows=[_row(s) for s in sound])


def plain(blocks: Sequence[Block]) -> str:
    """Return blocks as text."""
    lines: list[str] = []
    for block in blocks:
        lines += ["", block.head] if lines else [block.head]
        lines += [f"  {line}" for line in block.lines]
        lines += _table([block.columns, *block.rows]) if block.rows else []
    return "\n".join(lines) + "\n"


def _two_ends(summary: Summary) -> Iterator[str]:
    """Yield the two durations of a save into memory."""
    if summary.released:
        later = _seconds(max(summary.seconds - summary.released, 0.0))
        yield (
            f"Memory tier: training waited {_seconds(summary.blocking)}, the memory of the hosts had the snapshot "
            f"after {_seconds(summary.released)}, and agents made it durable {later} later."
        )


def _bottleneck(summary: Summary) -> Iterator[str]:
    """Yield the phases that took longest; then the slowest stage, if the graph took most of the time."""
    phases = sorted((phase for phase in summary.phases if phase.name not in INNER), key=lambda phase: -phase.seconds)
    long = [phase for phase in phases if phase.seconds >= LONG * summary.seconds][:SHOWN] or phases[:1]
    if long:
        times = ", ".join(f"{phase.name} took {_seconds(phase.seconds)}" for phase in long)
        yield f"Bottleneck: of {_seconds(summary.seconds)}, phase {times}."
    slowest = summary.bottleneck
    if slowest is not None and (not long or slowest.seconds >= MOST * summary.seconds):
        yield f"Bottleneck of the {long[0].name if long else summary.kind}: {slowest.reason}."


# -- parts of it ----------------------------------------------------------------------------------


def _details(summary: Summary) -> Iterator[Block]:
    """Yield the blocks of one save or load."""
    seconds = f"{_seconds(summary.seconds)} ({_seconds(summary.blocking)} blocking)"
    figures = [f"{seconds}, {_bytes(summary.nbytes)}, {_bytes(summary.throughput)}/s", *sentences(summary)]
    if summary.balance is not None and summary.world_size > 1:
        figures.append(f"Balance: the most bytes of a rank are {summary.balance.ratio:.2f} times the mean.")
    if summary.stages:
        figures.append(f"Overlap: {summary.overlap:.1f} stages had work at a time.")
    yield Block(title(summary), lines=figures)
    columns = ("phase", "seconds", "median", "slowest")
    rows = [(clean(p.name), _seconds(p.seconds), _seconds(p.median), f"rank {p.rank}") for p in summary.phases]
    yield Block("Phases", columns=columns, rows=rows)
    if summary.stages:
        yield Block(
            "Stages",
            columns=("stage", "items", "busy", "wall", "waited", "in use", "bytes/s"),
            rows=[
                (
                    clean(stage.name),
                    str(stage.items),
                    _seconds(stage.busy),
                    _seconds(stage.wall),
                    _seconds(stage.waited),
                    f"{stage.utilisation:.0%}",
                    _bytes(stage.throughput),
                )
                for stage in summary.stages
            ],
        )
    if summary.verbs:
        yield Block(
            "Storage",
            columns=("request", "count", "p50", "p90", "p99", "longest", "retries", "failures"),
            rows=[
                (
                    clean(verb.name),
                    str(verb.count),
                    *map(_seconds, (verb.p50, verb.p90, verb.p99, verb.longest)),
                    str(verb.retries),
                    str(verb.failures),
                )
                for verb in summary.verbs
            ],
        )


def _straggler(straggler: Straggler) -> str:
    description = _WHAT.get(straggler.what, f"slow in {straggler.what}")
    times = f"{_seconds(straggler.seconds)}, the median is {_seconds(straggler.median)}"
    return f"rank {straggler.rank} (host {straggler.host}) {description}: {times}"


def _trend(trend: Trend) -> str:
    return f"{trend.kind}: {trend.figure} of the newest one is {trend.ratio:.2g} times the median of those before"


def _row(summary: Summary) -> tuple[str, ...]:
    rate = f"{_bytes(summary.throughput)}/s"
    return title(summary), _seconds(summary.seconds), _seconds(summary.blocking), rate, str(summary.retries)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table: the first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        yield "  ".join(("", first.ljust(widths[0]), *cells)).rstrip()


def _most(counts: Mapping[int, int]) -> list[tuple[int, int]]:
    return sorted(counts.items(), key=lambda pair: -pair[1])


def _moment(seconds: float) -> str:
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return f"{seconds} s"


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"  # noqa: PLR2004 -- no exponents


def _bytes(number: float) -> str:
    unit = 0
    while abs(number) >= _STEP and unit < len(_UNITS) - 1:
        number, unit = number / _STEP, unit + 1
    return f"{number:.3g} {_UNITS[unit]}" if number < 1000 else f"{number:.0f} {_UNITS[unit]}"  # noqa: PLR2004 -- same
