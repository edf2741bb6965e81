"""A training with every kind of state is killed, and goes on as if nothing had happened."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import exact_training
import pytest
from exact_training import DEAD, EPOCHS, SAVED, Job, sources
from ranks import ended, meeting_place, started

from bcp.data import SampleId

pytestmark = [pytest.mark.dist, pytest.mark.long]

Log = list[dict[str, Any]]
"""A rank's steps, and last its weights."""


class Runs(NamedTuple):
    """The logs of two runs, by rank; and the checkpoint of the killed one."""

    uninterrupted: list[Log]
    killed: list[Log]
    checkpoint: Path


def run(job: Job) -> list[Log]:
    """Run a job in processes of its own; return the log of each rank."""
    server = meeting_place()
    codes = ended(started(job.size, exact_training.main, server.port, job), 120)
    assert codes == [-signal.SIGKILL if job.dies else 0] * job.size
    logs = [(job.path / f"{rank}.jsonl").read_text().splitlines() for rank in range(job.size)]
    return [[json.loads(line) for line in lines] for lines in logs]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    path = tmp_path_factory.mktemp("runs")
    uninterrupted = run(Job(path / "uninterrupted"))
    return Runs(uninterrupted, run(Job(path / "killed", dies=True)), path / "killed" / "checkpoint")


def due() -> Counter[SampleId]:
    """Every sample, once in each epoch."""
    return Counter(
        SampleId(source.name, epoch, index)
        for source in sources()
        for epoch in range(EPOCHS)
        for index in range(len(source.samples))
    )


def fed(*logs: Log) -> Counter[SampleId]:
    return Counter(SampleId(*sample) for log in logs for record in log for sample in record.get("samples", []))


def kept(runs: Runs) -> list[Log]:
    """The killed run's steps before the checkpoint. It took others, which died with it."""
    assert [len(log) for log in runs.killed] == [DEAD, DEAD]
    return [log[:SAVED] for log in runs.killed]


def test_a_killed_run_goes_on_bit_by_bit(runs: Runs, tmp_path: Path) -> None:
    resumed = run(Job(tmp_path, resumes=runs.checkpoint))
    for before, after, expected in zip(runs.killed, resumed, runs.uninterrupted, strict=True):
        assert before == expected[:DEAD]
        assert after == expected[SAVED:]
        assert len(after) > 50, "fewer than 50 steps were compared"
    assert fed(*kept(runs), *resumed) == due()


@pytest.mark.parametrize("size", [1, 4])
def test_another_number_of_ranks_feeds_every_sample_once(runs: Runs, tmp_path: Path, size: int) -> None:
    resumed = run(Job(tmp_path, size=size, resumes=runs.checkpoint))
    assert [log[0]["step"] for log in resumed] == [SAVED] * size
    assert fed(*kept(runs), *resumed) == due()


@pytest.mark.parametrize("left_out", ["optimizer", "dataloader", "scheduler", "rng"])
def test_no_part_of_the_state_can_be_left_out(runs: Runs, tmp_path: Path, left_out: str) -> None:
    resumed = run(Job(tmp_path, resumes=runs.checkpoint, left_out=left_out, end=SAVED + 3))
    for after, expected in zip(resumed, runs.uninterrupted, strict=True):
        assert [record["step"] for record in after[:3]] == [SAVED, SAVED + 1, SAVED + 2]
        assert after[:3] != expected[SAVED : SAVED + 3]
