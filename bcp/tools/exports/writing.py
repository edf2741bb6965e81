"""Write laid-out files: each part is read from the checkpoint, checksummed and stored, within a byte budget."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from bcp.pipeline import Budget, Pipeline, Stage, unwrap_stage_errors
from bcp.plan.shards import ShardRow, ShardTable
from bcp.protocols import Backend, LocalShards, PartWriter, at_once_of
from bcp.read.source import Source
from bcp.read.tensors import fill
from bcp.runtime.staging import Lease, pool_for
from bcp.runtime.threads import in_thread
from bcp.stages.memcpy import bytes_of, torch_dtype
from bcp.tools.exports.streamed import Elements, Fixed, Part, Sealed, TargetFile

__all__ = ["write_file"]

MIB = 1 << 20
PART_BYTES = 64 * MIB
"""The most bytes of a part. Smaller parts read blocks of the checkpoint twice more often, at their two ends."""

READERS = 2
"""Parts that are read at once. Each of them already reads several files at once."""


@dataclass(frozen=True, slots=True)
class _Filled:
    """A part with its bytes."""

    part: Part
    buffer: torch.Tensor  # uint8, borrowed; page-aligned, so that a disk takes it without a copy

    @property
    def memory(self) -> torch.Tensor:
        """The bytes of the part, uint8."""
        return self.buffer[: self.part.nbytes]


async def write_file(
    source: Source, backend: Backend, file: TargetFile, budget_bytes: int, told: Callable[[int], object]
) -> None:
    """Write a file in parts.

    Args:
        source: the open checkpoint.
        backend: where the file goes, under its key.
        file: the file.
        budget_bytes: memory for parts, and for bytes on their way into them.
        told: called with the number of bytes of elements after each part that was stored.

    Raises:
        CorruptError: a file of the checkpoint is missing or damaged.
        StorageError: storage failed.

    """
    part_bytes = max(min(budget_bytes // 8 // MIB * MIB, PART_BYTES), MIB)
    reader = _within(source, budget_bytes // 8)
    parts = list(file.parts(part_bytes))
    async with backend.open_write(file.key, file.nbytes) as writer, pool_for([]).borrowed(keep=False) as lease:
        begin: Pipeline[Part, Part] = Pipeline()
        graph = (
            begin.then(Stage("read", partial(_read, reader, lease), workers=READERS))
            .then(Stage("seal", _Seal(file), ordered=True))
            .then(Stage("write", partial(_write, writer, lease, told), workers=at_once_of(backend)))
        )
        with unwrap_stage_errors():
            await graph.run(parts, budget=Budget(budget_bytes * 3 // 4))


def _within(source: Source, budget_bytes: int) -> Source:
    """Return the checkpoint, to be read with so many bytes of staging memory."""
    options = source.options
    read_bytes = max(min(options.read_bytes, budget_bytes // 2 // MIB * MIB), MIB)
    return replace(source, options=replace(options, budget_bytes=max(budget_bytes, 1), read_bytes=read_bytes))


async def _read(source: Source, lease: Lease, part: Part) -> _Filled:
    """Fill a part, all but its sealed pieces."""
    filled = _Filled(part, await in_thread(lease.take, part.nbytes))
    memory = filled.memory
    metas, rows, saved, tensors = source.metadata.layout.tensors, [], [], []
    for piece in part.pieces:
        place, own = memory[part.within(piece)], part.of(piece)
        if isinstance(piece, Elements):
            first, last = own.start // piece.itemsize, own.stop // piece.itemsize
            rows.append(ShardRow(metas[piece.row], piece.box, first, last))
            saved.append(piece.row)
            tensors.append(place.view(torch_dtype(piece.dtype)))
        elif isinstance(piece, Fixed):
            bytes_of(place)[:] = memoryview(piece.data)[own]
    if rows:
        shards = LocalShards(ShardTable.build(rows), _shaped(rows, tensors))
        await fill(source, shards, np.array(list(dict.fromkeys(saved))))
    return filled


def _shaped(rows: list[ShardRow], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Give each tensor the shape of its box where it has all of the box."""
    return [
        tensor.view(row.box.lengths) if tensor.numel() == row.box.numel else tensor
        for row, tensor in zip(rows, tensors, strict=True)
    ]


class _Seal:
    """Computes checksums part by part, and with them the sealed pieces."""

    def __init__(self, file: TargetFile) -> None:
        self._checksums = [0] * file.checksums

    async def __call__(self, filled: _Filled) -> _Filled:
        if self._checksums:
            await in_thread(self._seal, filled)
        return filled

    def _seal(self, filled: _Filled) -> None:
        part, memory = filled.part, bytes_of(filled.memory)
        for piece in part.pieces:
            place = memory[part.within(piece)]
            if isinstance(piece, Elements):
                self._checksums[piece.number] = zlib.crc32(place, self._checksums[piece.number])
            elif isinstance(piece, Sealed):
                place[:] = piece.make(self._checksums)[part.of(piece)]


async def _write(writer: PartWriter, lease: Lease, told: Callable[[int], object], filled: _Filled) -> None:
    """Store a part, and tell how many bytes of elements it has."""
    part = filled.part
    await writer.write_part(part.index, part.start, bytes_of(filled.memory))
    lease.give(filled.buffer)
    spans = [part.within(piece) for piece in part.pieces if isinstance(piece, Elements)]
    told(sum(span.stop - span.start for span in spans))
