"""Loads over networks whose hosts do not all send at one speed."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from jobs import Job
from patience import patiently

import bcp
from benchmarks.network import Network

NBYTES = 160 << 20


def model(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {f"w{number}": torch.full((NBYTES // 32,), value) for number in range(8)}}


def saved(path: Path) -> None:
    bcp.save(path, model(1.0))


def loaded(path: Path) -> int:
    """Load what all ranks want; return how much of it this rank has read, for itself and for the others."""
    target = model(0.0)
    report = bcp.load(path, target)
    assert all(bool((tensor == 1.0).all()) for tensor in target["model"].values())
    return report.read_nbytes


@pytest.mark.long
@pytest.mark.parametrize("slow", [None, 3])
def test_a_rank_with_a_slow_uplink_reads_and_sends_less(network: Network, tmp_path: Path, slow: int | None) -> None:
    """On a busy machine the others are slow, too: then the slow one is made slower still."""

    def check(rate: float) -> None:
        for host in network.hosts:
            network.rate(host, 500 if host != slow else int(rate))
        read = ranks.run(loaded, tmp_path)
        assert sum(read.values()) == pytest.approx(NBYTES, rel=0.01)
        if slow is None:
            assert min(read.values()) > 0  # how much depends on the speeds that were measured
        else:
            others = [nbytes for rank, nbytes in read.items() if rank + 1 != slow]
            assert read[slow - 1] < sum(others) / len(others) / 2  # single ones may be slow

    with closing(Job(network, [1, 2, 3, 4], lambda _: "tcp://h1:29511")) as ranks:
        assert ranks.run(saved, tmp_path) == dict.fromkeys(range(4))
        patiently(check, 50, 10, 3)
