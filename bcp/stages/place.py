"""Destinations of the bytes of a chunk: memory to read into, and copies into tensors on any device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bcp.plan.columns import Ints
from bcp.plan.read.copies import Chunk, Copies, ZeroCopyReads
from bcp.runtime.device import SMALL_BYTES, Lanes, Mark
from bcp.stages.memcpy import block_of, bytes_at, bytes_row_of, move, torch_dtype, typed, written

__all__ = ["LoadBuffers"]


@dataclass(frozen=True, slots=True)
class LoadBuffers:
    """The tensors that a load fills, and which bytes of the checkpoint go where.

    Attributes:
        tensors: live memory, one a row of this rank's table.
        sizes: int64[n], bytes of an element of each.
        dtypes: for each of them, the dtype that was saved.
        address: int64[n], where they lie; 0 for those whose bytes cannot simply be written.
        copies: the copies of each chunk.
        straight: the same for chunks that are read to where they belong.
        lanes: where copies to devices are queued.
    """

    tensors: Sequence[torch.Tensor]
    sizes: Ints
    dtypes: Sequence[str]
    address: Ints
    copies: Copies
    straight: ZeroCopyReads
    lanes: Lanes

    def views(self, chunk: Chunk, start: int, stop: int) -> list[memoryview]:
        """View the destinations of bytes [start, stop) of a data section: a zero-copy chunk, and the bytes around it.

        They are about to be written, which the guard of a save that is under way learns now: it looks when it is done.

        Bytes without a target go to memory of their own, which lives as long as the views.
        """
        runs, outs, offset = self.straight.of_chunk(chunk.number), [], start
        self._written(runs.row)
        columns = (runs.start, runs.nbytes, self.address[runs.row] + runs.to)
        for begin, nbytes, address in zip(*(column.tolist() for column in columns), strict=True):
            if offset < begin:
                outs.append(_nowhere(begin - offset))
            outs.append(bytes_at(address, nbytes))
            offset = begin + nbytes
        if offset < stop:
            outs.append(_nowhere(stop - offset))
        return outs

    def filled(self, chunk: Chunk) -> int:
        """Return how many bytes of tensors a straight chunk fills."""
        return int(self.straight.of_chunk(chunk.number).nbytes.sum())

    def place(self, chunk: Chunk, data: torch.Tensor) -> tuple[int, Mark]:
        """Copy the wanted bytes of a chunk: uint8, in host memory or on a device of the lanes.

        Returns:
            How many bytes were put into tensors, and when the copies are done: ``data`` has to stay until then.

        """
        copies, indices = self.copies, self.copies.of_chunk(chunk.number)
        self._written(copies.row[indices])  # first, as above
        # Row by row as bytes, blocks of many rows would take longer: 2 GB/s for rows of 4 KiB, where torch does 4.
        raw = (copies.run[indices] == copies.numel[indices]) & (self.address[copies.row[indices]] > 0)
        if raw.any():
            self._into_host(indices[raw], data, chunk.start)
        with torch.no_grad(), self.lanes.opened():
            for group in self._groups(indices[~raw]):
                if len(group) > 1:
                    self._together(group, data, chunk.start)
                else:
                    self._alone(int(group[0]), data, chunk.start)
            return self._nbytes(indices), self.lanes.mark()

    def _into_host(self, rows: Ints, data: torch.Tensor, start: int) -> None:
        """Copy runs of bytes by memcpy."""
        if not data.is_cpu:
            with self.lanes.opened():
                data = data.cpu()
        runs = self.copies.runs(rows)
        move(self.address[runs.row] + runs.to, data.data_ptr() + runs.start - start, runs.nbytes)

    def _groups(self, rest: Ints) -> Iterator[Ints]:
        """Group small neighbours of one device; all others stay alone."""
        places, sizes = self._places(rest), self.copies.itemsize[rest]
        firsts = self.copies.source.take(rest).position(np.zeros_like(rest))  # the wanted part may begin later
        starts = self.copies.start[rest] + firsts * sizes
        gaps = starts[1:] - (starts + self.copies.run[rest] * sizes)[:-1]
        near, begin = ((gaps >= 0) & (gaps <= SMALL_BYTES)).tolist(), 0
        for index in range(1, len(rest)):
            if places[index] is None or places[index] != places[index - 1] or not near[index - 1]:
                yield rest[begin:index]
                begin = index
        if len(rest):
            yield rest[begin:]

    def _places(self, rest: Ints) -> list[torch.device | None]:
        """Return the device of each copy; None for large copies, conversions, and several runs of bytes."""
        copies, rows = self.copies, self.copies.row[rest].tolist()
        small = (copies.run[rest] * copies.itemsize[rest] < SMALL_BYTES) & (copies.run[rest] == copies.numel[rest])
        dtypes = {name: torch_dtype(name) for name in {self.dtypes[row] for row in rows}}
        candidates = zip(map(self.tensors.__getitem__, rows), (dtypes[self.dtypes[row]] for row in rows), strict=True)
        return [
            tensor.device if is_small and tensor.dtype is dtype and _is_flat(tensor) else None
            for is_small, (tensor, dtype) in zip(small.tolist(), candidates, strict=True)
        ]

    def _together(self, group: Ints, data: torch.Tensor, start: int) -> None:
        """Copy runs by one transfer to their device, and from there by few calls."""
        runs, device = self.copies.runs(group), self.tensors[int(self.copies.row[group[0]])].device
        first, stop = int(runs.start[0]), int(runs.start[-1] + runs.nbytes[-1])
        gaps = np.diff(runs.start, append=stop) - runs.nbytes
        device_bytes = data[first - start : stop - start].to(device, non_blocking=True)
        sources = device_bytes.split(np.stack([runs.nbytes, gaps], axis=1).ravel().tolist())[::2]
        targets = []
        for row, to, nbytes in zip(runs.row.tolist(), runs.to.tolist(), runs.nbytes.tolist(), strict=True):
            flat = bytes_row_of(self.tensors[row])
            targets.append(flat if nbytes == len(flat) else flat[to : to + nbytes])
        torch._foreach_copy_(targets, sources, non_blocking=True)

    def _alone(self, copy: int, data: torch.Tensor, start: int) -> None:
        """Copy one block by torch, which converts, knows strides, and reaches other devices."""
        row, block = int(self.copies.row[copy]), self.copies.block(copy)
        dtype, target = torch_dtype(self.dtypes[row]), self.tensors[row].detach()
        source = typed(data, int(self.copies.start[copy]) - start, block.source_lengths, dtype)
        if target.shape != block.target_lengths:  # a flat shard
            first = int(self.copies.first[copy])
            target = target[first : first + math.prod(block.target_lengths)].view(block.target_lengths)
        block_of(target, block.target).copy_(block_of(source, block.source), non_blocking=True)

    def _nbytes(self, indices: Ints) -> int:
        return int((self.copies.numel[indices] * self.sizes[self.copies.row[indices]]).sum())

    def _written(self, rows: Ints) -> None:
        written([self.tensors[row] for row in set(rows.tolist())])


def _nowhere(nbytes: int) -> memoryview:
    return memoryview(np.empty(nbytes, np.uint8).data)


def _is_flat(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor has its values as they are, in row-major order."""
    return tensor.is_contiguous() and not tensor.is_complex() and not tensor.is_neg()
