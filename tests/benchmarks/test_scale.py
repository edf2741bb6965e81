"""That the benchmark runs, and what it does with its figures; never how long anything takes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.agreement import gathered, spine, virtual_ranks
from benchmarks.chain import busy_chain
from benchmarks.figures import Figures
from benchmarks.llama import Job
from benchmarks.planning import look_up, plan, reshard


def options(**changes: object) -> argparse.Namespace:
    return argparse.Namespace(**{"quick": False, "json": None, "check": True} | changes)


@pytest.mark.parametrize("zero", ["A", "B"])
def test_a_small_job_is_planned_and_looked_up(zero: str) -> None:
    figures = Figures()
    job = Job(tp=2, dp=3, pp=16, zero=zero)
    planned = plan(job, figures)
    layout = planned.division.layout
    assert layout.world_size == 96
    assert len(layout.tensors) == 4 * 759
    parameters = sum(int(n) for n in layout.tensors.numel[layout.tensors.kind == 0])
    assert parameters == 405_853_388_800  # Llama-3.1-405B
    assert int(layout.file_nbytes.sum()) == (2 + 3 * 4) * parameters
    look_up(planned, figures)
    reshard(planned, Job(tp=4, dp=2, pp=8, zero=zero), figures)
    names = [figure.name for figure in figures.found]
    assert any("balance in a DP group" in name for name in names)
    assert any("look-up of a rank" in name for name in names)


def test_the_ranks_of_a_job_are_what_the_groups_say() -> None:
    job = Job(tp=2, dp=3, pp=16, zero="B")
    for tp, pp, table, start, stop in job.groups():
        for dp in range(job.dp):
            mine = job.table(job.rank(tp, dp, pp))
            assert np.array_equal(mine.start, start[dp])
            assert np.array_equal(mine.stop, stop[dp])
            assert mine.tensors.fqn == table.tensors.fqn


@pytest.mark.long
def test_agreement_is_measured() -> None:
    figures = Figures()
    spine(2, 3, 1e9, figures, rounds=2)
    virtual_ranks(20, 4, 1e9, figures, rounds=2)
    gathered(20, figures)
    busy_chain(1, 1e9, figures)
    assert len(figures.found) == 8
    assert all(figure.value > 0 for figure in figures.found)


def test_a_missed_goal_is_measured_again_and_said_last(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    figures, values = Figures(), iter([3.0, 2.5, 0.5])
    figures.add("fixed", 2.0, "MB", 1.0)
    figures.add("no goal", 2.0, "MB")
    figures.measure("slow at first", lambda: next(values), "ms", 1.0)
    assert figures.close(options(json=str(tmp_path / "found.json"))) == 1
    said = capsys.readouterr().out.strip().splitlines()
    assert said[-1].startswith("missed: fixed")
    assert said[-2] == "1 of 2 goals reached"
    found = {row["name"]: row for row in json.loads((tmp_path / "found.json").read_text())}
    assert (found["slow at first"]["value"], found["slow at first"]["missed"]) == (0.5, False)
    assert (found["fixed"]["missed"], found["no goal"]["missed"]) == (True, False)


def test_without_check_a_missed_goal_is_no_failure() -> None:
    figures = Figures()
    figures.add("too much", 2.0, "MB", 1.0)
    assert figures.close(options(check=False)) == 0
    assert Figures().close(options()) == 0
