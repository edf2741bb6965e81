"""Give every request of a commit every answer, and judge what each save tells and leaves.

The requests are those of saves without a fault, and those of saves whose commit is in doubt. Each request gets errors,
lost and cut connections, stale answers, answers without headers and others, carried out or not, once and each time.
After each save the old checkpoint or the new one has to load whole, and the save has to have told the truth.

The servers are those of the tests. The extra ``servers`` has them; HDFS needs Java, and shared files need root and
``/dev/fuse``. All cells take about an hour on two cores.
"""

from __future__ import annotations

import importlib
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import anyio

from benchmarks.commit_table.cells import Cell
from benchmarks.commit_table.rows import cells_of, few_of
from benchmarks.commit_table.run import try_cells
from benchmarks.commit_table.table import counts_of, written
from benchmarks.commit_table.trial import Outcome, Store
from benchmarks.figures import Figures, parser

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "storage.md"
PROBLEMS = ("untrue", "lost", "foreign", "next", "left over")
_QUICK = 40


async def run(
    open_store: Callable[[], AbstractContextManager[Store]], share: int
) -> tuple[Sequence[Cell], list[Outcome]]:
    """Return all cells of a store, and the outcomes of one in ``share``."""
    with open_store() as store:
        cells = await cells_of(store)
        try:
            return cells, await try_cells(store, cells if share == 1 else few_of(cells, share))
        finally:
            await store.aclose()


def stores() -> Mapping[str, Callable[[], AbstractContextManager[Store]]]:
    """Return the tests' stores."""
    sys.path.insert(0, str(ROOT / "tests"))
    found: Mapping[str, Callable[[], AbstractContextManager[Store]]] = importlib.import_module(
        "servers.commit_stores"
    ).STORES
    return found


def main() -> int:
    """Try all cells, print the figures and what went wrong, and return the exit status."""
    options = parser(__doc__)
    options.add_argument("--store", metavar="NAME", action="append", help="only this store; may be given again")
    options.add_argument("--docs", action="store_true", help=f"write the counts into {PAGE.relative_to(ROOT)}")
    chosen = options.parse_args()
    logging.disable(logging.CRITICAL)  # faults are expected, many thousands of them
    warnings.simplefilter("ignore")
    figures = Figures()
    for name, open_store in stores().items():
        if chosen.store and name not in chosen.store:
            continue
        figures.head(name)
        began = time.monotonic()
        cells, outcomes = anyio.run(run, open_store, _QUICK if chosen.quick else 1)
        counts = counts_of(cells)
        figures.add(f"{name}, kinds of requests", counts.requests)
        figures.add(f"{name}, answers", counts.answers)
        figures.add(f"{name}, cells of the table", counts.cells)
        figures.add(f"{name}, cells tried", len(outcomes))
        figures.add(f"{name}, cells whose request did not come", sum(0 in outcome.hits for outcome in outcomes))
        figures.add(f"{name}, all cells", time.monotonic() - began, "s")
        seen = Counter(problem.partition(":")[0] for outcome in outcomes for problem in outcome.problems)
        for problem in PROBLEMS:
            figures.add(f"{name}, {problem}", seen[problem], goal=0)
        print(*(outcome for outcome in outcomes if outcome.problems), sep="\n")
        if chosen.docs:
            PAGE.write_text(written(PAGE.read_text("utf-8"), name, counts), "utf-8")
    return figures.close(chosen)


if __name__ == "__main__":
    sys.exit(main())
