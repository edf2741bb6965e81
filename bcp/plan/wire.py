"""Shard tables and write plans as bytes, to send between ranks; and the digest that tells one layout from another.

Arrow IPC: columns, no pickle. A message is one row whose columns are lists, because tensors and shards, which travel
together, differ in number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from bcp.errors import CorruptError
from bcp.plan.divide import Writes
from bcp.plan.shards import Ints, ShardTable, TensorTable

__all__ = ["decode_table", "decode_writes", "digest", "encode_table", "encode_writes"]

TABLE = b"bcp shard table 1"
WRITES = b"bcp writes 1"

Column = Ints | Sequence[str]


def encode_table(table: ShardTable) -> bytes:
    """Encode what a rank holds; :func:`decode_table` is the exact inverse."""
    return _encode(TABLE, _columns(table))


def decode_table(data: bytes) -> ShardTable:
    """Decode what :func:`encode_table` made. Columns are read-only views of ``data`` where that is possible.

    Raises:
        CorruptError: these are not the bytes of a shard table, or another version of bcp made them.

    """
    columns = _decode(TABLE, data)
    try:
        return _table(columns)
    except (KeyError, ValueError) as error:
        raise CorruptError(f"a shard table of {len(data)} bytes has wrong columns: {error}") from error


def encode_writes(writes: Writes) -> bytes:
    """Encode what a rank has to write; :func:`decode_writes` is the exact inverse."""
    return _encode(WRITES, {name: getattr(writes, name) for name in ("row", "start", "stop", "offset")})


def decode_writes(data: bytes) -> Writes:
    """Decode what :func:`encode_writes` made.

    Raises:
        CorruptError: these are not the bytes of a write plan, or another version of bcp made them.

    """
    columns = _decode(WRITES, data)
    return Writes(columns["row"], columns["start"], columns["stop"], columns["offset"])


def digest(table: ShardTable) -> bytes:
    """Return 16 bytes (xxh3-128) that change whenever anything in the table does, the order of its rows included.

    Independent of machine, process and library versions, so that ranks can compare theirs.
    """
    state = xxhash.xxh3_128()
    for name, column in _columns(table).items():
        state.update(f"{name} {len(column)}\n".encode())
        if isinstance(column, np.ndarray):
            state.update(column.astype("<i8").tobytes())
        else:
            texts = [text.encode() for text in column]
            state.update(np.array([len(text) for text in texts], dtype="<i8").tobytes())
            state.update(b"".join(texts))
    return state.digest()


def _columns(table: ShardTable) -> dict[str, Column]:
    """Name everything in a table, flattened to one dimension."""
    tensors = table.tensors
    return {
        "width": np.array([tensors.shape.shape[1]], dtype=np.int64),
        "kind": tensors.kind,
        "fqn": tensors.fqn,
        "dtype": tensors.dtype,
        "itemsize": tensors.itemsize,
        "ndim": tensors.ndim,
        "shape": tensors.shape.ravel(),
        "stride": tensors.stride.ravel(),
        "device": tensors.device,
        "requires_grad": tensors.requires_grad,
        "tied_to": tensors.tied_to,
        "tensor": table.tensor,
        "offset": table.offset.ravel(),
        "length": table.length.ravel(),
        "start": table.start,
        "stop": table.stop,
        "object_kind": [kind for kind, _ in table.objects],
        "object_path": [path for _, path in table.objects],
        "extras": table.extras,
    }


def _table(columns: Mapping[str, Any]) -> ShardTable:
    """Put the columns back together."""
    width, tensors, shards = int(columns["width"][0]), len(columns["fqn"]), len(columns["tensor"])
    names = ("kind", "fqn", "dtype", "itemsize", "ndim", "device", "requires_grad", "tied_to")
    return ShardTable(
        tensors=TensorTable(
            **{name: columns[name] for name in names},
            shape=columns["shape"].reshape(tensors, width),
            stride=columns["stride"].reshape(tensors, width),
        ),
        tensor=columns["tensor"],
        offset=columns["offset"].reshape(shards, width),
        length=columns["length"].reshape(shards, width),
        start=columns["start"],
        stop=columns["stop"],
        objects=list(zip(columns["object_kind"], columns["object_path"], strict=True)),
        extras=columns["extras"],
    )


def _encode(what: bytes, columns: Mapping[str, Column]) -> bytes:
    """Write columns of different lengths as one Arrow record."""
    lists = {name: _list(column) for name, column in columns.items()}
    schema = pa.schema([(name, array.type) for name, array in lists.items()], metadata={b"bcp": what})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as stream:
        stream.write_batch(pa.record_batch(list(lists.values()), schema=schema))
    return bytes(sink.getvalue())


def _list(column: Column) -> pa.Array:
    """Return a list array whose only element is the column."""
    is_ints = isinstance(column, np.ndarray)
    values = pa.array(column, type=pa.int64() if is_ints else pa.string())
    return pa.ListArray.from_arrays(pa.array([0, len(values)], type=pa.int32()), values)


def _decode(what: bytes, data: bytes) -> dict[str, Any]:
    """Read what :func:`_encode` wrote: numbers as int64 arrays, texts as lists."""
    try:
        with pa.ipc.open_stream(data) as stream:
            found, batch = (stream.schema.metadata or {}).get(b"bcp"), stream.read_next_batch()
            batch.validate(full=True)
    except (pa.ArrowException, OSError, StopIteration) as error:
        raise CorruptError(f"{len(data)} bytes from another rank are damaged ({error}); save again") from error
    if found != what:
        raise CorruptError(f"expected {what!r} and got {found!r}; run the same version of bcp on every rank")
    columns = {name: batch.column(name).values for name in batch.schema.names}
    return {
        name: values.to_numpy(zero_copy_only=False) if pa.types.is_int64(values.type) else values.to_pylist()
        for name, values in columns.items()
    }
