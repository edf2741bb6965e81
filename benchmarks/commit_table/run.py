"""Try the cells of a store, some at a time: in one event loop, and in several processes with a server each."""

from __future__ import annotations

import gc
import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import anyio

from benchmarks.commit_table.cells import Cell
from benchmarks.commit_table.rows import cells_of, few_of
from benchmarks.commit_table.trial import Outcome, Store, try_cell

__all__ = ["run", "run_in_processes", "stores"]

_TOLD = 100
"""Cells between two lines about the progress."""

_ALL = slice(None)


def stores() -> Mapping[str, Callable[[], AbstractContextManager[Store]]]:
    """Return the tests' stores."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    found: Mapping[str, Callable[[], AbstractContextManager[Store]]] = importlib.import_module(
        "servers.commit_stores"
    ).STORES
    return found


async def run(
    open_store: Callable[[], AbstractContextManager[Store]], share: int, part: slice = _ALL
) -> tuple[Sequence[Cell], list[Outcome]]:
    """Return all cells of a store, and the outcomes of a part of one cell in ``share``."""
    with open_store() as store:
        cells = await cells_of(store)
        try:
            return cells, await _try_cells(store, (cells if share == 1 else few_of(cells, share))[part])
        finally:
            await store.aclose()


def run_in_processes(name: str, share: int, processes: int) -> tuple[Sequence[Cell], list[Outcome]]:
    """Return all cells of one of the tests' stores, and the outcomes of one cell in ``share``."""
    parts = [slice(first, None, processes) for first in range(processes)]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        found = list(pool.map(partial(_run_part, name, share), parts))
    return found[0][0], [outcome for _, outcomes in found for outcome in outcomes]


def _run_part(name: str, share: int, part: slice) -> tuple[Sequence[Cell], list[Outcome]]:
    logging.disable(logging.CRITICAL)  # faults are expected, many thousands of them
    warnings.simplefilter("ignore")
    return anyio.run(run, stores()[name], share, part)


async def _try_cells(store: Store, cells: Sequence[Cell]) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    waiting = list(enumerate(cells))[::-1]
    gc.freeze()  # each failed save collects garbage; what is there before need not be looked at

    async def work() -> None:
        while waiting:
            number, cell = waiting.pop()
            outcome = outcomes[number] = await try_cell(store, cell)
            if outcome.problems:
                print(outcome, file=sys.stderr, flush=True)
            if len(outcomes) % _TOLD == 0:
                print(f"{store.name}: {len(outcomes)} of {len(cells)} cells", file=sys.stderr, flush=True)

    async with anyio.create_task_group() as group:
        for _ in range(store.at_once):
            group.start_soon(work)
    return [outcomes[number] for number in sorted(outcomes)]
