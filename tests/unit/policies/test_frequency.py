"""The save interval: the closed form against expected losses that are computed here, and the tuner's bounds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from bcp.errors import InputError
from bcp.policies import Costs, Moment, Tuned, interval

CASES = [
    (stall, hours * 3600.0, restart)
    for stall in (0.01, 0.1, 1.0, 10.0)
    for hours in (1, 3, 10, 30, 100)
    for restart in (0.0, 60.0, 600.0)
]


def least(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the place of the minimum, by golden sections."""
    ratio = (math.sqrt(5) - 1) / 2
    while high - low > 1e-7 * high:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if function(left) < function(right) else (left, high)
    return (low + high) / 2


def first_order(seconds: float, stall: float, failures: float, restart: float) -> float:
    """Return the time for a second of training where each failure costs half an interval and the restart."""
    return seconds / (seconds - stall) * (1 + (seconds / 2 + restart) / failures)


def poisson(seconds: float, stall: float, failures: float, restart: float) -> float:
    """Return the expected time for a second of training, of Poisson failures that may also hit a restart.

    An interval that is repeated until no failure hits it takes (e^x - 1) e^y times the mean time between failures.
    """
    return failures * math.exp(restart / failures) * math.expm1(seconds / failures) / (seconds - stall)


@pytest.mark.parametrize(("stall", "failures", "restart"), CASES)
def test_the_closed_form_is_the_minimum_of_the_expected_time(stall: float, failures: float, restart: float) -> None:
    found = least(lambda seconds: first_order(seconds, stall, failures, restart), stall * 1.001, failures * 3)
    assert interval(stall, failures, restart) == pytest.approx(found, rel=1e-3)


@pytest.mark.parametrize(("stall", "failures", "restart"), CASES)
def test_it_loses_hardly_more_than_the_best_interval_under_poisson_failures(
    stall: float, failures: float, restart: float
) -> None:
    best = least(lambda seconds: poisson(seconds, stall, failures, restart), stall * 1.001, failures)
    mine = interval(stall, failures, restart)
    assert poisson(mine, stall, failures, restart) <= 1.0005 * poisson(best, stall, failures, restart)


def test_no_stall_no_interval_and_bad_numbers_are_refused() -> None:
    assert interval(0.0, 3600.0, 60.0) == 0.0
    for numbers in ((-1.0, 1.0, 1.0), (1.0, 0.0, 1.0), (1.0, math.inf, 1.0), (1.0, 1.0, -1.0), (math.nan, 1.0, 1.0)):
        with pytest.raises(InputError, match="interval"):
            interval(*numbers)


def test_failures_are_learned_from_the_prior_to_the_observed_rate() -> None:
    tuned = Tuned(prior_hours=24.0, prior_failures=1.0)
    assert tuned.failure_seconds(Costs()) == 24 * 3600
    assert tuned.failure_seconds(Costs(failures=1, observed_hours=0.0)) == 12 * 3600
    assert tuned.failure_seconds(Costs(failures=0, observed_hours=24.0)) == 48 * 3600
    assert tuned.failure_seconds(Costs(failures=10_000, observed_hours=20_000.0)) == pytest.approx(7200, rel=2e-3)


def test_the_interval_is_the_closed_form_with_the_lag_as_part_of_a_failure() -> None:
    costs = Costs(stall=1.0, durable=40.0, step=2.0, failures=9, observed_hours=56.0, restart=90.0)
    assert Tuned().interval(costs) == interval(1.0, 8 * 3600.0, 130.0)
    assert Tuned(restart=70.0).interval(Costs(stall=1.0)) == interval(1.0, 24 * 3600.0, 70.0)


@pytest.mark.parametrize(
    ("tuned", "costs", "seconds", "said"),
    [
        (Tuned(), Costs(), 10.0, "no save has shown yet"),
        (Tuned(first=3.0), Costs(failures=5), 3.0, "no save has shown yet"),
        (Tuned(), Costs(step=45.0), 45.0, "a step takes so long"),
        (Tuned(), Costs(durable=30.0), 30.0, "so long to be durable"),
        (Tuned(), Costs(stall=0.01, step=200.0), 200.0, "a step takes so long"),
        (Tuned(), Costs(stall=0.01, durable=3000.0), 3000.0, "so long to be durable"),
        (Tuned(overhead=0.001), Costs(stall=2.0), 2000.0, "saves may take 0.1 % of the training"),
        (Tuned(), Costs(stall=60.0, failures=100, observed_hours=10.0), 1200.0, "saves may take 5 % of the training"),
    ],
)
def test_each_bound_counts_and_is_named(tuned: Tuned, costs: Costs, seconds: float, said: str) -> None:
    assert tuned.interval(costs) == pytest.approx(seconds)
    assert said in tuned.explain(costs).partition(". ")[0]


def test_bounds_hold_whatever_was_measured() -> None:
    rng = random.Random(4)  # noqa: S311 -- a fixed seed, no secret
    for _ in range(2000):
        stall, durable, step = (10 ** rng.uniform(-4, 4) for _ in range(3))
        costs = Costs(stall=stall, durable=durable, step=step, failures=rng.randrange(50), observed_hours=rng.random())
        seconds = Tuned(overhead=0.1).interval(costs)
        assert seconds >= max(stall / 0.1, durable, step) * (1 - 1e-12)


def test_numbers_that_are_none_count_as_not_measured() -> None:
    for bad in (math.nan, math.inf, -1.0):
        costs = Costs(stall=bad, durable=bad, step=bad, failures=-2, observed_hours=bad, restart=bad)
        assert Tuned().interval(costs) == Tuned().interval(Costs())
        assert Tuned().explain(costs) == Tuned().explain(Costs())


def test_it_is_due_when_the_interval_has_passed_and_not_before() -> None:
    tuned, costs = Tuned(), Costs(stall=0.5, durable=5.0, failures=3, observed_hours=40.0)
    seconds = tuned.interval(costs)
    for began in (None, 1000.0):
        since = began or 0.0
        for later, due in ((0.0, False), (seconds - 0.01, False), (seconds + 0.01, True), (1e9, True)):
            moment = Moment(step=9, seconds=since + later, last_step=3, last_seconds=began, costs=costs)
            assert tuned.due(moment) is due


def test_the_first_save_comes_early_and_the_second_waits_for_it() -> None:
    tuned = Tuned(first=10.0)
    assert tuned.due(Moment(step=1, seconds=10.0, last_step=None, last_seconds=None))
    running = Moment(step=9, seconds=500.0, last_step=1, last_seconds=10.0, saving=True, costs=Costs(stall=0.1))
    assert not tuned.due(running)


def test_more_failures_mean_more_saves_and_longer_stalls_fewer() -> None:
    often = [Tuned().interval(Costs(stall=1.0, failures=failures, observed_hours=50.0)) for failures in range(20)]
    assert often == sorted(often, reverse=True)
    assert len(set(often)) == 20
    stalls = [Tuned().interval(Costs(stall=stall)) for stall in (0.01, 0.1, 1.0, 10.0, 100.0)]
    assert stalls == sorted(stalls)


def test_it_explains_itself_with_every_number() -> None:
    said = Tuned().explain(Costs(stall=2.0, durable=40.0, step=1.5, failures=9, observed_hours=56.0, restart=90.0))
    assert said == (
        "Saves begin 5.7 min apart: this loses the least training. "
        "The least training is lost at 5.7 min (stall 2.0 s, failures 8.0 h apart, restart 90.0 s). "
        "Saves may take 5 % of the training: 40.0 s apart at least. "
        "A step takes 1.5 s. "
        "Failures: 9 in 56.0 h, and before these 1 in 24.0 h by assumption."
    )
