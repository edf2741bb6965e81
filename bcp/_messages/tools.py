"""Messages of ranks that share the work of a tool."""

from __future__ import annotations

import msgspec

from bcp._messages.base import Count, Message, Rank, prepare

__all__ = ["Compared", "Copied", "Counted", "Damage", "Examined", "Imported", "LastNames", "ObjectSides", "ValueSides"]


class Damage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, order=True):
    """A damaged file."""

    key: str
    start: Count  # first byte with damage
    words: str  # a sentence for people


class Examined(Message, frozen=True):
    """The findings of a verification."""

    files: Count = 0
    blocks: Count = 0
    nbytes: Count = 0
    damage: tuple[Damage, ...] = ()
    others: tuple[str, ...] = ()  # files of other saves
    unverified: Count = 0


class ValueSides(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The JSON texts of a value in two checkpoints; "" for a side that is not known, or lacks the value."""

    kind: str
    name: str
    before: str
    after: str


class ObjectSides(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The digests of an opaque object in two checkpoints; empty as for values."""

    kind: Count
    rank: Rank
    before: bytes
    after: bytes


class Counted(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor whose elements differ."""

    row: Count  # in the layout of the first checkpoint
    other: Count  # in the layout of the second one
    elements: Count
    largest: float | None


class Compared(Message, frozen=True):
    """The findings of a comparison."""

    values: tuple[ValueSides, ...] = ()
    objects: tuple[ObjectSides, ...] = ()
    counts: tuple[Counted, ...] = ()
    read_nbytes: Count = 0


class Copied(Message, frozen=True):
    """The files that are in the target of a copy, without the metadata."""

    keys: tuple[str, ...]
    nbytes: Count  # of data files


class LastNames(Message, frozen=True):
    """The small files that rank 0 writes at the end of an export."""

    names: tuple[str, ...]


class Imported(Message, frozen=True):
    """The checkpoint that an import without a copy has made."""

    operation: str
    tensors: Count
    values: Count  # without tensors


prepare(__name__)
