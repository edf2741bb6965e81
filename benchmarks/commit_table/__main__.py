"""Give every request of a commit every answer, and judge what each save tells and leaves.

The requests are those of saves without a fault, and those of saves whose commit is in doubt. Each request gets errors,
lost and cut connections, stale answers, answers without headers and others, carried out or not, once and each time.
After each save the old checkpoint or the new one has to load whole, and the save has to have told the truth.

The servers are those of the tests. The extra ``servers`` has them; HDFS needs Java, and shared files need root and
``/dev/fuse``. ``--processes`` divides the cells of a store among processes with servers of their own. All cells take
about an hour on two cores.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from pathlib import Path

from benchmarks.commit_table.run import run_in_processes, stores
from benchmarks.commit_table.table import counts_of, written
from benchmarks.figures import Figures, parser

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "storage.md"
PROBLEMS = ("untrue", "lost", "foreign", "next", "left over")
_QUICK = 40


def main() -> int:
    """Try all cells, print the figures and what went wrong, and return the exit status."""
    options = parser(__doc__)
    options.add_argument("--store", metavar="NAME", action="append", help="only this store; may be given again")
    options.add_argument("--docs", action="store_true", help=f"write the counts into {PAGE.relative_to(ROOT)}")
    options.add_argument("--processes", metavar="N", type=int, default=os.cpu_count(), help="try cells in so many")
    chosen = options.parse_args()
    figures = Figures()
    for name in stores():
        if chosen.store and name not in chosen.store:
            continue
        figures.head(name)
        began = time.monotonic()
        cells, outcomes = run_in_processes(name, _QUICK if chosen.quick else 1, chosen.processes)
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
