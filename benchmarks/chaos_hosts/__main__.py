"""Kill trainers of others at file events of their saves, resume them, and compare their last weights bit by bit.

The same as :mod:`benchmarks.chaos`, for the trainers of ``bcp.integrations``. It runs in their environment, with
``pip install ckpt-chaos``: ``.venv-hosts/bin/python -m benchmarks.chaos_hosts --check``. ``job.py`` is the job.

24 kill points of each trainer are six in each mode, drawn over all kinds of events of its saves; ``--quick`` takes 8,
and ``--all`` every event in every mode. A point is two lives of the job. The CPU time of a life is 5.5 s with
Lightning, 8 s with the Trainer and 9.5 s with torchtitan, most of it for imports. All points are kept until the last
one is judged: 64 MB each with torchtitan. ``--native`` kills the trainers without bcp, with their own checkpoints of
the same steps.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.chaos import MODES, killed
from benchmarks.chaos_hosts.job import HOSTS
from benchmarks.figures import Figures, parser

POINTS, QUICK = 6 * len(MODES), 2 * len(MODES)
EVERY = 10_000
"""More points than there are events."""


def main() -> int:
    """Kill each trainer, print the verdicts, and return the exit status."""
    options = parser(__doc__)
    options.add_argument("--jobs", type=int, default=2, help="runs at a time")
    options.add_argument("--points", type=int, default=POINTS, help=f"kill points of a trainer; default: {POINTS}")
    options.add_argument("--all", action="store_true", help="kill at every event in every mode, which takes hours")
    options.add_argument("--hosts", default=",".join(HOSTS), help=f"some of {','.join(HOSTS)}; default: all")
    options.add_argument("--native", action="store_true", help="without bcp: any verdict is a result, and no goal")
    options.add_argument("--work", type=Path, help="keep the files of all runs in this folder; default: delete them")
    chosen = options.parse_args()
    hosts = chosen.hosts.split(",")
    if not set(hosts) <= set(HOSTS):
        options.error(f"--hosts takes some of {','.join(HOSTS)}")
    points = EVERY if chosen.all else QUICK if chosen.quick else chosen.points
    figures = Figures()
    figures.head("ckpt-chaos on trainers" + (" with their own checkpoints" if chosen.native else ""))
    for host in hosts:
        with tempfile.TemporaryDirectory() as passing:
            work = chosen.work / host if chosen.work else Path(passing)
            job = ["benchmarks.chaos_hosts.job", "--out", "{out}", "--host", host]
            job += ["--native"] if chosen.native else []
            name = HOSTS[host] if chosen.native else "step"
            modes, sized = list(MODES), chosen.native
            found = killed(job, work, name=name, modes=modes, points=points, jobs=chosen.jobs, sized=sized)
        report(figures, host, Counter(kill.verdict for kill in found), is_goal=not chosen.native)
    return figures.close(chosen)


def report(figures: Figures, host: str, verdicts: Counter[str], *, is_goal: bool) -> None:
    """Add the figures of a trainer. A job that never came to its event was not killed."""
    del verdicts["UNREACHED"]
    figures.add(f"{host}: kills", verdicts.total())
    for verdict in sorted(verdicts.keys() - {"PASS"}):
        figures.add(f"{host}: {verdict}", verdicts[verdict])
    failed = verdicts.total() - verdicts["PASS"]
    figures.add(f"{host}: any other verdict than PASS", failed, goal=0 if is_goal else None)


if __name__ == "__main__":
    sys.exit(main())
