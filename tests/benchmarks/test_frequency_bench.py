"""The simulation against one that counts seconds, and a few of its cases."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from samples import sample

from bcp.policies import Costs, Moment, Tuned
from benchmarks import frequency
from benchmarks.frequency import Job, fixed, jobs, lives, optimum, ratios, tuned


def by_seconds(job: Job, times: list[int], seconds: int) -> float:
    """Return the goodput, second by second; all numbers are whole."""
    kept = 0
    for life, length in enumerate(times):
        trained, safe, stalled, running = 0, 0, 0, list[tuple[int, int]]()
        for second in range(length - (int(job.restart) if life else 0) + 1):
            for durable, work in running:
                if second >= durable:
                    safe = max(safe, work)
            if second and second % seconds == 0:
                running.append((second + int(job.lag), trained))
                stalled = int(job.stall)
            if stalled:
                stalled -= 1
            else:
                trained += 1
        kept += safe
    return kept / sum(times)


def test_the_goodput_of_a_fixed_interval_is_that_of_counting_seconds() -> None:
    rng = random.Random(6)  # noqa: S311 -- a fixed seed, no secret
    for _ in range(60):
        job = Job(stall=rng.randrange(4), restart=rng.randrange(30), lag=rng.randrange(4, 12))
        times = [rng.randrange(1, 200) for _ in range(8)]
        seconds = rng.randrange(12, 60)
        assert fixed(job, np.array(times, float), seconds) == pytest.approx(by_seconds(job, times, seconds), abs=1e-12)


class Steady(Tuned):
    """A tuner that always answers the same."""

    __slots__ = ()

    def interval(self, costs: Costs) -> float:
        del costs
        return 100.0


def test_a_tuner_that_never_changes_its_mind_is_a_fixed_interval() -> None:
    times = lives(0.5, 300.0, 1)
    for job in (Job(0.1, 60.0, 5.0), Job(10.0, 600.0, 60.0)):
        assert tuned(job, times, Steady(), 1) == pytest.approx(fixed(job, times, 100.0), rel=1e-9)


def test_no_fixed_interval_is_better_than_the_optimum() -> None:
    times = lives(3.0, 2000.0, 2)
    job = Job(1.0, 60.0, 5.0)
    best = optimum(job, times)
    assert best.goodput == fixed(job, times, best.seconds)
    assert 0.99 * best.goodput < max(fixed(job, times, each) for each in np.geomspace(5.0, 5000.0, 97)) <= best.goodput


def test_failures_come_at_their_rate_for_all_the_hours() -> None:
    for mtbf in (1.0, 10.0):
        times = lives(mtbf, 10_000.0, 3)
        assert times.sum() == pytest.approx(10_000 * 3600)
        assert len(times) == pytest.approx(10_000 / mtbf, rel=0.1)
        assert times.min() >= 0


def test_the_interval_of_the_simulation_is_that_at_which_a_save_is_due() -> None:
    policy, costs = Tuned(), Costs(stall=0.5, durable=5.0, step=1.0, failures=7, observed_hours=9.0, restart=60.0)
    seconds = policy.interval(costs)
    for share, due in ((0.999999, False), (1.000001, True)):
        moment = Moment(step=1, seconds=50.0 + share * seconds, last_step=0, last_seconds=50.0, costs=costs)
        assert policy.due(moment) is due


@pytest.mark.parametrize("stall", sample([0.01, 10.0], 0.01))
@pytest.mark.parametrize("mtbf", [1.0, 100.0])
def test_the_corners_are_within_five_percent_of_the_optimum(stall: float, mtbf: float) -> None:
    found = [share for share, _ in ratios(jobs(stall, quick=False), mtbf, 10_000.0, [5])]
    assert len(found) == 4
    assert 0.95 <= min(found) <= max(found) < 1.01


def test_it_writes_its_figures_and_says_whether_goals_were_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frequency, "HOURS", 200.0)
    monkeypatch.setattr(frequency, "MTBF_HOURS", (3.0,))
    out = tmp_path / "figures.json"
    assert frequency.main(["--quick", "--check", "--json", str(out)]) == 0
    assert len(json.loads(out.read_text())) == 9
    monkeypatch.setattr(frequency, "GOAL", 1.5)
    assert frequency.main(["--quick", "--check"]) == 1
