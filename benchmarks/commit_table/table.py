"""The counts of the table, as docs/storage.md has them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.commit_table.cells import Cell

__all__ = ["Counts", "counts_of", "read_counts", "written"]


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of one store: kinds of requests, answers, and cells."""

    requests: int
    answers: int
    cells: int


def counts_of(cells: Sequence[Cell]) -> Counts:
    """Count the cells."""
    faults = [fault for cell in cells for fault in cell.faults]
    return Counts(
        requests=len({fault.request for fault in faults}),
        answers=len({fault.answer for fault in faults}),
        cells=len(cells),
    )


def read_counts(page: str, name: str) -> Counts | None:
    """Return the counts of a store that a page has; None if it has none."""
    row = _row(name).search(page)
    return None if row is None else Counts(*(int(number.replace(",", "")) for number in row.groups()))


def written(page: str, name: str, counts: Counts) -> str:
    """Return the page with the counts of a store."""
    row = f"| {name} | {counts.requests:,} | {counts.answers:,} | {counts.cells:,} |"
    return _row(name).sub(row, page)


def _row(name: str) -> re.Pattern[str]:
    return re.compile(rf"^\| {re.escape(name)} \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", re.MULTILINE)
