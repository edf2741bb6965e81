"""The memory that Arrow IPC streams take once they are decoded, read from their headers before anything is decoded.

A few kilobytes of zstd expand to gigabytes, and a column without buffers may claim any number of rows. So a file is
measured first, and one that would take more than :func:`most_decoded` allows is refused. Headers are flatbuffers; Arrow
has verified their offsets by the time that they are read here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from bcp.plan.columns import Ints

__all__ = ["check_decoded_size", "decoded_nbytes", "most_decoded"]

FLOOR_BYTES = 16 << 20
RATIO = 8192
"""FSDP over 8,192 ranks with 1,000 equal tensors has 6,800, the most found. Llama-3.1-405B has 14 to 21."""

VALUE_BYTES = 8
"""Numbers are widened to int64, and strings become Python objects: at least a pointer each."""

MOST_FIELDS = 256
"""Fields and pairs of metadata in one header. Flatbuffers may refer to one of them many times, at 4 bytes a time."""

MOST_TEXT_BYTES = 1 << 20
"""Names and metadata in one header, counted as often as they are referred to."""


def most_decoded(nbytes: int) -> int:
    """Return how many bytes a file of ``nbytes`` may take decoded: 16 MiB, and 8192 for each of its bytes."""
    return FLOOR_BYTES + RATIO * nbytes


def check_decoded_size(payload: memoryview, nbytes: int) -> None:
    """Check that the tables in a file are not larger than :func:`most_decoded` allows. Decodes nothing.

    Args:
        payload: Arrow IPC streams, one behind the other.
        nbytes: size of the whole file.

    Raises:
        ValueError, OSError, pa.ArrowException: they are larger, or no such streams.

    """
    found, most = decoded_nbytes(payload), most_decoded(nbytes)
    if found > most:
        raise ValueError(f"its {nbytes} bytes would take {found} bytes of memory decoded, more than {most}")


def decoded_nbytes(payload: memoryview) -> int:
    """Return the bytes of all buffers after decompression, and 8 for each value of each column and list.

    Raises the same as :func:`check_decoded_size`.
    """
    source, total = pa.BufferReader(pa.py_buffer(payload)), 0
    try:
        while source.tell() < len(payload):
            for message in pa.ipc.MessageReader.open_stream(source):
                total += _message_nbytes(message)
    except (struct.error, IndexError) as error:
        raise ValueError(f"the header of an Arrow message is damaged: {error}") from error
    return total


def _message_nbytes(message: pa.Message) -> int:
    """Return the decoded size of a schema, a dictionary or a record batch."""
    flat = _Flat(memoryview(message.metadata))
    root = flat.at(0)
    header = flat.table(root, 2)
    text = flat.text_nbytes(flat.tables(root, 4))
    if message.type == "schema":
        return text + flat.schema_nbytes(header)
    batch = flat.table(header, 1) if message.type == "dictionary" else header
    if message.type not in ("dictionary", "record batch") or not batch:
        raise ValueError(f"a message of type {message.type!r}")
    rows: list[int] = [flat.number(batch, 0), *flat.pairs(batch, 1)[:, 0].tolist()]
    buffers = list(_buffer_sizes(flat, batch, memoryview(message.body)))
    if min(rows + buffers) < 0:
        raise ValueError("a column of a negative length")
    return text + sum(buffers) + VALUE_BYTES * sum(rows)


def _buffer_sizes(flat: _Flat, batch: int, body: memoryview) -> Iterator[int]:
    """Yield the decoded size of each buffer; a compressed one has it in its first 8 bytes, -1 where it is not."""
    compressed = bool(flat.table(batch, 3))
    for start, nbytes in flat.pairs(batch, 2).tolist():
        if not compressed or not nbytes:
            yield nbytes
            continue
        (decoded,) = struct.unpack("<q", body[start : start + 8])
        yield nbytes - 8 if decoded == -1 else decoded


class _Flat:
    """A flatbuffer; positions are counted from its first byte, and 0 stands for what is not there."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._fields = self._text = 0

    def at(self, position: int) -> int:
        """Follow a reference."""
        return position + int(struct.unpack_from("<I", self._data, position)[0])

    def table(self, table: int, slot: int) -> int:
        """Return the table, vector or string in a slot of a table."""
        position = self._slot(table, slot)
        return self.at(position) if position else 0

    def number(self, table: int, slot: int) -> int:
        """Return the int64 in a slot of a table."""
        position = self._slot(table, slot)
        return int(struct.unpack_from("<q", self._data, position)[0]) if position else 0

    def pairs(self, table: int, slot: int) -> Ints:
        """Return a vector of pairs of int64."""
        vector = self.table(table, slot)
        count = self._length(vector) if vector else 0
        return np.frombuffer(self._data, "<i8", 2 * count, vector + 4).reshape(count, 2) if count else _NO_PAIRS

    def tables(self, table: int, slot: int) -> Iterator[int]:
        """Yield the tables of a vector; all that are ever yielded are counted."""
        vector = self.table(table, slot)
        for index in range(self._length(vector) if vector else 0):
            self._fields += 1
            if self._fields > MOST_FIELDS:
                raise ValueError(f"a header with more than {MOST_FIELDS} fields and pairs of metadata")
            yield self.at(vector + 4 + 4 * index)

    def text_nbytes(self, pairs: Iterator[int]) -> int:
        """Return the bytes of pairs of strings."""
        return sum(self._string(pair, 0) + self._string(pair, 1) for pair in pairs)

    def schema_nbytes(self, schema: int) -> int:
        """Return the bytes of all names and metadata of a schema."""
        return self.text_nbytes(self.tables(schema, 2)) + sum(map(self._field_nbytes, self.tables(schema, 1)))

    def _field_nbytes(self, field: int) -> int:
        inside = sum(map(self._field_nbytes, self.tables(field, 5)))
        return inside + self._string(field, 0) + self.text_nbytes(self.tables(field, 6))

    def _string(self, table: int, slot: int) -> int:
        string = self.table(table, slot)
        self._text += self._length(string) if string else 0
        if self._text > MOST_TEXT_BYTES:
            raise ValueError(f"a header with more than {MOST_TEXT_BYTES} bytes of names and metadata")
        return self._length(string) if string else 0

    def _length(self, vector: int) -> int:
        return int(struct.unpack_from("<I", self._data, vector)[0])

    def _slot(self, table: int, slot: int) -> int:
        """Return the position of a table's slot."""
        start = table - int(struct.unpack_from("<i", self._data, table)[0])
        (nbytes,) = struct.unpack_from("<H", self._data, start)
        at = 4 + 2 * slot
        offset = struct.unpack_from("<H", self._data, start + at)[0] if at + 2 <= nbytes else 0
        return table + offset if offset else 0


_NO_PAIRS: Ints = np.empty((0, 2), np.int64)
