"""The container of bcp's small files: named Arrow tables, one after the other, a checksum and a magic number.

::

    Arrow IPC stream | Arrow IPC stream | ... | xxh3-128 of all before, 16 bytes | magic, 7 bytes | version, 1 byte

Encoding is deterministic. Decoding trusts nothing: wrong types, missing values, and lengths that do not add up
are :class:`~bcp.errors.CorruptError`. ``docs/format.md`` specifies it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from bcp.errors import CorruptError, FormatVersionError, NotACheckpointError
from bcp.plan.shards import Ints

__all__ = [
    "DIGEST_BYTES",
    "VERSION",
    "counted",
    "digest",
    "encode_table",
    "integers",
    "list_lengths",
    "ragged",
    "ragged_column",
    "read_tables",
    "schema",
    "seal",
    "translated",
    "unseal",
    "values",
]

VERSION = 1
"""Version of the format, the last byte of every file; one that is not known is refused."""

DIGEST_BYTES = 16
TRAILER_BYTES = DIGEST_BYTES + 8
NAME_KEY = b"bcp.table"
HEAD_BYTES = 4096  # the first table's name is in the first few hundred bytes

Buffer = bytes | bytearray | memoryview


def digest(data: Buffer) -> bytes:
    """Return the xxh3-128 of the bytes: 16 bytes, big-endian (xxhash's canonical form)."""
    return xxhash.xxh3_128_digest(data)


# -- the frame ----------------------------------------------------------------------------------


def seal(payload: bytes, magic: bytes) -> bytes:
    """Append checksum, magic number and version."""
    return b"".join((payload, digest(payload), magic, bytes([VERSION])))


def unseal(data: Buffer, magic: bytes, where: str) -> memoryview:
    """Return the payload of a sealed file.

    Args:
        data: the whole file.
        magic: the seven bytes that must be there.
        where: what the file is called, for messages.

    Raises:
        NotACheckpointError: no bcp wrote this file.
        FormatVersionError: a bcp of another version of the format wrote it.
        CorruptError: it is truncated, or its checksum does not match.

    """
    view = memoryview(data)
    if bytes(view[-8:-1]) != magic:
        if not view or NAME_KEY in bytes(view[:HEAD_BYTES]):
            raise CorruptError(f"{where} is truncated: after {len(view)} bytes it ends without {magic.decode()}")
        raise NotACheckpointError(f"{where} ({len(view)} bytes) was not written by bcp: no {magic.decode()} at its end")
    if view[-1] != VERSION:
        raise FormatVersionError(
            f"{where} is in version {view[-1]} of the format, this bcp reads version {VERSION}; "
            f"use the bcp that wrote it, or a newer one"
        )
    payload = view[:-TRAILER_BYTES]
    stored, found = bytes(view[-TRAILER_BYTES:-8]), digest(payload)
    if stored != found:
        raise CorruptError(
            f"{where} ({len(view)} bytes) is corrupt: its checksum is {found.hex()}, it should be {stored.hex()}"
        )
    return payload


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Raise what is found wrong while decoding as :class:`~bcp.errors.CorruptError` that names the file."""
    try:
        yield
    except (ValueError, OSError, pa.ArrowException) as error:
        raise CorruptError(f"{where} is corrupt: {error}") from error


# -- tables -------------------------------------------------------------------------------------


def schema(name: str, **columns: pa.DataType) -> pa.Schema:
    """Return the schema of a named table; no column may have missing values."""
    fields = [pa.field(column, kind, nullable=False) for column, kind in columns.items()]
    return pa.schema(fields, metadata={NAME_KEY: name.encode()})


def encode_table(of: pa.Schema, columns: Sequence[Any], **metadata: str) -> bytes:
    """Encode one table as an Arrow IPC stream of one record batch, buffers compressed with zstd.

    Args:
        of: the schema.
        columns: one array for each of its fields.
        metadata: more schema metadata; key ``x`` is stored as ``bcp.x``.

    """
    of = of.with_metadata(dict(of.metadata) | {f"bcp.{key}".encode(): text.encode() for key, text in metadata.items()})
    arrays = [pa.array(column, type=field.type) for column, field in zip(columns, of, strict=True)]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, of, options=pa.ipc.IpcWriteOptions(compression="zstd")) as stream:
        stream.write_batch(pa.record_batch(arrays, schema=of))
    return bytes(sink.getvalue().to_pybytes())


def read_tables(payload: Buffer, schemas: Sequence[pa.Schema]) -> list[pa.Table]:
    """Decode the tables of these schemas, in this order; nothing may follow.

    Raises:
        ValueError, OSError, pa.ArrowException: the bytes are something else.

    """
    source, tables = pa.BufferReader(pa.py_buffer(payload)), []
    for wanted in schemas:
        name = wanted.metadata[NAME_KEY].decode()
        with pa.ipc.open_stream(source) as stream:
            if (stream.schema.metadata or {}).get(NAME_KEY) != wanted.metadata[NAME_KEY]:
                raise ValueError(f"table {name!r} is not where it should be")
            if not stream.schema.equals(wanted):
                raise ValueError(f"table {name!r} has other columns: {stream.schema.names}")
            table = stream.read_all().combine_chunks()
        table.validate(full=True)
        if any(column.null_count for column in table.columns):
            raise ValueError(f"table {name!r} has missing values")
        tables.append(table)
    if source.tell() != len(payload):
        raise ValueError(f"{len(payload) - source.tell()} bytes follow the last table")
    return tables


# -- columns ------------------------------------------------------------------------------------


def _array(table: pa.Table, column: str) -> pa.Array:
    """Return a column as one array."""
    chunks = table.column(column)
    return chunks.chunk(0) if chunks.num_chunks else pa.array([], type=chunks.type)


def integers(table: pa.Table, column: str) -> Ints:
    """Return an int64 column as a read-only numpy array."""
    return np.asarray(_array(table, column).to_numpy(zero_copy_only=True), dtype=np.int64)


def values(table: pa.Table, column: str) -> list[Any]:
    """Return a column as Python objects: strings, lists of strings, booleans, checksums."""
    found: list[Any] = _array(table, column).to_pylist()
    return found


def list_lengths(table: pa.Table, column: str) -> Ints:
    """Return how many numbers each row of a column of lists has."""
    return np.asarray(_array(table, column).value_lengths().to_numpy(zero_copy_only=False), dtype=np.int64)


def counted(counts: Ints, rows: int, what: str) -> Ints:
    """Return, for each of ``rows`` rows, which owner it belongs to; owner ``i`` has the next ``counts[i]`` rows.

    Raises:
        ValueError: the counts do not add up to ``rows``.

    """
    if ((counts < 0) | (counts > rows)).any() or counts.sum() != rows:
        raise ValueError(f"the counts of {what} do not add up to {rows}")
    return np.repeat(np.arange(len(counts), dtype=np.int64), counts)


def ragged(rows: Ints, lengths: Ints) -> pa.Array:
    """Make a column of lists: the first ``lengths[i]`` numbers of row ``i`` of a matrix."""
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    inside = np.arange(rows.shape[1]) < lengths[:, None]
    return pa.ListArray.from_arrays(offsets, pa.array(rows[inside], type=pa.int64()))


def ragged_column(table: pa.Table, column: str, lengths: Ints, width: int, fill: int) -> Ints:
    """Return a column of lists as an int64 matrix, padded on the right with ``fill``; inverse of :func:`ragged`.

    Raises:
        ValueError: the lists do not have these lengths.

    """
    lists = _array(table, column)
    flat = lists.flatten()
    if flat.null_count or not np.array_equal(list_lengths(table, column), lengths):
        raise ValueError(f"the lists of column {column!r} do not have as many numbers as there are dimensions")
    rows = np.full((len(lists), width), fill, dtype=np.int64)
    rows[np.arange(width) < lengths[:, None]] = flat.to_numpy(zero_copy_only=False)
    return rows
