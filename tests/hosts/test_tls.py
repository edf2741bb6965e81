"""Certificates on every connection between hosts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import trustme
from jobs import Job

import bcp
from bcp.coordinators import GrpcCoordinator, Tls
from benchmarks.network import Network

NBYTES = 80 << 20  # enough for the ranks to measure their ways, and for several connections of a pair


def certificates(authority: trustme.CA, name: str) -> Tls:
    issued = authority.issue_cert(name)
    chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
    return Tls(authority.cert_pem.bytes(), chain, issued.private_key_pem.bytes(), target_name="job.bcp.test")


def round_trip(path: Path, tls: Tls, address: str) -> float:
    """Save and load over a coordinator with certificates; return the part that this rank has received of the other."""
    coordinator = GrpcCoordinator.over(tls=tls, address=address)
    bcp.save(path, {"model": {"w": torch.arange(NBYTES // 4, dtype=torch.int32)}}, coordinator=coordinator)
    target = {"w": torch.zeros(NBYTES // 4, dtype=torch.int32)}
    report = bcp.load(path, {"model": target}, coordinator=coordinator)
    assert torch.equal(target["w"], torch.arange(NBYTES // 4, dtype=torch.int32))
    coordinator.close()
    return report.received_nbytes / NBYTES


def refused(path: Path, tls: Tls, address: str) -> str:
    coordinator = GrpcCoordinator.over(tls=tls, address=address)
    try:
        bcp.save(path, {"model": {}}, coordinator=coordinator, options=bcp.SaveOptions(timeout=8.0))
    except bcp.BcpError as error:
        return str(error)
    finally:
        coordinator.close()
    return "it was let in"


@pytest.mark.long
def test_a_job_with_certificates(network: Network, tmp_path: Path) -> None:
    authority = trustme.CA()
    ranks = Job(network, [1, 2], lambda _: "tcp://h1:29511")
    for rank in range(2):
        tls = certificates(authority, "job.bcp.test")
        ranks.begin(round_trip, tmp_path / "ckpt", tls, network.address(rank + 1), ranks=[rank])
    received = ranks.collect(60.0)  # how the reading is shared depends on the speeds that were measured
    assert sum(received.values()) == pytest.approx(1.0, rel=0.01)
    for rank in range(2):
        tls = certificates(authority if rank == 0 else trustme.CA(), "job.bcp.test")
        ranks.begin(refused, tmp_path / "other", tls, network.address(rank + 1), ranks=[rank])
    outcomes = ranks.collect(60.0)
    assert "rank 1 (host h2) has not begun it" in outcomes[0]
    assert "check tls= of both ranks" in outcomes[1]  # the side that dials knows why
    ranks.close()
