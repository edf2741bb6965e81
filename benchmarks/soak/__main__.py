"""Kill the ranks of a training job 25 times, at any rank and any time, and judge the job from outside.

    python -m benchmarks.soak [--quick] [--json FILE] [--check] [--kills N] [--steps N] [--seed N]

torchrun restarts the job after each kill. The last weights have to equal those of an undisturbed job bit by bit. A kill
costs no more than one interval of work, and the steps that ran while the lost save was in flight. Each change of the
folder is judged: see :class:`benchmarks.soak.rules.Retention`.
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

from benchmarks.figures import Figures, parser
from benchmarks.soak.kills import moments
from benchmarks.soak.rules import KEEP, SAVE_EVERY
from benchmarks.soak.soak import RANKS, Outcome, StoreOf, soak
from benchmarks.soak.verdict import Verdict, verdict

PHASES = ("start", "resume", "step", "save", "sweep")


def show(figures: Figures, outcome: Outcome, found: Verdict) -> None:
    """Add the figures of a soaked job."""
    retention = outcome.retention
    figures.add("kills of a live rank", len(found.lost))
    for phase in PHASES:
        figures.add(f"  of these in phase {phase!r}", found.phases[phase])
    figures.add("restarts for another reason", len(outcome.lives) - 1 - len(found.lost), goal=0)
    figures.add("commits", retention.commits)
    figures.add("deletions", retention.deletions)
    figures.add("most checkpoints at one moment", retention.most)
    figures.add(f"changes of the folder against keep={KEEP}", len(retention.wrong), goal=0)
    figures.add("all broken promises", len(found.wrong), goal=0)
    figures.add("slowest commit-to-deletion", retention.slowest, "s")
    if found.lost:
        figures.add("steps lost by a kill, mean", statistics.mean(found.lost))
        figures.add("steps lost by a kill, most", max(found.lost), goal=2 * SAVE_EVERY)
        figures.add("  without those during the save in flight, most", max(found.beyond), goal=SAVE_EVERY)
        figures.add("seconds from a kill to the end of all ranks, median", statistics.median(found.survived), "s")
        figures.add("seconds from a kill to the end of all ranks, most", max(found.survived), "s")
    if found.back:
        figures.add("seconds from a kill to the next resumed step, median", statistics.median(found.back), "s")
        figures.add("seconds from a kill to the next resumed step, most", max(found.back), "s")
    figures.add("seconds of the job", outcome.seconds, "s")
    for words in found.wrong:
        print(words, flush=True)


def main() -> int:
    """Run the undisturbed job, then the soaked one; print the figures, and return the exit status."""
    options = parser(__doc__)
    options.add_argument("--kills", type=int, default=None, help="how many; 25 by default, 4 with --quick")
    options.add_argument("--steps", type=int, default=None, help="how many; 300 by default, 120 with --quick")
    options.add_argument("--seed", type=int, default=1, help="of the kills")
    options.add_argument("--dir", type=Path, default=None, help="folder on the disk to be used; /tmp by default")
    options.add_argument(
        "--store", choices=get_args(StoreOf), default="rank 0", help="whose process has the job's store"
    )
    chosen = options.parse_args()
    kills = chosen.kills if chosen.kills is not None else 4 if chosen.quick else 25
    steps = chosen.steps if chosen.steps is not None else 120 if chosen.quick else 300
    figures = Figures()
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} before the run", flush=True)
    with TemporaryDirectory(dir=chosen.dir) as undisturbed, TemporaryDirectory(dir=chosen.dir) as disturbed:
        figures.head(f"{steps} steps of {RANKS} ranks without a kill")
        calm = soak(Path(undisturbed), steps, [])
        show(figures, calm, verdict(calm, 0, ""))
        figures.head(f"the same with {kills} kills, seed {chosen.seed}, the store with {chosen.store}")
        outcome = soak(Path(disturbed), steps, moments(chosen.seed, kills, RANKS), store=chosen.store)
        digest = calm.lives[-1].digest
        found = verdict(outcome, kills, digest)
        show(figures, outcome, found)
        figures.add("last weights that differ", outcome.lives[-1].digest != digest or not digest, goal=0)
        if found.wrong:
            print(outcome.errors[-20_000:], flush=True)
    return figures.close(chosen)


if __name__ == "__main__":
    sys.exit(main())
