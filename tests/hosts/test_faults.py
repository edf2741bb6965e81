"""Networks that fail in the middle of an operation: an error with rank and host within the timeout, never a hang."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
import torch
from jobs import SLOW, Job, halt, mark, with_more_time
from samples import sample
from test_restarts import loaded, saved, works

import bcp
from bcp.coordinators import coordinator
from bcp.protocols import Agreement
from benchmarks.network import Network

TIMEOUT = 6.0
TIMEOUTS = (TIMEOUT, 10 * TIMEOUT)
NEVER = 3600.0
ENDLESS = 1_000_000
"""Rounds of an exchange that a fault ends."""


@contextmanager
def job_of(network: Network, tmp_path: Path) -> Iterator[Job]:
    """Four ranks on four hosts, which have saved and loaded once; the store is on the first host."""
    made = Job(network, [1, 2, 3, 4], lambda _: "tcp://h1:29511")
    try:
        works(made, tmp_path / "old", 1)
        yield made
    finally:
        made.close()


def halted(path: Path, timeout: float, marks: Path) -> None:
    """Save, and halt in the middle of it."""
    options = bcp.SaveOptions(timeout=timeout, edit=lambda graph: graph.after("d2h", halt(marks)))
    bcp.save(path, {"model": {"w": torch.zeros(1000)}}, options=options, overwrite=True)


def exchanged(nbytes: int, rounds: int, timeout: float, marks: Path) -> float:
    """Exchange bytes between all ranks, again and again; return how long it took."""

    async def exchange() -> None:
        async with coordinator().begin("exchange", timeout) as agreement:
            await _exchange(agreement, nbytes, rounds, marks)

    started = time.monotonic()
    anyio.run(exchange)
    return time.monotonic() - started


async def _exchange(agreement: Agreement, nbytes: int, rounds: int, marks: Path) -> None:
    size = coordinator().world_size
    incoming = [bytearray(nbytes) for _ in range(size)]
    for number in range(rounds):
        await agreement.all_to_all([bytes(nbytes)] * size, incoming)
        if number == 3:
            mark(marks)


def errors_of(outcomes: dict[int, object]) -> dict[int, bcp.PeerError]:
    """Return the error of each rank; all have to have one."""
    assert all(isinstance(outcome, bcp.PeerError) for outcome in outcomes.values()), outcomes
    return outcomes  # type: ignore[return-value]  # as was just checked


@pytest.mark.parametrize(("host", "fault"), sample(itertools.product([1, 3], ["cable", "port"]), (3, "cable")))
@with_more_time(*TIMEOUTS)
def test_a_host_is_lost_in_a_save(network: Network, tmp_path: Path, timeout: float, fault: str, host: int) -> None:
    with job_of(network, tmp_path) as job:
        job.reach(halted, tmp_path / "new", timeout, marks=tmp_path / "marks")
        getattr(network, fault)(host, up=False)
        errors = errors_of(job.collect(timeout + SLOW))
        for rank, error in errors.items():
            if rank != host - 1 and host != 1:
                assert (error.rank, f"(host h{host}" in str(error)) == (host - 1, True), error
        getattr(network, fault)(host, up=True)
        assert job.run(loaded, tmp_path / "old", 1) == dict.fromkeys(range(4), True)
        assert job.run(saved, tmp_path / "new", 2) == dict.fromkeys(range(4))


@with_more_time(*TIMEOUTS)
def test_two_hosts_lose_each_other_in_an_exchange(network: Network, tmp_path: Path, timeout: float) -> None:
    """Neither is the other's neighbour in the tree, and their kernels would go on for a quarter of an hour."""
    with job_of(network, tmp_path) as job:
        job.reach(exchanged, 1_000_000, ENDLESS, timeout, marks=tmp_path / "marks")
        network.part(3, 4)
        errors = errors_of(job.collect(timeout + SLOW))
        assert all("(host h3)" in str(error) and "(host h4)" in str(error) for error in errors.values()), errors
        network.part(3, 4, apart=False)
        works(job, tmp_path / "new", 2)


@with_more_time(*TIMEOUTS)
def test_one_direction_is_lost_in_an_exchange(network: Network, tmp_path: Path, timeout: float) -> None:
    with job_of(network, tmp_path) as job:
        job.reach(exchanged, 1_000_000, ENDLESS, timeout, marks=tmp_path / "marks")
        network.deafen(3, 4)
        errors_of(job.collect(timeout + SLOW))
        network.ip(3, "neigh", "del", network.address(4), "dev", "eth0")
        works(job, tmp_path / "new", 2)


@with_more_time(TIMEOUT / 2, *TIMEOUTS)
def test_a_slow_exchange_is_none_that_fails(network: Network, tmp_path: Path, timeout: float) -> None:
    with job_of(network, tmp_path) as job:
        network.rate(4, 20 * TIMEOUT / timeout)
        outcomes = job.run(exchanged, 8_000_000, 1, timeout, tmp_path / "marks", timeout=10 * timeout + SLOW)
        assert all(isinstance(outcome, float) for outcome in outcomes.values()), outcomes
        assert min(outcomes.values()) > timeout, "this was too fast to show anything"


@pytest.mark.long
@with_more_time(*TIMEOUTS)
def test_a_host_is_back_after_an_outage_between_operations(network: Network, tmp_path: Path, timeout: float) -> None:
    with job_of(network, tmp_path) as job:
        network.port(3, up=False)
        errors_of(job.run(saved, tmp_path / "new", 2, timeout))
        time.sleep(12.0)  # longer than a rank that has lost its connection is waited for
        network.port(3, up=True)
        assert job.run(saved, tmp_path / "new", 2) == dict.fromkeys(range(4))


def test_a_killed_rank_is_named_with_its_host(network: Network, tmp_path: Path) -> None:
    with job_of(network, tmp_path) as job:
        job.reach(halted, tmp_path / "new", NEVER, marks=tmp_path / "marks")  # the kill is noticed, not the silence
        job.signal(2, signal.SIGKILL)
        outcomes = job.collect(SLOW)
        assert outcomes.pop(2) == "dead"
        for error in errors_of(outcomes).values():
            assert (error.rank, "rank 2 (host h3" in str(error)) == (2, True), error
