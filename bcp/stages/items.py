"""The nouns of a load: ReadItem -> Stored -> Loaded -> Loaded (placed) -> done.

The nouns of a save: the items that flow between its stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from bcp.format.receipt import FileReceipt
from bcp.plan.columns import Ints
from bcp.plan.read.copies import Chunk
from bcp.plan.shards import ShardTable
from bcp.plan.write.files import Part
from bcp.protocols import Buffer
from bcp.runtime.device import Mark
from bcp.runtime.process import cached_property
from bcp.stages.memcpy import torch_dtype, typed

__all__ = ["Blob", "HostPart", "Loaded", "PartReceipt", "ReadItem", "Stored", "WriteItem"]


@dataclass(frozen=True, slots=True)
class WriteItem:
    """One part of one data file, not copied yet.

    Attributes:
        part: the byte range of the file, and which elements make it up.
        key: the data file.
        header: the safetensors header where this is the file's first part, else empty.
        table: the table whose rows the part's spans name.
        tensors: the live memory of those rows.
        address: int64[n], where each row's first byte is, or 0 where only torch can copy it.
        edges: bytes of the part at which a block of checksums ends, besides those at equal distances; ascending.
        is_steady: no code changes the tensors, so training need not wait for the copy.
    """

    part: Part
    key: str
    header: bytes
    table: ShardTable
    tensors: Sequence[torch.Tensor]
    address: Ints
    edges: tuple[int, ...] = ()
    is_steady: bool = False

    @property
    def name(self) -> str:
        """File, part number and the first tensor, for errors and events."""
        return self.part.name

    @property
    def nbytes(self) -> int:
        """Bytes of the part, header included: its share of the byte budget."""
        return self.part.nbytes


@dataclass(frozen=True)
class HostPart:
    """A part whose elements are in host memory: training may change the tensors again.

    A custom stage after ``d2h`` gets these. Writing to the tensors changes the saved values.

    Attributes:
        item: the part as it was planned.
        buffer: uint8, at least as long as the part; header and elements at their places.
    """

    item: WriteItem
    buffer: torch.Tensor

    @property
    def name(self) -> str:
        """File, part number and the first tensor."""
        return self.item.name

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return self.item.nbytes

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The staged elements: FQN to 1-D tensor.

        If a part holds only some of a tensor, the name carries the flat range inside the shard, as in ``w{0:1024}``.
        """
        return self._tensors

    @cached_property
    def _tensors(self) -> Mapping[str, torch.Tensor]:
        table, tensors = self.item.table, {}
        for span in self.item.part.spans:
            meta = table.meta(span.row)
            count = span.stop - span.start
            name = meta.fqn if count == _numel(meta.shape) else f"{meta.fqn}{{{span.start}:{span.stop}}}"
            while name in tensors:
                name += "'"
            tensors[name] = typed(self.buffer, span.at, (count,), torch_dtype(meta.dtype))
        return tensors

    @property
    def tensor(self) -> torch.Tensor:
        """All of the part's elements as one 1-D tensor; raw uint8 where the part mixes dtypes (see ``tensors``)."""
        spans = self.item.part.spans
        dtypes = {self.item.table.meta(span.row).dtype for span in spans}
        dtype = torch_dtype(dtypes.pop()) if len(dtypes) == 1 else torch.uint8
        first = len(self.item.header)
        return typed(self.buffer, first, ((self.nbytes - first) // dtype.itemsize,), dtype)


@dataclass(frozen=True, slots=True)
class Blob:
    """The bytes of a part as they will be stored.

    Attributes:
        part: the staged part; its buffer is given back once the bytes are stored.
        data: the bytes, encoded where codecs are used.
        start: where they go in the stored file; -1 until that is known (codecs change lengths).
        blocks: int64[n, 2], start and length of each block inside ``data`` that gets a checksum.
        checksums: one xxh3-128 digest a block, where they come before the storing.
        is_kept: bool[n], the blocks that an earlier checkpoint has, so that ``data`` has only the others; None for all
            blocks in ``data``.
        index: number of the stored part in its file; -1 for that of ``part``.
    """

    part: HostPart
    data: Buffer
    start: int
    blocks: np.ndarray
    checksums: tuple[bytes, ...] = ()
    is_kept: np.ndarray | None = None
    index: int = -1

    @property
    def name(self) -> str:
        """File, part number and the first tensor."""
        return self.part.name

    @property
    def nbytes(self) -> int:
        """Bytes to store."""
        return len(self.data)

    @property
    def planned_nbytes(self) -> int:
        """Bytes that the blocks to store have."""
        return int(self.blocks[-1].sum() if self.is_kept is None else self.blocks[~self.is_kept, 1].sum())


@dataclass(frozen=True, slots=True)
class PartReceipt:
    """The stored bytes of one part.

    Attributes:
        part: the part.
        stored_start: where its bytes begin in the stored file.
        stored_nbytes: how many they are.
        blocks: int64[n, 2], start and length of each block inside the stored bytes of the part.
        checksums: one xxh3-128 digest a block.
        is_kept: bool[n], the blocks that were not stored, because an earlier checkpoint has them; None for none.
    """

    part: Part
    stored_start: int
    stored_nbytes: int
    blocks: np.ndarray
    checksums: tuple[bytes, ...]
    is_kept: np.ndarray | None = None


def _numel(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


@dataclass(frozen=True)
class ReadItem:
    """One chunk of one data file to read, or this rank's place in a round in which it reads nothing.

    Attributes:
        name: file, byte range and first tensor.
        nbytes: bytes that it takes from the byte budget.
        chunk: the range, and who needs it. None: only take part in the round.
        round: number of the all-to-all round; -1 for a chunk that no other rank needs.
        key: the data file, or "" where there is nothing to read.
        file: its record in the writer's receipt; None if there is nothing to read.
        straight: whether it is read to where it belongs, without staging memory.
        room: bytes of staging memory to borrow, if more than the bytes to read: a buffer can only be used again for
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
        item: the chunk that was to be read.
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
        item: the chunk that was to be read.
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
