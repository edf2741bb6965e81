"""The kill points of ``benchmarks.chaos`` and ``benchmarks.chaos_hosts``; trainers are of another environment."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.chaos import MODES, ROOT
from benchmarks.chaos_hosts.__main__ import POINTS, report
from benchmarks.chaos_hosts.job import HOSTS
from benchmarks.chaos_points import Event, choose, kind
from benchmarks.figures import Figures

SAVE = [
    ("os.mkdir", "step-0000000{}", False),
    ("open", ".00000-000000000000000{}.safetensors.00000000000000000000000{}.bcp-tmp", False),
    ("os.rename", ".00000-000000000000000{}.safetensors.00000000000000000000000{}.bcp-tmp", False),
    ("open", ".save-000000000000000{}.arrow.00000000000000000000000{}.bcp-tmp", True),
    ("open", ".run.json.00000000000000000000000{}.bcp-tmp", False),
    ("os.rmdir", "step-0000000{}", False),
]
EVENTS: list[Event] = [
    (1 + len(SAVE) * save + place, call, name.format(save, save), tornable)
    for save in range(4)
    for place, (call, name, tornable) in enumerate(SAVE)
]
KINDS = {number: kind((number, call, name, tornable)) for number, call, name, tornable in EVENTS}


def test_names_of_one_kind_differ_in_counters_and_random_parts_only() -> None:
    assert kind((1, "open", ".run.json.8363ad48dc16e061f9498a01a3106015-0.bcp-tmp", False)) == "open run json bcp tmp"
    assert kind((1, "os.mkdir", "optimizer", False)) == kind((9, "os.mkdir", "step-00000002", False)) == "os.mkdir"
    assert len(set(KINDS.values())) == len(SAVE)


@pytest.mark.parametrize("most", [8, 24])
def test_each_mode_has_its_share_and_no_kind_comes_twice_before_all_came(most: int) -> None:
    points = choose(EVENTS, most, list(MODES))
    assert Counter(mode for _, mode in points) == dict.fromkeys(MODES, most // 4) | {"torn": min(most // 4, 4)}
    assert all(EVENTS[number - 1][3] for number, mode in points if mode == "torn")
    times = Counter(KINDS[number] for number, mode in points if mode != "torn")
    assert max(times.values()) - min((times[each] for each in KINDS.values()), default=0) <= 1
    assert points == choose(EVENTS, most, list(MODES))


def test_the_default_of_trainers_lies_in_all_saves() -> None:
    saves = {(number - 1) // len(SAVE) for number, _ in choose(EVENTS, POINTS, list(MODES))}
    assert saves == {0, 1, 2, 3}


def test_enough_points_are_all_events_in_every_mode() -> None:
    points = choose(EVENTS, 1000, list(MODES))
    assert len(points) == len(set(points)) == 3 * len(EVENTS) + len(EVENTS) // len(SAVE)


JOB = """
import os, sys
out = sys.argv[1]
os.makedirs(out, exist_ok=True)
done = max((int(name[3:]) for name in os.listdir(out) if name.startswith("at-")), default=0)
print("resumed from step", done)
for step in range(done + 1, 5):
    with open(f"{out}/new-{step}", "w") as file:
        file.write("x" * 64)
    os.rename(f"{out}/new-{step}", f"{out}/at-{step}")
with open(f"{out}/digest", "w") as file:
    file.write("equal")
"""


def test_ckpt_chaos_kills_at_these_points(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    work = tmp_path / "work"
    command = [sys.executable, "-m", "benchmarks.chaos_points", "run", "--work", str(work), "--max-points", "8"]
    command += ["--modes", ",".join(MODES), "--result-file", "{out}/digest", "--step-regex", "resumed from step (.)"]
    command += ["--checkpoint-glob", "{out}/at-*", "--", sys.executable, str(tmp_path / "job.py"), "{out}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603 -- a job of this file
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split("\t") for line in (work / "reference" / "events.log.rank0").read_text().splitlines()]
    events = [(int(number), call, name, tornable == "1") for number, call, name, tornable in lines]
    points = [json.loads((work / f"pt_{each:03d}" / "result.json").read_text())["point"] for each in range(1, 9)]
    assert [tuple(point) for point in points] == choose(events, 8, list(MODES))


def test_each_trainer_has_a_job() -> None:
    folder = ROOT / "benchmarks" / "chaos_hosts"
    assert {f"with_{host}" for host in HOSTS} == {path.stem for path in folder.glob("with_*.py")}


@pytest.mark.parametrize("is_goal", [True, False])
def test_a_lost_step_misses_the_goal_of_bcp_alone(*, is_goal: bool) -> None:
    figures = Figures()
    report(figures, "host", Counter(PASS=3, LOST_WORK=1, UNREACHED=2), is_goal=is_goal)
    values = {figure.name: figure.value for figure in figures.found}
    assert values == {"host: kills": 4, "host: LOST_WORK": 1, "host: any other verdict than PASS": 1}
    assert figures.verdict(check=True) == is_goal
