"""Removes the network namespaces of runs that were killed: their names tell the process that has made them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

__all__ = ["remove_left_networks", "spaces"]

SPACE = re.compile(r"bcp(\d+)x\d+(?:sw|h\d+)")
"""A namespace of :class:`~benchmarks.network.Network`. The number is that of the process, modulo 100,000."""


def spaces() -> Iterator[str]:
    """Yield the names of all such namespaces on this machine."""
    folder = Path("/var/run/netns")
    if folder.is_dir():
        yield from (path.name for path in folder.iterdir() if SPACE.fullmatch(path.name))


def remove_left_networks() -> None:
    """Remove the namespaces of processes that are gone."""
    left = list(spaces())
    alive = {int(path.name) % 100_000 for path in Path("/proc").iterdir() if path.name.isdigit()}
    for space in left:
        found = SPACE.fullmatch(space)
        if found is not None and int(found[1]) not in alive:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)  # noqa: S603, S607 -- iproute2's
