"""Kill a job with a memory tier at random, in any of its parts, and judge each life by what docs/tiers.md promises.

    python -m benchmarks.chaos_tiers [--quick] [--kills N] [--torchrun N] [--seed N] [--ends A,B]
        [--minutes M] [--json FILE] [--check]

The job has 8 ranks on 4 hosts, with ``copies=2``. Each host is a network namespace with an address, a memory and an
agent of its own, so that root alone runs this. Ranks, agents and whole hosts are killed; memories are wiped; a bit
flips; agents and storage fall silent. Each next life resumes from a step that is not older than the table in
docs/tiers.md allows. All of its tensors equal those of a computation without bcp, bit by bit, and so do those of the
newest checkpoint in storage.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from bcp.tiers.options import SHARED_MEMORY
from benchmarks.chaos_tiers.campaign import NBYTES, Campaign, Outcome
from benchmarks.chaos_tiers.network import Network
from benchmarks.chaos_tiers.plan import ENDS, HOSTS, MEANWHILE, plan
from benchmarks.chaos_tiers.store import Store
from benchmarks.figures import Figures, parser

KILLS, QUICK, TORCHRUN = 200, 12, 20


def show(figures: Figures, outcome: Outcome) -> None:
    """Add the figures of a campaign."""
    figures.add("kills", sum(count for kind, count in outcome.kills.items() if not kind.startswith("silent")))
    for kind in (*ENDS, *MEANWHILE):
        if outcome.kills[kind]:
            figures.add(f"  of these: {kind}", outcome.kills[kind])
    figures.add("  of these in lives of torchrun", outcome.by_torchrun)
    figures.add("resumptions from memory, 0 files of storage opened", outcome.near)
    figures.add("  of these by 6 ranks behind 8", outcome.fewer)
    figures.add("resumptions from memory and storage, for an agent did not answer", outcome.unanswered)
    figures.add("resumptions from storage", outcome.far)
    figures.add("snapshots of a killed job that agents made durable", outcome.returned)
    figures.add("lives with steps lost beyond the table", len(outcome.lost), goal=0)
    figures.add("lives with wrong values or broken promises", len(outcome.wrong), goal=0)
    figures.add("lives that hung", len(outcome.hung), goal=0)
    figures.add("most bytes of data on a host, in parts of a snapshot", outcome.most_nbytes * HOSTS / NBYTES)
    figures.add("most files on a host", outcome.most_files)
    if outcome.resumed:
        figures.add("seconds from a start until all ranks are back, median", statistics.median(outcome.resumed), "s")
        figures.add("seconds from a start until all ranks are back, most", max(outcome.resumed), "s")


def main() -> int:
    """Run a campaign, print its figures, and return the exit status."""
    options = parser(__doc__)
    options.add_argument("--kills", type=int, help=f"how many; {KILLS} by default, {QUICK} with --quick")
    options.add_argument("--torchrun", type=int, help=f"lives of torchrun; {TORCHRUN} by default, 1 with --quick")
    options.add_argument("--seed", type=int, default=1, help="of the kills")
    options.add_argument("--ends", default=",".join(ENDS), help=f"some of {','.join(ENDS)}; default: all")
    options.add_argument("--minutes", type=float, default=float("inf"), help="no life begins after so many")
    options.add_argument("--work", type=Path, help="keep what all ranks write in this folder; default: delete it")
    chosen = options.parse_args()
    kills = chosen.kills if chosen.kills is not None else QUICK if chosen.quick else KILLS
    torchrun = chosen.torchrun if chosen.torchrun is not None else 1 if chosen.quick else TORCHRUN
    ends = chosen.ends.split(",")
    if not {*ends} <= {*ENDS}:
        options.error(f"--ends takes some of {','.join(ENDS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # nothing is left behind
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each agent would compile bcp
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    figures = Figures()
    figures.head(f"{kills} kills of {2 * HOSTS} ranks on {HOSTS} hosts, seed {chosen.seed}")
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bcp-chaos-", dir=SHARED_MEMORY)))
        network = stack.enter_context(Network(HOSTS))
        store = stack.enter_context(Store(root / "store"))
        work = chosen.work or root / "work"
        work.mkdir(parents=True, exist_ok=True)
        campaign = Campaign(network, store, root, work, chosen.seed)
        stack.callback(campaign.close)
        outcome = campaign.run(plan(chosen.seed, kills, torchrun, ends), chosen.minutes)
    show(figures, outcome)
    return figures.close(chosen)


if __name__ == "__main__":
    sys.exit(main())
