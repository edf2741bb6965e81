"""Which checkpoints a run keeps: each policy against a plain account, and the guards that no policy gets past."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest

from bcp.errors import InputError
from bcp.policies import (
    AnyKept,
    Best,
    ClosestTo,
    Entry,
    EveryKSteps,
    Everything,
    KeepPolicy,
    LastDays,
    Latest,
    Pinned,
    as_keep_policy,
    doomed,
)

DAY = 86_400.0
NOW = 100 * DAY


def entries_of(*steps: int) -> list[Entry]:
    return [Entry(step=step, committed=NOW - 1000 + step) for step in steps]


class Nothing:
    """A policy of a user who did not think."""

    def kept(self, entries: Sequence[Entry], now: float) -> set[int]:
        del entries, now
        return set()


class Absent:
    """A policy that keeps a checkpoint that is not there."""

    def kept(self, entries: Sequence[Entry], now: float) -> set[int]:
        del entries, now
        return {10**9}


class Oldest:
    """A policy that gives up as much as it can."""

    def kept(self, entries: Sequence[Entry], now: float) -> set[int]:
        del now
        return {min((entry.step for entry in entries), default=0)}


POLICIES: list[KeepPolicy] = [
    Latest(1),
    Latest(3),
    EveryKSteps(5),
    ClosestTo(7),
    LastDays(2),
    Best("loss"),
    Best("loss", n=3, mode="max"),
    Pinned(),
    Pinned([4, 5]),
    Everything(),
    AnyKept(1, Best("loss"), EveryKSteps(6)),
    Nothing(),
    Absent(),
    Oldest(),
]


def some_entries(rng: random.Random) -> list[Entry]:
    steps = rng.sample(range(40), rng.randrange(12))
    return [
        Entry(
            step=step,
            committed=NOW + rng.uniform(-5, 1) * DAY,
            metrics=rng.choice([{}, {"loss": rng.choice([1.0, 2.0, math.nan, math.inf])}, {"other": 1.0}]),
            trust=rng.choice(["unknown", "verified", "suspect"]),
            pinned=rng.random() < 0.1,
        )
        for step in steps
    ]


def assert_guarded(entries: Sequence[Entry], policy: KeepPolicy) -> int:
    gone = doomed(entries, policy, NOW)
    left = [entry for entry in entries if entry.step not in gone]
    assert gone == sorted(set(gone))
    assert set(gone) <= {entry.step for entry in entries}
    assert not set(gone) & policy.kept(entries, NOW)
    assert all(entry in left for entry in entries if entry.pinned)
    for wanted in ({"unknown", "verified", "suspect"}, {"verified"}, {"unknown", "verified"}):
        chosen = [entry for entry in entries if entry.trust in wanted]
        if chosen:
            assert max(chosen, key=lambda entry: entry.step) in left
    return len(gone)


def name_of(policy: object) -> str:
    """Name a policy in the name of a test, the same in every process."""
    return type(policy).__name__ if type(policy).__repr__ is object.__repr__ else repr(policy)


@pytest.mark.parametrize("policy", POLICIES, ids=name_of)
def test_no_policy_gets_past_the_guards(policy: KeepPolicy) -> None:
    rng = random.Random(7)  # noqa: S311 -- a fixed seed, no secret
    gone = sum(assert_guarded(some_entries(rng), policy) for _ in range(500))
    assert (gone == 0) == isinstance(policy, Everything | Nothing | Absent)


def test_every_marking_of_four_checkpoints_leaves_the_guarded_ones_and_no_others() -> None:
    marks: tuple[Literal["unknown", "verified", "suspect"], ...] = ("unknown", "verified", "suspect")
    for trusts in itertools.product(marks, repeat=4):
        for pins in itertools.product([False, True], repeat=4):
            entries = [
                Entry(step=step, committed=0.0, trust=trust, pinned=pin)
                for step, trust, pin in zip((1, 2, 3, 4), trusts, pins, strict=True)
            ]
            expected = {1, 4} | {step for step, pin in enumerate(pins, 1) if pin}
            expected |= set([step for step, trust in enumerate(trusts, 1) if trust == "verified"][-1:])
            sound = [step for step, trust in enumerate(trusts, 1) if trust != "suspect"]
            expected |= {*sound[:1], *sound[-1:]}  # the policy is asked about these alone, too
            assert doomed(entries, Oldest(), NOW) == sorted({1, 2, 3, 4} - expected)


@pytest.mark.parametrize("policy", POLICIES, ids=name_of)
def test_the_order_of_the_entries_does_not_matter(policy: KeepPolicy) -> None:
    rng = random.Random(3)  # noqa: S311 -- a fixed seed, no secret
    for _ in range(100):
        entries = some_entries(rng)
        assert doomed(rng.sample(entries, len(entries)), policy, NOW) == doomed(entries, policy, NOW)


def test_no_checkpoints_at_all() -> None:
    for policy in POLICIES:
        assert doomed([], policy, NOW) == []


def test_nothing_is_deleted_where_a_policy_keeps_nothing() -> None:
    assert doomed(entries_of(1, 2, 3), Best("no such metric"), NOW) == []
    assert doomed(entries_of(1, 2, 3), LastDays(1e-9), NOW + DAY) == []


@pytest.mark.parametrize("n", [1, 2, 5])
def test_latest_leaves_exactly_n_at_every_moment_of_a_long_run(n: int) -> None:
    entries: list[Entry] = []
    for step in range(7, 7000, 7):
        entries.append(Entry(step=step, committed=float(step)))
        gone = doomed(entries, Latest(n), float(step))
        entries = [entry for entry in entries if entry.step not in gone]
        assert [entry.step for entry in entries] == list(range(7, step + 1, 7))[-n:]


def test_what_is_deleted_goes_oldest_first() -> None:
    assert doomed(entries_of(30, 10, 50, 20, 40), Latest(2), NOW) == [10, 20, 30]


def test_a_newer_suspect_does_not_push_the_last_good_one_out() -> None:
    good, *bad = entries_of(10, 20, 30, 40)
    suspects = [Entry(step=entry.step, committed=entry.committed, trust="suspect") for entry in bad]
    assert doomed([good, *suspects], Latest(2), NOW) == [20]


def test_every_k_steps_keeps_multiples() -> None:
    assert EveryKSteps(100).kept(entries_of(50, 100, 150, 200, 201), NOW) == {100, 200}


def plain_closest(steps: Sequence[int], k: int) -> set[int]:
    multiples = range(k, (max(steps) // k + 1) * k + 1, k) if steps else ()
    return {min((abs(step - multiple), step) for step in steps)[1] for multiple in multiples}


def test_closest_to_keeps_the_closest_to_each_multiple_of_all_small_sets() -> None:
    for size in range(7):
        for steps in itertools.combinations(range(14), size):
            for k in (1, 2, 3, 5, 20):
                assert ClosestTo(k).kept(entries_of(*steps), NOW) == plain_closest(steps, k), (steps, k)


def test_closest_to_leaves_in_a_long_run_what_it_would_keep_of_all() -> None:
    rng = random.Random(2)  # noqa: S311 -- a fixed seed, no secret
    for k in (3, 10, 40):
        step, left, every = 0, list[Entry](), list[Entry]()
        for _ in range(300):
            step += rng.randrange(1, 25)
            every += entries_of(step)
            left += entries_of(step)
            gone = doomed(left, ClosestTo(k), NOW)
            left = [entry for entry in left if entry.step not in gone]
            kept = {entry.step for entry in left}
            assert kept == ClosestTo(k).kept(every, NOW) | {step}


def test_closest_to_is_quick_over_a_wide_gap() -> None:
    assert ClosestTo(1).kept(entries_of(5, 10**15), NOW) == {5, 10**15}


def test_last_days_goes_by_the_commit() -> None:
    ages = {10: 8.0, 20: 7.001, 30: 6.999, 40: 0.0}
    entries = [Entry(step=step, committed=NOW - age * DAY) for step, age in ages.items()]
    assert doomed(entries, LastDays(7), NOW) == [10, 20]


def test_a_clock_that_was_set_back_deletes_nothing_of_the_future() -> None:
    entries = [Entry(step=step, committed=NOW + step * DAY) for step in (1, 50, 5000)]
    assert LastDays(1).kept(entries, NOW) == {1, 50, 5000}
    assert doomed([Entry(step=0, committed=NOW - 2 * DAY), *entries], LastDays(1), NOW) == [0]


def test_best_ranks_by_the_metric_and_ignores_those_without_a_value() -> None:
    losses = {10: 3.0, 20: 1.0, 30: math.nan, 40: 2.0, 50: 1.0, 60: math.inf}
    entries = [Entry(step=step, committed=0.0, metrics={"loss": loss}) for step, loss in losses.items()]
    entries.append(Entry(step=70, committed=0.0))
    assert Best("loss").kept(entries, NOW) == {50}
    assert Best("loss", n=3).kept(entries, NOW) == {20, 40, 50}
    assert Best("loss", n=2, mode="max").kept(entries, NOW) == {10, 60}
    assert Best("loss", n=99).kept(entries, NOW) == {10, 20, 40, 50, 60}
    assert doomed(entries, Best("loss"), NOW) == [10, 20, 30, 40, 60]


def test_pinned_keeps_steps_and_pinned_entries() -> None:
    entries = [*entries_of(1, 2, 3, 4), Entry(step=5, committed=0.0, pinned=True), *entries_of(6)]
    assert Pinned([2, 99]).kept(entries, NOW) == {2, 5}
    assert Pinned().kept(entries, NOW) == {5}


def test_any_kept_is_the_union() -> None:
    rng = random.Random(5)  # noqa: S311 -- a fixed seed, no secret
    for _ in range(100):
        entries = some_entries(rng)
        both = AnyKept(Latest(2), AnyKept(EveryKSteps(3), Best("loss")))
        each: list[KeepPolicy] = [Latest(2), EveryKSteps(3), Best("loss")]
        assert both.kept(entries, NOW) == set[int]().union(*(policy.kept(entries, NOW) for policy in each))


def test_a_number_is_the_newest_so_many_and_others_are_as_they_are() -> None:
    policy = Oldest()
    assert as_keep_policy(4) == Latest(4)
    assert as_keep_policy(policy) is policy
    assert AnyKept(4, Pinned([2])) == AnyKept(Latest(4), Pinned((2,)))


@pytest.mark.parametrize(
    ("make", "arguments", "said"),
    [
        (Latest, [0], r"Latest\(n=0\).*1 or more"),
        (Latest, [True], r"n=True"),
        (EveryKSteps, [0], r"EveryKSteps\(k=0\)"),
        (ClosestTo, [-5], r"every_k=-5"),
        (LastDays, [0], r"LastDays\(days=0\).*above zero"),
        (LastDays, [math.nan], r"finite"),
        (Best, [""], r"no name"),
        (Best, ["loss", 0], r"n=0"),
        (Best, ["loss", 1, "least"], r"'least'.*'min' or 'max'"),
        (Pinned, [[1.5]], r"has 1.5"),
        (AnyKept, [], r"AnyKept\(\) would delete every checkpoint"),
        (AnyKept, [0], r"n=0"),
        (as_keep_policy, [0], r"n=0"),
        (as_keep_policy, [True], r"True is no keep policy"),
        (as_keep_policy, [None], r"None is no keep policy"),
        (as_keep_policy, [Latest], r"is no keep policy"),
    ],
)
def test_a_policy_that_cannot_work_is_refused(make: Any, arguments: list[Any] | dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        make(**arguments) if isinstance(arguments, dict) else make(*arguments)


def test_checkpoints_that_a_run_did_not_resume_from_take_no_place() -> None:
    entries = [Entry(step=step, committed=0.0) for step in (10, 15, 20, 30, 40)]
    assert doomed(entries, Latest(3), NOW) == [10, 15]
    assert doomed(entries, Latest(3), NOW, distrusted={20, 30, 40}) == []
    assert doomed(entries, Latest(1), NOW, distrusted={20, 30, 40}) == [10, 20, 30]
    verified = [replace(entry, trust="verified") if entry.step in (10, 40) else entry for entry in entries]
    assert doomed(verified, Latest(1), NOW, distrusted={40}) == [15, 20]


def test_what_a_kept_checkpoint_refers_to_is_kept() -> None:
    refers = {50: (40, 10), 40: (20,), 30: (20,), 20: (), 10: ()}
    entries = [Entry(step=step, committed=0.0, refers=refers[step]) for step in refers]
    assert doomed(entries, Latest(1), now=0.0) == [30]  # 40 is kept for 50, and 20 for 40
    assert doomed(entries, Latest(2), now=0.0) == [30]
    assert doomed([entry for entry in entries if entry.step < 50], Latest(1), now=0.0) == [10, 30]
    assert doomed(entries[3:], Latest(1), now=0.0, needed={10}) == []
