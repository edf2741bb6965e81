"""Messages of the memory tier: intents, records of uploads, and the choice of a snapshot."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from bcp._messages.base import Count, Message, Rank, expect, prepare
from bcp._messages.planning import DIGEST_BYTES

__all__ = [
    "Attended",
    "Digested",
    "Drained",
    "Drift",
    "HeldGroup",
    "HeldRanks",
    "Holdings",
    "Intent",
    "KnownLayout",
    "LeftBehind",
    "Living",
    "MadeMetadata",
    "Note",
    "Offered",
    "ParityRecord",
    "Post",
    "Posted",
    "Recovery",
    "Settled",
    "Sources",
    "ToldLayout",
    "Traffic",
    "Troubles",
    "TwinShares",
    "TwinTable",
    "Want",
    "WholeSnapshots",
    "WrittenTwin",
]

OPERATION = re.compile(r"[0-9a-f]{16}")
PLACE = re.compile(r"(?:[A-Za-z0-9_@+=][A-Za-z0-9._@+=-]*(?:/[A-Za-z0-9_@+=][A-Za-z0-9._@+=-]*)*)?")
"""Names below a root. None begins with a dot, so that no place leads out of it."""

SHARE_BYTES = 24
"""Bytes of a row of bcp.plan.write.divide.SHARE."""

MOST_KEY = 256
MOST_VALUE = 2048

MEETING = re.compile(r"[A-Za-z0-9-]{1,64}")

Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class Intent(Message, frozen=True):
    """One rank's files of one save, as they are to be committed. Training may go on once it is in the folder."""

    rank: Rank
    world_size: Count
    operation: str  # id of the save
    place: str  # of the checkpoint below the durable root, as in "step-00001000"; empty for the root itself
    step: Count
    framework: str  # name of the planner that read the state
    part_bytes: Count
    layout: Digest  # of the encoded layout, which lies in the folder once
    receipt: bytes  # the rank's receipt with zeros for digests, encoded
    branch: str = ""  # of the run, see its ledger
    copied: bool = False  # whether other hosts shall have copies of it
    durable: bool = True  # whether it shall go to durable storage while the job lives
    replaces: str = ""  # operation of the checkpoint at its place that it may replace; empty: there must be none
    metrics: dict[str, float] = msgspec.field(default_factory=dict)  # of the step, for the commit
    user: bytes = b"{}"  # the caller's own facts, as JSON

    def __post_init__(self) -> None:
        expect(
            self.rank < self.world_size,
            OPERATION.fullmatch(self.operation) is not None,
            PLACE.fullmatch(self.place) is not None,
            not self.replaces or OPERATION.fullmatch(self.replaces) is not None,
            reason=f"rank {self.rank} of {self.world_size}, operation {self.operation!r}, place {self.place!r}",
        )

    def with_receipt(self, receipt: bytes) -> Intent:
        """Return it with another receipt, or without one."""
        return msgspec.structs.replace(self, receipt=receipt)


class ToldLayout(Message, frozen=True):
    """What one rank knows before a save."""

    digest: bytes  # of the encoded layout that its host has; empty for none
    is_copied: bool  # whether other hosts have all of the last snapshot of this host that was to be copied
    pairs: bool = False  # whether this rank wants twins
    is_paired: bool = False  # whether it knows them


class KnownLayout(Message, frozen=True):
    """The layout of a save, from rank 0: an agent on any host has to be able to commit."""

    digest: Digest
    layout: bytes  # encoded; empty if all ranks have kept it before
    is_copied: bool = True  # whether all hosts have copies of the last snapshot that was to be copied
    pairs: bool = False  # whether all ranks choose twins now


class TwinTable(Message, frozen=True, array_like=True, tag=False):
    """The shards of one rank, and its writes of them."""

    held: Digest  # of the shards; equal shards have equal digests
    rows: bytes  # rows of bcp.plan.write.divide.SHARE


class TwinShares(Message, frozen=True, array_like=True, tag=False):
    """What one rank writes for its twins on another host."""

    source: Count  # number of the host that this one copies; this host's own for none
    ranks: bytes  # int32[k], whose tensors
    rows: tuple[bytes, ...]  # rows of bcp.plan.write.divide.SHARE of each of them

    def __post_init__(self) -> None:
        expect(
            len(self.ranks) == 4 * len(self.rows),
            *(len(each) % SHARE_BYTES == 0 for each in self.rows),
            reason=f"{len(self.ranks)} bytes of ranks with {len(self.rows)} columns of rows",
        )


class WrittenTwin(Message, frozen=True):
    """A note of a rank that writes the tensors of a rank on another host."""

    writer: Rank  # on this host
    differing: tuple[str, ...]  # tensors whose replicas are known to differ


class Drift(Message, frozen=True):
    """A file whose two replicas in memory have differed: one of them is damaged, or ranks have trained apart."""

    operation: str
    step: Count
    host: str  # that has the file of its own
    rank: Rank  # whose file it is
    twin: Rank  # that wrote the replica on this host
    nbytes: Count  # bytes that have differed
    said: str  # file, blocks and tensors

    def __post_init__(self) -> None:
        expect(OPERATION.fullmatch(self.operation) is not None, reason=f"operation {self.operation!r}")


class HeldRanks(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The marked files of one save on one host."""

    operation: str
    step: Count
    world_size: Count
    ranks: bytes  # int32[n]
    branch: str = ""  # of the run

    def __post_init__(self) -> None:
        expect(
            OPERATION.fullmatch(self.operation) is not None and len(self.ranks) % 4 == 0,
            reason=f"operation {self.operation!r} with {len(self.ranks)} bytes of ranks",
        )


class ParityRecord(Message, frozen=True):
    """The parity that one host has of the files of its group in one save; these are whole in its memory."""

    operation: str
    step: Count
    world_size: Count
    place: Count  # number of this host in the group
    names: tuple[str, ...]  # of the hosts of the group; empty for this one
    addresses: tuple[str, ...]  # where their agents serve; empty for this one
    ranks: tuple[bytes, ...]  # int32[n], whose files each host of the group has

    def __post_init__(self) -> None:
        expect(
            OPERATION.fullmatch(self.operation) is not None,
            self.place < len(self.names) == len(self.addresses) == len(self.ranks),
            *(len(each) % 4 == 0 for each in self.ranks),
            reason=f"operation {self.operation!r}, host {self.place} of {len(self.names)} with {len(self.ranks)} ranks",
        )


class Holdings(Message, frozen=True):
    """What one reader's host has in memory."""

    node: str  # name of the host, the same for all of its ranks
    held: tuple[HeldRanks, ...]
    address: str = ""  # where its agent serves
    token: bytes = b""  # the job's secret, if the host has it
    host: str = ""  # identity of the host's network, other than that of another host
    parity: tuple[bytes, ...] = ()  # encoded records; those of one rank of each host are decoded
    root: str = ""  # path of its directory
    inode: str = ""  # device and inode of the same, which may have several paths


class HeldGroup(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Hosts with parity of each other's files."""

    ranks: tuple[bytes, ...]  # int32[n], whose files each of them has had
    holder: bytes  # int32[g], the host that has each stripe; -1 for none

    def __post_init__(self) -> None:
        expect(
            len(self.holder) == 4 * len(self.ranks),
            *(len(each) % 4 == 0 for each in self.ranks),
            reason=f"{len(self.ranks)} hosts with {len(self.holder)} bytes of holders",
        )


class WholeSnapshots(Message, frozen=True):
    """The hosts of a job and their whole snapshots, the same for all readers."""

    token: bytes  # the job's secret, the same on all hosts from now on
    nodes: tuple[str, ...]  # names of all hosts, by their number
    addresses: tuple[str, ...]  # where their agents serve
    host_of: bytes  # int32[readers], the host of each reader
    operations: tuple[str, ...] = ()  # of the whole snapshots, the newest first
    steps: tuple[Count, ...] = ()  # of the same
    reasons: tuple[str, ...] = ()  # why newer ones are not whole

    def __post_init__(self) -> None:
        expect(
            len(self.operations) == len(self.steps),
            *(OPERATION.fullmatch(each) is not None for each in self.operations),
            reason=f"operations {self.operations} with {len(self.steps)} steps",
        )


class Recovery(Message, frozen=True):
    """The holders of a snapshot's files, the same for all readers."""

    world_size: Count  # ranks that have saved; 0 if a rank's files have no holder any more
    holder: bytes = b""  # int32[p], hosts
    begin: bytes = b""  # int32[n + 1]: those of each saved rank are at begin[r] to begin[r + 1]
    rebuilt: bytes = b""  # int32[k], saved ranks whose files follow from parity alone
    groups: tuple[HeldGroup, ...] = ()
    reason: str = ""  # why there is none


class Digested(Message, frozen=True):
    """One reader's digests of receipts; or its error."""

    ranks: bytes  # int32[k]
    receipts: bytes  # 16 bytes for each
    intent: bytes = b""  # the intent of one rank, without its receipt
    layout: bytes = b""  # that the intent names
    error: str = ""

    def __post_init__(self) -> None:
        expect(
            len(self.ranks) % 4 == 0 and len(self.receipts) * 4 == DIGEST_BYTES * len(self.ranks),
            reason=f"{len(self.ranks)} bytes of ranks with {len(self.receipts)} bytes of digests",
        )


class Offered(Message, frozen=True):
    """The newest snapshot of a host that others are to copy."""

    operation: str  # empty for none
    ranks: tuple[Rank, ...] = ()  # whose files the host has

    def __post_init__(self) -> None:
        expect(
            not self.operation or OPERATION.fullmatch(self.operation) is not None,
            reason=f"operation {self.operation!r}",
        )


class Sources(Message, frozen=True):
    """The hosts whose snapshots this one copies, or keeps the parity of."""

    nodes: tuple[str, ...]  # their names
    addresses: tuple[str, ...]  # where their agents serve
    place: int = -1  # number of this host in a group with parity: the others are those before it, around; -1 for copies

    def __post_init__(self) -> None:
        count = len(self.addresses)
        is_sound = len(self.nodes) == count and -1 <= self.place <= count
        expect(is_sound, reason=f"{len(self.nodes)} hosts with {count} addresses, and this one at {self.place}")


class Troubles(Message, frozen=True):
    """What the agent of a host fails at, and tries again."""

    places: tuple[str, ...]  # names of hosts whose snapshots it cannot copy; or steps that storage does not take
    reasons: tuple[str, ...]  # the last error of each

    def __post_init__(self) -> None:
        count = len(self.reasons)
        expect(len(self.places) == count, reason=f"{len(self.places)} places with {count} reasons")


class Traffic(Message, frozen=True):
    """The bytes of copies that the agent of a host has made in its life."""

    fetched: Count  # over the network
    by_twins: Count  # from what ranks of this host have written


class Want(Message, frozen=True):
    """A request for bytes of a marked file of another host."""

    key: str
    start: Count
    nbytes: Count  # 0: all of a small file

    def __post_init__(self) -> None:
        expect(len(self.key) <= MOST_KEY, reason=f"a key of {len(self.key)} characters")


class Attended(Message, frozen=True):
    """One survivor of a job, as it comes to the meeting of all survivors."""

    rank: Rank
    world_size: Count  # ranks of the job
    step: Count  # the last one that has ended on this rank
    node: str  # name of its host
    trouble: str = ""  # why its states are not those at the end of the step; empty if they are

    def __post_init__(self) -> None:
        expect(self.rank < self.world_size, reason=f"rank {self.rank} of {self.world_size}")


class Post(Message, frozen=True):
    """A note for a meeting at an agent, and the question for later notes of others."""

    meeting: str
    seen: Count  # notes that are known
    key: str = ""  # empty: there is no note, only the question
    value: bytes = b""

    def __post_init__(self) -> None:
        expect(
            MEETING.fullmatch(self.meeting) is not None,
            len(self.key) <= MOST_KEY,
            len(self.value) <= MOST_VALUE,
            reason=f"meeting {self.meeting!r}, a key of {len(self.key)} and a value of {len(self.value)} characters",
        )


class Note(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A note of a meeting."""

    key: str
    value: bytes


class Posted(Message, frozen=True):
    """The notes of a meeting that the asker has not seen, in the order in which they came; perhaps not all at once."""

    board: str  # another one after each start of the agent, which forgets all notes
    notes: tuple[Note, ...]


class Living(Message, frozen=True):
    """The ranks of a host whose processes live."""

    ranks: tuple[Rank, ...]


class MadeMetadata(Message, frozen=True):
    """The metadata as a commit would have stored them; empty if the files of a host are damaged, to look again."""

    metadata: bytes
    place: str = ""  # of the checkpoint below the durable root


class LeftBehind(Message, frozen=True):
    """The snapshots of one host that the job has given up, and that may be on their way to storage."""

    places: tuple[str, ...]  # of their checkpoints below the durable root
    operations: tuple[str, ...]
    from_storage: Count = 0  # bytes of the loaded snapshot that this rank has read from storage

    def __post_init__(self) -> None:
        expect(
            len(self.places) == len(self.operations),
            *(OPERATION.fullmatch(each) is not None for each in self.operations),
            *(PLACE.fullmatch(each) is not None for each in self.places),
            reason=f"{len(self.places)} places with operations {self.operations}",
        )


class Settled(Message, frozen=True):
    """All snapshots but the one that the job goes on from are given up."""

    durable: bool  # whether storage has the checkpoint of that one
    branch: str  # of the run from now on
    folders: tuple[str, ...]  # of the run's steps, as they are listed now
    from_storage: Count = 0  # bytes of the loaded snapshot that all ranks have read from storage


class Drained(Message, frozen=True):
    """The ranks whose files one node has made durable, and what each of them would have told rank 0."""

    ranks: tuple[Rank, ...]
    written: tuple[bytes, ...]  # the message of each of these ranks for the commit

    def __post_init__(self) -> None:
        expect(
            len(self.ranks) == len(self.written) == len({*self.ranks}),
            reason=f"{len(self.ranks)} ranks with {len(self.written)} messages",
        )


prepare(__name__)
