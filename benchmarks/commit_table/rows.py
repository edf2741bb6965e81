"""The rows of the table: the requests of saves as they come, each with every answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.commit_table.cells import ALWAYS, Cell, Fault, Mode
from benchmarks.commit_table.trial import Store, requests_of

__all__ = ["cells_of", "few_of"]

_STUBBORN = ("lost", "404", "stale", "empty")
"""Answers that come each time after a doubtful commit, too: they may be believed to be the truth."""

MODES: tuple[Mode, ...] = ("fresh", "overwrite", "remains")


async def cells_of(store: Store) -> list[Cell]:
    """Return all cells of a store.

    The first and the last request of each kind gets every answer once, and all requests of the kind get it each time.
    The requests after a doubtful commit get every answer too: those that only such a save makes are among them. A kind
    of request that several saves make alike is tried with the first of them.
    """
    cells: list[Cell] = []
    known: set[str] = set()
    for mode in MODES:
        for large in (False, True):
            blank = Cell(mode, large, ())
            requests = await requests_of(store, blank)
            is_base = not large and mode != "remains"
            cells += _of_save(store, blank, [one for one in requests if is_base or one not in known])
            known.update(requests)
    for mode in MODES[:2]:
        for doubt in store.doubts():
            begun = Cell(mode, large=False, faults=(doubt,))
            cells += [begun, *_of_save(store, begun, await requests_of(store, begun))]
    return list(dict.fromkeys(cells))


def few_of(cells: Sequence[Cell], share: int) -> list[Cell]:
    """Return a fixed part of the cells: one in ``share``, and all kinds of requests and all answers among them."""
    chosen = list(cells[::share])
    known = {feature for cell in chosen for feature in _features(cell)}
    for cell in cells:
        if not known.issuperset(_features(cell)):
            chosen.append(cell)
            known.update(_features(cell))
    return chosen


def _features(cell: Cell) -> frozenset[str]:
    """Return what a cell is there for: its last request and answer."""
    fault = cell.faults[-1]
    return frozenset((fault.request, str(fault.answer)))


def _of_save(store: Store, blank: Cell, requests: Sequence[str]) -> Iterator[Cell]:
    """Yield the cells of one save's requests."""
    for request, count in Counter(requests).items():
        for answer in store.answers(request):
            once = Fault(request, answer)
            yield _with(blank, once)
            if not blank.faults or answer.name in _STUBBORN:
                yield _with(blank, replace(once, times=ALWAYS))
            if count > 1 and not blank.faults:
                yield _with(blank, replace(once, skip=count - 1))


def _with(cell: Cell, fault: Fault) -> Cell:
    return replace(cell, faults=(*cell.faults, fault))
