"""A rank's data files, cut into the parts that go through the save pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bcp.errors import InputError
from bcp.plan.columns import Ints
from bcp.plan.save.header import ALIGNMENT, Entry, entry, header
from bcp.plan.save.writes import Writes
from bcp.plan.shards import KINDS, ShardTable

__all__ = ["DataFile", "Part", "Span", "data_files"]


@dataclass(frozen=True, slots=True)
class Span:
    """A run of elements that one part takes from one shard.

    Attributes:
        row: row in the rank's shard table.
        start: first flat element, counted in the row's box.
        stop: one past the last.
        at: byte of the part at which the first element goes; a multiple of the element's size.
    """

    row: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True)  # no slots: cached_property
class Part:
    """A byte range of one data file: what one item of the save pipeline carries.

    Attributes:
        kind: one of :data:`~bcp.plan.shards.KINDS`.
        index: 0, 1, 2 ... in file order.
        start: first byte in the file; 0 for part 0, which begins with the file's header.
        stop: one past the last.
        spans: what fills it, in order and without holes; after the header in part 0.
        name: for people: kind, number, first tensor and how many more.
    """

    kind: str
    index: int
    start: int
    stop: int
    spans: tuple[Span, ...]
    name: str

    @property
    def nbytes(self) -> int:
        """Bytes of the part, header included."""
        return self.stop - self.start

    @cached_property
    def columns(self) -> Ints:
        """int64[4, n]: row, start, stop and at of the spans."""
        spans = [(span.row, span.start, span.stop, span.at) for span in self.spans]
        return np.array(spans, np.int64).reshape(-1, 4).T.copy()


@dataclass(frozen=True, slots=True)
class DataFile:
    """One data file that this rank writes.

    Attributes:
        kind: one of :data:`~bcp.plan.shards.KINDS`; a rank has one file a kind.
        header: the safetensors header; the data section starts at its end.
        nbytes: bytes of the whole file.
        parts: tile the file, in order.
    """

    kind: str
    header: bytes
    nbytes: int
    parts: tuple[Part, ...]


def data_files(table: ShardTable, writes: Writes, *, rank: int, part_bytes: int) -> list[DataFile]:
    """Lay out the files that a rank writes, in the order of :data:`~bcp.plan.shards.KINDS`.

    A large tensor spans several parts and small ones share one; no element straddles two.

    Args:
        table: what the rank holds.
        writes: what it has to write of that.
        rank: this rank; noted in the headers.
        part_bytes: bytes of data in a part, a multiple of 4096; the last part of a file may be smaller.

    Raises:
        InputError: ``part_bytes`` is not a positive multiple of 4096.

    """
    if part_bytes <= 0 or part_bytes % ALIGNMENT:
        raise InputError(f"part_bytes={part_bytes} must be a positive multiple of {ALIGNMENT}; round it")
    kinds = table.tensors.kind[table.tensor[writes.row]]
    files = []
    for code in np.unique(kinds).tolist():
        mine = kinds == code
        chosen = Writes(writes.row[mine], writes.start[mine], writes.stop[mine], writes.offset[mine])
        files.append(_data_file(table, chosen, {"bcp.kind": KINDS[code], "bcp.rank": str(rank)}, part_bytes))
    return files


def _data_file(table: ShardTable, writes: Writes, notes: Mapping[str, str], part_bytes: int) -> DataFile:
    """Lay out one file; ``writes`` are all of its kind."""
    rows = list(zip(writes.row.tolist(), writes.start.tolist(), writes.stop.tolist(), strict=True))
    entries = _entries(table, writes)
    head = header(entries, {"format": "pt", **notes})
    nbytes = sum(one.nbytes for one in entries)
    spans: list[list[Span]] = [[] for _ in range(-(-nbytes // part_bytes))]
    for (row, start, stop), one, offset in zip(rows, entries, writes.offset.tolist(), strict=True):
        itemsize = one.nbytes // (stop - start)
        for index, first, last, at in _spread(start, stop, offset, itemsize, part_bytes):
            spans[index].append(Span(row, first, last, at if index else at + len(head)))
    kind = notes["bcp.kind"]
    parts = tuple(
        Part(
            kind=kind,
            index=index,
            start=len(head) + index * part_bytes if index else 0,
            stop=len(head) + min((index + 1) * part_bytes, nbytes),
            spans=tuple(mine),
            name=_name(table, kind, index, mine),
        )
        for index, mine in enumerate(spans)
    )
    return DataFile(kind, head, len(head) + nbytes, parts)


def _entries(table: ShardTable, writes: Writes) -> list[Entry]:
    """Return the entries of what is written. Those of whole tensors, most of 20,000 as a rule, need no boxes."""
    row, tensors = writes.row, table.tensors
    tensor, length = table.tensor[row], table.length[row]
    whole = (writes.start == 0) & (writes.stop == length.prod(axis=1)) & (length == tensors.shape[tensor]).all(axis=1)
    count, shape, ndim = (writes.stop - writes.start).tolist(), tensors.shape.tolist(), tensors.ndim.tolist()
    itemsize = tensors.itemsize.tolist()
    return [
        Entry(tensors.fqn[of], tensors.dtype[of], tuple(shape[of][: ndim[of]]), count[at] * itemsize[of])
        if is_whole
        else entry(table.meta(int(row[at])), table.box(int(row[at])), int(writes.start[at]), int(writes.stop[at]))
        for at, (of, is_whole) in enumerate(zip(tensor.tolist(), whole.tolist(), strict=True))
    ]


def _spread(start: int, stop: int, offset: int, itemsize: int, part_bytes: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut elements, placed in the data section, at the parts' boundaries: part number, first, last + 1, place in it."""
    while start < stop:
        index, at = divmod(offset, part_bytes)
        count = min(stop - start, (part_bytes - at) // itemsize)
        yield index, start, start + count, at
        start, offset = start + count, offset + count * itemsize


def _name(table: ShardTable, kind: str, index: int, spans: Sequence[Span]) -> str:
    """Name a part for people, as in ``model part 3: layers.0.weight and 2 more``."""
    tensors = dict.fromkeys(int(table.tensor[span.row]) for span in spans)
    first = table.tensors.fqn[next(iter(tensors))]
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return f"{kind} part {index}: {first}{more}"
