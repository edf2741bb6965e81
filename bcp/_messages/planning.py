"""Messages of planning a save and a load.

Columns of numbers are little-endian bytes inside of a message, which numpy views. Two rows that every rank sends are
no messages at all: its digests (64 bytes), and its flat intervals if it states nothing else. Rank 0 joins those of all
ranks without a step of Python for each rank. A message takes such a step: decoding those of 100,000 ranks takes 45 ms.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from bcp._messages.base import Count, Message, expect, prepare

__all__ = [
    "DIGEST_BYTES",
    "BlockRuns",
    "CatalogueColumns",
    "Claim",
    "Ints",
    "LoadAnswer",
    "LoadRequestColumns",
    "Opened",
    "Opening",
    "Rate",
    "Share",
    "SharedDigests",
    "SharedRuns",
    "SlotColumns",
    "SurveyAnswer",
    "Table",
    "Written",
    "numbers",
]

Ints: TypeAlias = npt.NDArray[np.int64]
DIGEST_BYTES = 16
LARGEST = 1 << 32
"""Most bytes of a catalogue: ten million names."""

Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


def numbers(data: bytes, dtype: str = "<i8") -> Ints:
    """Return a column as int64, without a copy if it is one already."""
    return np.frombuffer(data, dtype).astype(np.int64, copy=False)


def _whole(data: bytes, nbytes: int) -> bool:
    return len(data) % nbytes == 0


# -- the opening of a save --------------------------------------------------------------------


class SharedDigests(Message, frozen=True):
    """The shared parts of a rank's dataloader states, by name of the state; behind the 16 bytes of its plan's key."""

    digests: dict[str, str]


class Opening(Message, frozen=True, array_like=True, tag=False):
    """Rank 0's first answer to all ranks.

    Attributes:
        operation: id of the save.
        cached: whether every rank has the plan already.
        found: version of the metadata that was there when the save began; None for none.
        trace: trace context of rank 0; empty for none.
    """

    operation: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
    cached: bool
    found: Annotated[str, msgspec.Meta(min_length=1)] | None
    trace: str


# -- the survey and the division of a save ----------------------------------------------------


class CatalogueColumns(Message, frozen=True):
    """The names of a rank.

    Attributes:
        nbytes: bytes of the columns.
        columns: an Arrow stream, compressed.
    """

    nbytes: Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
    columns: bytes


class SlotColumns(Message, frozen=True):
    """The boxes of a rank, each column int64.

    Attributes:
        width: dimensions of a box.
        family: the family of each box.
        regular: whether each box is cut regularly.
        offset: the begin of each box, by dimension.
        length: the extent of each box, by dimension.
    """

    width: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
    family: bytes
    regular: bytes
    offset: bytes
    length: bytes

    def __post_init__(self) -> None:
        sizes = len(self.family), len(self.regular), len(self.offset), len(self.length)
        boxes = len(self.family) * self.width
        expect(_whole(self.family, 8), sizes[1:] == (sizes[0], boxes, boxes), reason=f"columns of {sizes} bytes")


class Table(Message, frozen=True, array_like=True):
    """The parts of its table that a rank states.

    Attributes:
        catalogue: encoded :class:`CatalogueColumns`, if the rank was asked for it; else empty.
        slots: encoded :class:`SlotColumns`, if the rank was asked for it; else empty.
        units: claims of units, as text.
        flat: rows of 20 bytes, as ranks send them that state nothing else.
    """

    catalogue: bytes
    slots: bytes
    units: str
    flat: bytes


class SurveyAnswer(Message, frozen=True):
    """Rank 0's question for tables.

    Attributes:
        key: of the plan.
        catalogue_leaders: int32, the ranks that state their catalogue.
        slots_leaders: int32, the ranks that state their slots.
    """

    key: Digest
    catalogue_leaders: bytes
    slots_leaders: bytes

    def __post_init__(self) -> None:
        expect(_whole(self.catalogue_leaders, 4), _whole(self.slots_leaders, 4), reason="leaders are cut off")


class Share(Message, frozen=True, array_like=True, tag=False):
    """The writes of one rank.

    Attributes:
        owned: int64, the objects that it writes.
        units: int64, the units that it writes.
        rows: rows of :data:`bcp.plan.write.divide.SHARE`.
    """

    owned: bytes
    units: bytes
    rows: bytes


class Claim(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The units of one sharded state that one rank holds.

    Attributes:
        name: where the state stands below ``states["dataloader"]``: keys joined by ``/``; empty for itself.
        reader: number of the rank's reader.
        readers: how many readers there are.
        ids: ids of the reader's units.
    """

    name: str
    reader: int
    readers: int
    ids: tuple[str, ...]

    def __str__(self) -> str:
        return f"dataloader {self.name!r}" if self.name else "the dataloader"


class Written(Message, frozen=True, array_like=True, tag=False):
    """The files that a rank has written.

    Attributes:
        digest: of its receipt.
        nbytes: bytes of its receipt.
        files: rows of 9 bytes for its data files: code of the kind, and bytes as stored.
    """

    digest: Digest
    nbytes: Count
    files: bytes

    def __post_init__(self) -> None:
        expect(_whole(self.files, 9), reason="rows of files are cut off")


# -- loads ------------------------------------------------------------------------------------


class Opened(Message, frozen=True):
    """The metadata of a checkpoint, for all ranks.

    Attributes:
        trace: trace context of rank 0; empty for none.
        metadata: the bytes of the file.
    """

    trace: str
    metadata: bytes


class BlockRuns(Message, frozen=True, array_like=True):
    """The blocks that a rank needs.

    Attributes:
        count: the number of runs.
        columns: the gap before each run, and the length of each, compressed.
    """

    count: Count
    columns: bytes


class LoadRequestColumns(Message, frozen=True, array_like=True):
    """The reading that a rank needs.

    Attributes:
        kinds: kinds of states that it loads, as bits.
        names: int32, rows of names.
        claims: units that it wants, as text.
        runs: encoded :class:`BlockRuns`; empty without overlap.
    """

    kinds: Count
    names: bytes
    claims: str
    runs: bytes

    def __post_init__(self) -> None:
        expect(_whole(self.names, 4), reason="names are cut off")


class LoadAnswer(Message, frozen=True):
    """The reading that all ranks agree on.

    Attributes:
        world_size: the number of ranks.
        names: int32, rows of names that no rank wants.
        runs: encoded :class:`SharedRuns`.
    """

    world_size: Count
    names: bytes
    runs: bytes

    def __post_init__(self) -> None:
        expect(_whole(self.names, 4), reason="names are cut off")


class SharedRuns(Message, frozen=True):
    """The blocks that ranks read for each other.

    Attributes:
        count: the number of runs.
        groups: the number of groups of ranks.
        members: the number of ranks in all groups.
        columns: seven columns, compressed.
    """

    count: Count
    groups: Count
    members: Count
    columns: bytes

    def __post_init__(self) -> None:
        expect(self.groups <= self.count, reason=f"{self.groups} groups of {self.count} runs")


class Rate(Message, frozen=True, array_like=True, tag=False):
    """How fast a rank sends to other hosts; infinite if all ranks share its host."""

    bytes_per_second: Annotated[float, msgspec.Meta(gt=0)]


prepare(__name__, Claim)
