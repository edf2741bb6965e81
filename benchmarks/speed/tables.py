"""The samples as tables, for the terminal and for a page of the documentation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import Figure
from benchmarks.speed.cases import MANY, ONE, RANKS, SINGLE
from benchmarks.speed.goals import over
from benchmarks.speed.samples import RAW, Samples

__all__ = ["Table", "plain", "put_into", "tables"]

BEGIN, END = "<!-- begin: python -m benchmarks.speed -->", "<!-- end: python -m benchmarks.speed -->"
GB = 1e9


@dataclass(frozen=True, slots=True)
class Table:
    """A title, the names of columns, and rows of as many cells; the first ``words`` columns are no numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1


def tables(samples: Samples) -> list[Table]:
    """Make all tables that have rows."""
    made = [_raw(samples), _saves(samples, SINGLE), _backgrounds(samples, SINGLE), _loads(samples, SINGLE)]
    for case in RANKS.values():
        made += [_saves(samples, case), _backgrounds(samples, case), _loads(samples, case)]
    made.append(_small(samples))
    return [table for table in made if table.rows]


def _raw(samples: Samples) -> Table:
    """Make the table of what the machine can do."""
    rows = []
    for kind, what in (("write", "write"), ("cold load", "read"), ("warm load", "read"), ("copy", "copy")):
        for library, way in samples.ways(kind):
            if library == RAW:
                seconds = samples.each(kind, RAW, way)
                median = samples.median(kind, RAW, way)
                gbs = over(_state(samples), median)
                rows.append([what, way, _number(median), _number(gbs, GB), f"{min(seconds):.2f} to {max(seconds):.2f}"])
    return Table("The machine", ["", "how", "s", "GB/s", "from, to s"], rows, words=2)


def _saves(samples: Samples, case: str) -> Table:
    """Make the table of synchronous saves."""
    limit = samples.best("write", RAW, case=case)

    def row(library: str, way: str, value: Callable[..., float | None]) -> list[str]:
        seconds = value()
        first = samples.median("first save", library, way, case=case)
        return [
            f"{library}: {way}",
            _number(seconds),
            _number(over(value(name="state"), seconds), GB),
            _percent(over(limit, seconds)),
            _number(first),
            _number(value(name="cpu")),
            _number(value(name="memory"), GB),
        ]

    columns = ["save", "durable s", "GB/s", "of raw", "first s", "CPU s", "memory GB"]
    return Table(f"Save, {case}", columns, list(_rows(samples, "save", case, row)))


def _backgrounds(samples: Samples, case: str) -> Table:
    """Make the table of background saves."""
    trained = case == SINGLE

    def row(library: str, way: str, value: Callable[..., float | None]) -> list[str]:
        cells = [f"{library}: {way}", _number(value(name="blocking"), digits=3)]
        if trained:
            lost = value(name="lost")
            cells += [
                _number(value(name="stall"), digits=3),
                _number(value()),
                _number(lost),
                _percent(over(lost, value())),
                _number(value(name="worst"), 1e-3, digits=0),
                _number(over(value(name="worst"), value(name="alone")), digits=1),
            ]
        else:
            cells.append(_number(value()))
        return [*cells, _number(value(name="cpu")), _number(value(name="memory"), GB)]

    training = ["stall s", "durable s", "training lost s", "of it", "worst step ms", "by usual"]
    columns = ["background save", "blocking s", *(training if trained else ["durable s"]), "CPU s", "memory GB"]
    return Table(f"Background save, {case}", columns, list(_rows(samples, "background", case, row)))


def _loads(samples: Samples, case: str) -> Table:
    """Make the table of loads."""
    limits = [samples.best(f"{kind} load", RAW, case=case) for kind in ("cold", "warm")]

    def row(library: str, way: str, value: Callable[..., float | None]) -> list[str]:
        warm = samples.median("warm load", library, way, case=case)
        return [
            f"{library}: {way}",
            _number(value()),
            _percent(over(limits[0], value())),
            _number(warm),
            _percent(over(limits[1], warm)),
            _number(value(name="cpu")),
            _number(value(name="memory"), GB),
        ]

    columns = ["load", "cold s", "of raw", "warm s", "of raw", "CPU s", "memory GB"]
    return Table(f"Load, {case}", columns, list(_rows(samples, "cold load", case, row)))


def _small(samples: Samples) -> Table:
    """Make the table of many small tensors."""
    rows = []
    for kind in ("save", "cold load", "warm load"):
        for library, way in samples.ways(kind, MANY):
            many, one = (samples.median(kind, library, way, case=case) for case in (MANY, ONE))
            rows.append([f"{library}: {way}", kind, _number(many), _number(one), _number(over(many, one), digits=1)])
    return Table("Small tensors", ["", "", f"{MANY} s", f"{ONE} s", "ratio"], rows, words=2)


def _rows(
    samples: Samples, kind: str, case: str, row: Callable[[str, str, Callable[..., float | None]], list[str]]
) -> Iterator[list[str]]:
    """Make a row of each way; the machine is not one."""
    for library, way in samples.ways(kind, case):
        if library != RAW:

            def value(name: str = "seconds", *, who: str = library, how: str = way) -> float | None:
                return samples.median(kind, who, how, name=name, case=case)

            yield row(library, way, value)


def _state(samples: Samples) -> float | None:
    """Return the bytes of the state."""
    states = [one.values["state"] for one in samples.taken if "state" in one.values and one.case == SINGLE]
    return states[0] if states else None


def _number(value: float | None, unit: float = 1.0, digits: int = 2) -> str:
    return "-" if value is None else f"{value / unit:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def plain(table: Table) -> str:
    """Write a table for the terminal."""
    lines = [table.columns, *table.rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.columns))]
    sides = ["<" if column < table.words else ">" for column in range(len(widths))]
    written = [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths, strict=True))
        for line in lines
    ]
    return "\n".join(["", table.title, "-" * len(table.title), *written])


def markdown(table: Table) -> str:
    """Write a table for a page; bcp's name is bold."""
    rows = [[f"**{row[0]}**" if row[0].startswith("bcp:") else row[0], *row[1:]] for row in table.rows]
    rule = ["---" if column < table.words else "---:" for column in range(len(table.columns))]
    written = ["| " + " | ".join(line) + " |" for line in [table.columns, rule, *rows]]
    return "\n".join([f"### {table.title}", "", *written])


def put_into(page: Path, samples: Samples, figures: Sequence[Figure]) -> None:
    """Put all tables and goals into a page, in place of what is between its two marks."""
    text = page.read_text("utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise SystemExit(f"{page} needs one line {BEGIN} and after it one line {END}")
    goals = [figure for figure in figures if figure.goal is not None]
    missed = sum(figure.missed for figure in goals)
    rows = [
        [
            figure.name,
            f"{figure.value:.3g} {figure.unit}".strip(),
            f"{'at least' if figure.least else 'at most'} {figure.goal:g} {figure.unit}".strip(),
            "**missed**" if figure.missed else "reached",
        ]
        for figure in goals
    ]
    reached = Table(f"Goals: {len(goals) - missed} of {len(goals)} reached", ["", "is", "should be", ""], rows)
    about = "; ".join(f"{name}: {value}" for name, value in samples.about.items())
    absent = [f"{library}: {why}." for library, why in samples.absent.items()]
    parts = [about + ".", *absent, *map(markdown, [*tables(samples), reached])]
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(before + "\n\n".join([BEGIN, *parts, END]) + after, "utf-8")
