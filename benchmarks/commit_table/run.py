"""Try cells, some at a time, in one event loop."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import anyio

from benchmarks.commit_table.cells import Cell
from benchmarks.commit_table.trial import Outcome, Store, try_cell

__all__ = ["try_cells"]


async def try_cells(store: Store, cells: Sequence[Cell]) -> list[Outcome]:
    """Return the outcomes of cells, in their order."""
    outcomes: dict[int, Outcome] = {}
    waiting = list(enumerate(cells))[::-1]
    gc.freeze()  # each failed save collects garbage; what is there before need not be looked at

    async def work() -> None:
        while waiting:
            number, cell = waiting.pop()
            outcomes[number] = await try_cell(store, cell)

    async with anyio.create_task_group() as group:
        for _ in range(store.at_once):
            group.start_soon(work)
    return [outcomes[number] for number in sorted(outcomes)]
