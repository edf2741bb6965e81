"""Set-ups on which torch itself works, and on which the host's own name or its routes lead astray."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from jobs import Job
from samples import sample
from test_restarts import WAIT, works

import bcp
from bcp.coordinators import coordinator
from benchmarks.network import Network


@contextmanager
def job(network: Network, init, **environment: str) -> Iterator[Job]:
    made = Job(network, [1, 2, 3], init, environment=lambda _: environment)
    try:
        yield made
    finally:
        made.close()


def address() -> str:
    """Return the address that this rank has chosen, once an operation has been."""
    return coordinator()._rendezvous.bind_address()


def tcp(host: str):
    return lambda _: f"tcp://{host}:29511"


def debian(network: Network) -> None:
    """Let each host's own name be 127.0.1.1, as Debian's installer writes it."""
    for host in network.hosts:
        network.know(host, [f"127.0.1.1 {network.name(host)}"])


def astray(network: Network) -> None:
    """Give the hosts a default route over another network, in which they do not reach each other."""
    for host in network.hosts:
        network.ip(host, "link", "add", "wan0", "type", "veth", "peer", "name", "wan1")
        network.ip(host, "addr", "add", f"172.31.{host}.1/24", "dev", "wan0")
        network.ip(host, "link", "set", "wan1", "up")
        network.ip(host, "link", "set", "wan0", "up")
        network.ip(host, "route", "add", "default", "dev", "wan0")


def test_plain_hosts(network: Network, tmp_path: Path) -> None:
    with job(network, tcp("h1")) as ranks:
        works(ranks, tmp_path / "ckpt", 1)
        assert ranks.run(address) == {rank: f"10.77.0.{rank + 1}:0" for rank in range(3)}


@pytest.mark.parametrize("route", sample([False, True], False))  # noqa: FBT003 -- a case
def test_hosts_that_call_themselves_127_0_1_1(network: Network, tmp_path: Path, *, route: bool) -> None:
    debian(network)
    if route:
        astray(network)
    with job(network, tcp("h1")) as ranks:
        works(ranks, tmp_path / "ckpt", 1)


@pytest.mark.parametrize("route", sample([False, True], False))  # noqa: FBT003 -- a case
def test_localhost_is_the_master_on_the_first_host(network: Network, tmp_path: Path, *, route: bool) -> None:
    if route:
        astray(network)
    with job(network, lambda rank: f"tcp://{'10.77.0.1' if rank else 'localhost'}:29511") as ranks:
        works(ranks, tmp_path / "ckpt", 1)


def test_a_process_group_over_a_file(network: Network, tmp_path: Path) -> None:
    astray(network)
    with job(network, lambda _: f"file://{tmp_path}/store") as ranks:
        works(ranks, tmp_path / "ckpt", 1)


def test_ipv6_alone_with_names_that_lead_to_the_loopback(networks: Callable[..., Network], tmp_path: Path) -> None:
    network = networks(3, ipv4=False)
    for host in network.hosts:
        network.know(host, [f"127.0.1.1 {network.name(host)}", f"::1 {network.name(host)}"])
    with job(network, lambda rank: f"tcp://{'[fd77::1]' if rank else 'localhost'}:29511") as ranks:
        works(ranks, tmp_path / "ckpt", 1)


def test_hosts_of_one_name(networks: Callable[..., Network], tmp_path: Path) -> None:
    """Containers may all have the same; they are different hosts all the same."""
    with job(networks(3, names=dict.fromkeys([1, 2, 3], "node")), tcp("10.77.0.1")) as ranks:
        works(ranks, tmp_path / "ckpt", 1)
        assert ranks.run(address) == {rank: f"10.77.0.{rank + 1}:0" for rank in range(3)}


def refused(path: Path) -> str:
    with pytest.raises(bcp.InputError) as caught:
        bcp.save(path, {"model": {}}, options=bcp.SaveOptions(timeout=10))
    return str(caught.value)


def test_a_variable_that_is_wrong_is_said_at_once_on_all_ranks(network: Network, tmp_path: Path) -> None:
    with job(network, tcp("h1"), BCP_ADDRESS="127.0.0.1") as ranks:
        said = ranks.run(refused, tmp_path / "ckpt", timeout=WAIT)
        assert all("Set BCP_ADDRESS to an address" in text for text in said.values()), said


def test_the_variable_is_honoured(network: Network, tmp_path: Path) -> None:
    with job(network, tcp("h1"), BCP_ADDRESS="fd77::/64") as ranks:
        works(ranks, tmp_path / "ckpt", 1)
        assert ranks.run(address) == {rank: f"[fd77::{rank + 1}]:0" for rank in range(3)}
