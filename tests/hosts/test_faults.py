"""Networks that fail in the middle of an operation: an error with rank and host within the timeout, never a hang."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
import torch
from jobs import HUNG, Job
from test_restarts import loaded, saved, works

import bcp
from bcp.coordinators import coordinator
from bcp.protocols import Agreement
from benchmarks.network import Network

TIMEOUT = 6.0
LATE = TIMEOUT + 2.0
SLOW = 60.0
"""More, for a machine with other work; on an idle one none of it is needed."""
NEVER = 3600.0


@pytest.fixture
def job(network: Network, tmp_path: Path) -> Iterator[Job]:
    """Four ranks on four hosts, which have saved and loaded once; the store is on the first host."""
    made = Job(network, [1, 2, 3, 4], lambda _: "tcp://h1:29511")
    works(made, tmp_path / "old", 1)
    yield made
    made.close()


async def _slowly(part):
    await anyio.sleep(2.0)
    return part


def saved_slowly(path: Path, timeout: float = TIMEOUT) -> float:
    """Save, and take seconds for it; return how long it took until the error came."""
    started = time.monotonic()
    edit = bcp.SaveOptions(timeout=timeout, edit=lambda graph: graph.after("d2h", bcp.extend.Stage("slow", _slowly)))
    try:
        bcp.save(path, {"model": {"w": torch.zeros(1000)}}, options=edit, overwrite=True)
    except bcp.PeerError as error:
        error.add_note(f"{time.monotonic() - started:.1f}")
        raise
    return time.monotonic() - started


def exchanged(nbytes: int, rounds: int) -> float:
    """Exchange bytes between all ranks, again and again; return how long it took."""

    async def exchange() -> None:
        async with coordinator().begin("exchange", TIMEOUT) as agreement:
            await _exchange(agreement, nbytes, rounds)

    started = time.monotonic()
    anyio.run(exchange)
    return time.monotonic() - started


async def _exchange(agreement: Agreement, nbytes: int, rounds: int) -> None:
    size = coordinator().world_size
    incoming = [bytearray(nbytes) for _ in range(size)]
    for _ in range(rounds):
        await agreement.all_to_all([bytes(nbytes)] * size, incoming)


def errors_of(outcomes: dict[int, object]) -> dict[int, bcp.PeerError]:
    """Return the error of each rank; all have to have one."""
    assert all(isinstance(outcome, bcp.PeerError) for outcome in outcomes.values()), outcomes
    return outcomes  # type: ignore[return-value]  # as was just checked


@pytest.mark.parametrize("fault", ["cable", "port"])
@pytest.mark.parametrize("host", [1, 3])
def test_a_host_is_lost_in_a_save(network: Network, job: Job, tmp_path: Path, fault: str, host: int) -> None:
    job.begin(saved_slowly, tmp_path / "new")
    time.sleep(1.0)
    getattr(network, fault)(host, up=False)
    errors = errors_of(job.collect(LATE + SLOW))
    for rank, error in errors.items():
        if rank != host - 1 and host != 1:
            assert (error.rank, f"(host h{host}" in str(error)) == (host - 1, True), error
    getattr(network, fault)(host, up=True)
    assert job.run(loaded, tmp_path / "old", 1) == dict.fromkeys(range(4), True)
    assert job.run(saved, tmp_path / "new", 2) == dict.fromkeys(range(4))


def test_two_hosts_lose_each_other_in_an_exchange(network: Network, job: Job, tmp_path: Path) -> None:
    """Neither is the other's neighbour in the tree, and their kernels would go on for a quarter of an hour."""
    job.begin(exchanged, 1_000_000, 2_000)
    time.sleep(1.5)
    network.part(3, 4)
    errors = errors_of(job.collect(LATE + SLOW))
    assert all("(host h3)" in str(error) and "(host h4)" in str(error) for error in errors.values()), errors
    network.part(3, 4, apart=False)
    works(job, tmp_path / "new", 2)


def test_one_direction_is_lost_in_an_exchange(network: Network, job: Job, tmp_path: Path) -> None:
    job.begin(exchanged, 1_000_000, 2_000)
    time.sleep(1.5)
    network.deafen(3, 4)
    errors_of(job.collect(LATE + SLOW))
    network.ip(3, "neigh", "del", network.address(4), "dev", "eth0")
    works(job, tmp_path / "new", 2)


def test_a_slow_exchange_is_none_that_fails(network: Network, job: Job) -> None:
    network.rate(4, 20)
    outcomes = job.run(exchanged, 8_000_000, 1, timeout=60.0)
    assert HUNG not in outcomes.values()
    assert min(outcomes.values()) > TIMEOUT, "this was too fast to show anything"


def test_a_host_is_back_after_an_outage_between_operations(network: Network, job: Job, tmp_path: Path) -> None:
    network.port(3, up=False)
    assert all(isinstance(error, bcp.PeerError) for error in job.run(saved, tmp_path / "new", 2, TIMEOUT).values())
    time.sleep(12.0)  # longer than a rank that has lost its connection is waited for
    network.port(3, up=True)
    assert job.run(saved, tmp_path / "new", 2) == dict.fromkeys(range(4))


def test_a_killed_rank_is_named_with_its_host(job: Job, tmp_path: Path) -> None:
    job.begin(saved_slowly, tmp_path / "new", NEVER)  # the kill is noticed, not the silence
    time.sleep(1.0)
    job.signal(2, signal.SIGKILL)
    outcomes = job.collect(2 * SLOW)
    assert outcomes.pop(2) == "dead"
    for error in errors_of(outcomes).values():
        assert (error.rank, "rank 2 (host h3" in str(error)) == (2, True), error
