"""Files that ranks of this host have written for twins on another host, compared with the owner's digests.

A block that differs is fetched from the owner. Two replicas that differ are silent corruption, or were trained apart.
"""

from __future__ import annotations

import json
import mmap
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from bcp._messages.tiers import Drift
from bcp.agent.pace import Pace
from bcp.errors import CorruptError
from bcp.format.receipt import FileReceipt, Receipt
from bcp.pipeline import Pipeline, Stage
from bcp.plan.columns import Ints
from bcp.protocols import Backend
from bcp.read.windows import Window, windows_of, wrong_block, wrong_rows
from bcp.runtime.threads import in_thread
from bcp.tiers.digests import PART_BYTES, key_of, run_windows

__all__ = ["Differing", "compared", "drift_of"]

SHOWN = 5
"""Blocks and tensors in a message."""

HEADER = "the header"


@dataclass(frozen=True, slots=True)
class Differing:
    """Where a file has differed from that of its owner. It is the owner's now.

    Attributes:
        blocks: numbers of those that should have been equal.
        nbytes: bytes that have differed in them.
        tensors: names of their tensors.
        fetched: bytes that came over the network, also of tensors that may differ.
    """

    blocks: Sequence[int]
    nbytes: int
    tensors: Sequence[str]
    fetched: int


async def compared(
    path: Path, files: Backend, receipt: Receipt, file: FileReceipt, pace: Pace, may_differ: Collection[str] = ()
) -> Differing:
    """Compare a file of this host with the digests of its owner, and fetch the blocks that differ.

    Args:
        path: of the file, which has the size of the owner's.
        files: of the owner's host.
        receipt: of the owner.
        file: its record in the receipt.
        pace: of what is fetched.
        may_differ: tensors whose replicas are known to differ.

    Raises:
        CorruptError: the owner's block has another digest than its receipt.
        StorageError: the owner's host does not answer.

    """
    with path.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as memory:
        twin = _Twin(key_of(receipt, file), file, memory, files, pace)
        start: Pipeline[Window, Window] = Pipeline()
        windows = windows_of(twin.key, file, PART_BYTES)
        done = await run_windows(start.then(Stage("compare", twin.compare, workers=2)), windows)
    wrong = dict(pair for each in done for pair in each)
    fetched = int(file.blocks.stored_length[[*wrong]].sum()) if wrong else 0
    blocks, total = list[int](), Counter[str]()
    for row, counts in wrong.items():
        drifted = {name: count for name, count in counts.items() if not _is_in(name, may_differ)}
        blocks += [row] if drifted else []
        total.update(drifted)
    return Differing(blocks, total.total(), [*total], fetched)


def drift_of(differing: Differing, receipt: Receipt, file: FileReceipt, step: int, *, host: str, twin: int) -> Drift:
    """Return the note of a file that differed.

    Args:
        differing: where.
        receipt: of the owner.
        file: its record in the receipt.
        step: of the training.
        host: name of the owner's host.
        twin: the rank of this host that has written the file.

    """
    tensors = _some([repr(name) for name in differing.tensors])
    said = (
        f"{key_of(receipt, file)}, block {_some([*map(str, differing.blocks)])}: {differing.nbytes} bytes of {tensors} "
        f"differ between rank {receipt.rank} on host {host} and its replica on rank {twin}; the copy is that of rank "
        f"{receipt.rank}. Check the memory of both hosts, or broadcast these tensors between the ranks"
    )
    return Drift(receipt.operation, step, host, receipt.rank, twin, differing.nbytes, said)


@dataclass(frozen=True, slots=True)
class _Twin:
    """A file of this host that is compared."""

    key: str
    file: FileReceipt
    memory: mmap.mmap
    files: Backend  # of the owner
    pace: Pace

    async def compare(self, window: Window) -> list[tuple[int, Counter[str]]]:
        """Replace the blocks of a window that differ; return their numbers, and bytes that differed by tensor."""
        rows = await in_thread(self._wrong_rows, window)
        return [(row, await self._replaced(row)) for row in rows]

    def _wrong_rows(self, window: Window) -> list[int]:
        with memoryview(self.memory) as whole, whole[window.start : window.start + window.nbytes] as part:
            return wrong_rows(window, part)

    async def _replaced(self, row: int) -> Counter[str]:
        [block] = windows_of(self.key, self.file, PART_BYTES, begin=row, end=row + 1)
        fetched = memoryview(bytearray(block.nbytes))
        await self.pace.take(block.nbytes)
        await self.files.read_into(self.key, block.start, fetched)
        if wrong := await in_thread(wrong_block, block, fetched):
            raise CorruptError(f"from {self.files!r}: {wrong}")
        return await in_thread(partial(self._put, block.start, fetched))

    def _put(self, start: int, fetched: memoryview) -> Counter[str]:
        """Replace bytes; count those that differed, by tensor."""
        stop = start + len(fetched)
        differs = np.frombuffer(self.memory[start:stop], np.uint8) != np.frombuffer(fetched, np.uint8)
        self.memory[start:stop] = bytes(fetched)
        return self._tensors_at(np.flatnonzero(differs) + start)

    def _tensors_at(self, places: Ints) -> Counter[str]:
        """Count bytes of a data file by the names in its header."""
        try:
            table = json.loads(self.memory[8 : self.file.data_start])
        except ValueError:  # it differs, too, and is replaced with its block
            return Counter({HEADER: len(places)})
        names = [name for name in table if name != "__metadata__"]
        starts = np.array([table[name]["data_offsets"][0] for name in names], np.int64) + self.file.data_start
        rows, counts = np.unique(np.searchsorted(starts, places, side="right") - 1, return_counts=True)
        labels = [names[row] if row >= 0 else HEADER for row in rows.tolist()]
        return Counter(dict(zip(labels, counts.tolist(), strict=True)))


def _is_in(name: str, tensors: Collection[str]) -> bool:
    """Whether an entry of a header is of one of these tensors: a box, an interval, or a number may follow the name."""
    return any(name == each or (name.startswith(each) and name[len(each)] in "[{#") for each in tensors)


def _some(words: Sequence[str]) -> str:
    more = f", ... ({len(words)} in all)" if len(words) > SHOWN else ""
    return ", ".join(words[:SHOWN]) + more
