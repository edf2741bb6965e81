"""A sample of ``python -m benchmarks.soak``, and proof that its judges see what they are there to see."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.soak.kills import moments
from benchmarks.soak.life import Life, Line, lost_steps
from benchmarks.soak.rules import SWEEP_SECONDS, Retention
from benchmarks.soak.soak import RANKS, soak
from benchmarks.soak.verdict import verdict
from benchmarks.soak.watch import Change, Watch

STEPS = 120
KILLS = 3
SEED = 8
"""With it rank 0 dies in a save, and others after a commit, in a resumption and in a step."""


@pytest.mark.dist
@pytest.mark.long
@pytest.mark.kills
@pytest.mark.timeout(2400)  # the start of each life takes ten seconds, and longer on a busy machine
def test_a_run_whose_ranks_are_killed_ends_with_the_weights_of_an_undisturbed_one(tmp_path: Path) -> None:
    for name in ("calm", "soaked"):
        (tmp_path / name).mkdir()
    calm = soak(tmp_path / "calm", STEPS, [])
    assert verdict(calm, 0, "").wrong == []
    digest = calm.lives[-1].digest
    assert digest
    soaked = soak(tmp_path / "soaked", STEPS, moments(SEED, KILLS, RANKS))
    found = verdict(soaked, KILLS, digest)
    assert found.wrong == [], soaked.errors
    assert len(found.lost) == KILLS


# -- the judge of the folder -----------------------------------------------------------------------


def name(step: int, rest: str = "") -> str:
    return f"step-{step:08d}/{rest}"


def made(step: int) -> list[str]:
    names = ("", "model/", "model/00000-a1.safetensors", "receipts/", "receipts/00000-a1.arrow")
    return ["+" + name(step, each) for each in names]


def committed(step: int) -> list[str]:
    return [*made(step), "+" + name(step, "metadata.arrow")]


def uncommitted(step: int) -> list[str]:
    return ["-" + name(step, "metadata.arrow")]


def deleted(step: int) -> list[str]:
    return [*uncommitted(step), *(f"-{each[1:]}" for each in reversed(made(step)))]


def judged(*parts: list[str]) -> Retention:
    """Show the changes to a judge, one each millisecond."""
    retention = Retention(keep=2, every=10)
    for number, word in enumerate([word for part in parts for word in part]):
        retention.see(Change(word[1:], made=word[0] == "+"), number / 1000)
    return retention


FIRST = [*committed(10), *committed(20), *committed(30)]


def test_a_run_as_it_has_to_be_is_not_found_fault_with() -> None:
    retention = judged(
        ["+run.json.new", "+run.json"], FIRST, deleted(10), committed(40), deleted(20), ["-run.json.new"]
    )
    retention.run_ended(40)
    assert retention.wrong == []
    assert (retention.most, retention.commits, retention.deletions, retention.newest) == (3, 4, 2, 40)
    assert retention.slowest == pytest.approx(0.006)


def test_a_kill_before_the_deletions_leaves_them_to_the_next_commit() -> None:
    retention = judged(FIRST)
    retention.deleter_ended()
    for word in [*committed(40), *deleted(10), *deleted(20)]:
        retention.see(Change(word[1:], made=word[0] == "+"), 1000.0)
    retention.look(2000.0)
    assert retention.wrong == []
    assert retention.most == 4


def test_a_commit_deletes_the_files_of_a_killed_save_of_its_step_and_none_of_its_own() -> None:
    killed = [name(10, "model/00000-b2.safetensors"), name(10, "receipts/00000-b2.arrow")]
    parts = [["+" + name(10)], [f"+{each}" for each in killed], committed(10), [f"-{each}" for each in killed]]
    assert judged(*parts).wrong == []
    for lost in ("model/00000-a1.safetensors", "receipts/00000-a1.arrow"):
        assert len(judged(*parts, ["-" + name(10, lost)]).wrong) == 1


@pytest.mark.parametrize(
    ("parts", "word"),
    [
        ([FIRST, deleted(10), deleted(20)], "step 20 was deleted, and [30] are left"),
        ([FIRST, uncommitted(20)], "step 20 was deleted, and [10, 30] are left"),
        ([FIRST, uncommitted(30)], "step 30 was deleted"),
        ([committed(10), deleted(10)], "step 10 was deleted, and [] are left"),
        ([FIRST, ["-" + name(10, "model/00000-a1.safetensors")]], "step 10 is still committed"),
        ([FIRST, ["-" + name(30)]], "the folder of the committed step 30 has gone"),
        ([FIRST, committed(20)], "step 20 was committed after 30"),
        ([committed(10), committed(30)], "step 30 was committed after 10"),
        ([committed(10), made(30)], "step 30 is being saved"),
        ([["+run.json.broken-20260131T235959123456"]], "broken-20260131T235959123456 has come"),
    ],
)
def test_a_change_that_is_forbidden_is_seen(parts: list[list[str]], word: str) -> None:
    wrong = judged(*parts).wrong
    assert any(word in each for each in wrong), wrong


def test_deletions_that_do_not_come_are_seen() -> None:
    retention = judged(FIRST)
    retention.look(SWEEP_SECONDS + 1)
    assert len(retention.wrong) == 1
    assert retention.wrong[0].startswith("[10] are still there")


@pytest.mark.parametrize(
    "more", [committed(40), made(40), [*committed(40), *uncommitted(20)], ["+.run.json.a1.bcp-tmp"]]
)
def test_a_last_state_with_remains_is_seen(more: list[str]) -> None:
    retention = judged(["+run.json"], FIRST, deleted(10), more)
    retention.run_ended(30)
    assert [each for each in retention.wrong if each.startswith("at the end")]


# -- the judge of lost work ------------------------------------------------------------------------


def life_with(last: int, *saves: int) -> Life:
    life = Life(0, RANKS)
    lines: list[Line] = [{"word": "step", "step": last}, *({"word": "save", "step": step} for step in saves)]
    for line in lines:
        life.hear({**line, "rank": 0, "at": 0.0})
    return life


@pytest.mark.parametrize(
    ("life", "resumed", "lost"),
    [
        (life_with(19, 10), 10, (9, 0)),
        (life_with(24, 10, 20), 20, (4, 0)),
        (life_with(24, 10, 20), 10, (14, 4)),
        (life_with(24, 10), 10, (14, 0)),
        (Life(0, RANKS), 40, (0, 0)),
    ],
)
def test_steps_during_the_save_in_flight_are_counted_apart(life: Life, resumed: int, lost: tuple[int, int]) -> None:
    assert lost_steps(life, resumed) == lost


def test_kills_are_drawn_from_the_seed_alone() -> None:
    assert moments(1, 25, RANKS) == moments(1, 25, RANKS)
    assert moments(1, 25, RANKS) != moments(2, 25, RANKS)
    assert {moment.victim for moment in moments(1, 25, RANKS)} == set(range(RANKS))


# -- the watch -------------------------------------------------------------------------------------

STEPS_OF_PROGRAM = 300
PROGRAM = """
import os, sys
os.chdir(sys.argv[1])
for step in range(int(sys.argv[2])):
    os.makedirs(f"{step}/model")
    sys.stdin.readline()
    for name in ("model/data", "metadata"):
        open(f"{step}/{name}.tmp", "w").close()
        os.rename(f"{step}/{name}.tmp", f"{step}/{name}")
    if step:
        for name in ("metadata", "model/data"):
            os.unlink(f"{step - 1}/{name}")
        os.removedirs(f"{step - 1}/model")
"""
"""It waits until the watch of a new folder has begun."""


def test_the_watch_sees_all_that_another_process_does_in_its_order(tmp_path: Path) -> None:
    tree, log = tmp_path / "tree", tmp_path / "log"
    tree.mkdir()
    log.mkdir()
    watch = Watch(tree, log=log)
    command = [sys.executable, "-c", PROGRAM, str(tree), str(STEPS_OF_PROGRAM)]
    changes: list[Change] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE) as other:  # noqa: S603 -- our own
        assert other.stdin is not None
        over = os.pidfd_open(other.pid)
        while not select.select([over], [], [], 0)[0]:
            select.select([watch, over], [], [])
            for change in watch.changes():
                changes.append(change)
                if change.made and change.path.endswith("/model/"):
                    other.stdin.write(b"\n")
                    other.stdin.flush()
        os.close(over)
    changes += watch.changes()
    watch.close()
    assert other.returncode == 0
    expected: list[Change] = []
    for step in range(STEPS_OF_PROGRAM):
        expected += [Change(f"{step}/model/data", made=True), Change(f"{step}/metadata", made=True)]
        if step:
            expected += [Change(f"{step - 1}/metadata", made=False), Change(f"{step - 1}/model/data", made=False)]
            expected += [Change(f"{step - 1}/", made=False)]
    words = [each for each in changes if each in set(expected)]
    assert words == expected
