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

from bcp._messages.base import Count, Message, Seconds, expect, prepare

__all__ = [
    "DIGEST_BYTES",
    "Base",
    "BlockRuns",
    "CatalogueColumns",
    "Claim",
    "CodecTrial",
    "DifferingReplicas",
    "EqualBlocks",
    "Ints",
    "LoadAnswer",
    "LoadRequestColumns",
    "Opened",
    "Opening",
    "Rate",
    "ReplicaDigests",
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
    nothing: bool = False  # whether the rank's states have no kind at all


class Opening(Message, frozen=True, array_like=True, tag=False):
    """Rank 0's first answer to all ranks."""

    operation: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]  # id of the save
    cached: bool  # whether every rank has the plan already
    version: Annotated[str, msgspec.Meta(min_length=1)] | None  # of the metadata before the save; None for none
    trace: str  # trace context of rank 0; empty for none
    compares: bool  # whether the ranks compare replicas
    differs: bool  # whether replicas of a plan that every rank has are known to differ


class ReplicaDigests(Message, frozen=True, array_like=True, tag=False):
    """The replicas of one rank, each column eight bytes a shard or a value of the optimizer."""

    name: bytes  # digest of the name
    shard: bytes  # digest of the name and of the shard's place in its tensor
    value: bytes  # digest of sampled values

    def __post_init__(self) -> None:
        nbytes = len(self.name)
        expect(_whole(self.name, 8), len(self.shard) == nbytes, len(self.value) == nbytes, reason="cut off")


class DifferingReplicas(Message, frozen=True):
    """Rank 0's answer: the tensors and values whose replicas differ."""

    tensors: bytes  # digests of the names of tensors, eight bytes each
    values: bytes  # the same for values that are no tensors
    is_trained: bool  # whether a parameter or an optimizer state is among the tensors

    def __post_init__(self) -> None:
        expect(_whole(self.tensors, 8), _whole(self.values, 8), reason="digests are cut off")


# -- the survey and the division of a save ----------------------------------------------------


class CatalogueColumns(Message, frozen=True):
    """The names of a rank."""

    nbytes: Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]  # bytes of the columns, decompressed
    columns: bytes  # an Arrow stream, compressed


class SlotColumns(Message, frozen=True):
    """The boxes of a rank, each column int64."""

    width: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]  # dimensions of a box
    family: bytes  # number of each box's family
    regular: bytes  # 1 for a box that is held as a whole, 0 for one whose intervals every rank lists
    offset: bytes  # first corner of each box, by dimension
    length: bytes  # extent of each box, by dimension

    def __post_init__(self) -> None:
        sizes = len(self.family), len(self.regular), len(self.offset), len(self.length)
        boxes = len(self.family) * self.width
        expect(_whole(self.family, 8), sizes[1:] == (sizes[0], boxes, boxes), reason=f"columns of {sizes} bytes")


class Table(Message, frozen=True, array_like=True):
    """The parts of its table that a rank states."""

    catalogue: bytes  # encoded CatalogueColumns, if the rank was asked for it; else empty
    slots: bytes  # encoded SlotColumns, if the rank was asked for it; else empty
    units: str  # claims of units, as text
    flat: bytes  # flat intervals in rows of 20 bytes; a rank that states nothing else sends these bytes alone


class SurveyAnswer(Message, frozen=True):
    """Rank 0's question for tables."""

    key: Digest  # key of the plan
    catalogue_leaders: bytes  # int32, the ranks that state their catalogue
    slots_leaders: bytes  # int32, the ranks that state their slots

    def __post_init__(self) -> None:
        expect(_whole(self.catalogue_leaders, 4), _whole(self.slots_leaders, 4), reason="leaders are cut off")


class Share(Message, frozen=True, array_like=True, tag=False):
    """The writes of one rank."""

    owned: bytes  # int64, the objects that it writes
    units: bytes  # int64, the units that it writes
    replicas: bytes  # rows of bcp.plan.write.replicas.REPLICAS
    compared: Count  # bytes that it compares of each replica, at most
    rows: bytes  # rows of bcp.plan.write.divide.SHARE


class Claim(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The units of one sharded state that one rank holds."""

    name: str  # keys from ``states["dataloader"]`` to the state, joined by ``/``; empty if it is the state
    reader: int  # number of the rank's reader
    readers: int  # how many readers there are
    ids: tuple[str, ...]  # ids of the reader's units

    def __str__(self) -> str:
        return f"dataloader {self.name!r}" if self.name else "the dataloader"


class EqualBlocks(Message, frozen=True, array_like=True, tag=False):
    """How many blocks of a rank's last save were equal to those of the save before."""

    equal: Count
    blocks: Count  # how many were compared

    def __post_init__(self) -> None:
        expect(self.equal <= self.blocks, reason=f"{self.equal} of {self.blocks} blocks are equal")


class Base(Message, frozen=True):
    """Rank 0's answer: the earlier checkpoint of the run to which a save may refer."""

    step: Count
    operation: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]  # id of its save
    since_full: Count  # how many saves have referred to others in a row, with the one that begins
    refers: tuple[Count, ...]  # steps that the save may refer to, the base itself among them


class Written(Message, frozen=True, array_like=True, tag=False):
    """The files that a rank has written."""

    digest: Digest  # digest of the rank's receipt
    nbytes: Count  # bytes of this receipt
    files: bytes  # rows of 9 bytes for the rank's data files: code of the kind, and bytes as stored
    packed: bytes  # the same for files that lack blocks of earlier checkpoints
    refers: tuple[Count, ...]  # steps of these checkpoints

    def __post_init__(self) -> None:
        expect(_whole(self.files, 9), _whole(self.packed, 9), reason="rows of files are cut off")


class CodecTrial(Message, frozen=True, array_like=True, tag=False):
    """How fast a rank's codec is, and how fast storage takes the rank's bytes."""

    nbytes: Count  # bytes of the rank's state
    sample: Count  # bytes of it that were encoded
    stored: Count  # bytes that they became
    encode_seconds: Seconds  # for the sample, with all of the codec's workers at work
    written: Annotated[int, msgspec.Meta(gt=0, le=(1 << 63) - 1)]  # bytes that were written
    written_seconds: Seconds  # for them, beside those of all other ranks


# -- loads ------------------------------------------------------------------------------------


class Opened(Message, frozen=True):
    """The metadata of a checkpoint, for all ranks."""

    trace: str  # trace context of rank 0; empty for none
    metadata: bytes  # the file's bytes


class BlockRuns(Message, frozen=True, array_like=True):
    """The blocks that a rank needs."""

    count: Count  # number of runs
    columns: bytes  # the gap before each run, and each run's length, compressed


class LoadRequestColumns(Message, frozen=True, array_like=True):
    """The reading that a rank needs."""

    kinds: Count  # kinds of states that it loads, as bits
    names: bytes  # int32, rows of names
    claims: str  # units that it wants, as text
    runs: bytes  # encoded BlockRuns; empty if options.overlap_loading is off

    def __post_init__(self) -> None:
        expect(_whole(self.names, 4), reason="names are cut off")


class LoadAnswer(Message, frozen=True):
    """The reading that all ranks agree on."""

    world_size: Count
    names: bytes  # int32, rows of names that no rank wants
    runs: bytes  # encoded SharedRuns

    def __post_init__(self) -> None:
        expect(_whole(self.names, 4), reason="names are cut off")


class SharedRuns(Message, frozen=True):
    """The blocks that ranks read for each other."""

    count: Count  # number of runs
    groups: Count  # number of groups of ranks
    members: Count  # number of ranks in all groups
    columns: bytes  # seven columns, compressed

    def __post_init__(self) -> None:
        expect(self.groups <= self.count, reason=f"{self.groups} groups of {self.count} runs")


class Rate(Message, frozen=True, array_like=True, tag=False):
    """How fast a rank sends to other hosts; infinite if all ranks share its host."""

    bytes_per_second: Annotated[float, msgspec.Meta(gt=0)]


prepare(__name__, Claim)
