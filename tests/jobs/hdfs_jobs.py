"""Processes for the tests of HDFS: a writer that is killed, one that dies in its commit, one that races."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

from bcp.backends.hdfs import open_hdfs
from bcp.backends.hdfs.client import Hdfs

MIB = 1 << 20


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


async def upload(url: str) -> None:
    """Write two parts of three, and wait to be killed."""
    backend = open_hdfs(url, {})
    async with backend.open_write("folder/large", 30 * MIB) as writer:
        await writer.write_part(0, 0, bytes(10 * MIB))
        await writer.write_part(1, 10 * MIB, bytes(10 * MIB))
        say("ready")
        await asyncio.sleep(600)


async def die_in_commit(url: str) -> None:
    """Claim the version that is there, and die before the rename."""
    place = Hdfs.place

    async def killed(self: Hdfs, temp: str, state: Any, final: str, *, overwrite: bool) -> None:
        if final.endswith("/key"):
            os.kill(os.getpid(), signal.SIGKILL)
        await place(self, temp, state, final, overwrite=overwrite)

    Hdfs.place = killed  # type: ignore[method-assign]
    backend = open_hdfs(url, {})
    await backend.put_if("key", b"of the dead", await backend.version("key"))


async def race(url: str) -> None:
    """Replace a key whenever a line comes with its found version; say whether that was done."""
    backend = open_hdfs(url, {})
    await backend.version("warm")
    say("ready")
    while line := await asyncio.to_thread(sys.stdin.readline):
        key, found = line.split()
        won = await backend.put_if(key, f"{os.getpid()}".encode(), None if found == "none" else found)
        say("lost" if won is None else f"won {won}")
    await backend.aclose()


if __name__ == "__main__":
    asyncio.run({"upload": upload, "die_in_commit": die_in_commit, "race": race}[sys.argv[1]](sys.argv[2]))
