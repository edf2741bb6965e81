"""Whether zstd is chosen where it saves time: on slow storage, and not on the local disk."""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic, perf_counter

import anyio
import torch

import bcp
from bcp.backends import LocalBackend
from bcp.extend import Codec, PartWriter
from bcp.protocols import Backend, Buffer, States
from bcp.testing.storage_fakes import CountingBackend
from benchmarks.figures import Figures
from benchmarks.publish.training import Training

__all__ = ["codecs"]

SLOW = 50_000_000
"""Bytes that the slow storage takes in a second, of all files together."""

LEARNING_RATE, ROUNDS = 3e-6, 3


class SlowStore(CountingBackend):
    """A directory behind a narrow line."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._free_at = 0.0

    @asynccontextmanager
    async def open_write(self, key: str, nbytes: int | None = None) -> AsyncIterator[PartWriter]:
        """Write a large object in parts."""
        async with super().open_write(key, nbytes) as parts:
            yield _SlowParts(self, parts)

    async def pass_through(self, nbytes: int) -> None:
        """Wait until so many bytes have gone through the line, behind those of other callers."""
        self._free_at = max(self._free_at, monotonic()) + nbytes / SLOW
        await anyio.sleep(self._free_at - monotonic())


class _SlowParts:
    """Sends the parts of an object over the line."""

    def __init__(self, store: SlowStore, inner: PartWriter) -> None:
        self._store, self._inner = store, inner

    async def write_part(self, index: int, offset: int, data: Buffer) -> None:
        """Write one part."""
        await self._store.pass_through(memoryview(data).nbytes)
        await self._inner.write_part(index, offset, data)


def codecs(weights: Mapping[str, torch.Tensor], folder: Path, figures: Figures) -> None:
    """Let bcp choose on both, and save with and without zstd.

    Args:
        weights: of the run.
        folder: an empty directory on a local disk.
        figures: get the result.

    """
    states = Training(weights, LEARNING_RATE).states()
    figures.head(f"A codec for fp32 weights and AdamW, on storage of {SLOW / 1e6:g} MB/s and on the local disk")
    for name, chosen, make in (("slow storage", 1, _slow), ("the local disk", 0, LocalBackend)):
        where = "_".join(name.split())
        found = [bool(bcp.choose_codecs(make(folder / where), states)) for _ in range(ROUNDS)]
        goal = ROUNDS * chosen
        figures.add(f"of {ROUNDS} trials, zstd is chosen on {name}", sum(found), "", goal, least=bool(chosen))
        plain = [_seconds(make(folder / f"{where}-{number}"), states, []) for number in range(ROUNDS)]
        coded = [_seconds(make(folder / f"{where}-z{number}"), states, [bcp.zstd()]) for number in range(ROUNDS)]
        figures.add(f"a save with zstd to one without, on {name}", statistics.median(coded) / statistics.median(plain))


def _slow(path: Path) -> Backend:
    return SlowStore(LocalBackend(path))


def _seconds(backend: Backend, states: States, with_codecs: list[Codec]) -> float:
    begin = perf_counter()
    bcp.save(backend, states, options=bcp.SaveOptions(codecs=with_codecs, record=False))
    return perf_counter() - begin
