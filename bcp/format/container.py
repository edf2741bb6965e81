"""The container of bcp's small files: named Arrow tables, one after the other, a checksum and a magic number.

::

    Arrow IPC stream | Arrow IPC stream | ... | xxh3-128 of all before, 16 bytes | magic, 7 bytes | version, 1 byte

Encoding is deterministic. Decoding trusts nothing: wrong types, missing values, and lengths that do not add up
are :class:`~bcp.errors.CorruptError`. ``docs/format.md`` specifies it.

A few kilobytes of zstd expand to gigabytes, and a column without buffers may claim any number of rows. So a file is
measured first, by its headers, and one that would take more than :func:`most_decoded` allows is refused. Headers are
flatbuffers; Arrow has verified their offsets by the time that they are read here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from bcp.errors import CorruptError, FormatVersionError, NotACheckpointError
from bcp.plan.arrow import arrow_array, numbers_of
from bcp.plan.columns import Ints

__all__ = [
    "DIGEST_BYTES",
    "GRID",
    "INT",
    "VERSION",
    "WORD",
    "Buffer",
    "check_counts",
    "counted",
    "decoded_nbytes",
    "digest",
    "encode_table",
    "encode_tables",
    "first_table",
    "fixed_bytes",
    "grid",
    "integers",
    "most_decoded",
    "read_table",
    "read_tables",
    "schema",
    "seal",
    "steps",
    "summed",
    "translated",
    "unseal",
    "values",
    "version_of",
]

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


def check_decoded_size(payload: memoryview, nbytes: int, first: int | None = None) -> None:
    """Check that the tables in a file of ``nbytes`` are not larger than :func:`most_decoded` allows. Decodes nothing.

    ``first`` is the count of the tables to check; None for all.

    Raises:
        ValueError, OSError, pa.ArrowException: they are larger, or no such streams.
    """
    decoded, most = decoded_nbytes(payload, first), most_decoded(nbytes)
    if decoded > most:
        raise ValueError(f"its {nbytes} bytes would take {decoded} bytes of memory decoded, more than {most}")


def decoded_nbytes(payload: memoryview, first: int | None = None) -> int:
    """Return the bytes of all buffers after decompression, and 8 for each value of each column and list.

    ``first`` is the count of the tables to look at; None for all.

    Raises the same as :func:`check_decoded_size`.
    """
    source, total = pa.BufferReader(pa.py_buffer(payload)), 0
    try:
        for _ in count() if first is None else range(first):
            if source.tell() >= len(payload):
                break
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
    """A flatbuffer; positions are counted from its first byte, and 0 stands for an absent value."""

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
        entry = 4 + 2 * slot
        offset = struct.unpack_from("<H", self._data, start + entry)[0] if entry + 2 <= nbytes else 0
        return table + offset if offset else 0


_NO_PAIRS: Ints = np.empty((0, 2), np.int64)


VERSION = 1
"""Version of the format, the last byte of every file; one that is not known is refused."""

DIGEST_BYTES = 16
TRAILER_BYTES = DIGEST_BYTES + 8
NAME_KEY = b"bcp.table"
HEAD_BYTES = 4096  # the first table's name is in the first few hundred bytes

INT = pa.int64()
"""A column of integers. It is stored in the narrowest of int8, int16, int32 and int64."""

GRID = pa.list_(pa.int64())
"""A column of as many integers in each row; stored as fixed-size lists, in the narrowest type."""

WORD = pa.dictionary(pa.int32(), pa.string())
"""A column of strings of which there are few."""

WIDTHS = (np.int8, np.int16, np.int32, np.int64)

RESTORE = "restore the file, or load another checkpoint"

Buffer = bytes | bytearray | memoryview


def digest(data: Buffer) -> bytes:
    """Return the xxh3-128 of the bytes: 16 bytes, big-endian (xxhash's canonical form)."""
    return xxhash.xxh3_128_digest(data)


# -- the frame ----------------------------------------------------------------------------------


def seal(payload: bytes, magic: bytes, version: int = VERSION) -> bytes:
    """Append checksum, magic number and version."""
    return b"".join((payload, digest(payload), magic, bytes([version])))


def version_of(data: Buffer) -> int:
    """Return the version of a sealed file."""
    return memoryview(data)[-1]


def unseal(data: Buffer, magic: bytes, where: str, first: int | None = None, newest: int = VERSION) -> memoryview:
    """Return the payload of a sealed file.

    Args:
        data: the file.
        magic: the magic number of its kind.
        where: its name for messages.
        first: count of the tables that the caller will decode, from the first one on; None for all.
        newest: the newest version that this bcp reads; it reads all from 1 on.

    Raises:
        NotACheckpointError: no bcp wrote this file.
        FormatVersionError: a bcp of another version of the format wrote it.
        CorruptError: it is truncated, its checksum does not match, or those tables would take too much memory.
    """
    view = memoryview(data)
    if bytes(view[-8:-1]) != magic:
        if not view or NAME_KEY in bytes(view[:HEAD_BYTES]):
            raise CorruptError(
                f"{where} is truncated: after {len(view)} bytes it ends without {magic.decode()}; {RESTORE}"
            )
        raise NotACheckpointError(
            f"{where} ({len(view)} bytes) was not written by bcp: no {magic.decode()} at its end; check the path"
        )
    if not VERSION <= view[-1] <= newest:
        known = f"version {VERSION}" if newest == VERSION else f"versions {VERSION} to {newest}"
        raise FormatVersionError(
            f"{where} is in version {view[-1]} of the format, this bcp reads {known}; use the bcp that wrote it, or a "
            "newer one"
        )
    payload = view[:-TRAILER_BYTES]
    stored, computed = bytes(view[-TRAILER_BYTES:-8]), digest(payload)
    if stored != computed:
        raise CorruptError(
            f"{where} ({len(view)} bytes) is corrupt: its checksum is {computed.hex()}, it should be {stored.hex()}; "
            f"{RESTORE}"
        )
    with translated(where):
        check_decoded_size(payload, len(view), first)
    return payload


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Raise errors of decoding as :class:`~bcp.errors.CorruptError` that names the file."""
    try:
        yield
    except (ValueError, OSError, RecursionError, pa.ArrowException) as error:
        raise CorruptError(f"{where} is corrupt: {error}; {RESTORE}") from error


# -- tables -------------------------------------------------------------------------------------


def schema(name: str, **columns: pa.DataType) -> pa.Schema:
    """Return the schema of a named table; no column may have missing values.

    :data:`INT` and :data:`GRID` stand for any width; a file has the narrowest that holds the column.
    """
    fields = [pa.field(column, kind, nullable=False) for column, kind in columns.items()]
    return pa.schema(fields, metadata={NAME_KEY: name.encode()})


def encode_tables(tables: Sequence[tuple[pa.Schema, Sequence[Any]]], beside: int = 0) -> bytes:
    """Encode tables one behind the other; the rest of the file will have ``beside`` bytes.

    Buffers are compressed, unless that makes the file smaller than :func:`~bcp.format.container.most_decoded` allows.
    """
    data = b"".join(encode_table(table_schema, columns) for table_schema, columns in tables)
    if decoded_nbytes(memoryview(data)) <= most_decoded(len(data) + beside):
        return data
    return b"".join(encode_table(table_schema, columns, compression=None) for table_schema, columns in tables)


def encode_table(
    table_schema: pa.Schema, columns: Sequence[Any], compression: str | None = "zstd", **metadata: str
) -> bytes:
    """Encode one table as an Arrow IPC stream of one record batch; the schema's metadata get ``x`` as ``bcp.x``."""
    arrays = [_encoded(column, field.type) for column, field in zip(columns, table_schema, strict=True)]
    fields = [
        pa.field(name, array.type, nullable=False) for name, array in zip(table_schema.names, arrays, strict=True)
    ]
    about = dict(table_schema.metadata) | {f"bcp.{key}".encode(): text.encode() for key, text in metadata.items()}
    batch = pa.record_batch(arrays, schema=pa.schema(fields, metadata=about))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as stream:
        stream.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


def read_tables(payload: Buffer, schemas: Sequence[pa.Schema]) -> list[pa.RecordBatch]:
    """Decode the tables of these schemas, in this order; nothing may follow.

    Raises:
        ValueError, OSError, pa.ArrowException: the bytes are something else.
    """
    tables, left = [], payload
    for wanted in schemas:
        table, left = read_table(left, wanted)
        tables.append(table)
    if len(left):
        raise ValueError(f"{len(left)} bytes follow the last table")
    return tables


def first_table(payload: Buffer) -> str:
    """Return the name of the first table; "" if it has none. Raises as :func:`read_table`."""
    with pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(payload))) as stream:
        return ((stream.schema.metadata or {}).get(NAME_KEY) or b"").decode()


def read_table(payload: Buffer, wanted: pa.Schema) -> tuple[pa.RecordBatch, memoryview]:
    """Decode the first table, which has this schema; also return the bytes that follow it. Raises the same."""
    source, name = pa.BufferReader(pa.py_buffer(payload)), wanted.metadata[NAME_KEY].decode()
    # Threads would cost more than they save: a buffer is decompressed in microseconds.
    with pa.ipc.open_stream(source, options=pa.ipc.IpcReadOptions(use_threads=False)) as stream:
        stored = stream.schema
        if (stored.metadata or {}).get(NAME_KEY) != wanted.metadata[NAME_KEY]:
            raise ValueError(f"table {name!r} is not where it should be")
        if stored.names != wanted.names or not all(map(_fits, stored, wanted)):
            raise ValueError(
                f"table {name!r} has other columns: {', '.join(f'{field.name} {field.type}' for field in stored)}"
            )
        batches = list(stream)
    if len(batches) != 1:
        raise ValueError(f"table {name!r} has {len(batches)} record batches instead of 1")
    (table,) = batches
    table.validate(full=True)
    if any(map(_has_nulls, table.columns)):
        raise ValueError(f"table {name!r} has missing values")
    return table, memoryview(payload)[source.tell() :]


# -- columns ------------------------------------------------------------------------------------


def integers(table: pa.RecordBatch, column: str) -> Ints:
    """Return an :data:`INT` column as a numpy array."""
    return np.asarray(numbers_of(table.column(column)), dtype=np.int64)


def steps(numbers: Ints) -> Ints:
    """Return the differences between neighbours, from 0 to the first on.

    They compress where numbers ascend: the ranks of 17,920 files take 30 bytes, not 16 KB.
    """
    return np.diff(numbers, prepend=0)


def summed(table: pa.RecordBatch, column: str) -> Ints:
    """Return the array of which :func:`steps` made an :data:`INT` column."""
    numbers = numbers_of(table.column(column)).astype(np.int64)
    return np.cumsum(numbers, out=numbers)


def values(table: pa.RecordBatch, column: str) -> list[Any]:
    """Return a column as Python objects: strings, lists of strings, booleans, checksums."""
    array = table.column(column)
    if pa.types.is_dictionary(array.type):
        words = np.array(array.dictionary.to_pylist(), dtype=np.object_)
        return list(words[numbers_of(array.indices)])
    elements: list[Any] = array.to_pylist()
    return elements


def fixed_bytes(table: pa.RecordBatch, column: str) -> bytes:
    """Return a column of fixed-size binary as the bytes of all its rows."""
    array = table.column(column)
    nbytes = len(array) * array.type.byte_width
    return bytes(array.buffers()[1].to_pybytes()[:nbytes]) if nbytes else b""


def grid(table: pa.RecordBatch, column: str) -> Ints:
    """Return a :data:`GRID` column as an int64 matrix."""
    array = table.column(column)
    flat = np.asarray(numbers_of(array.flatten()), dtype=np.int64)
    return flat.reshape(len(array), array.type.list_size)


def counted(counts: Ints, rows: int, name: str) -> Ints:
    """Return the owner of each of ``rows`` rows; owner ``i`` has the next ``counts[i]`` rows.

    Raises ValueError if the counts do not add up to ``rows``.
    """
    check_counts(counts, rows, name)
    return np.repeat(np.arange(len(counts), dtype=np.int64), counts)


def check_counts(counts: Ints, rows: int, name: str) -> None:
    """Raise ValueError unless counts are at least 0 and add up to ``rows``."""
    if ((counts < 0) | (counts > rows)).any() or counts.sum() != rows:
        raise ValueError(f"the counts of {name} do not add up to {rows}")


def _encoded(column: Any, kind: pa.DataType) -> pa.Array:
    """Return a column as it is stored."""
    if kind == INT:
        return _narrowest(np.asarray(column, dtype=np.int64))
    if kind == GRID:
        rows = np.asarray(column, dtype=np.int64)
        flat = _narrowest(rows.reshape(-1))
        item = pa.field("item", flat.type, nullable=False)
        return pa.Array.from_buffers(pa.list_(item, rows.shape[1]), len(rows), [None], children=[flat])
    if kind == WORD:
        return arrow_array(column, pa.string()).dictionary_encode()
    return arrow_array(column, kind)


def _narrowest(numbers: Ints) -> pa.Array:
    """Return integers in the narrowest type that holds them all.

    zstd finds little in int64: the files of 300,000 segments take 461 KB, and 2.2 ms to decompress, as int64, and 46 KB
    and 0.1 ms as int16.
    """
    low, high = int(numbers.min(initial=0)), int(numbers.max(initial=0))
    fitting = (width for width in WIDTHS if np.iinfo(width).min <= low and high <= np.iinfo(width).max)
    return arrow_array(numbers, pa.from_numpy_dtype(next(fitting)))


def _fits(stored: pa.Field, wanted: pa.Field) -> bool:
    """Tell whether a field has the type that is wanted, in any width where it stands for any."""
    if stored.nullable:
        return False
    if wanted.type == GRID:
        return bool(pa.types.is_fixed_size_list(stored.type) and pa.types.is_signed_integer(stored.type.value_type))
    return bool(pa.types.is_signed_integer(stored.type) if wanted.type == INT else stored.type == wanted.type)


def _has_nulls(array: pa.Array) -> bool:
    """Tell whether a value is missing, or one inside a list or dictionary."""
    if pa.types.is_fixed_size_list(array.type):
        return bool(array.null_count or array.flatten().null_count)
    if pa.types.is_dictionary(array.type):
        return bool(array.null_count or array.dictionary.null_count)
    return bool(array.null_count)
