"""Hosts as directories of one machine: their memories and agents, and ranks as tasks of this process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TypeVar

import torch

import bcp
from bcp._calls import keep_call
from bcp.backends import MemoryBackend
from bcp.protocols import Coordinator, States
from bcp.tiers.folder import NodeFolder
from bcp.tiers.memory import TierMemory
from bcp.tiers.near import READ_BYTES
from bcp.tiers.recovery import find_whole
from bcp.tiers.saving import Aim
from benchmarks.speed.state import State, gpt

__all__ = [
    "LOADING",
    "SAVING",
    "Host",
    "Kept",
    "Recovered",
    "at_once",
    "filled",
    "keep",
    "memory_of",
    "recover",
    "until",
]

SAVING, LOADING = bcp.SaveOptions(record=False), bcp.LoadOptions(record=False)
RECOVERING = replace(LOADING, read_bytes=READ_BYTES)
"""As a run has it that comes back from memory."""

TOKEN = b"the secret of the benchmark's job"
HANG_SECONDS, NAP_SECONDS = 300.0, 0.02

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Host:
    """A directory in the place of a host.

    Attributes:
        name: of the host.
        folder: its memory.
        durable: path of the run.
    """

    name: str
    folder: NodeFolder
    durable: Path

    @classmethod
    def make(cls, root: Path, name: str, durable: Path) -> Host:
        """Make an empty host below a directory on a tmpfs."""
        folder = NodeFolder(root / name)
        folder.put_token(TOKEN)
        return cls(name, folder, durable)

    @contextmanager
    def served(self) -> Iterator[None]:
        """Let an agent serve this host at the loopback, in a process of its own."""
        words = [str(self.folder.root), str(self.durable), "--node", self.name, "--listen", "127.0.0.1"]
        process = subprocess.Popen([sys.executable, "-m", "bcp.agent", *words])  # noqa: S603 -- this interpreter
        try:
            until(lambda: self.folder.is_served() and self.folder.address(), f"the agent of {self.name} does not serve")
            yield
        finally:
            process.terminate()
            process.wait()


@dataclass(frozen=True, slots=True)
class Kept:
    """A save into memory.

    Attributes:
        operation: its id.
        seconds: until the last rank could go on.
    """

    operation: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Recovered:
    """A recovery.

    Attributes:
        seconds: of the choice of the snapshot and the load.
        read_nbytes: bytes that all ranks have read from a place, by its name.
    """

    seconds: float
    read_nbytes: Mapping[str, int]


def filled(nbytes: int) -> tuple[State, States]:
    """Make a GPT and its AdamW moments of random numbers; and the same as states whose tensors all may change at once.

    A save in the background returns before it has copied what an optimizer alone writes to, and a save into memory does
    not. Both copy the same before they return if the tensors are not those of an optimizer.
    """
    state = gpt(nbytes)
    state.fill()
    return state, {"model": {name: tensor.detach() for name, tensor in state.local()}}


def memory_of(states: States) -> list[memoryview]:
    """View the bytes of a state's tensors."""
    return [memoryview(each.reshape(-1).view(torch.uint8).numpy().data) for each in states["model"].values()]


async def at_once(calls: Sequence[Awaitable[T]]) -> list[T]:
    """Await all, as ranks of one job."""
    return list(await asyncio.gather(*calls))


async def keep(memories: Sequence[TierMemory], ranks: Sequence[Coordinator], states: States, step: int) -> Kept:
    """Save into the memories of the ranks, which hold the same values."""
    begin, ends = perf_counter(), list[float]()

    async def one(memory: TierMemory, coordinator: Coordinator) -> str:
        aim = Aim(step, f"step-{step}", durable=False)
        call = keep_call(memory, aim, states, None, SAVING, coordinator)
        return (await call.run(lambda: ends.append(perf_counter()))).operation

    operations = await at_once([one(*each) for each in zip(memories, ranks, strict=True)])
    return Kept(operations[0], max(ends) - begin)


async def recover(hosts: Sequence[Host], ranks: Sequence[Coordinator], states: Sequence[States]) -> Recovered:
    """Let ranks on these hosts come back from memory, each with its states."""
    begin = perf_counter()

    async def one(host: Host, coordinator: Coordinator, own: States) -> Mapping[str, int]:
        memories = await find_whole(coordinator, lambda: host.folder, host.name, HANG_SECONDS)
        if not memories.snapshots:
            raise RuntimeError(f"{host.folder!r} and the others have no whole snapshot")
        found = await memories.open(memories.snapshots[0].operation, MemoryBackend)
        await bcp.aload(found.storage, own, options=RECOVERING, coordinator=coordinator)
        await found.storage.aclose()
        return found.storage.read_nbytes

    read = await at_once([one(*each) for each in zip(hosts, ranks, states, strict=True)])
    return Recovered(perf_counter() - begin, sum((Counter(each) for each in read), Counter()))


def until(is_true: Callable[[], object], why: str) -> None:
    """Wait until something is true. Raises TimeoutError, with a reason, after minutes."""
    end = time.monotonic() + HANG_SECONDS
    while not is_true():
        if time.monotonic() > end:
            raise TimeoutError(why)
        time.sleep(NAP_SECONDS)
