"""When a run saves: each policy against a plain account of what it promises."""

from __future__ import annotations

import doctest
import importlib
import random
from typing import Any

import pytest
from samples import sample

from bcp.errors import InputError
from bcp.policies import (
    AnyOf,
    AtSteps,
    Continuously,
    Costs,
    EverySeconds,
    EverySteps,
    FirstStep,
    Moment,
    OnPreemption,
    SavePolicy,
    Tuned,
    as_save_policy,
)

TIMED = [
    EverySeconds(7.5),
    Continuously(),
    Continuously(gap=9.0),
    Tuned(),
    Tuned(first=3.0),
    AnyOf(3, EverySeconds(5)),
    AnyOf(Tuned(), Continuously(20)),
]


def at(step: int, last: int | None = None, seconds: float = 0.0, begun: float | None = None, **more: Any) -> Moment:
    return Moment(step=step, seconds=seconds, last_step=last, last_seconds=begun, **more)


def saved(
    policy: SavePolicy, steps: range, *, busy: frozenset[int] = frozenset(), last: int | None = None
) -> list[int]:
    """Return the steps that a run saves which leaves out a save that is due at one of the busy steps."""
    found = []
    for step in steps:
        if policy.due(at(step, last)) and step not in busy:
            found.append(step)
            last = step
    return found


@pytest.mark.parametrize("module", ["save", "keep", "frequency", "checks"])
def test_the_examples_of_the_documentation_are_true(module: str) -> None:
    assert doctest.testmod(importlib.import_module(f"bcp.policies.{module}")).failed == 0


@pytest.mark.parametrize("n", [1, 2, 7, 100])
def test_every_steps_saves_the_multiples_and_not_step_0(n: int) -> None:
    assert saved(EverySteps(n), range(301)) == list(range(n, 301, n))


def test_every_steps_is_not_due_twice_at_one_step() -> None:
    assert not EverySteps(10).due(at(20, last=20))


def test_every_steps_catches_up_with_a_save_that_was_left_out_and_returns_to_the_multiples() -> None:
    assert saved(EverySteps(10), range(1, 52), busy=frozenset(range(20, 23))) == [10, 23, 30, 40, 50]
    assert saved(EverySteps(10), range(14, 52), busy=frozenset(range(20, 37)), last=13) == [37, 40, 50]


def test_every_steps_goes_on_at_the_multiples_after_a_resume_between_them() -> None:
    assert saved(EverySteps(10), range(14, 45), last=13) == [20, 30, 40]


def test_every_steps_that_is_asked_at_some_steps_only_is_never_n_steps_late() -> None:
    for n in range(1, 12):
        for stride in range(1, 12):
            last = 5
            for step in range(5 + stride, 300, stride):
                if EverySteps(n).due(at(step, last)):
                    last = step
                assert step - last < n


def test_at_steps_saves_these_and_catches_up_with_one_that_was_left_out() -> None:
    assert saved(AtSteps([30, 5, 12]), range(50)) == [5, 12, 30]
    assert saved(AtSteps([5, 12, 30]), range(50), busy=frozenset({12, 13})) == [5, 14, 30]


def test_at_steps_does_not_repeat_those_before_a_resume() -> None:
    assert saved(AtSteps([5, 12, 30]), range(14, 50), last=13) == [30]


def test_every_seconds_counts_from_the_last_save_or_from_the_beginning() -> None:
    policy = EverySeconds(60)
    assert not policy.due(at(4, seconds=59.9))
    assert policy.due(at(4, seconds=60.0))
    assert not policy.due(at(9, last=4, seconds=119.0, begun=60.0))
    assert policy.due(at(9, last=4, seconds=120.0, begun=60.0))


@pytest.mark.parametrize("policy", TIMED, ids=repr)
def test_a_save_that_began_in_the_future_is_not_repeated_at_once(policy: SavePolicy) -> None:
    costs = Costs(stall=1.0, durable=3.0)
    assert not policy.due(at(10, last=10, seconds=5.0, begun=100.0, costs=costs))


@pytest.mark.parametrize("policy", sample(TIMED, TIMED[0], TIMED[-1]), ids=repr)
def test_a_timed_policy_that_is_due_stays_due(policy: SavePolicy) -> None:
    assert policy.timed
    rng = random.Random(1)  # noqa: S311 -- a fixed seed, no secret
    changes = 0
    for _ in range(200):
        step, begun = rng.randrange(40), rng.choice([None, 0.0, rng.uniform(0, 50)])
        last = rng.choice([None, max(0, step - rng.randrange(5))])
        costs = Costs(stall=rng.choice([0.0, 0.1, 2.0]), durable=rng.choice([0.0, 12.0]), failures=rng.randrange(300))
        saving = rng.random() < 0.3
        answers = [
            policy.due(at(step, last, second, begun, saving=saving, costs=costs)) for second in range(0, 4000, 3)
        ]
        assert answers == sorted(answers)
        changes += answers[0] != answers[-1]
    assert changes > 20


def test_continuously_waits_for_the_save_before_and_for_the_gap() -> None:
    costs = Costs(durable=30.0)
    assert not Continuously().due(at(9, 4, 45.0, 10.0, saving=True, costs=costs))
    assert Continuously().due(at(9, 4, 45.0, 10.0, costs=costs))
    assert not Continuously().due(at(9, 4, 39.9, 10.0, costs=costs))
    assert not Continuously(gap=60).due(at(9, 4, 69.9, 10.0, costs=costs))
    assert Continuously(gap=60).due(at(9, 4, 70.0, 10.0, costs=costs))


def test_on_preemption_and_first_step() -> None:
    assert not OnPreemption().due(at(5, 4))
    assert OnPreemption().due(at(5, 4, preempted=True))
    assert saved(FirstStep(), range(3, 20)) == [3]
    assert saved(FirstStep(), range(3, 20), last=2) == []


def test_any_of_saves_when_one_does_and_is_timed_when_one_is() -> None:
    assert saved(AnyOf(10, AtSteps([13]), FirstStep()), range(1, 32)) == [1, 10, 13, 20, 30]
    assert not AnyOf(10, OnPreemption(), AtSteps([1]), FirstStep()).timed
    assert AnyOf(10, AnyOf(5, EverySeconds(1))).timed


def test_policies_are_values() -> None:
    assert AnyOf(10, AtSteps([2, 1])) == AnyOf(EverySteps(10), AtSteps((1, 2)))
    assert len({EverySteps(3), EverySteps(3), AtSteps([1]), AtSteps((1,))}) == 2


def test_a_number_is_every_so_many_steps_and_others_are_as_they_are() -> None:
    policy = EverySeconds(3)
    assert as_save_policy(7) == EverySteps(7)
    assert as_save_policy(policy) is policy


class OwnPolicy:
    timed = False

    def due(self, moment: Moment) -> bool:
        return moment.step == 3


def test_a_policy_of_the_user_is_one() -> None:
    assert saved(as_save_policy(OwnPolicy()), range(10)) == [3]


@pytest.mark.parametrize(
    ("make", "arguments", "said"),
    [
        (EverySteps, [0], r"EverySteps\(n=0\).*1 or more"),
        (EverySteps, [-3], r"n=-3"),
        (EverySteps, [True], r"n=True.*bool is no whole number"),
        (EverySteps, [2.0], r"float is no whole number"),
        (EverySeconds, [0], r"EverySeconds\(seconds=0\).*above zero"),
        (EverySeconds, [float("nan")], r"nan.*finite"),
        (EverySeconds, [float("inf")], r"inf.*finite"),
        (EverySeconds, ["60"], r"'60'.*str is no number"),
        (AtSteps, [[]], r"never saves"),
        (AtSteps, [5], r"steps=5.*pass a list"),
        (AtSteps, ["12"], r"'12'.*pass a list"),
        (AtSteps, [[3, -1]], r"has -1"),
        (AtSteps, [[True]], r"has True"),
        (Continuously, [-1], r"gap=-1.*zero or more"),
        (AnyOf, [], r"AnyOf\(\) never saves"),
        (AnyOf, [EverySteps(1), None], r"None is no save policy"),
        (AnyOf, [0], r"n=0"),
        (as_save_policy, [True], r"True is no save policy"),
        (as_save_policy, [0], r"n=0"),
        (as_save_policy, ["100"], r"'100' is no save policy.*no due"),
        (as_save_policy, [OnPreemption], r"is a class"),
        (Tuned, {"overhead": 0.0}, r"overhead=0.0.*above zero and at most 1"),
        (Tuned, {"overhead": 5}, r"overhead=5.*at most 1"),
        (Tuned, {"prior_hours": 0}, r"prior_hours=0"),
        (Tuned, {"prior_failures": -1}, r"prior_failures=-1"),
        (Tuned, {"first": 0}, r"first=0"),
        (Tuned, {"restart": -1}, r"restart=-1"),
    ],
)
def test_a_policy_that_cannot_work_is_refused(make: Any, arguments: list[Any] | dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        make(**arguments) if isinstance(arguments, dict) else make(*arguments)
