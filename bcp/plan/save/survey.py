"""How rank 0 learns all ranks' tables in few bytes: digests first, then one copy of each distinct table.

64 bytes from each rank tell which ranks hold the same; one rank for each distinct catalogue and slots sends
them; and each rank sends its own flat intervals, 20 bytes each, and its units of sharded states. For 405B parameters
on 8,960 ranks these are 16 catalogues and 24 times slots instead of 8,960 tables.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import xxhash

from bcp.errors import CorruptError
from bcp.plan.cache import plan_id
from bcp.plan.columns import Ints, concat, distinct_rows
from bcp.plan.save.template import Factored
from bcp.plan.save.wire import (
    DIGEST_BYTES,
    FLAT,
    decode_catalogue,
    decode_flat,
    decode_slots,
    encode_catalogue,
    encode_flat,
    encode_slots,
)
from bcp.plan.save.world import World
from bcp.plan.units import decode_claims

__all__ = ["Stated", "Survey", "gather", "survey"]

_HEAD = struct.Struct("<3q")
"""Bytes of catalogue, slots and units in a message that has any."""

_DIGESTS = 4  # of table, catalogue, slots, units
_NO_UNITS = bytes(DIGEST_BYTES)


@dataclass(frozen=True, slots=True)
class Stated:
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
    def of(cls, factored: Factored, table: bytes) -> Stated:
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
        """64 bytes for :func:`survey`."""
        units = xxhash.xxh3_128_digest(self.units) if self.units else _NO_UNITS
        return self.table + xxhash.xxh3_128_digest(self.catalogue) + xxhash.xxh3_128_digest(self.slots) + units

    def message(self, rank: int, plan: Survey) -> bytes:
        """Return the message that :func:`gather` needs of this rank."""
        catalogue = self.catalogue if rank in plan.catalogue_leaders else b""
        slots = self.slots if rank in plan.slots_leaders else b""
        head = _HEAD.pack(len(catalogue), len(slots), len(self.units)) if catalogue or slots or self.units else b""
        return head + catalogue + slots + self.units + self.flat


@dataclass(frozen=True, slots=True)
class Survey:
    """Who holds the same as whom.

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


def survey(hellos: Sequence[bytes], *, balance: str, block_bytes: int) -> Survey:
    """Find the distinct catalogues and slots.

    Args:
        hellos: :attr:`Stated.hello` of every rank, by rank.
        balance: as in :func:`bcp.plan.save.divide.divide`.
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


def gather(plan: Survey, messages: Sequence[bytes]) -> World:
    """Put together the tables of all ranks.

    Args:
        plan: the survey that the messages answer.
        messages: :meth:`Stated.message` of every rank, by rank.

    Raises:
        CorruptError: a message does not answer the survey.

    """
    flats, catalogues, slots, units = list(messages), {}, {}, {}
    stating = {*plan.catalogue_leaders.tolist(), *plan.slots_leaders.tolist(), *plan.claiming.tolist()}
    for rank in stating:
        catalogues[rank], slots[rank], units[rank], flats[rank] = _take_apart(messages[rank])
    slot, start, stop = decode_flat(b"".join(flats))
    boxes = [decode_slots(slots[rank]) for rank in plan.slots_leaders.tolist()]
    world = World(
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


def _check(world: World) -> None:
    """Raise where numbers point to nothing."""
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
