"""Units in storage: uploaded at once or one after the other, and read by twice as many readers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import bcp
from bcp.backends import LocalBackend, MemoryBackend
from bcp.coordinators.local import memory_coordinators
from bcp.testing.storage_fakes import CountingBackend
from benchmarks.figures import Figures

__all__ = ["reshard", "upload"]

MIB = 1 << 20
SHARDS = 64
REQUEST_SECONDS, STREAM_MB_S = 0.02, 90.0
"""Of an object store: the least time of a request, and the speed of a connection (Amazon says 85 to 90 MB/s for S3)."""

TIMES_FASTER, TIMES_READ = 2.0, 1.01


class Shelf:
    """A sharded state with buffers of one size, in 64 virtual shards."""

    def __init__(self, reader: int, readers: int, nbytes: int) -> None:
        self.reader, self.readers = reader, readers
        self.units: Mapping[str, Any] = {
            f"{number:05d}": {"at": number, "tokens": torch.arange(nbytes // SHARDS // 8) + number}
            for number in range(reader, SHARDS, readers)
        }

    def shared_state(self) -> Any:
        """Return the part that is equal on all readers."""
        return {"shards": SHARDS}

    def unit_states(self) -> Mapping[str, Any]:
        """Return the units."""
        return self.units

    def wanted_units(self, shared: Any, ids: Sequence[str]) -> Sequence[str]:
        """Return every unit whose number is the reader's, modulo readers."""
        return [unit for unit in ids if int(unit) % self.readers == self.reader and shared["shards"] == SHARDS]

    def load_units(self, shared: Any, units: Mapping[str, Any]) -> None:
        """Take the units."""
        del shared
        self.units = dict(units)

    def prepare(self, step: int) -> None:
        """Do nothing: the units are there."""


class SlowStreams(CountingBackend):
    """An object store far away: every part takes as long as on a connection of its own, however many there are."""

    at_once = 8  # as of GCS and S3

    async def before(self, operation: str, key: str) -> None:
        """Wait for a part."""
        await super().before(operation, key)
        if operation == "write_part":
            await asyncio.sleep(REQUEST_SECONDS + bcp.SaveOptions().part_bytes / STREAM_MB_S / 1e6)


def upload(nbytes: int, figures: Figures) -> None:
    """Measure saves of units to a store whose connections are slow: parts at once, and one after the other."""
    title = f"Upload: {nbytes // MIB} MiB in {SHARDS} units, {STREAM_MB_S:g} MB/s for each part under way"
    figures.head(title)
    shelf = Shelf(0, 1, nbytes)
    at_once = partial(_saved, shelf, bcp.SaveOptions())
    one_by_one = partial(_saved, shelf, bcp.SaveOptions(io_workers=1))
    figures.add("one part after the other", alone := one_by_one(), "s")
    figures.add("parts at once", together := at_once(), "s")
    figures.add("times faster", alone / together, "", TIMES_FASTER, least=True)


def _saved(shelf: Shelf, options: bcp.SaveOptions) -> float:
    """Save, and return the seconds."""
    began = time.perf_counter()
    store = SlowStreams(MemoryBackend(f"units by {options.io_workers}"))
    bcp.save(store, {"dataloader": shelf}, options=replace(options, overwrite=True))
    return time.perf_counter() - began


def reshard(nbytes: int, folder: Path, figures: Figures) -> None:
    """Save with 4 readers and load with 8, all in this process, and compare the bytes read with those stored."""
    figures.head(f"Resharding: {nbytes // MIB} MiB in {SHARDS} units, from 4 readers to 8 on a local disk")
    saved, loaded = ([Shelf(reader, count, nbytes) for reader in range(count)] for count in (4, 8))
    for shelf in loaded:
        shelf.units = {}
    backend = CountingBackend(LocalBackend(folder))
    figures.add("save", asyncio.run(_collective(bcp.asave, backend, saved)), "s")
    figures.add("load", asyncio.run(_collective(bcp.aload, backend, loaded)), "s")
    stored = sum(file.stat().st_size for file in (folder / "dataloader").iterdir())
    read = sum(count for key, count in backend.read.items() if key.startswith("dataloader/"))
    figures.add("bytes read, as a part of those stored", read / stored, "", TIMES_READ)
    figures.add("units lost", sum(len(each.units) for each in saved) - sum(len(each.units) for each in loaded), "", 0)
    for shelf in loaded:
        _check(shelf, nbytes)


async def _collective(call: Callable[..., Any], backend: CountingBackend, shelves: Sequence[Shelf]) -> float:
    """Let all ranks save or load, and return the seconds."""
    ranks = memory_coordinators(len(shelves))
    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for shelf, rank in zip(shelves, ranks, strict=True):
            group.create_task(call(backend, {"dataloader": shelf}, coordinator=rank))
    return time.perf_counter() - began


def _check(shelf: Shelf, nbytes: int) -> None:
    """Exit unless a reader has the units that it should have, with the tokens that were saved."""
    wanted = Shelf(shelf.reader, shelf.readers, nbytes).units
    for unit, state in wanted.items():
        found = shelf.units.get(unit, {})
        if found.get("at") != state["at"] or not torch.equal(found["tokens"], state["tokens"]):
            raise SystemExit(f"reader {shelf.reader} has not loaded unit {unit} as it was saved")
