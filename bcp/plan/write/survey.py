"""Messages of planning a save: rank 0 learns all ranks' tables in few bytes.

Each rank first sends 64 bytes of digests, which tell the ranks with equal tables. One rank for each distinct catalogue
and for each distinct slots then sends these: for 405B parameters on 8,960 ranks, 16 catalogues and 24 times slots
instead of 8,960 tables. Each rank sends its flat intervals and its units. Rank 0 answers with shares of the writing.

Tables with names are Arrow IPC inside of a message, all other columns are plain little-endian integers; there is no
pickle. No message is trusted to be well-formed: it comes from another process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from bcp._messages.base import refused
from bcp._messages.planning import DIGEST_BYTES, CatalogueColumns, Share, SlotColumns, SurveyAnswer, Table, numbers
from bcp.errors import MessageError
from bcp.plan.arrow import arrow_array, numbers_of
from bcp.plan.columns import Ints, concat, distinct_rows
from bcp.plan.shards import TENSOR_COLUMNS, ShardTable, TensorTable
from bcp.plan.units import decode_claims
from bcp.plan.write.divide import SHARE, RankShare, WriteDivision
from bcp.plan.write.replicas import REPLICAS
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

FLAT = np.dtype([("slot", "<i4"), ("start", "<i8"), ("stop", "<i8")])
"""20 bytes for every flat interval."""

Column = Ints | Sequence[str]


def encode_catalogue(catalogue: Catalogue) -> bytes:
    """Encode the names of a rank; :func:`decode_catalogue` is the exact inverse. Equal ones give equal bytes."""
    names = _names(catalogue.tensors, catalogue.objects, catalogue.extras)
    return _encode(names | {"family": catalogue.family, "marks": catalogue.marks})


def decode_catalogue(data: bytes, sender: int | None = None) -> Catalogue:
    """Decode a catalogue of :func:`encode_catalogue`, of the rank ``sender``.

    Raises MessageError if these are not the bytes of a catalogue, or another version of bcp made them.
    """
    columns = _decode(data, sender)
    try:
        width, tensors = int(columns["width"][0]), len(columns["fqn"])
        grids = {name: columns[name].reshape(tensors, width) for name in ("shape", "stride")}
        table = TensorTable(**{name: columns[name] for name in TENSOR_COLUMNS} | grids)
        objects = list(zip(columns["object_kind"], columns["object_path"], strict=True))
        family, marks = columns["family"].reshape(tensors), columns["marks"].reshape(tensors)
        lengths = set(map(len, table.columns().values()))
    except (IndexError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise refused("CatalogueColumns", data, f"wrong columns: {error!r}", sender) from error
    if lengths != {tensors}:
        raise refused("CatalogueColumns", data, "columns of different lengths", sender)
    return Catalogue(table, family, marks, objects, columns["extras"])


def encode_slots(slots: Slots) -> bytes:
    """Encode the boxes of a rank; :func:`decode_slots` is the exact inverse. Equal ones give equal bytes."""
    columns = (slots.family, slots.regular, slots.offset, slots.length)
    return SlotColumns(slots.offset.shape[1], *(column.astype("<i8").tobytes() for column in columns)).encode()


def decode_slots(data: bytes, sender: int | None = None) -> Slots:
    """Undo :func:`encode_slots` of the rank ``sender``. Raises MessageError if the bytes are no slots."""
    columns = SlotColumns.decode(data, sender)
    family = numbers(columns.family)
    offset, length = (
        numbers(column).reshape(len(family), columns.width) for column in (columns.offset, columns.length)
    )
    return Slots(family, offset, length, numbers(columns.regular))


def encode_flat(flat: Ints) -> bytes:
    """Encode the flat intervals of a rank, (slot, start, stop) each, in 20 bytes each."""
    out = np.empty(len(flat), dtype=FLAT)
    for name, column in zip(FLAT.fields or (), flat.T, strict=True):
        out[name] = column
    return out.tobytes()


def decode_flat(data: bytes) -> tuple[Ints, Ints, Ints]:
    """Decode slots, starts and stops of one rank or several. Raises MessageError if the last interval is cut off."""
    rows = _records(data, FLAT, "of flat intervals")
    slot, start, stop = (rows[name].astype(np.int64) for name in FLAT.fields or ())
    return slot, start, stop


def encode_shares(division: WriteDivision) -> list[bytes]:
    """Encode each rank's share, by rank; :func:`decode_share` reads one of them."""
    rows, ends = division.rows.tobytes(), (division.begin * SHARE.itemsize).tolist()
    owned, units = (
        {rank: rows.astype("<i8").tobytes() for rank, rows in by_rank.items()}
        for by_rank in (division.owned, division.units)
    )
    nbytes, compared = division.replicas.nbytes, division.replicas.by_rank()
    return [
        Share(owned.get(rank, b""), units.get(rank, b""), replicas, nbytes, rows[begin:end]).encode()
        for rank, (replicas, (begin, end)) in enumerate(zip(compared, pairwise(ends), strict=True))
    ]


def decode_share(data: bytes) -> RankShare:
    """Decode one answer of :func:`encode_shares`. Raises MessageError if it is no such answer."""
    share = Share.decode(data, sender=0)
    owned, units = (
        _records(column, np.dtype("<i8"), "Share", 0).astype(np.int64) for column in (share.owned, share.units)
    )
    replicas = _records(share.replicas, REPLICAS, "Share", 0)
    return RankShare(owned, units, replicas, share.compared, _records(share.rows, SHARE, "Share", 0))


def _records(data: bytes, dtype: np.dtype[Any], name: str, sender: int | None = None) -> npt.NDArray[Any]:
    if len(data) % dtype.itemsize:
        raise refused(name, data, f"no rows of {dtype.itemsize} bytes", sender)
    return np.frombuffer(data, dtype=dtype)


def digest(table: ShardTable) -> bytes:
    """Return 16 bytes (xxh3-128) that change whenever anything in the table does, the order of its rows included.

    The digest does not depend on machine, process and library versions. It is computed once for a table.
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
    rare: dict[str, Column] = {"units": [table.units]} if table.units else {}
    rare |= {} if table.marks is None else {"marks": table.marks}
    return (
        _names(table.tensors, table.objects, table.extras)
        | rare
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


def _encode(columns: Mapping[str, Column]) -> bytes:
    """Write columns of different lengths as one Arrow record."""
    lists = {name: _list(column) for name, column in columns.items()}
    schema = pa.schema([(name, array.type) for name, array in lists.items()])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as stream:
        stream.write_batch(pa.record_batch(list(lists.values()), schema=schema))
    data = sink.getvalue()
    # Compressed whole: Arrow would compress each of 60 buffers, which takes as long again to undo.
    return CatalogueColumns(len(data), pa.compress(data, codec="zstd", asbytes=True)).encode()


def _list(column: Column) -> pa.Array:
    """Return a list array whose only element is the column."""
    is_ints = isinstance(column, np.ndarray)
    values = arrow_array(column, pa.int64() if is_ints else pa.string())
    return pa.ListArray.from_arrays(arrow_array([0, len(values)], pa.int32()), values)


_TYPES = (pa.int64(), pa.string())


def _decode(data: bytes, sender: int | None) -> dict[str, Any]:
    """Read the columns of :func:`_encode`: numbers as int64 arrays, texts as lists."""
    message = CatalogueColumns.decode(data, sender)
    try:
        with pa.ipc.open_stream(pa.decompress(message.columns, message.nbytes, codec="zstd")) as stream:
            batch = stream.read_next_batch()
            batch.validate(full=True)
        columns = {name: batch.column(name).values for name in batch.schema.names}
    except (pa.ArrowException, OSError, StopIteration, ValueError, KeyError, AttributeError) as error:
        raise refused("CatalogueColumns", data, repr(error), sender) from error
    if any(values.null_count or values.type not in _TYPES for values in columns.values()):
        raise refused("CatalogueColumns", data, "a column has neither numbers nor texts, or lacks some", sender)
    return {
        name: numbers_of(values) if pa.types.is_int64(values.type) else values.to_pylist()
        for name, values in columns.items()
    }


_DIGESTS = 4  # of table, catalogue, slots, units
_NO_UNITS = bytes(DIGEST_BYTES)


@dataclass(frozen=True, slots=True)
class EncodedTable:
    """The table of one rank, as bytes."""

    table: bytes  # digest of the whole table
    catalogue: bytes  # encoded
    slots: bytes  # encoded
    flat: bytes  # encoded
    units: str = ""  # claims of units, as text; empty as a rule

    @classmethod
    def of(cls, factored: FactoredTable, table: bytes) -> EncodedTable:
        """Encode a factored table, whose digest is ``table``."""
        return cls(
            table,
            encode_catalogue(factored.catalogue),
            encode_slots(factored.slots),
            encode_flat(factored.flat),
            factored.units,
        )

    @property
    def hello(self) -> bytes:
        """64 bytes for :func:`survey_tables`."""
        units = xxhash.xxh3_128_digest(self.units.encode()) if self.units else _NO_UNITS
        return self.table + xxhash.xxh3_128_digest(self.catalogue) + xxhash.xxh3_128_digest(self.slots) + units

    def message(self, rank: int, plan: Survey) -> bytes:
        """Return the message that :func:`gather_tables` needs of this rank."""
        catalogue = self.catalogue if rank in plan.catalogue_leaders else b""
        slots = self.slots if rank in plan.slots_leaders else b""
        if not (catalogue or slots or self.units):
            return self.flat
        return Table(catalogue, slots, self.units, self.flat).encode()


def plan_id(digests: bytes, *, balance: str, block_bytes: int) -> bytes:
    """Return 16 bytes that name a division: a function of the tables' digests, in rank order, and of the options."""
    return xxhash.xxh3_128_digest(f"{balance} {block_bytes}\n".encode() + digests)


@dataclass(frozen=True, slots=True)
class Survey:
    """The groups of ranks with equal tables."""

    key: bytes  # :func:`plan_id` of all ranks' tables
    catalogue_leaders: Ints  # int64[c], the lowest rank that has each distinct catalogue, ascending
    slots_leaders: Ints  # int64[s], the same for slots
    template: Ints  # int64[N], each rank's pair of catalogue and slots; pairs are in the order of their lowest ranks
    template_catalogue: Ints  # int64[K], number of each pair's distinct catalogue
    template_slots: Ints  # int64[K], number of each pair's distinct slots
    claiming: Ints  # int64[u], the ranks that have units

    def encode(self) -> bytes:
        """Return the answer to the ranks: the key and the leaders."""
        leaders = (self.catalogue_leaders, self.slots_leaders)
        return SurveyAnswer(self.key, *(ranks.astype("<i4").tobytes() for ranks in leaders)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Survey:
        """Undo :meth:`encode`; the other fields are empty. Raises MessageError if ``data`` is no survey."""
        answer, none = SurveyAnswer.decode(data, sender=0), np.empty(0, dtype=np.int64)
        catalogue, slots = (numbers(column, "<i4") for column in (answer.catalogue_leaders, answer.slots_leaders))
        return cls(answer.key, catalogue, slots, none, none, none, none)


def survey_tables(hellos: Sequence[bytes], *, balance: str, block_bytes: int) -> Survey:
    """Find the distinct catalogues and slots; ``hellos``: :attr:`EncodedTable.hello` of every rank, by rank.

    Raises MessageError if a hello has another size: the ranks run different versions of bcp.
    """
    nbytes = _DIGESTS * DIGEST_BYTES
    if set(map(len, hellos)) != {nbytes}:
        rank = next(rank for rank, hello in enumerate(hellos) if len(hello) != nbytes)
        raise refused("of digests", hellos[rank], f"{nbytes} bytes were expected", rank)
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

    Raises MessageError if a message is no :meth:`EncodedTable.message` that answers the survey.
    """
    flats = list(messages)
    stating = {*plan.catalogue_leaders.tolist(), *plan.slots_leaders.tolist(), *plan.claiming.tolist()}
    tables = {rank: Table.decode(messages[rank], rank) for rank in stating}
    for rank, table in tables.items():
        flats[rank] = table.flat
    nbytes = np.fromiter(map(len, flats), np.int64)
    if (ragged := np.flatnonzero(nbytes % FLAT.itemsize)).size:
        rank = int(ragged[0])
        raise refused("of flat intervals", flats[rank], f"no rows of {FLAT.itemsize} bytes", rank)
    slot, start, stop = decode_flat(b"".join(flats))
    boxes = [decode_slots(tables[rank].slots, rank) for rank in plan.slots_leaders.tolist()]
    world = AllTables(
        catalogues=[decode_catalogue(tables[rank].catalogue, rank) for rank in plan.catalogue_leaders.tolist()],
        template_catalogue=plan.template_catalogue,
        template_slots=[boxes[number] for number in plan.template_slots.tolist()],
        template=plan.template,
        flat_rank=np.repeat(np.arange(len(flats)), nbytes // FLAT.itemsize),
        flat_slot=slot,
        flat_start=start,
        flat_stop=stop,
        claims={rank: decode_claims(table.units, rank) for rank, table in tables.items() if table.units},
    )
    _check(world)
    return world


def _check(world: AllTables) -> None:
    """Raise MessageError if numbers point to nothing."""
    families = np.array([int(catalogue.family.max(initial=-1)) + 1 for catalogue in world.catalogues], dtype=np.int64)
    family = concat([slots.family for slots in world.template_slots])
    sizes = np.array([len(slots.family) for slots in world.template_slots], dtype=np.int64)
    known = np.repeat(families[world.template_catalogue], sizes)
    if ((family < 0) | (family >= known)).any():
        raise MessageError(
            "a rank states boxes of a family that does not exist; run the same version of bcp on every rank"
        )
    slot = world.flat_slot
    wrong = (slot < 0) | (slot >= sizes[world.template[world.flat_rank]])
    if wrong.any():
        rank = int(world.flat_rank[int(wrong.argmax())])
        raise MessageError(
            f"rank {rank} states an interval of a box that does not exist; run the same version of bcp everywhere"
        )
