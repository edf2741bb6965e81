"""The tensors of a checkpoint as its table of contents has them; no data is read, and torch is not imported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

import numpy as np

from bcp._text import printable
from bcp.format.metadata import Metadata
from bcp.plan.box import Box
from bcp.plan.columns import Ints
from bcp.plan.layout import Layout, find, resolve
from bcp.plan.read.reads import wants
from bcp.plan.shards import KINDS, ShardRow, ShardTable
from bcp.read.receipts import key_of

__all__ = ["Place", "TensorInfo", "Tensors", "places_of"]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint, as :attr:`bcp.Checkpoint.tensors` lists it.

    Attributes:
        kind: ``"model"`` or ``"optimizer"``.
        name: fully qualified name, unique within the kind.
        dtype: torch's name of the dtype, as in ``"bfloat16"``.
        shape: global shape, whatever the parallelism of the job that saved it; ``()`` for a scalar.
        nbytes: bytes of its elements. A tied tensor has them, too, though they are stored once.
        tied_to: the tensor whose data this one shares; "" if it has data of its own.
        pieces: the number of boxes that it was saved in; 1 for a tensor that was saved whole.

    Example:
        >>> bcp.Checkpoint("ckpt/step-100")["weight"]
        model: weight float32[8, 8]

    """

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    tied_to: str
    pieces: int

    @property
    def type_words(self) -> str:
        """Dtype and shape in words, as in ``"float32[2, 4]"``."""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    def __repr__(self) -> str:
        tied = f" tied to {self.tied_to}" if self.tied_to else ""
        pieces = f" in {self.pieces} pieces" if self.pieces > 1 else ""
        return printable(f"{self.kind}: {self.name} {self.type_words}{tied}{pieces}")


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of a tensor that lie side by side in a file, as :meth:`bcp.Checkpoint.places` returns them.

    Attributes:
        box: the block of the global tensor that the bytes belong to.
        first: the first of these elements, as a flat, row-major position in the box.
        key: the file, relative to the checkpoint.
        start: first byte, counted from the start of the file's data section; in a file of another library from its
            start.
        stop: one past the last.
    """

    box: Box
    first: int
    key: str
    start: int
    stop: int


class Tensors(Mapping[tuple[str, str], TensorInfo]):
    """The tensors of a layout by (kind, name), in the order of both. Records are made when they are asked for."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._pieces: Ints = np.bincount(layout.box_tensor, minlength=len(layout.tensors))

    def __len__(self) -> int:
        return len(self._layout.tensors)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        tensors = self._layout.tensors
        return ((KINDS[kind], name) for kind, name in zip(tensors.kind.tolist(), tensors.fqn, strict=True))

    def __getitem__(self, key: tuple[str, str]) -> TensorInfo:
        row = self.row(*key) if isinstance(key, tuple) and len(key) == 2 else None  # noqa: PLR2004 -- kind and name
        if row is None:
            raise KeyError(key)
        return self.info(row)

    def row(self, kind: str, name: str) -> int | None:
        """Return the row of a tensor in the layout; None if the checkpoint lacks it."""
        return find(self._layout, kind, name) if kind in KINDS else None

    def info(self, row: int) -> TensorInfo:
        """Return the record of a row of the layout."""
        meta, layout = self._layout.tensors[row], self._layout
        leader = int(layout.leader[resolve(layout, row)])
        nbytes = prod(meta.shape) * meta.itemsize
        return TensorInfo(meta.kind, meta.fqn, meta.dtype, meta.shape, nbytes, meta.tied_to, int(self._pieces[leader]))

    def rows(self, kind: str | None = None, glob: str = "*") -> list[int]:
        """Return the rows whose kind and name match, in order."""
        tensors = self._layout.tensors
        code = None if kind is None else KINDS.index(kind)
        return [
            row
            for row, (has, name) in enumerate(zip(tensors.kind.tolist(), tensors.fqn, strict=True))
            if code in (None, has) and fnmatchcase(name, glob)
        ]


def places_of(metadata: Metadata, row: int) -> list[Place]:
    """Return the places of the tensor in a row of the layout, by file and byte. A tied tensor has those of the other.

    Raises CorruptError if elements are said to lie outside of their file.
    """
    layout = metadata.layout
    meta = layout.tensors[row]
    if 0 in meta.shape:
        return []
    table = ShardTable.build([ShardRow(meta, Box.whole(meta.shape))])
    reads, ndim = wants(layout, table, np.array([row])), len(meta.shape)
    base = 0 if metadata.foreign is None else metadata.foreign.base[reads.file]
    columns = (reads.box, reads.first, reads.file, reads.start + base, reads.stop + base)
    return [
        Place(
            Box(tuple(layout.offset[box, :ndim].tolist()), tuple(layout.length[box, :ndim].tolist())),
            first,
            key_of(metadata, file),
            start,
            stop,
        )
        for box, first, file, start, stop in zip(*(column.tolist() for column in columns), strict=True)
    ]
