"""Messages of planning a save: rank 0 learns all ranks' tables in few bytes.

Each rank first sends 64 bytes of digests, which tell the ranks with equal tables. One rank for each distinct catalogue
and for each distinct slots then sends these. Each rank sends its own flat intervals, 20 bytes each, and its units of
sharded states. For 405B parameters on 8,960 ranks these are 16 catalogues and 24 times slots instead of 8,960 tables.
Rank 0 answers each rank with its share of the writing.

Tables with names are Arrow IPC, all else is plain little-endian integers; there is no pickle. No message is trusted to
be well-formed: it comes from another process.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from bcp.errors import CorruptError
from bcp.plan.cache import plan_id
from bcp.plan.columns import Ints, concat, distinct_rows
from bcp.plan.shards import TENSOR_COLUMNS, ShardTable, TensorTable
from bcp.plan.units import decode_claims
from bcp.plan.write.divide import SHARE, RankShare, WriteDivision
from bcp.plan.write.world import AllTables, Catalogue, FactoredTable, Slots

__all__ = [
    "DIGEST_BYTES",
    "EncodedTable",
    "Survey",
    "decode_catalogue",
    "decode_flat",
    "decode_share",
    "decode_slots",
    "digest",
    "encode_catalogue",
    "encode_flat",
    "encode_shares",
    "encode_slots",
    "gather_tables",
    "survey_tables",
]

DIGEST_BYTES = 16
CATALOGUE = b"bcp catalogue 1"
LARGEST = 1 << 32  # bytes of a catalogue: ten million names
FLAT = np.dtype([("slot", "<i4"), ("start", "<i8"), ("stop", "<i8")])
"""20 bytes for every flat interval."""

_SHARE_HEAD = struct.Struct("<2Q")
"""How many objects a rank owns, and how many units it writes."""

Column = Ints | Sequence[str]


def encode_catalogue(catalogue: Catalogue) -> bytes:
    """Encode the names of a rank; :func:`decode_catalogue` is the exact inverse. Equal ones give equal bytes."""
    return _encode(
        CATALOGUE, _names(catalogue.tensors, catalogue.objects, catalogue.extras) | {"family": catalogue.family}
    )


def decode_catalogue(data: bytes) -> Catalogue:
    """Decode a catalogue of :func:`encode_catalogue`. Columns are read-only views of ``data`` if possible.

    Raises:
        CorruptError: these are not the bytes of a catalogue, or another version of bcp made them.

    """
    columns = _decode(CATALOGUE, data)
    try:
        width, tensors = int(columns["width"][0]), len(columns["fqn"])
        grids = {name: columns[name].reshape(tensors, width) for name in ("shape", "stride")}
        table = TensorTable(**{name: columns[name] for name in TENSOR_COLUMNS} | grids)
        objects = list(zip(columns["object_kind"], columns["object_path"], strict=True))
        family = columns["family"].reshape(tensors)
        lengths = set(map(len, table.columns().values()))
    except (KeyError, ValueError) as error:
        raise CorruptError(f"a catalogue of {len(data)} bytes has wrong columns: {error}") from error
    if lengths != {tensors}:
        raise CorruptError(f"a catalogue of {len(data)} bytes has columns of different lengths")
    return Catalogue(table, family, objects, columns["extras"])


def encode_slots(slots: Slots) -> bytes:
    """Encode the boxes of a rank; :func:`decode_slots` is the exact inverse. Equal ones give equal bytes."""
    columns = [slots.family, slots.regular, slots.offset.ravel(), slots.length.ravel()]
    shape = np.array(slots.offset.shape, dtype=np.int64)
    return np.concatenate([shape, *columns]).astype("<i8").tobytes()


def decode_slots(data: bytes) -> Slots:
    """Decode the slots of :func:`encode_slots`.

    Raises:
        CorruptError: these are not the bytes of slots.

    """
    numbers = np.frombuffer(data[: len(data) // 8 * 8], dtype="<i8").astype(np.int64, copy=False)
    rows, width = numbers[:2].tolist() if len(numbers) > 1 else (-1, -1)
    if rows < 0 or width < 0 or len(data) != 8 * (2 + 2 * rows * (1 + width)):
        raise CorruptError(
            f"{len(data)} bytes from another rank are no boxes; run the same version of bcp on every rank"
        )
    family, regular, boxes = np.split(numbers[2:], [rows, 2 * rows])
    offset, length = boxes.reshape(2, rows, width)
    return Slots(family, offset, length, regular)


def encode_flat(flat: Ints) -> bytes:
    """Encode the flat intervals of a rank, (slot, start, stop) each, in 20 bytes each."""
    out = np.empty(len(flat), dtype=FLAT)
    for name, column in zip(FLAT.fields or (), flat.T, strict=True):
        out[name] = column
    return out.tobytes()


def decode_flat(data: bytes) -> tuple[Ints, Ints, Ints]:
    """Decode intervals of :func:`encode_flat`, of one rank or of several joined: slots, starts, stops.

    Raises:
        CorruptError: these are not whole intervals.

    """
    rows = _records(data, FLAT)
    slot, start, stop = (rows[name].astype(np.int64) for name in FLAT.fields or ())
    return slot, start, stop


def encode_shares(division: WriteDivision) -> list[bytes]:
    """Encode each rank's share, by rank; :func:`decode_share` reads one of them."""
    rows, ends = division.rows.tobytes(), (division.begin * SHARE.itemsize).tolist()
    heads = [bytes(_SHARE_HEAD.size)] * (len(ends) - 1)
    none = np.empty(0, np.int64)
    for rank in division.owned.keys() | division.units.keys():
        owned, units = division.owned.get(rank, none), division.units.get(rank, none)
        numbers = np.concatenate([owned, units]).astype("<i8").tobytes()
        heads[rank] = _SHARE_HEAD.pack(len(owned), len(units)) + numbers
    return [head + rows[begin:end] for head, begin, end in zip(heads, ends, ends[1:], strict=False)]


def decode_share(data: bytes) -> RankShare:
    """Decode one answer of :func:`encode_shares`.

    Raises:
        CorruptError: these are not whole rows.

    """
    start = _SHARE_HEAD.size
    owned, units = _SHARE_HEAD.unpack_from(data) if len(data) >= start else (len(data), 0)
    end = start + 8 * (owned + units)
    if end > len(data):
        raise CorruptError(f"{len(data)} bytes from another rank are shorter than they say; save again")
    numbers = _records(data[start:end], np.dtype("<i8")).astype(np.int64)
    return RankShare(numbers[:owned], numbers[owned:], _records(data[end:], SHARE))


def _records(data: bytes, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if len(data) % dtype.itemsize:
        raise CorruptError(
            f"{len(data)} bytes from another rank are no rows of {dtype.itemsize}; run the same bcp on every rank"
        )
    return np.frombuffer(data, dtype=dtype)


def digest(table: ShardTable) -> bytes:
    """Return 16 bytes (xxh3-128) that change whenever anything in the table does, the order of its rows included.

    The digest does not depend on machine, process and library versions, so ranks can compare theirs. It is computed
    once for a table.
    """
    if (known := _digests.get(table)) is None:
        known = _digests[table] = _digest(table)
    return known


_digests: WeakKeyDictionary[ShardTable, bytes] = WeakKeyDictionary()


def _digest(table: ShardTable) -> bytes:
    state = xxhash.xxh3_128()
    for name, column in _columns(table).items():
        state.update(f"{name} {len(column)}\n".encode())
        if isinstance(column, np.ndarray):
            state.update(column.astype("<i8").tobytes())
        else:
            joined = "".join(column)
            texts = column if joined.isascii() else [text.encode() for text in column]  # a character is a byte
            state.update(np.fromiter(map(len, texts), dtype="<i8").tobytes())
            state.update(joined.encode())
    return state.digest()


def _columns(table: ShardTable) -> dict[str, Column]:
    """Return all columns of a table by name, flattened to one dimension."""
    units: dict[str, Column] = {"units": [table.units]} if table.units else {}
    return (
        _names(table.tensors, table.objects, table.extras)
        | units
        | {
            "tensor": table.tensor,
            "offset": table.offset.ravel(),
            "length": table.length.ravel(),
            "start": table.start,
            "stop": table.stop,
        }
    )


def _names(tensors: TensorTable, objects: Sequence[tuple[str, str]], extras: Sequence[str]) -> dict[str, Column]:
    """Return the columns of tensors and objects by name, flattened to one dimension."""
    return {
        "width": np.array([tensors.shape.shape[1]], dtype=np.int64),
        **{
            name: column.ravel() if isinstance(column, np.ndarray) else column
            for name, column in tensors.columns().items()
        },
        "object_kind": [kind for kind, _ in objects],
        "object_path": [path for _, path in objects],
        "extras": extras,
    }


def _encode(what: bytes, columns: Mapping[str, Column]) -> bytes:
    """Write columns of different lengths as one Arrow record."""
    lists = {name: _list(column) for name, column in columns.items()}
    schema = pa.schema([(name, array.type) for name, array in lists.items()], metadata={b"bcp": what})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as stream:
        stream.write_batch(pa.record_batch(list(lists.values()), schema=schema))
    data = sink.getvalue()
    # Compressed whole: Arrow would compress each of 60 buffers, which takes as long again to undo.
    return len(data).to_bytes(8, "little") + bytes(pa.compress(data, codec="zstd", asbytes=True))


def _list(column: Column) -> pa.Array:
    """Return a list array whose only element is the column."""
    is_ints = isinstance(column, np.ndarray)
    values = pa.array(column, type=pa.int64() if is_ints else pa.string())
    return pa.ListArray.from_arrays(pa.array([0, len(values)], type=pa.int32()), values)


def _decode(what: bytes, data: bytes) -> dict[str, Any]:
    """Read the columns of :func:`_encode`: numbers as int64 arrays, texts as lists."""
    try:
        size = int.from_bytes(data[:8], "little")
        if size > LARGEST:
            raise CorruptError(f"{len(data)} bytes from another rank claim to be {size}; save again")
        with pa.ipc.open_stream(pa.decompress(data[8:], size, codec="zstd")) as stream:
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


_HEAD = struct.Struct("<3q")
"""Bytes of catalogue, slots and units in a message that has any."""

_DIGESTS = 4  # of table, catalogue, slots, units
_NO_UNITS = bytes(DIGEST_BYTES)


@dataclass(frozen=True, slots=True)
class EncodedTable:
    """The table of one rank, as bytes.

    Attributes:
        table: digest of the whole table.
        catalogue: encoded.
        slots: encoded.
        flat: encoded.
        units: claims of units, encoded; empty as a rule.
    """

    table: bytes
    catalogue: bytes
    slots: bytes
    flat: bytes
    units: bytes = b""

    @classmethod
    def of(cls, factored: FactoredTable, table: bytes) -> EncodedTable:
        """Encode a factored table, whose digest is ``table``."""
        return cls(
            table,
            encode_catalogue(factored.catalogue),
            encode_slots(factored.slots),
            encode_flat(factored.flat),
            factored.units.encode(),
        )

    @property
    def hello(self) -> bytes:
        """64 bytes for :func:`survey_tables`."""
        units = xxhash.xxh3_128_digest(self.units) if self.units else _NO_UNITS
        return self.table + xxhash.xxh3_128_digest(self.catalogue) + xxhash.xxh3_128_digest(self.slots) + units

    def message(self, rank: int, plan: Survey) -> bytes:
        """Return the message that :func:`gather_tables` needs of this rank."""
        catalogue = self.catalogue if rank in plan.catalogue_leaders else b""
        slots = self.slots if rank in plan.slots_leaders else b""
        head = _HEAD.pack(len(catalogue), len(slots), len(self.units)) if catalogue or slots or self.units else b""
        return head + catalogue + slots + self.units + self.flat


@dataclass(frozen=True, slots=True)
class Survey:
    """The groups of ranks with equal tables.

    Attributes:
        key: :func:`~bcp.plan.cache.plan_id` of all ranks' tables.
        catalogue_leaders: int64[c], the lowest rank that has each distinct catalogue, ascending.
        slots_leaders: int64[s], the same for slots.
        template: int64[N], number of each rank's distinct pair of both; counted by the lowest rank that has it.
        template_catalogue: int64[K], the distinct catalogue of each pair.
        template_slots: int64[K], its distinct slots.
        claiming: int64[u], the ranks that have units.
    """

    key: bytes
    catalogue_leaders: Ints
    slots_leaders: Ints
    template: Ints
    template_catalogue: Ints
    template_slots: Ints
    claiming: Ints

    def encode(self) -> bytes:
        """Return the answer to the ranks: the key and the leaders."""
        leaders = np.concatenate([[len(self.catalogue_leaders)], self.catalogue_leaders, self.slots_leaders])
        return self.key + leaders.astype("<i4").tobytes()

    @classmethod
    def decode(cls, data: bytes) -> Survey:
        """Undo :meth:`encode`; the rest is empty."""
        count, *leaders = np.frombuffer(data[DIGEST_BYTES:], "<i4").astype(np.int64).tolist()
        none = np.empty(0, dtype=np.int64)
        first, second = (np.array(ranks, dtype=np.int64) for ranks in (leaders[:count], leaders[count:]))
        return cls(data[:DIGEST_BYTES], first, second, none, none, none, none)


def survey_tables(hellos: Sequence[bytes], *, balance: str, block_bytes: int) -> Survey:
    """Find the distinct catalogues and slots.

    Args:
        hellos: :attr:`EncodedTable.hello` of every rank, by rank.
        balance: as in :func:`bcp.plan.write.divide.divide_writes`.
        block_bytes: the same.

    Raises:
        CorruptError: a hello has another size; the ranks run different versions of bcp.

    """
    sizes = set(map(len, hellos))
    if sizes != {_DIGESTS * DIGEST_BYTES}:
        raise CorruptError(
            f"ranks sent {sorted(sizes)} bytes instead of {_DIGESTS * DIGEST_BYTES}; run the same version of bcp on "
            "every rank"
        )
    digests = np.frombuffer(b"".join(hellos), dtype="<i8").reshape(len(hellos), -1).astype(np.int64)
    tables, catalogues, boxes, units = np.split(digests, _DIGESTS, axis=1)
    first, template = distinct_rows(np.hstack([catalogues, boxes]))
    catalogue_leaders, catalogue = distinct_rows(catalogues)
    slots_leaders, slots = distinct_rows(boxes)
    key = plan_id(tables.tobytes(), balance=balance, block_bytes=block_bytes)
    claiming = np.flatnonzero(units.any(axis=1))
    return Survey(key, catalogue_leaders, slots_leaders, template, catalogue[first], slots[first], claiming)


def gather_tables(plan: Survey, messages: Sequence[bytes]) -> AllTables:
    """Assemble the tables of all ranks.

    Args:
        plan: the survey that the messages answer.
        messages: :meth:`EncodedTable.message` of every rank, by rank.

    Raises:
        CorruptError: a message does not answer the survey.

    """
    flats, catalogues, slots, units = list(messages), {}, {}, {}
    stating = {*plan.catalogue_leaders.tolist(), *plan.slots_leaders.tolist(), *plan.claiming.tolist()}
    for rank in stating:
        catalogues[rank], slots[rank], units[rank], flats[rank] = _take_apart(messages[rank])
    slot, start, stop = decode_flat(b"".join(flats))
    boxes = [decode_slots(slots[rank]) for rank in plan.slots_leaders.tolist()]
    world = AllTables(
        catalogues=[decode_catalogue(catalogues[rank]) for rank in plan.catalogue_leaders.tolist()],
        template_catalogue=plan.template_catalogue,
        template_slots=[boxes[number] for number in plan.template_slots.tolist()],
        template=plan.template,
        flat_rank=np.repeat(np.arange(len(flats)), np.fromiter(map(len, flats), np.int64) // FLAT.itemsize),
        flat_slot=slot,
        flat_start=start,
        flat_stop=stop,
        claims={rank: decode_claims(text.decode(errors="replace")) for rank, text in units.items() if text},
    )
    _check(world)
    return world


def _take_apart(message: bytes) -> tuple[bytes, bytes, bytes, bytes]:
    """Return the catalogue, the slots, the claims of units and the flat intervals of a message that has a head."""
    if len(message) < _HEAD.size:
        raise CorruptError(
            f"{len(message)} bytes from another rank lack what was asked for; run the same bcp everywhere"
        )
    ends = accumulate((max(size, 0) for size in _HEAD.unpack_from(message)), initial=_HEAD.size)
    first, second, third, last = ends
    return message[first:second], message[second:third], message[third:last], message[last:]


def _check(world: AllTables) -> None:
    """Raise CorruptError if numbers point to nothing."""
    families = np.array([int(each.family.max(initial=-1)) + 1 for each in world.catalogues], dtype=np.int64)
    family = concat([each.family for each in world.template_slots])
    sizes = np.array([len(each.family) for each in world.template_slots], dtype=np.int64)
    known = np.repeat(families[world.template_catalogue], sizes)
    if ((family < 0) | (family >= known)).any():
        raise CorruptError(
            "a rank states boxes of a family that does not exist; run the same version of bcp on every rank"
        )
    slot = world.flat_slot
    wrong = (slot < 0) | (slot >= sizes[world.template[world.flat_rank]])
    if wrong.any():
        rank = int(world.flat_rank[int(wrong.argmax())])
        raise CorruptError(
            f"rank {rank} states an interval of a box that does not exist; run the same version of bcp everywhere"
        )
