"""Saves and loads in jobs that torchrun starts again: ranks are killed, hosts are lost, at rest and in operations."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic import Torchrun
from jobs import DEAD, HUNG, LONG, SLOW, Ranks, halt, with_more_time
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import bcp
from benchmarks.network import Network

TIMEOUTS = (5.0, 50.0)
"""Of operations in which a host is lost."""


def states(step: int) -> dict[str, Any]:
    """Return a tensor that all ranks have, and one that is divided between them."""
    whole = torch.arange(1001.0) + step
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    part = whole.chunk(dist.get_world_size())[dist.get_rank()].clone()
    sharded = DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=(1,))
    return {"model": {"whole": whole, "sharded": sharded}}


def saved(path: Path, step: int, timeout: float = LONG, marks: Path | None = None) -> None:
    edit = bcp.SaveOptions().edit if marks is None else lambda graph: graph.after("d2h", halt(marks))
    bcp.save(path, states(step), overwrite=True, options=bcp.SaveOptions(timeout=timeout, edit=edit))


def loaded(path: Path, step: int, timeout: float = LONG, marks: Path | None = None) -> bool:
    edit = bcp.LoadOptions().edit if marks is None else lambda graph: graph.before("h2d", halt(marks))
    target = states(-1000)
    bcp.load(path, target, options=bcp.LoadOptions(timeout=timeout, edit=edit))
    right, model = states(step)["model"], target["model"]
    return torch.equal(model["whole"], right["whole"]) and torch.equal(
        model["sharded"].to_local(), right["sharded"].to_local()
    )


def works(ranks: Ranks, path: Path, last: int, step: int, *, load_first: bool) -> None:
    """Assert that the first operations of these ranks succeed, and that what was committed last is there."""
    everywhere = range(ranks.size)
    if load_first:
        assert ranks.run(loaded, path, last) == dict.fromkeys(everywhere, True)
    assert ranks.run(saved, path, step) == dict.fromkeys(everywhere)
    assert ranks.run(loaded, path, step) == dict.fromkeys(everywhere, True)


def blamed(ranks: Ranks, lost: int, seconds: float) -> None:
    """Assert that all other ranks are told of the loss; torchrun may be quicker to kill them."""
    outcomes = ranks.collect(seconds + SLOW, set(range(ranks.size)) - {lost})
    assert HUNG not in outcomes.values()
    for error in outcomes.values():
        assert error == DEAD or (isinstance(error, bcp.PeerError) and error.rank == lost), outcomes


OPERATIONS: dict[str, Callable[..., Any] | None] = {"at rest": None, "save": saved, "load": loaded}
STORES = {"shared": {}, "own": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}}
"""Whose store the ranks meet in: that of an agent, which outlives them (torch's default), or rank 0's own."""


@pytest.mark.long
@pytest.mark.parametrize("store", [pytest.param("shared", marks=pytest.mark.kills), "own"])
def test_ranks_are_killed(network: Network, tmp_path: Path, store: str) -> None:
    path = tmp_path / "ckpt"
    with closing(Torchrun(network, "4", network.hosts, STORES[store])) as job:
        ranks = job.ranks(4)
        works(ranks, path, 0, 1, load_first=False)
        for step, (victim, (name, operation)) in enumerate(zip((3, 1, 0), OPERATIONS.items(), strict=True), start=1):
            if operation is not None:
                ranks.reach(operation, path, step, LONG, marks=tmp_path / name)
            ranks.signal(victim)
            if operation is not None:
                blamed(ranks, victim, 0.0)
            ranks = job.ranks(4)
            works(ranks, path, step, step + 1, load_first=operation is not None)


@pytest.mark.long
@with_more_time(*TIMEOUTS)
def test_hosts_are_lost_and_come_back(network: Network, tmp_path: Path, timeout: float) -> None:
    """Not with the shared store, to which torch 2.13 admits no new agent.

    Such an agent waits for keys that rank 0's agent has written in its own first round only. After a minute all agents
    fail, with "DistNetworkError: Failed to recv, got 0 bytes" in ``RendezvousStoreInfo.build``.
    """
    path = tmp_path / "ckpt"
    with closing(Torchrun(network, "4", network.hosts, STORES["own"])) as job:
        ranks = job.ranks(4)
        works(ranks, path, 0, 1, load_first=False)
        for step, (host, (name, operation)) in enumerate(zip((2, 4, 3), OPERATIONS.items(), strict=True), start=1):
            if operation is not None:
                ranks.reach(operation, path, step, timeout, marks=tmp_path / name)
            job.lose(host)
            if operation is not None:
                blamed(ranks, host - 1, timeout)
                ranks.begin(os._exit, 1)  # as a training script that meets an error
            job.regain(host)
            ranks = job.ranks(4)
            works(ranks, path, step, step + 1, load_first=operation is not None)


@pytest.mark.long
@pytest.mark.kills  # a host that comes late begins the job again, and gloo hangs in the shared store (pytorch#135712)
@pytest.mark.parametrize("store", ["shared", "own"])
@with_more_time(*TIMEOUTS, hosts=5)
def test_hosts_are_lost_and_the_job_goes_on_with_fewer(
    network: Network, tmp_path: Path, timeout: float, store: str
) -> None:
    path = tmp_path / "ckpt"
    with closing(Torchrun(network, "2:5", network.hosts, STORES[store])) as job:
        ranks = job.ranks(5)
        works(ranks, path, 0, 1, load_first=False)
        for step, (host, (name, operation)) in enumerate(zip((3, 5, 2), OPERATIONS.items(), strict=True), start=1):
            lost = {3: 2, 5: 3, 2: 1}[host]  # its rank among those that are left
            if operation is None:
                job.lose(host)
                ranks.begin(saved, path, 0, timeout, ranks=set(range(ranks.size)) - {lost})
            else:
                ranks.reach(operation, path, step, timeout, marks=tmp_path / name)
                job.lose(host)
            blamed(ranks, lost, timeout)
            ranks.begin(os._exit, 1)
            ranks = job.ranks(ranks.size - 1)
            works(ranks, path, step, step + 1, load_first=True)
        if store == "own":
            for step, host in enumerate((5, 2), start=4):
                job.regain(host)
                ranks = job.ranks(ranks.size + 1)
                works(ranks, path, step, step + 1, load_first=True)
