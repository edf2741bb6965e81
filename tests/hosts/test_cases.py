"""What else happens to networks and ranks: chains, resets, strangers, slow links, other jobs; and the store as channel.

Each test has one job, which goes through several faults. After each, the next operation works without a restart.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import anyio
import pytest
import torch
from jobs import LONG, SLOW, Job, Store, halt, with_more_time
from samples import sample
from strangers import Strangers
from test_faults import TIMEOUTS, errors_of
from test_restarts import started
from torch import distributed as dist
from torch.distributed import distributed_c10d

import bcp
from bcp._save import leader as root
from bcp.coordinators import GrpcCoordinator, coordinator
from bcp.format.metadata import METADATA_KEY, decode_metadata
from bcp.protocols import Coordinator
from benchmarks.network import Network

WAYS: dict[str, Callable[[], Coordinator]] = {
    "tree": coordinator,
    "chain": lambda: GrpcCoordinator.over(fanout=1),
}
_chosen: dict[str, Coordinator] = {}
PATIENT = LONG
COUNT = 20_000


def chosen(way: str) -> Coordinator:
    if way not in _chosen:
        _chosen[way] = WAYS[way]()
    return _chosen[way]


def states(step: int) -> dict[str, Any]:
    """Return a tensor that all ranks have, and one of this rank alone."""
    own = {f"of rank {dist.get_rank()}": torch.arange(100.0) - step}
    return {"model": {"w": torch.arange(1000.0) + step, **own}}


def saved(way: str, path: Path, step: int, timeout: float = PATIENT, marks: Path | None = None) -> None:
    edit = bcp.SaveOptions().edit if marks is None else lambda graph: graph.after("d2h", halt(marks))
    options = bcp.SaveOptions(timeout=timeout, edit=edit)
    bcp.save(path, states(step), overwrite=True, options=options, coordinator=chosen(way))


def loaded(way: str, path: Path, step: int, timeout: float = PATIENT) -> bool:
    target = states(-1)
    bcp.load(path, target, options=bcp.LoadOptions(timeout=timeout), coordinator=chosen(way))
    right, model = states(step)["model"], target["model"]
    return all(torch.equal(model[name], right[name]) for name in right)


def exchanged(way: str, nbytes: int, stop: Path, timeout: float) -> int:
    """Exchange bytes between all ranks until there is a file; return how often."""

    async def exchange() -> int:
        async with chosen(way).begin("exchange", timeout) as agreement:
            rounds, size = 0, dist.get_world_size()
            incoming = [bytearray(nbytes) for _ in range(size)]
            while await agreement.gather_broadcast("go on", b"", decide) == b"yes":
                await agreement.all_to_all([bytes(nbytes)] * size, incoming)
                rounds += 1
                if rounds == 3:
                    (stop.parent / f"{stop.name}.{dist.get_rank()}").touch()
            return rounds

    async def decide(_: object) -> bytes:
        return b"" if stop.exists() else b"yes"  # noqa: ASYNC240 -- in memory

    return anyio.run(exchange)


def until(happens: Callable[[], bool], seconds: float = SLOW) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)


def succeed(job: Job, way: str, path: Path, step: int) -> None:
    """Assert that a save and a load work."""
    assert job.run(saved, way, path, step) == dict.fromkeys(range(job.size))
    assert job.run(loaded, way, path, step) == dict.fromkeys(range(job.size), True)


def failed(job: Job, ranks: Iterable[int] | None = None, *, within: float) -> dict[int, bcp.PeerError]:
    """Return the errors of these ranks; each has come in time."""
    return errors_of(job.collect(within + SLOW, ranks))


@contextmanager
def job_of(network: Network, placement: Iterable[int] = (1, 2, 3, 4), port: int = 29511) -> Iterator[Job]:
    hosts = list(placement)
    job = Job(network, hosts, lambda _: f"tcp://h{hosts[0]}:{port}")
    try:
        yield job
    finally:
        job.close()


def names(error: bcp.PeerError, *ranks: int) -> bool:
    """Say whether an error blames one of these ranks, and says on which host it is."""
    return error.rank in ranks and f"rank {error.rank} (host h{error.rank + 1}" in str(error)


# -- who needs whom ---------------------------------------------------------------------------


@pytest.mark.long
@with_more_time(*TIMEOUTS)
def test_a_chain_of_hosts(network: Network, tmp_path: Path, timeout: float) -> None:
    with job_of(network) as job:
        succeed(job, "chain", tmp_path / "old", 1)
        path = tmp_path / "new"

        # two neighbours in the middle: each side blames the other one's end
        job.reach(saved, "chain", path, 2, timeout, marks=tmp_path / "cut")
        network.part(2, 3)
        errors = failed(job, within=timeout)
        assert all(names(errors[rank], 2) for rank in (0, 1)), errors
        assert all(names(errors[rank], 1) for rank in (2, 3)), errors
        network.part(2, 3, apart=False)
        assert job.run(loaded, "chain", tmp_path / "old", 1) == dict.fromkeys(range(4), True)
        succeed(job, "chain", path, 3)

        # one direction alone
        job.reach(saved, "chain", path, 4, timeout, marks=tmp_path / "deaf")
        network.deafen(2, 3)
        errors = failed(job, within=timeout)
        assert all(error.rank in (1, 2) for error in errors.values()), errors
        network.ip(2, "neigh", "del", network.address(3), "dev", "eth0")
        succeed(job, "chain", path, 5)

        # the two ends, which are no neighbours, do not need each other
        job.reach(saved, "chain", path, 6, timeout, marks=tmp_path / "ends")
        network.part(1, 4)
        time.sleep(timeout + 2.0)
        (tmp_path / "ends" / "go").touch()
        assert job.collect(PATIENT) == dict.fromkeys(range(4))
        network.part(1, 4, apart=False)
        assert job.run(loaded, "chain", path, 6) == dict.fromkeys(range(4), True)


@with_more_time(*TIMEOUTS)
def test_a_leaf_and_the_first_rank_lose_each_other_in_a_save(network: Network, tmp_path: Path, timeout: float) -> None:
    with job_of(network) as job:
        succeed(job, "tree", tmp_path / "old", 1)
        job.reach(saved, "tree", tmp_path / "new", 2, timeout, marks=tmp_path / "marks")
        network.part(1, 3)
        errors = failed(job, within=timeout)
        assert all(names(errors[rank], 2) for rank in (0, 1, 3)), errors
        assert names(errors[2], 0), errors
        network.part(1, 3, apart=False)
        assert job.run(loaded, "tree", tmp_path / "old", 1) == dict.fromkeys(range(4), True)
        succeed(job, "tree", tmp_path / "new", 3)


@pytest.mark.long
@with_more_time(*TIMEOUTS)
def test_a_host_dies_without_a_word(network: Network, tmp_path: Path, timeout: float) -> None:
    """Its network goes first: there is no reset of its connections."""
    with job_of(network) as job:
        succeed(job, "tree", tmp_path / "old", 1)
        job.reach(saved, "tree", tmp_path / "new", 2, timeout, marks=tmp_path / "marks")
        network.port(3, up=False)
        job.signal(2, signal.SIGKILL)
        survivors = (0, 1, 3)
        assert all(names(error, 2) for error in failed(job, survivors, within=timeout).values())
        for _ in range(2):  # the others cannot know that it never comes back
            job.begin(saved, "tree", tmp_path / "new", 2, timeout, ranks=survivors)
            assert all(names(error, 2) for error in failed(job, survivors, within=timeout).values())


@pytest.mark.parametrize("outages", sample([1, 3], 1))
def test_short_outages_between_operations(network: Network, tmp_path: Path, outages: int) -> None:
    with job_of(network) as job:
        for step in range(outages):
            succeed(job, "tree", tmp_path / "ckpt", step)
            network.port(3, up=False)
            time.sleep(3.0)
            network.port(3, up=True)
        succeed(job, "tree", tmp_path / "ckpt", 3)


# -- before the first operation ---------------------------------------------------------------


@pytest.mark.parametrize("host", sample([3, 1], 3))
@with_more_time(*TIMEOUTS)
def test_a_host_cannot_reach_the_store_in_the_first_operation(
    network: Network, tmp_path: Path, timeout: float, host: int
) -> None:
    with job_of(network) as job:
        network.port(host, up=False)
        job.begin(saved, "tree", tmp_path / "ckpt", 1, timeout)
        errors = failed(job, within=timeout)
        if host == 3:
            assert all(errors[rank].rank == 2 for rank in (0, 1, 3)), errors
        else:
            assert errors[0].rank in (1, 2, 3), errors
        cut_off = [2] if host == 3 else [1, 2, 3]
        assert all("store" in str(errors[rank]) for rank in cut_off), errors
        network.port(host, up=True)
        succeed(job, "tree", tmp_path / "ckpt", 2)


# -- slow links -------------------------------------------------------------------------------


def names_of_rank(count: int) -> list[str]:
    """Return names that no codec makes short."""
    source = Random(dist.get_rank())  # noqa: S311 -- nothing secret
    return [f"{source.getrandbits(128):032x}" for _ in range(count)]


def saved_many(path: Path, count: int) -> float:
    """Save many small tensors of this rank alone; return how long it took."""
    began = time.monotonic()
    model = {name: torch.full((2,), float(n)) for n, name in enumerate(names_of_rank(count))}
    bcp.save(path, {"model": model}, overwrite=True, options=bcp.SaveOptions(timeout=5.0))
    return time.monotonic() - began


def loaded_many(path: Path, count: int) -> bool:
    model = {name: torch.zeros(2) for name in names_of_rank(count)}
    bcp.load(path, {"model": model}, options=bcp.LoadOptions(timeout=4.0))
    return all(bool((tensor == float(n)).all()) for n, tensor in enumerate(model.values()))


@pytest.mark.long
def test_a_large_plan_on_a_slow_link_is_no_silence(network: Network, tmp_path: Path) -> None:
    with job_of(network, [1, 2]) as job:
        succeed(job, "tree", tmp_path / "warm", 1)
        network.rate(2, 0.4)
        took = job.run(saved_many, tmp_path / "ckpt", COUNT, timeout=SLOW)
        assert all(isinstance(seconds, float) and seconds > 6.0 for seconds in took.values()), took
        network.rate(2, None)
        assert job.run(loaded_many, tmp_path / "ckpt", COUNT) == dict.fromkeys(range(2), True)


# -- connections that break -------------------------------------------------------------------


def in_exchange(job: Job, way: str, stop: Path, timeout: float) -> None:
    """Begin to exchange, and return in the midst of it."""
    job.begin(exchanged, way, 300_000, stop, timeout)
    until(lambda: all(Path(f"{stop}.{rank}").exists() for rank in range(job.size)))


def test_connections_are_reset(network: Network, tmp_path: Path) -> None:
    with job_of(network) as job:
        of_torch = network.flows(2, 1)
        succeed(job, "tree", tmp_path / "old", 1)

        # between operations: nobody hears of it
        ours = network.flows(2, 1) - of_torch
        assert ours
        network.reset(2, 1, ours)
        succeed(job, "tree", tmp_path / "new", 2)

        # in a save
        job.reach(saved, "tree", tmp_path / "new", 3, PATIENT, marks=tmp_path / "marks")
        network.reset(2, 1, network.flows(2, 1) - of_torch)
        errors = failed(job, within=2.0)
        assert all(error.rank in (0, 1) for error in errors.values()), errors
        assert job.run(loaded, "tree", tmp_path / "new", 2) == dict.fromkeys(range(4), True)
        succeed(job, "tree", tmp_path / "new", 4)

        # bulk data
        of_torch = network.flows(3, 4)
        in_exchange(job, "tree", tmp_path / "stop", PATIENT)
        network.reset(3, 4, network.flows(3, 4) - of_torch)
        errors = failed(job, within=4.0)
        assert all("(host h3)" in str(error) and "(host h4)" in str(error) for error in errors.values()), errors
        succeed(job, "tree", tmp_path / "new", 5)


@with_more_time(*TIMEOUTS)
def test_a_table_of_connections_drops_one_in_an_exchange(network: Network, tmp_path: Path, timeout: float) -> None:
    with job_of(network) as job:
        succeed(job, "tree", tmp_path / "old", 1)
        of_torch = network.flows(3, 4)
        in_exchange(job, "tree", tmp_path / "stop", timeout)
        network.swallow(3, 4, list(network.flows(3, 4) - of_torch)[:1])
        errors = failed(job, within=timeout)
        assert all("(host h3)" in str(error) and "(host h4)" in str(error) for error in errors.values()), errors
        succeed(job, "tree", tmp_path / "new", 2)


# -- others -----------------------------------------------------------------------------------


def test_strangers_knock_at_all_doors(network: Network, tmp_path: Path) -> None:
    with job_of(network) as job:
        succeed(job, "tree", tmp_path / "ckpt", 0)
        with Strangers(network, host=4, victim=job.pid(0), address=network.address(1), spare=[29511]) as strangers:
            for step in range(1, 4):
                succeed(job, "tree", tmp_path / "ckpt", step)
            in_exchange(job, "tree", tmp_path / "stop", PATIENT)
            until(
                lambda: len([port for port, count in strangers.knocks().items() if count > 20]) >= 3
            )  # gloo's, the tree's, bulk data's
            (tmp_path / "stop").touch()
            assert all(isinstance(rounds, int) for rounds in job.collect(PATIENT).values())
        succeed(job, "tree", tmp_path / "ckpt", 4)


def test_two_jobs_on_the_same_hosts(network: Network, tmp_path: Path) -> None:
    with job_of(network) as one, job_of(network, [4, 3, 2, 1], 29512) as other:
        jobs = {one: tmp_path / "one", other: tmp_path / "other"}
        for step in range(3):
            for function, outcome in ((saved, None), (loaded, True)):
                for job, path in jobs.items():
                    job.begin(function, "tree", path, step)
                for job in jobs:
                    assert job.collect(PATIENT) == dict.fromkeys(range(4), outcome)


_groups: list[dist.ProcessGroup] = []


def grouped() -> None:
    """Make two groups in two ways, and join two of them; gloo gets keys that no earlier rank had, bcp does not."""
    world = distributed_c10d._world.pg_map
    backend, store = world[dist.group.WORLD]
    world[dist.group.WORLD] = backend, dist.PrefixStore(f"groups of {os.environ['ATTEMPT']}", store)
    made = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    world[dist.group.WORLD] = backend, store
    _groups[:] = [group for group in made if group in world]
    for group in _groups:
        world[group] = world[group][0], dist.PrefixStore(group.group_name, store)


def saved_in_groups(path: Path, step: int) -> list[bool]:
    """Save and load in all groups of this rank, and in that of all, at once."""
    right: list[bool] = []
    ways: list[tuple[str, Coordinator]] = [("all", coordinator())]
    ways += [(str(dist.get_process_group_ranks(group)), GrpcCoordinator.over(group)) for group in _groups]

    def run(name: str, way: Coordinator) -> None:
        target = states(-1)
        bcp.save(path / name, states(step), overwrite=True, coordinator=way, options=bcp.SaveOptions(timeout=PATIENT))
        bcp.load(path / name, target, coordinator=way, options=bcp.LoadOptions(timeout=PATIENT))
        right.append(torch.equal(target["model"]["w"], states(step)["model"]["w"]))

    threads = [Thread(target=run, args=way) for way in ways]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return right


def test_several_groups_of_a_job_after_restarts(network: Network, tmp_path: Path) -> None:
    store = Store(network, 2)
    for attempt in range(3):
        job = started(network, store, [1, 2, 3, 4], attempt)
        assert job.run(grouped) == dict.fromkeys(range(4))
        assert job.run(saved_in_groups, tmp_path, attempt) == dict.fromkeys(range(4), [True] * 3)
        job.close()
    store.close()


# -- clocks -----------------------------------------------------------------------------------


def astray(days: float) -> None:
    """Let this rank's wall clock be wrong."""
    true = time.time
    off = timedelta(days=days * (dist.get_rank() - 1))

    class Wrong(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]  # no subclass of its own
            return datetime.now(tz) + off

    time.time = lambda: true() + off.total_seconds()  # type: ignore[method-assign]
    root.datetime = Wrong  # type: ignore[misc]


def test_clocks_that_differ_by_years(network: Network, tmp_path: Path) -> None:
    with job_of(network) as job:
        succeed(job, "tree", tmp_path / "ckpt", 1)
        assert job.run(astray, 1000.0) == dict.fromkeys(range(4))
        for step in (2, 3):
            succeed(job, "tree", tmp_path / "ckpt", step)
        data = (tmp_path / "ckpt" / METADATA_KEY).read_bytes()
        created = datetime.fromisoformat(decode_metadata(data, METADATA_KEY).commit.created)
        assert created < datetime.now(UTC) - timedelta(days=900), "rank 0's clock was right"
