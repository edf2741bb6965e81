"""Let the tuner of the save interval train for 10,000 simulated hours, beside the best fixed interval in hindsight.

Failures come by a Poisson process. A save stops the training for its stall, and is durable some seconds later.
A failure takes the work since the last durable save began, and the seconds of a restart.

The tuner is ``bcp.policies.Tuned``. It begins with its prior alone and sees each failure when it happens. Stall and lag
are known after the first save of each life only, and a measured stall is off by a quarter or so. The optimum is the
fixed interval with the most goodput in the same failures, found by trying some hundreds.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from bcp.policies import Costs, Tuned
from benchmarks.figures import Figures, parser

__all__ = ["Job", "Optimum", "fixed", "jobs", "lives", "main", "optimum", "ratios", "tuned"]

HOUR = 3_600.0
HOURS = 10_000.0
EARLY_HOURS = 100.0
STALLS = (0.01, 0.1, 1.0, 10.0)
MTBF_HOURS = (1.0, 3.0, 10.0, 30.0, 100.0)
RESTARTS = (60.0, 600.0)
LAGS = (5.0, 60.0)
STEP = 1.0
USUAL = 1_800.0
GOAL = 0.95
NOISE = 0.25
"""Standard deviation of the logarithm of a measured stall."""
RENEWAL = 0.002
"""The tuner is asked again when the hours that it has seen have grown by this share."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Job:
    """A training job, in seconds.

    Attributes:
        stall: training time that a save takes away.
        restart: from a failure until the training goes on.
        lag: from the beginning of a save until it is durable; at least the stall.
    """

    stall: float
    restart: float
    lag: float


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best fixed interval.

    Attributes:
        seconds: from the beginning of one save to that of the next.
        goodput: share of the time that became training which was not lost.
    """

    seconds: float
    goodput: float


def lives(mtbf_hours: float, hours: float, seed: int) -> Floats:
    """Return the seconds between failures, from the beginning to the end of so many hours; the end counts as one."""
    rng = np.random.default_rng([seed, round(1000 * mtbf_hours)])
    gaps = rng.exponential(mtbf_hours * HOUR, size=2 * math.ceil(hours / mtbf_hours) + 100)
    ends = np.cumsum(gaps)
    ends = ends[ends < hours * HOUR]
    return np.diff(ends, prepend=0.0, append=hours * HOUR)


def fixed(job: Job, times: Floats, seconds: float) -> float:
    """Return the goodput of saves at a fixed interval.

    Args:
        job: the job.
        times: seconds between failures.
        seconds: from the beginning of one save to that of the next; not below the lag: saves do not overlap.

    """
    trained = np.maximum(0.0, _training(job, times) - job.lag)
    saves = np.floor(trained / seconds)
    return float((saves * seconds - np.maximum(0.0, saves - 1) * job.stall).sum() / times.sum())


def optimum(job: Job, times: Floats) -> Optimum:
    """Return the best of some hundred fixed intervals, and of as many between the neighbours of the best one."""
    low, high = max(STEP, job.lag, 2 * job.stall), 10 * math.sqrt(float(times.max()) * (job.stall + 1.0))
    best = Optimum(low, 0.0)
    for _ in range(2):
        tried = np.geomspace(low, max(low * 1.01, high), 150)
        best = max((Optimum(float(each), fixed(job, times, each)) for each in tried), key=lambda one: one.goodput)
        at = int(np.searchsorted(tried, best.seconds))
        low, high = float(tried[max(0, at - 1)]), float(tried[min(len(tried) - 1, at + 1)])
    return best


def tuned(job: Job, times: Floats, policy: Tuned, seed: int) -> float:
    """Return the goodput of saves whenever the tuner says so.

    Args:
        job: the job.
        times: seconds between failures.
        policy: the tuner.
        seed: of the errors of the measured stalls.

    """
    training = _training(job, times)
    measured = job.stall * np.random.default_rng(seed).lognormal(0.0, NOISE, len(times))
    kept, seen, restart = 0.0, 0.0, 0.0
    for life, (whole, seconds) in enumerate(zip(times.tolist(), training.tolist(), strict=True)):
        if life and seconds > 0:
            restart = job.restart
        at, stall, lag = 0.0, 0.0, 0.0
        while True:
            hours = (seen + whole - seconds + at) / HOUR
            costs = Costs(stall=stall, durable=lag, step=STEP, failures=life, observed_hours=hours, restart=restart)
            interval = policy.interval(costs)
            ahead = min(seconds - job.lag - at, RENEWAL * (policy.prior_hours + hours) * HOUR if stall else interval)
            saves = max(1, int(ahead // interval))
            if at + interval + job.lag > seconds:
                break  # the failure comes first
            kept += saves * interval - (saves if stall else saves - 1) * job.stall
            at += saves * interval
            stall, lag = float(measured[life]), job.lag
        seen += whole
    return kept / float(times.sum())


def _training(job: Job, times: Floats) -> Floats:
    """Return the seconds of each life in which the job trains; all but the first begin with a restart."""
    trained = np.maximum(0.0, times - job.restart)
    trained[0] = times[0]
    return trained


def jobs(stall: float, *, quick: bool) -> list[Job]:
    """Return the jobs of one stall."""
    settings = [(RESTARTS[0], LAGS[0])] if quick else list(product(RESTARTS, LAGS))
    return [Job(stall, restart, max(lag, stall)) for restart, lag in settings]


def ratios(some: Sequence[Job], mtbf_hours: float, hours: float, seeds: Sequence[int]) -> list[tuple[float, float]]:
    """Return the goodput of the tuner, and that of a usual interval, as shares of the optimum's.

    Args:
        some: the jobs.
        mtbf_hours: mean hours between failures.
        hours: how long each job trains.
        seeds: one run of each job for each of them.

    """
    found = []
    for job, seed in product(some, seeds):
        times = lives(mtbf_hours, hours, seed)
        best = optimum(job, times).goodput
        found.append((tuned(job, times, Tuned(), seed) / best, fixed(job, times, USUAL) / best))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare in every case, and return the exit status."""
    options = parser(__doc__).parse_args(arguments)
    figures, quick = Figures(), bool(options.quick)
    seeds = range(1 if quick else 3)
    usual = []
    figures.head(f"Goodput of the tuner as a share of the optimum's, {HOURS:,.0f} hours; the worst of each case's runs")
    for stall, mtbf in product(STALLS, MTBF_HOURS):
        found = ratios(jobs(stall, quick=quick), mtbf, HOURS, seeds)
        figures.add(f"stall {stall:g} s, a failure every {mtbf:g} h", min(found)[0], "", GOAL, least=True)
        usual.append(min(share for _, share in found))
    figures.add(f"for comparison, saves {USUAL:g} s apart: the worst case", min(usual))
    early = range(5 if quick else 20)
    figures.head(f"The same in the first {EARLY_HOURS:g} hours, when the tuner has hardly learned; mean of the runs")
    for stall in STALLS:
        some = jobs(stall, quick=quick)
        runs = [ratios(some, mtbf, EARLY_HOURS, early) for mtbf in MTBF_HOURS]
        worst = min(statistics.fmean(share for share, _ in one) for one in runs)
        figures.add(f"stall {stall:g} s, the worst mean time between failures", worst, "", GOAL, least=True)
    return figures.close(options)


if __name__ == "__main__":
    sys.exit(main())
