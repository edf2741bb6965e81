"""The bytes of a rank's own part of a live model: copied to host memory first, or taken from the live tensors.

A plan of a save divides the elements of the model among the ranks, each element to one of them. The part of a rank is
the data section of the file that it would write.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Protocol

import numpy as np
import torch

from bcp import _save as saving
from bcp._job import SaveJob
from bcp.pipeline import unwrap_stage_errors
from bcp.publication.encoding import Bytes
from bcp.runtime.device import Fence, accelerators, on_side_stream
from bcp.runtime.staging import pool_for
from bcp.stages.items import Blob, WriteItem
from bcp.stages.memcpy import flat_to_bytes
from bcp.stages.save import SaveContext, Staging, Writers, snapshot_graph

__all__ = ["CopiedShare", "LiveShare", "Share", "copied_share"]


class Share(Protocol):
    """The part of a rank."""

    def read_into(self, start: int, out: Bytes) -> None:
        """Copy the bytes of the data section from ``start`` on; blocks."""


class LiveShare:
    """The part of a rank in its live tensors, which nobody changes meanwhile.

    Args:
        items: the parts of the file.
        fence: work of the devices that copies wait for.

    """

    def __init__(self, items: Sequence[WriteItem], fence: Fence) -> None:
        self._fence = fence
        self._table = items[0].table if items else None
        self._tensors = items[0].tensors if items else []
        head = len(items[0].header) if items else 0
        spans = [(item.part.columns, item.part.start - head) for item in items]
        columns = [np.vstack((columns[:3], columns[3:] + start)) for columns, start in spans]
        self._row, self._first, last, self._start = np.hstack(columns) if columns else np.empty((4, 0), np.int64)
        self._size = np.empty(0, np.int64)
        if self._table is not None:
            self._size = self._table.tensors.itemsize[self._table.tensor[self._row]]
        self._stop = self._start + (last - self._first) * self._size
        self._devices = accelerators(self._tensors)

    def read_into(self, start: int, out: Bytes) -> None:
        """Copy the bytes."""
        stop, target = start + len(out), torch.from_numpy(out)
        begin, end = np.searchsorted(self._stop, start, side="right"), np.searchsorted(self._start, stop)
        with torch.no_grad(), on_side_stream(self._devices, self._fence):
            for span in range(int(begin), int(end)):
                self._copy(span, start, stop, target)

    def _copy(self, span: int, start: int, stop: int, out: torch.Tensor) -> None:
        """Copy the bytes of one span that lie between ``start`` and ``stop``."""
        assert self._table is not None  # noqa: S101 -- for mypy: there is a span
        row, at, size = int(self._row[span]), int(self._start[span]), int(self._size[span])
        low, high = max(at, start), min(int(self._stop[span]), stop)
        base = int(self._first[span] - self._table.start[row])
        first, last = base + (low - at) // size, base + (high - at) // size
        flat_to_bytes(self._tensors[row].detach(), first, last, out[low - start : high - start])


class CopiedShare:
    """The part of a rank in host memory.

    Args:
        blobs: the parts of the file, in order.

    """

    def __init__(self, blobs: Sequence[Blob]) -> None:
        head = len(blobs[0].part.item.header) if blobs else 0
        self._parts = [np.frombuffer(blob.data, np.uint8) for blob in blobs]
        if blobs:
            self._parts[0] = self._parts[0][head:]
        self._ends = np.cumsum([len(part) for part in self._parts], dtype=np.int64)

    def read_into(self, start: int, out: Bytes) -> None:
        """Copy the bytes."""
        number, done = int(np.searchsorted(self._ends, start, side="right")), 0
        while done < len(out):
            part = self._parts[number]
            first = start + done - int(self._ends[number]) + len(part)
            data = part[first : first + len(out) - done]
            out[done : done + len(data)] = data
            done += len(data)
            number += 1


async def copied_share(
    job: SaveJob, items: Sequence[WriteItem], snapshot: saving.Snapshot, stack: AsyncExitStack
) -> CopiedShare:
    """Copy all parts to host memory, and let the caller go on.

    Args:
        job: the caller's.
        items: the parts of the file.
        snapshot: knows when the caller may go on.
        stack: gives the memory back.

    Raises:
        StateChangedError: a tensor was written to meanwhile.

    """
    budget = snapshot.lend(items)
    stack.callback(snapshot.release)
    borrowing = pool_for(snapshot.devices).borrowed(most=saving.pinned_nbytes(job.options))
    lease = await stack.enter_async_context(borrowing)
    context = SaveContext(
        Staging(lease), Writers(), saving.BLOCK_BYTES, snapshot.fence, len(items), snapshot.taken, copies_first=True
    )
    if not items:
        await snapshot.taken()
    with unwrap_stage_errors():
        graph = snapshot_graph(context, copy_workers=job.options.copy_workers)
        return CopiedShare(await graph.run(items, budget=budget, observe=job.watch))
