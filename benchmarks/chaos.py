"""Kill a training job at every file event of its saves, resume it, and compare its last weights bit by bit.

The killing and the judging are ``ckpt-chaos``'s, a tool of others. It runs the job once without a fault and records
every file that is opened for writing, renamed, removed, or made. A fresh copy of the job dies at each of these events;
files written through Python's ``open`` are also cut in half. The resumed job has to end with the weights of the run
without a fault, from the newest complete checkpoint. ``benchmarks/chaos_job.py`` is the job.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos_job import WAYS
from benchmarks.figures import Figures, parser

ROOT = Path(__file__).parents[1]
FAIL_ON = "HARD_FAIL,SILENT_DIVERGENCE,LOST_WORK,CONTROL_FAIL"


@dataclass(frozen=True, slots=True)
class Case:
    """One way to save, by a number of ranks of which one is killed.

    Attributes:
        way: of :data:`~benchmarks.chaos_job.WAYS`.
        ranks: processes of the job.
        victim: the rank that is killed; the others are killed 3 s later unless they end by themselves.
    """

    way: str
    ranks: int = 1
    victim: int = 0

    def __str__(self) -> str:
        return f"{self.way}, 1 rank" if self.ranks == 1 else f"{self.way}, {self.ranks} ranks, rank {self.victim} dies"


CASES = [Case(way, ranks, victim) for way in WAYS for ranks, victim in ((1, 0), (2, 0), (2, 1))]


def kill_and_resume(case: Case, work: Path, *, points: int, jobs: int) -> Counter[str]:
    """Run ckpt-chaos over one case, and count its verdicts.

    Args:
        case: what to run.
        work: an empty folder for the runs' files.
        points: at how many events to kill, evenly spaced over all.
        jobs: how many runs at a time.

    Returns:
        How many kill points got which verdict. "UNREACHED" are those at which the job was never killed, and passed:
        ranks race to make folders, so not every run of several has as many events.

    Raises:
        RuntimeError: ckpt-chaos could not run the job; the message ends with its output.

    """
    from ckpt_chaos.runner import rejudge  # noqa: PLC0415 -- of the extra dev

    command = [
        sys.executable,
        "-m",
        "ckpt_chaos",
        "run",
        "--work",
        str(work),
        "--step-regex",
        r"resumed from step (\d+)",
    ]
    command += ["--result-file", "{out}/digest", "--checkpoint-glob", "{out}/ckpt-*", "--fail-on", FAIL_ON]
    command += ["--ranks", str(case.ranks), "--crash-rank", str(case.victim)]
    command += ["--max-points", str(points), "--jobs", str(jobs), "--"]
    command += [sys.executable, "-m", "benchmarks.chaos_job", "--out", "{out}", "--way", case.way]
    # ckpt-chaos 0.1.8 arms the rank that --crash-rank names, but asks this variable, 0 by default, whether to crash it
    env = {**os.environ, "CKPT_CHAOS_CRASH_RANK": str(case.victim), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)  # noqa: S603 -- our own job
    rows = rejudge(work)
    if done.returncode not in (0, 1) or not rows:
        raise RuntimeError(f"ckpt-chaos ended with {done.returncode} over {case}:\n{done.stdout}{done.stderr}")
    print(done.stdout, flush=True)
    kills = [row for row in rows if not row.label.startswith("no crash")]
    return Counter("UNREACHED" if row.verdict == "PASS" and not row.crashed else row.verdict for row in kills)


def main() -> int:
    """Run all cases, print the verdicts, and return the exit status."""
    options = parser(__doc__)
    options.add_argument("--jobs", type=int, default=2, help="runs at a time")
    options.add_argument("--points", type=int, default=1000, help="most kill points of a case")
    chosen = options.parse_args()
    figures = Figures()
    figures.head("ckpt-chaos")
    for case in CASES[:: 5 if chosen.quick else 1]:
        with tempfile.TemporaryDirectory() as work:
            verdicts = kill_and_resume(case, Path(work), points=4 if chosen.quick else chosen.points, jobs=chosen.jobs)
        killed = verdicts.total() - verdicts["UNREACHED"]
        figures.add(f"{case}: kills", killed)
        figures.add(f"{case}: any other verdict than PASS", killed - verdicts["PASS"], goal=0)
    return figures.close(chosen)


if __name__ == "__main__":
    sys.exit(main())
