"""The namespaces of hosts: those of a run that was killed are removed by the next one, those of others are not."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from left_networks import remove_left_networks, spaces

from benchmarks.network import Network

KILLED = """
import os, signal
from benchmarks.network import Network

network = Network(2)
print(*map(network.space, network.hosts), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_networks_of_processes_that_are_gone_are_removed(networks: Callable[..., Network]) -> None:
    own = networks(1).space(1)
    command, root = [sys.executable, "-c", KILLED], Path(__file__).parents[2]
    killed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)  # noqa: S603 -- no torch
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = killed.stdout.split()
    assert len(left) == 2
    assert {own, *left} <= set(spaces())
    remove_left_networks()
    assert own in spaces()
    assert not set(left) & set(spaces())
