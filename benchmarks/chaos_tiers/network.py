"""Hosts on this machine: network namespaces with one address each, behind a bridge in a namespace of its own."""

from __future__ import annotations

import ctypes
import os
import secrets
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Self

__all__ = ["Network", "enter"]

NAMESPACES = Path("/run/netns")
NEW_NETWORK = 0x40000000
"""CLONE_NEWNET of the kernel."""


class Network:
    """So many hosts, from when its context is entered until it is left. No address of this machine changes.

    Attributes:
        hosts: names of the namespaces.
    """

    def __init__(self, count: int) -> None:
        """Choose names that no other run has."""
        self._id = f"bcp-{os.getpid()}-{secrets.token_hex(2)}"
        self._switch = f"{self._id}-switch"
        self.hosts = [f"{self._id}-{number}" for number in range(count)]

    def __enter__(self) -> Self:
        """Make the namespaces.

        Raises:
            RuntimeError: this process may not make namespaces, or there is no ``ip``.

        """
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the namespaces, and with them their links."""
        for name in (*self.hosts, self._switch):
            if (NAMESPACES / name).exists():
                _ip([["netns", "del", name]])

    def address(self, host: int) -> str:
        """Return the address of a host."""
        return f"10.77.0.{host + 1}"

    def command(self, host: int) -> list[str]:
        """Return the beginning of a command that runs on a host."""
        return ["ip", "netns", "exec", self.hosts[host]]

    def _make(self) -> None:
        _ip([["netns", "add", name] for name in (self._switch, *self.hosts)])
        inside = ["link add hub type bridge", "link set hub up"]
        for number, name in enumerate(self.hosts):
            _ip(
                [["link", "add", f"port{number}", "netns", self._switch, "type", "veth", "peer", "eth0", "netns", name]]
            )
            inside += [f"link set port{number} master hub", f"link set port{number} up"]
            address = f"addr add {self.address(number)}/24 dev eth0"
            _ip([each.split() for each in ("link set lo up", address, "link set eth0 up")], name)
        _ip([each.split() for each in inside], self._switch)


def enter(name: str) -> None:
    """Bring this process, which has one thread, onto a host. Raises OSError."""
    fd = os.open(NAMESPACES / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(fd, NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"{name} cannot be entered: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(fd)


def _ip(orders: Sequence[Sequence[str]], namespace: str = "") -> None:
    """Run orders of ``ip``, in a namespace or here."""
    command = ["ip", *(["-netns", namespace] if namespace else []), "-batch", "-"]
    text = "".join(f"{' '.join(order)}\n" for order in orders)
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)  # noqa: S603 -- our own words
    except FileNotFoundError:
        raise RuntimeError(
            "hosts of this benchmark are network namespaces: install iproute2, whose ip is missing"
        ) from None
    if done.returncode:
        raise RuntimeError(
            f"hosts of this benchmark are network namespaces, which root alone makes; {' '.join(command)} has said "
            f"{done.stderr.strip()!r} about {text!r}: run it as root, on a Linux that allows them"
        )
