"""A sample of the memory of a snapshot: sees writes that autograd does not count."""

from __future__ import annotations

from collections.abc import Sequence
from operator import ne

import numpy as np
import torch

from bcp.errors import StateChangedError
from bcp.plan.columns import Ints, concat, matrix, spread
from bcp.protocols import LocalShards
from bcp.stages.memory import move

__all__ = ["BLOCK_BYTES", "Sample"]

BLOCK_BYTES = 64
"""One block is a cache line; reading less of it costs as much."""

MOST_BLOCKS = 8192
"""Blocks of one sample, shared evenly by the tensors. Reading so many from 2 GiB takes 1.4 ms in one thread."""

FEWEST, MOST = 2, 64
"""Blocks of one tensor. 20,000 tensors of two blocks each take 5.6 ms."""

ELEMENTS = 8
"""Elements of a tensor that is not contiguous, in place of one block."""

SHOWN = 5  # names in an error message


class Sample:
    """Blocks of every tensor of a snapshot in host memory, as they were at one moment.

    Up to ``MOST`` blocks lie at equal distances between the first and the last byte of a tensor; a small tensor is
    sampled whole. A write to all elements of a tensor is seen, as that of an optimizer step. A write that misses every
    block is not seen, and neither is one that stores the bits that are there already.

    Device memory is not sampled: reading it would compete with training for the device.
    """

    def __init__(self, shards: LocalShards, address: Ints) -> None:
        """Read the sample.

        Args:
            shards: the tensors of the snapshot.
            address: int64[n], address of each tensor's first byte, or 0 for those that are not contiguous host memory.

        """
        self._shards = shards
        few = min(max(MOST_BLOCKS // max(len(address), 1), FEWEST), MOST)
        pieces = [_blocks(address, shards.table.nbytes, few), _elements(shards.tensors, address, few * ELEMENTS)]
        self._row, self._at, self._nbytes = (concat(list(columns)) for columns in zip(*pieces, strict=True))
        self._rows = np.unique(self._row).tolist()
        known = zip(self._rows, address[self._rows].tolist(), strict=True)
        self._pointers = [at or shards.tensors[row].data_ptr() for row, at in known]
        self._begin = np.cumsum(self._nbytes) - self._nbytes
        self._data = self._read()

    def __repr__(self) -> str:
        return f"<Sample: {len(self._data)} bytes of {len(self._rows)} tensors>"

    def check(self, rank: int) -> None:
        """Read the same blocks again, and compare them.

        Raises:
            StateChangedError: a tensor has other bytes now, or other memory; names the first few.

        """
        now = self._pointers_now()
        if now != self._pointers:
            moved = [row for row, differs in zip(self._rows, map(ne, now, self._pointers), strict=True) if differs]
            raise StateChangedError(
                f"the memory of {self._names(moved)} was replaced on rank {rank} while its snapshot was being taken "
                "(moved to shared memory, or resized); do that before the save, or after the snapshot"
            )
        differs = np.flatnonzero(self._read() != self._data)
        if not len(differs):
            return
        pieces = np.searchsorted(self._begin, differs, side="right") - 1
        raise StateChangedError(
            f"{self._names(np.unique(self._row[pieces]).tolist())} changed on rank {rank} while its snapshot was being "
            "taken, by a write that torch does not count (through .data, numpy or a raw pointer); write after the "
            "snapshot: with snapshot='lazy' pass every optimizer in states['optimizer'], whose steps are then held "
            "back, or save with snapshot='eager'. guard=False takes the snapshot unchecked"
        )

    def _read(self) -> np.ndarray:
        data = np.empty(int(self._nbytes.sum()), np.uint8)
        move(data.ctypes.data + self._begin, self._at, self._nbytes)
        return data

    def _pointers_now(self) -> list[int]:
        return list(map(torch.Tensor.data_ptr, map(self._shards.tensors.__getitem__, self._rows)))

    def _names(self, rows: Sequence[int]) -> str:
        metas = list(map(self._shards.table.meta, rows[:SHOWN]))
        more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
        return ", ".join(f"{meta.kind} tensor {meta.fqn!r}" for meta in metas) + more


def _blocks(address: Ints, nbytes: Ints, few: int) -> tuple[Ints, Ints, Ints]:
    """Return row, address and length of the blocks of contiguous tensors."""
    rows = np.flatnonzero((address > 0) & (nbytes > 0))
    size = nbytes[rows]
    each, number = spread(count := np.minimum(-(-size // BLOCK_BYTES), few))
    length = np.minimum(size, BLOCK_BYTES)
    at = (size - length)[each] * number // np.maximum(count - 1, 1)[each]
    return rows[each], address[rows][each] + at, length[each]


def _elements(tensors: Sequence[torch.Tensor], address: Ints, few: int) -> tuple[Ints, Ints, Ints]:
    """Return row, address and length of single elements of all other tensors in host memory.

    Bytes between the elements may belong to others.
    """
    rows = np.array([row for row in np.flatnonzero(address == 0).tolist() if _in_host_memory(tensors[row])], np.int64)
    mine = list(map(tensors.__getitem__, rows.tolist()))
    width = max((tensor.dim() for tensor in mine), default=0)
    length, stride = matrix([t.shape for t in mine], width, 1), matrix([t.stride() for t in mine], width, 0)
    total, size = length.prod(axis=1), np.array([tensor.itemsize for tensor in mine], np.int64)
    each, number = spread(count := np.minimum(total, few))
    element, at = (total - 1)[each] * number // np.maximum(count - 1, 1)[each], np.zeros_like(each)
    for dim in reversed(range(width)):
        element, index = np.divmod(element, length[each, dim])
        at += index * stride[each, dim]
    base = np.array([tensor.data_ptr() for tensor in mine], np.int64)
    return rows[each], base[each] + at * size[each], size[each]


def _in_host_memory(tensor: torch.Tensor) -> bool:
    kind = type(tensor)
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and tensor.numel() > 0
    )
