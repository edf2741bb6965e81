"""Hosts of a small network on this machine: a network namespace each, on a bridge that nothing else is on.

Faults as they are in a cluster: a cable that is pulled, a switch port that swallows packets, two hosts that have lost
each other while all else works, a slow uplink. Everything is gone when the network is closed.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import socket
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = ["Network", "enter", "missing"]

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_NOWHERE = "02:00:00:00:00:99"  # a hardware address that no host has

Flow = tuple[int, int]

_libc = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count()


def missing() -> str:
    """Say why this machine cannot play a network, or nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not all(map(shutil.which, ("ip", "ss", "tc"))):
        return "there is no ip, ss or tc: install iproute2"
    try:
        Network(1).close()
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)} failed: {error.stderr.strip()}"
    return ""


class Network:
    """Hosts 1 to ``hosts``, at 10.77.0.N and fd77::N on eth0, named h1, h2 and so on.

    Attributes:
        hosts: their numbers.
    """

    def __init__(self, hosts: int, *, ipv4: bool = True, names: Mapping[int, str] | None = None) -> None:
        self.hosts = range(1, hosts + 1)
        self._prefix = f"bcp{os.getpid() % 100_000}x{next(_numbers)}"
        self._names = {host: f"h{host}" for host in self.hosts} | dict(names or {})
        self._files: dict[int, str] = {}
        self._ipv4 = ipv4
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"Network({len(self.hosts)}, prefix={self._prefix!r})"

    def close(self) -> None:
        """Remove all of it."""
        for space in (self._switch, *map(self.space, self.hosts)):
            _try("ip", "netns", "del", space)

    def space(self, host: int) -> str:
        """Return the name of a host's namespace."""
        return f"{self._prefix}h{host}"

    def address(self, host: int) -> str:
        """Return a host's address."""
        return f"10.77.0.{host}" if self._ipv4 else f"fd77::{host}"

    def name(self, host: int) -> str:
        """Return a host's name."""
        return self._names[host]

    def hosts_file(self, host: int) -> str:
        """Return the text of a host's /etc/hosts."""
        if host in self._files:
            return self._files[host]
        others = (f"{self.address(other)} h{other}" for other in self.hosts)
        return "\n".join(["127.0.0.1 localhost", "::1 localhost", *others, ""])

    def know(self, host: int, lines: Iterable[str]) -> None:
        """Let a host's /etc/hosts begin with these lines."""
        self._files[host] = "\n".join([*lines, self.hosts_file(host)])

    def ip(self, host: int, *command: str) -> None:
        """Run ``ip`` in a host."""
        _run("ip", "-n", self.space(host), *command)

    # -- faults -------------------------------------------------------------------------------

    def cable(self, host: int, *, up: bool) -> None:
        """Pull or plug in a host's cable: the link loses its carrier."""
        _run("ip", "-n", self._switch, "link", "set", self._port(host), "up" if up else "down")

    def port(self, host: int, *, up: bool) -> None:
        """Let the switch forget a host, silently, or know it again."""
        _run("ip", "-n", self._switch, "link", "set", self._port(host), *(["master", "br0"] if up else ["nomaster"]))

    def part(self, one: int, other: int, *, apart: bool = True) -> None:
        """Let two hosts not reach each other, while all else works; or let them."""
        for host, peer in ((one, other), (other, one)):
            if apart:
                self.deafen(host, peer)
            else:
                self.ip(host, "neigh", "del", self.address(peer), "dev", "eth0")

    def deafen(self, host: int, peer: int) -> None:
        """Let what a host sends another one be lost."""
        self.ip(host, "neigh", "replace", self.address(peer), "lladdr", _NOWHERE, "dev", "eth0", "nud", "permanent")

    def rate(self, host: int, mbit: float | None) -> None:
        """Bound what a host sends, in Mbit/s."""
        tc = ["ip", "netns", "exec", self.space(host), "tc", "qdisc"]
        _try(*tc, "del", "dev", "eth0", "root")
        if mbit is not None:
            _run(*tc, "add", "dev", "eth0", "root", "tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "400ms")

    def flows(self, host: int, peer: int) -> set[Flow]:
        """Return the connections between two hosts, as (port here, port there)."""
        found = _run("ip", "netns", "exec", self.space(host), "ss", "-Htn", "dst", self.address(peer))
        ends = [line.split()[3:5] for line in found.splitlines()]
        return {(_port_of(here), _port_of(there)) for here, there in ends}

    def reset(self, host: int, peer: int, flows: Iterable[Flow]) -> None:
        """Break connections: both ends hear of it at once."""
        for here, there in flows:
            which = ["dst", self.address(peer), "sport", "=", f":{here}", "dport", "=", f":{there}"]
            _run("ip", "netns", "exec", self.space(host), "ss", "-K", "-tn", *which)
        if self.flows(host, peer).intersection(flows):
            raise OSError("connections of others cannot be ended here: the kernel lacks INET_DIAG_DESTROY")

    def swallow(self, host: int, peer: int, flows: Iterable[Flow]) -> None:
        """Lose what a host sends over connections, for good: a table of connections has dropped them."""
        for here, there in flows:
            which = ["to", self.address(peer), "ipproto", "tcp", "sport", str(here), "dport", str(there)]
            self.ip(host, "rule", "add", *which, "blackhole")

    # -- how it is made -----------------------------------------------------------------------

    @property
    def _switch(self) -> str:
        return f"{self._prefix}sw"

    def _port(self, host: int) -> str:
        return f"port{host}"

    def _make(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "br0", "up")
        for host in self.hosts:
            space = self.space(host)
            _run("ip", "netns", "add", space)
            peer = ["peer", "name", "eth0", "netns", space]
            _run("ip", "-n", self._switch, "link", "add", self._port(host), "type", "veth", *peer)
            self.ip(host, "link", "set", "lo", "up")
            if self._ipv4:
                self.ip(host, "addr", "add", f"10.77.0.{host}/24", "dev", "eth0")
            self.ip(host, "addr", "add", f"fd77::{host}/64", "dev", "eth0", "nodad")
            self.ip(host, "link", "set", "eth0", "up")
            self.port(host, up=True)
            self.cable(host, up=True)


def enter(space: str, name: str, hosts_file: Path) -> None:
    """Let this process, which has one thread, be on that host."""
    with Path(f"/var/run/netns/{space}").open() as file:
        _call("setns", file.fileno(), _CLONE_NEWNET)
    _call("unshare", _CLONE_NEWNS | _CLONE_NEWUTS)
    _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    _call("mount", os.fsencode(hosts_file), b"/etc/hosts", None, _MS_BIND, None)
    socket.sethostname(name)


def _call(function: str, *args: object) -> None:
    if getattr(_libc, function)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


def _port_of(end: str) -> int:
    return int(end.rpartition(":")[2])


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603 -- ours


def _try(*command: str) -> None:
    subprocess.run(command, check=False, capture_output=True)  # noqa: S603 -- ours
