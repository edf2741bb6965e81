"""Kill a training job at every file event of its saves, resume it, and compare its last weights bit by bit.

The killing and the judging are ``ckpt-chaos``'s, a tool of others. It runs the job once without a fault and records
every file that is opened for writing, renamed, removed, or made. A fresh copy of the job dies at each of these events,
in every mode of the tool (:data:`MODES`). The resumed job has to end with the weights of the run without a fault, from
the newest complete checkpoint. ``benchmarks/chaos_job.py`` is the job.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos_job import GRACE, RUNS, STOPPED, WAYS
from benchmarks.figures import Figures, parser

ROOT = Path(__file__).parents[1]
FAIL_ON = "HARD_FAIL,SILENT_DIVERGENCE,LOST_WORK,CONTROL_FAIL"
TIMEOUT = 3600
"""Seconds after which a run hangs, on a busy machine too."""
MODES = {
    "before": "the job dies before the event",
    "torn": "a file that Python's open() has made is cut in half when it is closed, and the job dies",
    "unsynced": "the job dies before the event, and files that Python's open() has made lose bytes without fsync",
    "term": "SIGTERM at the event, and the death of the job some seconds later unless it has ended",
}
"""All modes of ckpt-chaos 0.1.8. A loop without a handler of SIGTERM dies at once, as in the mode ``before``."""


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

    @property
    def modes(self) -> list[str]:
        """The modes that tell something about this way: a run that hangs does so after SIGTERM only."""
        if self.way == "run-hung":
            return ["term"]
        return [mode for mode in MODES if mode != "term" or self.way in RUNS]


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill point, and the end of the resumed job.

    Attributes:
        event: number of the file event, from 1.
        mode: of :data:`MODES`.
        verdict: ckpt-chaos's, or "UNREACHED" for a job that passed and never came to the event. Ranks and threads race,
            so not every job has as many events.
        status: exit status of the job at which the kill was aimed.
        step: the step from which the resumed job went on; None if it failed.
    """

    event: int
    mode: str
    verdict: str
    status: int
    step: int | None


CASES = [Case(way, ranks, victim) for way in WAYS for ranks, victim in ((1, 0), (2, 0), (2, 1))]
QUICK = [Case("lazy"), Case("run", 2)]


def kill_and_resume(case: Case, work: Path, *, points: int, jobs: int) -> list[Kill]:
    """Run ckpt-chaos over one case.

    Args:
        case: the case to run.
        work: an empty folder for the runs' files.
        points: at how many events to kill; see :func:`benchmarks.chaos_points.choose`.
        jobs: how many runs at a time.

    Raises:
        RuntimeError: ckpt-chaos could not run the job, or the job without a fault failed; the message ends with the
            tool's output.

    """
    job = ["benchmarks.chaos_job", "--out", "{out}", "--way", case.way]
    name = "step" if case.way in RUNS else "ckpt"
    ranks = ["--ranks", str(case.ranks), "--crash-rank", str(case.victim)]
    return killed(job, work, name=name, modes=case.modes, points=points, jobs=jobs, ranks=ranks, victim=case.victim)


def killed(
    job: Sequence[str],
    work: Path,
    *,
    name: str,
    modes: Sequence[str],
    points: int,
    jobs: int,
    ranks: Sequence[str] = (),
    victim: int = 0,
    sized: bool = False,
) -> list[Kill]:
    """Run ckpt-chaos over a job.

    Args:
        job: module and arguments of the job, whose folder is ``{out}``.
        work: an empty folder for the files of all runs.
        name: of the folders of checkpoints, before the step.
        modes: some of :data:`MODES`.
        points: at how many events to kill; see :func:`benchmarks.chaos_points.choose`.
        jobs: how many runs at a time.
        ranks: arguments of ckpt-chaos for a job of several ranks.
        victim: the rank that is killed.
        sized: whether files of one name have one size in all runs, so that a smaller one is not complete. Those of bcp
            vary with the times in them, and a file that has its final name is whole.

    """
    from ckpt_chaos.runner import rejudge  # noqa: PLC0415 -- of the extra dev

    command = [sys.executable, "-m", "benchmarks.chaos_points", "run", "--work", str(work), "--fail-on", FAIL_ON]
    command += ["--checkpoint-glob", f"{{out}}/{name}-*", "--result-file", "{out}/digest"]
    command += [] if sized else ["--ckpt-ignore-size"]
    command += ["--step-regex", r"(?m)^resumed from step (\d+)", "--modes", ",".join(modes)]
    command += ["--grace", str(GRACE), *ranks, "--max-points", str(points), "--jobs", str(jobs)]
    command += ["--timeout", str(TIMEOUT), "--"]
    command += [sys.executable, "-m", *job]
    # ckpt-chaos 0.1.8 arms the rank that --crash-rank names, but asks this variable, 0 by default, whether to crash it
    env = {**os.environ, "CKPT_CHAOS_CRASH_RANK": str(victim), "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile bcp
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)  # noqa: S603 -- our own job
    control, *rows = rejudge(work) or [None]
    if done.returncode not in (0, 1) or control is None or control.verdict != "PASS":
        raise RuntimeError(f"ckpt-chaos ended with {done.returncode} over {' '.join(job)}:\n{done.stdout}{done.stderr}")
    print(done.stdout, flush=True)
    return [_kill(work / f"pt_{number:03d}", row.verdict, victim) for number, row in enumerate(rows, 1)]


def _kill(folder: Path, verdict: str, victim: int) -> Kill:
    """Read the files of one kill point."""
    found = json.loads((folder / "result.json").read_text())
    event, mode = found["point"]
    events = (folder / f"events.log.rank{victim}").read_text().count("\n")
    if verdict == "PASS" and events < event:
        verdict = "UNREACHED"
    return Kill(event, mode, verdict, found["rc"], found["outcome"]["resumed_from_step"])


def report(figures: Figures, case: Case, found: Sequence[Kill]) -> None:
    """Add the figures of a case."""
    kills = [kill for kill in found if kill.verdict != "UNREACHED"]
    figures.add(f"{case}: kills", len(kills))
    figures.add(f"{case}: any other verdict than PASS", sum(kill.verdict != "PASS" for kill in kills), goal=0)
    if case.way in RUNS:
        signalled = [kill for kill in kills if kill.mode == "term"]
        figures.add(f"{case}: SIGTERM", len(signalled))
        figures.add(f"{case}: ended in the notice", sum(kill.status in (0, STOPPED) for kill in signalled))
    if case.way == "run-hung":
        saved = {0, *RUNS["run-hung"]["save"].steps}
        figures.add(f"{case}: resumed from a standby snapshot", sum(kill.step not in saved for kill in kills))


def main() -> int:
    """Run all cases, print the verdicts, and return the exit status."""
    options = parser(__doc__)
    options.add_argument("--jobs", type=int, default=2, help="runs at a time")
    options.add_argument("--points", type=int, default=1000, help="most kill points of a case")
    options.add_argument("--ways", default="", help=f"some of {','.join(WAYS)}; default: all")
    options.add_argument("--work", type=Path, help="keep the files of all runs in this folder; default: delete them")
    chosen = options.parse_args()
    ways = chosen.ways.split(",") if chosen.ways else WAYS
    if not set(ways) <= set(WAYS):
        options.error(f"--ways takes some of {','.join(WAYS)}")
    figures = Figures()
    figures.head("ckpt-chaos")
    for case in [each for each in (QUICK if chosen.quick else CASES) if each.way in ways]:
        with tempfile.TemporaryDirectory() as passing:
            work = chosen.work / str(case).replace(", ", "-").replace(" ", "-") if chosen.work else Path(passing)
            points = 2 * len(case.modes) if chosen.quick else chosen.points
            report(figures, case, kill_and_resume(case, work, points=points, jobs=chosen.jobs))
    return figures.close(chosen)


if __name__ == "__main__":
    sys.exit(main())
