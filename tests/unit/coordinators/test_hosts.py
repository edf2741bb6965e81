"""Which address a host chooses, on hosts of many kinds that are only written down here."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from bcp._messages.coordination import Host
from bcp.coordinators import hosts
from bcp.coordinators.hosts import address_of, here, stated_address
from bcp.errors import InputError

UP = SimpleNamespace(isup=True)
DOWN = SimpleNamespace(isup=False)


def interface(address: str, netmask: str | None) -> SimpleNamespace:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return SimpleNamespace(family=family, address=address, netmask=netmask)


LO = [interface("127.0.0.1", "255.0.0.0"), interface("::1", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")]
ETH = [interface("10.77.0.1", "255.255.255.0"), interface("fe80::1%eth0", "ffff:ffff:ffff:ffff::")]
WAN = [interface("172.31.1.1", "255.255.255.0")]
DOCKER = [interface("172.17.0.1", "255.255.0.0")]
IB = [interface("10.99.0.1", "255.255.0.0")]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A host with two networks and a bridge of containers; nothing is routed."""
    found = {"lo": LO, "docker0": DOCKER, "wan0": WAN, "eth0": ETH, "ib0": IB, "off0": [interface("10.5.0.1", None)]}
    states = dict.fromkeys(found, UP) | {"off0": DOWN}
    monkeypatch.setattr(hosts.psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(hosts.psutil, "net_if_stats", lambda: states)
    monkeypatch.setattr(hosts, "_source", lambda *_: "")
    for name in ("BCP_ADDRESS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def other(address: str = "", *networks: str) -> Host:
    return Host("h2", "another", address, networks)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.77.0.0/16", "10.77.0.1"),
        ("10.77.0.1", "10.77.0.1"),
        ("ib0", "10.99.0.1"),
        ("eth0", "10.77.0.1"),
        ("", ""),
    ],
)
def test_the_variable_names_a_network_an_address_or_an_interface(machine, text, address):
    machine.setenv("BCP_ADDRESS", text)
    assert stated_address(None) == address
    assert stated_address("10.1.1.1") == "10.1.1.1"


@pytest.mark.parametrize("text", ["10.5.0.0/16", "10.5.0.1", "off0", "eth", "192.168.0.0/16", "no network/at all"])
def test_a_variable_that_names_nothing_is_refused_with_what_there_is(machine, text):
    machine.setenv("BCP_ADDRESS", text)
    with pytest.raises(InputError, match=r"BCP_ADDRESS=.* is no address, network or interface .*eth0 10\.77\.0\.1/24"):
        stated_address(None)


@pytest.mark.parametrize(
    ("variable", "text", "address"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", "10.77.0.1"),
        ("GLOO_SOCKET_IFNAME", "eth", ""),
        ("GLOO_SOCKET_IFNAME", "none,ib0", "10.99.0.1"),
        ("GLOO_SOCKET_IFNAME", "lo", ""),
        ("NCCL_SOCKET_IFNAME", "eth", "10.77.0.1"),
        ("NCCL_SOCKET_IFNAME", "=eth", ""),
        ("NCCL_SOCKET_IFNAME", "=ib0", "10.99.0.1"),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", ""),
    ],
)
def test_interfaces_of_other_libraries_are_honoured(machine, variable, text, address):
    machine.setenv(variable, text)
    assert here(None).address == address


def test_a_job_of_one_host_listens_on_the_loopback(machine):
    machine.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert address_of(here(None), []) == "127.0.0.1"
    assert address_of(here(None), [], "10.77.0.1") == "10.77.0.1"


@pytest.mark.parametrize(
    "elsewhere",
    [
        [other("10.77.0.2")],
        [other("", "10.77.0.2/24")],
        [other("", "172.17.0.1/16", "10.77.0.2/24")],
        [other("", "172.17.0.1/16", "172.31.1.1/24", "10.77.0.2/24")],
        [other("10.77.0.2"), other("10.77.0.3"), other("172.31.1.9")],
    ],
)
@pytest.mark.usefixtures("machine")
def test_the_network_in_which_the_others_are_is_chosen(elsewhere):
    """An address that two hosts have, as that of a bridge of containers, is nobody's."""
    assert address_of(here(("localhost", 1)), elsewhere) == "10.77.0.1"


def test_in_no_common_network_it_is_the_way_to_the_others(machine):
    machine.setattr(hosts, "_source", lambda host, _: "10.99.0.1" if host == "10.200.0.9" else "172.31.1.1")
    assert address_of(here(None), [other("10.200.0.9")]) == "10.99.0.1"


@pytest.mark.parametrize("stated", ["", "127.0.0.1", "::1"])
@pytest.mark.usefixtures("machine")
def test_a_loopback_is_not_shown_to_other_hosts(stated):
    with pytest.raises(
        InputError, match=r"no address that the job's other hosts reach: h2 \(10.200.0.9\). Set BCP_ADD"
    ):
        address_of(here(None, stated), [other("10.200.0.9")], stated)


def test_the_way_to_the_store_is_the_way_to_the_others(machine):
    machine.setattr(hosts, "_source", lambda host, _: "127.0.0.1" if host == "me" else "10.99.0.1")
    assert here(("store", 1)).address == "10.99.0.1"
    assert here(("me", 1)).address == ""
    assert address_of(here(("store", 1)), [other("10.77.0.2")]) == "10.99.0.1"


def test_this_machine_can_be_described():
    host = here(None)
    assert host.name == socket.gethostname()
    assert host == here(None)
    assert host.identity
