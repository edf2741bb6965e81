"""Two open checkpoints: their common tensors, and one tour through the receipts of both.

The tour reads every receipt once. It finds values and objects that differ, and in checkpoints of one layout the byte
ranges with other checksums.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain
from typing import TypeVar

import numpy as np

from bcp._messages.tools import Compared, Counted, ObjectSides, ValueSides
from bcp.errors import FqnMismatchError
from bcp.format.container import digest
from bcp.format.receipt import FileReceipt, Receipt
from bcp.pipeline import unwrap_stage_errors
from bcp.plan.box import Box
from bcp.plan.layout import resolve
from bcp.plan.read.reads import ReadRequest, wants
from bcp.plan.shards import KINDS, OPAQUE_KINDS, ShardRow, ShardTable
from bcp.protocols import ObjectKey
from bcp.read.contents import TensorInfo, Tensors
from bcp.read.receipts import RANKS_AT_ONCE, fetch_receipts, file_of
from bcp.read.shares import Share
from bcp.read.source import Source
from bcp.runtime.process import cached_property
from bcp.runtime.threads import in_thread_gc_paused

__all__ = ["ALL", "ByteRange", "Pair", "joined", "larger"]

RANGE_BYTES = 8 << 20
"""Most bytes of a range: neighbouring blocks are read at once."""

ALL = "*"

T = TypeVar("T", str, bytes)


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes that may differ between two checkpoints of one layout.

    Attributes:
        first: key and receipt of the file in the first checkpoint.
        second: the same in the second one.
        start: first byte in the data section.
        stop: one past the last.
        pieces: the tensors with bytes in the range: row in the layout, first byte in the data section, and one past the
            last.
    """

    first: tuple[str, FileReceipt]
    second: tuple[str, FileReceipt]
    start: int
    stop: int
    pieces: tuple[tuple[int, int, int], ...]


@dataclass(slots=True)
class _Owned:
    """The contents of a saving rank's files that are compared by its receipt."""

    values: list[ObjectKey] = field(default_factory=list)
    objects: list[int] = field(default_factory=list)  # codes of kinds
    files: list[tuple[int, int, int]] = field(default_factory=list)  # row in the layout, kind, bytes of data


class Pair:
    """Two open checkpoints, and the names that are compared."""

    def __init__(self, a: Source, b: Source, glob: str) -> None:
        self.both = a, b
        self._glob = glob
        self._tensors = Tensors(a.metadata.layout), Tensors(b.metadata.layout)
        plain = all(each.metadata.foreign is None and not each.metadata.commit.codecs for each in self.both)
        self.is_one_layout = plain and a.metadata.layout is b.metadata.layout
        self.names = [{key for key in tensors if fnmatchcase(key[1], glob)} for tensors in self._tensors]

    def __str__(self) -> str:
        one, two = (f"{source.path} of operation {source.metadata.commit.operation}" for source in self.both)
        return f"{one}, {two} and glob={self._glob!r}"

    def check_names(self) -> None:
        """Raise FqnMismatchError for a pattern without a tensor or value."""
        if self._glob != ALL and not any(self.names) and not any(self._values(source) for source in self.both):
            paths = " and ".join(source.path for source in self.both)
            raise FqnMismatchError(f"{paths} have no tensor and no value that matches glob={self._glob!r}")

    def _values(self, source: Source) -> dict[ObjectKey, int]:
        """Return the rows of the values that are compared."""
        objects = enumerate(source.metadata.layout.objects)
        return {key: row for row, key in objects if key[0] not in OPAQUE_KINDS and fnmatchcase(key[1], self._glob)}

    @cached_property
    def common(self) -> list[tuple[TensorInfo, TensorInfo, tuple[int, int]]]:
        """The tensors of both checkpoints, each with the rows in the layouts that have its data."""
        layouts = [source.metadata.layout for source in self.both]
        found = []
        for key in sorted(self.names[0] & self.names[1]):
            rows = [tensors.row(*key) or 0 for tensors in self._tensors]
            one, two = (tensors.info(row) for tensors, row in zip(self._tensors, rows, strict=True))
            stored = [resolve(layout, row) for layout, row in zip(layouts, rows, strict=True)]
            found.append((one, two, (stored[0], stored[1])))
        return found

    @cached_property
    def comparable(self) -> list[tuple[int, int]]:
        """Rows in both layouts of the data of tensors with equal shapes and dtypes, each pair once."""
        rows = (rows for one, two, rows in self.common if (one.dtype, one.shape) == (two.dtype, two.shape))
        return list(dict.fromkeys(rows))

    # -- the tour ------------------------------------------------------------------------------------

    async def tour(self, share: Share) -> tuple[Compared, list[ByteRange]]:
        """Read the receipts of a share; return values and objects that may differ, and byte ranges that do.

        A value that differs has one side here, if the other side is in the receipt of another rank.
        """
        places = await in_thread_gc_paused(self._places) if self.is_one_layout else None
        files = set() if places is None else set(places.file.tolist())
        owned = [self._owned(source, files) for source in self.both]
        found, ranges = [self._foreign(share)], []
        parts = list(share.parts(sorted({*owned[0], *owned[1]})))
        for first in range(0, len(parts), RANKS_AT_ONCE):
            some = parts[first : first + RANKS_AT_ONCE]
            receipts = [await self._receipts(at, [rank for rank, _ in some if rank in owned[at]]) for at in (0, 1)]
            for rank, part in some:
                sides = [at for at in (0, 1) if part.reader == 0 and rank in owned[at]]
                found += [self._sides(at, receipts[at][rank], owned[at][rank]) for at in sides]
                if places is not None and (own := owned[0][rank].files):
                    ranges += part.of(list(self._ranges(receipts[0][rank], receipts[1][rank], own, places)))
            found = [joined(found)]
        return joined(found), ranges

    def _owned(self, source: Source, files: Collection[int]) -> dict[int, _Owned]:
        """Return the contents of each rank that its receipt decides; ``files`` are rows of files with tensors."""
        layout = source.metadata.layout
        owned: dict[int, _Owned] = defaultdict(_Owned)
        if source.metadata.foreign is not None:
            return owned
        for key, row in self._values(source).items():
            owned[int(layout.object_rank[row])].values.append(key)
        if self._glob == ALL:  # opaque objects have no names
            pairs = set(zip(layout.extra_rank.tolist(), layout.extra_kind.tolist(), strict=True))
            for (kind, _), rank in zip(layout.objects, layout.object_rank.tolist(), strict=True):
                if kind in OPAQUE_KINDS:  # units of a data loader, which the ranks share
                    pairs.add((rank, KINDS.index(kind)))
            for rank, code in pairs:
                owned[rank].objects.append(code)
        columns = (layout.file_rank.tolist(), layout.file_kind.tolist(), layout.file_nbytes.tolist())
        for row, (rank, code, nbytes) in enumerate(zip(*columns, strict=True)):
            if row in files:
                owned[rank].files.append((row, code, nbytes))
        return owned

    async def _receipts(self, at: int, ranks: Sequence[int]) -> Mapping[int, Receipt]:
        """Read receipts of one of the two checkpoints. They are kept only for a comparison tensor by tensor."""
        source = self.both[at]
        with unwrap_stage_errors():
            if self.is_one_layout:
                return await fetch_receipts(source.backend, source.metadata, ranks)
            return await source.read_receipts(ranks)

    def _sides(self, at: int, receipt: Receipt, owned: _Owned) -> Compared:
        """Return the values and objects of a receipt, as one side of a comparison."""
        metadata = self.both[at].metadata
        values = [(key, receipt.objects.get(key, "")) for key in owned.values]
        objects = [
            (kind, digest(b"".join(file_of(metadata, receipt, kind)[1].blocks.checksum))) for kind in owned.objects
        ]
        return Compared(
            values=tuple(ValueSides(*key, *_side(at, text, "")) for key, text in values),
            objects=tuple(ObjectSides(kind, receipt.rank, *_side(at, found, b"")) for kind, found in objects),
        )

    def _foreign(self, share: Share) -> Compared:
        """Return the values of files of other libraries, which have no receipts."""
        sides = [
            ValueSides(*key, *_side(at, source.value(row) or "", ""))
            for at, source in enumerate(self.both)
            if source.metadata.foreign is not None and share.reader == 0
            for key, row in self._values(source).items()
        ]
        return Compared(values=tuple(sides))

    # -- ranges of one layout ------------------------------------------------------------------------

    def _places(self) -> ReadRequest:
        """Return the bytes of all tensors that are compared, by file and byte."""
        layout = self.both[0].metadata.layout
        rows = sorted({row for row, _ in self.comparable})
        metas = [layout.tensors[row] for row in rows]
        table = ShardTable.build([ShardRow(meta, Box.whole(meta.shape)) for meta in metas])
        return wants(layout, table, np.array(rows, dtype=np.int64))

    def _ranges(
        self, one: Receipt, two: Receipt, files: Sequence[tuple[int, int, int]], places: ReadRequest
    ) -> Iterator[ByteRange]:
        """Yield the byte ranges of a rank's files whose blocks have other checksums, if they have tensors."""
        a, b = (source.metadata for source in self.both)
        for row, kind, nbytes in files:
            mine, theirs = file_of(a, one, kind, nbytes), file_of(b, two, kind, nbytes)
            for start, stop in _other_spans(mine[1], theirs[1]):
                if pieces := _inside(places, row, start, stop):
                    yield ByteRange(mine, theirs, start, stop, pieces)


def _side(at: int, own: T, none: T) -> tuple[T, T]:
    """Return both sides of a comparison, one of which is not known."""
    return (none, own) if at else (own, none)


def _other_spans(mine: FileReceipt, theirs: FileReceipt) -> Iterator[tuple[int, int]]:
    """Yield [start, stop) of the data section for neighbouring blocks with other checksums.

    Both files have equal blocks.
    """
    starts = np.maximum(mine.blocks.raw_start - mine.data_start, 0).tolist()
    stops = (mine.blocks.raw_start + mine.blocks.raw_length - mine.data_start).tolist()
    first = last = 0
    for start, stop, one, two in zip(starts, stops, mine.blocks.checksum, theirs.blocks.checksum, strict=True):
        if one == two or start >= stop:
            continue
        if start != last or stop - first > RANGE_BYTES:
            if first < last:
                yield first, last
            first = start
        last = stop
    if first < last:
        yield first, last


def _inside(places: ReadRequest, file: int, start: int, stop: int) -> tuple[tuple[int, int, int], ...]:
    """Return (row of the tensor, start, stop) for the tensors with bytes in a range of a file, cut to the range."""
    first, last = np.searchsorted(places.file, [file, file + 1])
    begin, end = places.start[first:last], places.stop[first:last]
    hits = first + np.flatnonzero((begin < stop) & (end > start))
    rows, begins, ends = (column[hits].tolist() for column in (places.tensor, places.start, places.stop))
    return tuple((row, max(one, start), min(two, stop)) for row, one, two in zip(rows, begins, ends, strict=True))


# -- findings --------------------------------------------------------------------------------------


def joined(found: Sequence[Compared]) -> Compared:
    """Join the findings of several shares. Values and objects leave with two equal sides."""
    values: dict[tuple[str, str], tuple[str, str]] = {}
    for value in chain.from_iterable(part.values for part in found):
        before, after = values.get((value.kind, value.name), ("", ""))
        values[value.kind, value.name] = value.before or before, value.after or after
    objects: dict[tuple[int, int], tuple[bytes, bytes]] = {}
    for each in chain.from_iterable(part.objects for part in found):
        old, new = objects.get((each.kind, each.rank), (b"", b""))
        objects[each.kind, each.rank] = each.before or old, each.after or new
    counts: dict[tuple[int, int], Counted] = {}
    for count in chain.from_iterable(part.counts for part in found):
        known = counts.get((count.row, count.other), Counted(count.row, count.other, 0, None))
        elements, largest = known.elements + count.elements, larger(known.largest, count.largest)
        counts[count.row, count.other] = Counted(count.row, count.other, elements, largest)
    return Compared(
        values=tuple(ValueSides(*key, *sides) for key, sides in sorted(values.items()) if sides[0] != sides[1]),
        objects=tuple(ObjectSides(*key, *sides) for key, sides in sorted(objects.items()) if sides[0] != sides[1]),
        counts=tuple(count for _, count in sorted(counts.items())),
        read_nbytes=sum(part.read_nbytes for part in found),
    )


def larger(one: float | None, two: float | None) -> float | None:
    """Return the larger of two distances: nan is the largest, and None is none.

    Example:
        >>> from bcp.tools.pairs import larger
        >>> larger(None, 1.0), larger(2.0, 1.0), larger(math.nan, 2.0)
        (1.0, 2.0, nan)

    """
    if one is None or two is None:
        return two if one is None else one
    return one if math.isnan(one) or one > two else two
