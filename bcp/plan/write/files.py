"""The data files of one rank: their safetensors headers, and the parts that go through the save pipeline.

Any safetensors reader opens a data file. Its header is eight bytes of length (little-endian), then JSON, padded with
spaces so that the data section starts at a multiple of 4096.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bcp.errors import InputError
from bcp.plan.box import Box, flat_boxes
from bcp.plan.columns import Ints
from bcp.plan.shards import KINDS, ShardTable, TensorMeta
from bcp.plan.write.divide import Writes
from bcp.runtime.process import cached_property

__all__ = ["DTYPE_CODES", "DataFile", "HeaderEntry", "Part", "PartInterval", "data_files", "entry", "framed", "header"]

ALIGNMENT = 4096
"""Bytes; the data section starts at a multiple of it, so that blocks of it can be written with O_DIRECT."""

DTYPE_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
}
"""Safetensors' names of torch's dtypes."""


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor of a safetensors file."""

    name: str  # its key in the file
    dtype: str  # torch's name without the ``torch.``
    shape: tuple[int, ...]  # its shape in this file
    nbytes: int


def header(entries: Sequence[HeaderEntry], metadata: Mapping[str, str]) -> bytes:
    """Return everything that comes before the data section.

    Entries are packed in the given order. A tensor whose dtype has no code in safetensors is stored as bytes (``U8``,
    one dimension). Its dtype is noted in ``__metadata__`` under ``bcp.dtype.<entry name>``. An entry whose name is
    taken is renamed ``<name>#2``, ``#3`` ...
    """
    notes = dict(metadata)
    table: dict[str, object] = {"__metadata__": notes}  # an entry of that name is renamed as well
    offset = 0
    for header_entry in entries:
        name = _free_name(header_entry.name, table)
        code, shape = DTYPE_CODES.get(header_entry.dtype), header_entry.shape
        if code is None:
            code, shape = "U8", (header_entry.nbytes,)
            notes[f"bcp.dtype.{name}"] = header_entry.dtype
        table[name] = {"dtype": code, "shape": shape, "data_offsets": (offset, offset + header_entry.nbytes)}
        offset += header_entry.nbytes
    return framed(table, ALIGNMENT)


def framed(table: Mapping[str, object], alignment: int) -> bytes:
    """Return the bytes of a header; the data section behind them starts at a multiple of ``alignment``."""
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % alignment)
    return len(text).to_bytes(8, "little") + text


def entry(tensor: TensorMeta, box: Box, start: int, stop: int) -> HeaderEntry:
    """Return the entry of the elements [start, stop) of a box of a tensor.

    The whole tensor is named ``fqn``. A block of it is named ``fqn[0:4,8:16]``, also if it is a flat interval of the
    box. Any other interval is named after the box and itself: ``fqn[0:4,8:16]{5:17}``.
    """
    block = _block(box, start, stop)
    part = f"{_slices(box)}{{{start}:{stop}}}" if block is None else _slices(block)
    return HeaderEntry(
        name=tensor.fqn if block == Box.whole(tensor.shape) else tensor.fqn + part,
        dtype=tensor.dtype,
        shape=(stop - start,) if block is None else block.lengths,
        nbytes=(stop - start) * tensor.itemsize,
    )


def _block(box: Box, start: int, stop: int) -> Box | None:
    """Return the flat interval as a block in global coordinates, or None if it is not one."""
    if (start, stop) == (0, box.numel):
        return box
    blocks = [block for _, block in flat_boxes(box.lengths, start, stop)]
    if len(blocks) != 1:
        return None
    offsets = tuple(low + inner for low, inner in zip(box.offsets, blocks[0].offsets, strict=True))
    return Box(offsets, blocks[0].lengths)


def _slices(box: Box) -> str:
    """Write a box as slices."""
    ranges = (f"{low}:{low + n}" for low, n in zip(box.offsets, box.lengths, strict=True))
    return f"[{','.join(ranges)}]"


def _free_name(name: str, taken: Mapping[str, object]) -> str:
    """Return the name, numbered if it is taken."""
    free, number = name, 2
    while free in taken:
        free, number = f"{name}#{number}", number + 1
    return free


@dataclass(frozen=True, slots=True)
class PartInterval:
    """A run of elements that one part takes from one shard."""

    row: int  # row in the rank's shard table
    start: int  # first flat element, counted in the row's box
    stop: int  # one past the last
    at: int  # byte of the part at which the first element goes; a multiple of the element's size


@dataclass(frozen=True)  # no slots: cached_property
class Part:
    """A byte range of one data file: one item of the save pipeline."""

    kind: str  # one of :data:`~bcp.plan.shards.KINDS`
    index: int  # 0, 1, 2 ... in file order
    start: int  # first byte in the file; 0 for part 0, which begins with the file's header
    stop: int  # one past the last
    # the intervals that fill it, in order and without holes; after the header in part 0
    spans: tuple[PartInterval, ...]
    name: str  # for people: kind, number, first tensor and how many more

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
    """One data file that this rank writes."""

    kind: str  # one of :data:`~bcp.plan.shards.KINDS`; a rank has one file a kind
    header: bytes  # the safetensors header; the data section starts at its end
    nbytes: int  # bytes of the whole file
    parts: tuple[Part, ...]  # tile the file, in order


def data_files(table: ShardTable, writes: Writes, *, rank: int, part_bytes: int) -> list[DataFile]:
    """Lay out the files that a rank writes, in the order of :data:`~bcp.plan.shards.KINDS`.

    A large tensor spans several parts and small ones share one; no element straddles two. Each part has ``part_bytes``
    bytes of data; the last part of a file may be smaller. The headers note the rank.

    Raises InputError if ``part_bytes`` is not a positive multiple of 4096.
    """
    if part_bytes <= 0 or part_bytes % ALIGNMENT:
        raise InputError(f"part_bytes={part_bytes} must be a positive multiple of {ALIGNMENT}; round it")
    kinds = table.tensors.kind[table.tensor[writes.row]]
    files = []
    for code in np.unique(kinds).tolist():
        in_kind = kinds == code
        chosen = Writes(writes.row[in_kind], writes.start[in_kind], writes.stop[in_kind], writes.offset[in_kind])
        files.append(_data_file(table, chosen, {"bcp.kind": KINDS[code], "bcp.rank": str(rank)}, part_bytes))
    return files


def _data_file(table: ShardTable, writes: Writes, notes: Mapping[str, str], part_bytes: int) -> DataFile:
    """Lay out one file; ``writes`` are all of its kind."""
    rows = list(zip(writes.row.tolist(), writes.start.tolist(), writes.stop.tolist(), strict=True))
    entries = _entries(table, writes)
    head = header(entries, {"format": "pt", **notes})
    nbytes = sum(header_entry.nbytes for header_entry in entries)
    spans: list[list[PartInterval]] = [[] for _ in range(-(-nbytes // part_bytes))]
    for (row, start, stop), header_entry, offset in zip(rows, entries, writes.offset.tolist(), strict=True):
        itemsize = header_entry.nbytes // (stop - start)
        for index, first, last, place in _spread(start, stop, offset, itemsize, part_bytes):
            spans[index].append(PartInterval(row, first, last, place if index else place + len(head)))
    kind = notes["bcp.kind"]
    parts = tuple(
        Part(
            kind=kind,
            index=index,
            start=len(head) + index * part_bytes if index else 0,
            stop=len(head) + min((index + 1) * part_bytes, nbytes),
            spans=tuple(part_spans),
            name=_name(table, kind, index, part_spans),
        )
        for index, part_spans in enumerate(spans)
    )
    return DataFile(kind, head, len(head) + nbytes, parts)


def _entries(table: ShardTable, writes: Writes) -> list[HeaderEntry]:
    """Return the header entries of the writes. Those of whole tensors, most of 20,000 as a rule, need no boxes."""
    row, tensors = writes.row, table.tensors
    tensor, length = table.tensor[row], table.length[row]
    whole = (writes.start == 0) & (writes.stop == length.prod(axis=1)) & (length == tensors.shape[tensor]).all(axis=1)
    count, shape, ndim = (writes.stop - writes.start).tolist(), tensors.shape.tolist(), tensors.ndim.tolist()
    itemsize = tensors.itemsize.tolist()
    return [
        HeaderEntry(
            tensors.fqn[tensor_row],
            tensors.dtype[tensor_row],
            tuple(shape[tensor_row][: ndim[tensor_row]]),
            count[index] * itemsize[tensor_row],
        )
        if is_whole
        else entry(
            table.meta(int(row[index])), table.box(int(row[index])), int(writes.start[index]), int(writes.stop[index])
        )
        for index, (tensor_row, is_whole) in enumerate(zip(tensor.tolist(), whole.tolist(), strict=True))
    ]


def _spread(start: int, stop: int, offset: int, itemsize: int, part_bytes: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut elements, placed in the data section, at the parts' boundaries: part number, first, last + 1, place in it."""
    while start < stop:
        index, place = divmod(offset, part_bytes)
        count = min(stop - start, (part_bytes - place) // itemsize)
        yield index, start, start + count, place
        start, offset = start + count, offset + count * itemsize


def _name(table: ShardTable, kind: str, index: int, spans: Sequence[PartInterval]) -> str:
    """Name a part for people, as in ``model part 3: layers.0.weight and 2 more``."""
    tensors = dict.fromkeys(int(table.tensor[span.row]) for span in spans)
    first = table.tensors.fqn[next(iter(tensors))]
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return f"{kind} part {index}: {first}{more}"
