"""Kill trainers of others at file events of their saves, resume them, and compare their last weights bit by bit.

The same as :mod:`benchmarks.chaos`, for the trainers of ``bcp.integrations``. It runs in their environment, with
``pip install ckpt-chaos``: ``.venv-hosts/bin/python -m benchmarks.chaos_hosts --check``.
``benchmarks/chaos_hosts_job.py`` is the job.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.chaos import MODES, killed
from benchmarks.chaos_hosts_job import HOSTS
from benchmarks.figures import Figures, parser


def main() -> int:
    """Kill each trainer, print the verdicts, and return the exit status."""
    options = parser(__doc__)
    options.add_argument("--jobs", type=int, default=2, help="runs at a time")
    options.add_argument("--points", type=int, default=1000, help="most kill points of a trainer")
    options.add_argument("--hosts", default=",".join(HOSTS), help=f"some of {','.join(HOSTS)}")
    options.add_argument("--work", type=Path, help="keep the files of all runs in this folder; default: delete them")
    chosen = options.parse_args()
    figures = Figures()
    figures.head("ckpt-chaos on trainers")
    for host in chosen.hosts.split(","):
        with tempfile.TemporaryDirectory() as passing:
            work = chosen.work / host if chosen.work else Path(passing)
            points = 2 * len(MODES) if chosen.quick else chosen.points
            job = ["benchmarks.chaos_hosts_job", "--out", "{out}", "--host", host]
            kills = killed(job, work, name="step", modes=list(MODES), points=points, jobs=chosen.jobs)
            verdicts = Counter(kill.verdict for kill in kills if kill.verdict != "UNREACHED")
            figures.add(f"{host}: kills", verdicts.total())
            figures.add(f"{host}: any other verdict than PASS", verdicts.total() - verdicts["PASS"], goal=0)
    return figures.close(chosen)


if __name__ == "__main__":
    sys.exit(main())
