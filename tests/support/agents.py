"""Agents of hosts as tasks of this process, which begin and end when the test says so."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import pytest

from bcp._sockets import Wire
from bcp.agent.loop import Agent
from bcp.agent.serve import serving
from bcp.runtime import bridge
from bcp.tiers.folder import NodeFolder

__all__ = ["agent", "until"]

SECONDS = 240.0  # the end of a hang


@contextmanager
def agent(root: Path, durable: Path, node: str = "n0") -> Iterator[Agent]:
    """Serve a host at the loopback; end at once, as by a kill, when the context is left."""
    folder = NodeFolder(root)
    name = sha256(node.encode()).hexdigest()[:16]
    made = Agent(folder, str(durable), name, poll_seconds=0.02, patience_seconds=0.5)
    with folder.serving() as lock, serving(folder, "127.0.0.1"):
        assert lock is not None
        background = bridge.start(lambda _: made.run(), name="an agent", daemon=True)
        try:
            yield made
        finally:
            background.cancel()
            assert background.wait_ended(SECONDS)
            background.exception()


def until(is_true: Callable[[], object], why: str) -> None:
    """Wait until something is true."""
    end = time.monotonic() + SECONDS
    while not is_true():
        assert time.monotonic() < end, why
        time.sleep(0.01)


def count_sent(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the bytes that agents of this process send from now on, by the directory of the file."""
    counted: Counter[str] = Counter()
    send = Wire.push_file

    def count(wire: Wire, fd: int, start: int, nbytes: int) -> None:
        counted[Path(f"/proc/self/fd/{fd}").readlink().parent.name] += nbytes
        send(wire, fd, start, nbytes)

    patch.setattr(Wire, "push_file", count)
    return counted
