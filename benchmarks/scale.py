"""From 8,960 ranks to 100,096: planning, metadata, look-ups and agreement (paper sec. 4.1, 5.2; Table 8).

    python -m benchmarks.scale [--quick] [--json FILE] [--check]

CPU times are of all threads of one process, the least of some runs. docs/scale.md explains the model.
"""

from __future__ import annotations

import sys

from benchmarks.agreement import gathered, spine, virtual_ranks
from benchmarks.chain import busy_chain
from benchmarks.figures import Figures, arguments
from benchmarks.llama import Job
from benchmarks.planning import LARGE, look_up, plan, reshard, share_reads

JOBS = [Job(8, 70, 16, "A"), Job(8, 70, 16, "B"), Job(8, 782, 16, "A"), Job(8, 782, 16, "B")]


TARGETS = [(4, 140, 16), (8, 64, 16), (8, 140, 8), (16, 35, 16)]
"""TP, DP and PP of jobs that load what 8,960 ranks saved."""


def main() -> int:
    """Run everything."""
    options = arguments(__doc__)
    figures = Figures()
    for job in JOBS[: 2 if options.quick else 4]:
        figures.head(
            f"Llama-3.1-405B on {job.world_size:,} ranks, TP={job.tp} DP={job.dp} PP={job.pp}, ZeRO-1 {job.zero}"
        )
        planned = plan(job, figures)
        look_up(planned, figures)
        if job.world_size < LARGE:
            for tp, dp, pp in TARGETS:
                reshard(planned, Job(tp, dp, pp, job.zero), figures)
        if job is JOBS[1] and not options.quick:
            share_reads(planned, Job(4, 140, 16, job.zero), figures)
    figures.head("Agreement over gRPC, on the loopback of this machine")
    spine(3, 21, 10.0, figures)
    spine(4, 18, 15.0, figures)
    busy_chain(3, 100.0, figures)
    for ranks in (8_960, 100_096):
        gathered(ranks, figures)
    virtual_ranks(512 if options.quick else 4096, 16, 2.0, figures)
    return figures.close(options)


if __name__ == "__main__":
    sys.exit(main())
