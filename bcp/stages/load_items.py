"""The nouns of a load: ReadItem -> Stored -> Loaded -> Loaded (placed) -> done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from bcp.plan.load.assign import Chunk
from bcp.receipt import FileReceipt
from bcp.stages.device import Mark

__all__ = ["Loaded", "ReadItem", "Stored"]


@dataclass(frozen=True)
class ReadItem:
    """One chunk of one data file to read, or this rank's place in a round in which it reads nothing.

    Attributes:
        name: file, byte range and first tensor.
        nbytes: what it takes from the byte budget.
        chunk: the range, and who needs it. None: only take part in the round.
        round: number of the all-to-all round; -1 for a chunk that nobody else needs.
        key: the data file, or "" where there is nothing to read.
        file: what its writer said of it; None where there is nothing to read.
        straight: whether it is read to where it belongs, without staging memory.
        room: bytes of staging memory to borrow, if that is more than what is read: a buffer can only be used again for
            a chunk that is about as long.
    """

    name: str
    nbytes: int
    chunk: Chunk | None
    round: int
    key: str
    file: FileReceipt | None
    straight: bool = False
    room: int = 0

    @cached_property
    def rows(self) -> slice:
        """Rows of the file's block table that have to be read; those of the header with the first data."""
        if self.chunk is None or self.file is None:
            return slice(0, 0)
        start = self.file.data_start + self.chunk.start if self.chunk.start else 0
        return self.file.covering(start, self.file.data_start + self.chunk.stop)

    @cached_property
    def stored_nbytes(self) -> int:
        """How many bytes they are in the stored file."""
        return 0 if self.file is None else int(self.file.blocks.stored_length[self.rows].sum())


@dataclass(frozen=True, slots=True)
class Stored:
    """Bytes as they were stored, not checked yet.

    Attributes:
        item: what was to be read.
        nbytes: how many bytes were read.
        outs: where they are, one piece behind the other: in staging memory, or in the tensors themselves.
        buffer: the staging memory; None where there is none.
    """

    item: ReadItem
    nbytes: int = 0
    outs: Sequence[memoryview] = ()
    buffer: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """Checked and decoded bytes of a chunk.

    Attributes:
        item: what was to be read.
        data: uint8, the data-section bytes of the chunk, no header; empty where nothing was to be read, and where the
            bytes are in the tensors already.
        buffer: the staging memory behind it; None where there is none.
        mark: when the copies out of it are done.
        sealed: the memory of ``data`` with the digest behind it, for other ranks; None for a chunk of this rank alone.
    """

    item: ReadItem
    data: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    buffer: torch.Tensor | None = None
    mark: Mark = field(default_factory=Mark)
    sealed: torch.Tensor | None = None

    @property
    def name(self) -> str:
        """File, byte range and first tensor."""
        return self.item.name
