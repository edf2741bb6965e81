"""Ranks that are started again while the store of the ranks before them lives on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from jobs import LONG, SLOW, Job, Store

import bcp
from benchmarks.network import Network

PATIENT = LONG
WAIT = PATIENT + SLOW


@pytest.fixture
def store(network: Network) -> Iterator[Store]:
    """The store of torchrun's agent on the second host: not where rank 0 is."""
    made = Store(network, 2)
    yield made
    made.close()


def states(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.arange(1000.0) + step}}


def saved(path: Path, step: int, timeout: float = PATIENT) -> None:
    bcp.save(path, states(step), overwrite=True, options=bcp.SaveOptions(timeout=timeout))


def loaded(path: Path, step: int, timeout: float = PATIENT) -> bool:
    target = states(-1)
    bcp.load(path, target, options=bcp.LoadOptions(timeout=timeout))
    return bool(torch.equal(target["model"]["w"], states(step)["model"]["w"]))


def started(network: Network, store: Store, placement: list[int], attempt: int) -> Job:
    """Start ranks as torchrun does: the numbers of restarts differ, since each belongs to one agent."""
    counts = [str(attempt * (rank % 2)) for rank in range(len(placement))]
    return Job(
        network,
        placement,
        lambda _: f"agent://{network.address(store.host)}:{store.port}",
        environment=lambda rank: {"TORCHELASTIC_RESTART_COUNT": counts[rank], "ATTEMPT": str(attempt)},
    )


def works(job: Job, path: Path, step: int) -> None:
    assert job.run(saved, path, step, timeout=WAIT) == dict.fromkeys(range(job.size))
    assert job.run(loaded, path, step, timeout=WAIT) == dict.fromkeys(range(job.size), True)


def test_saves_and_loads_work_after_every_restart(network: Network, store: Store, tmp_path: Path) -> None:
    """Killed at rest: all ranks again, fewer, more on other hosts."""
    for attempt, placement in enumerate(([1, 2, 3, 4], [1, 2, 3, 4], [4, 1, 3], [2, 3, 4, 1, 1])):
        job = started(network, store, placement, attempt)
        works(job, tmp_path / "ckpt", attempt)
        job.close()
