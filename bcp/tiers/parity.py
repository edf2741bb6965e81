"""The files of a lost host, rebuilt from the stripes and the files of the other hosts of its group (as RAID 5 does).

A wrong rebuild is not believed: whoever reads compares blocks with their digests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from bcp._messages.tiers import HeldGroup, Intent, ParityRecord
from bcp.backends.small import get_small
from bcp.errors import CheckpointError, CorruptError, StorageError
from bcp.events import REBUILT
from bcp.format.metadata import owner_of, receipt_key
from bcp.format.receipt import Receipt, encode_receipt
from bcp.plan.holders import Whole
from bcp.plan.parity import Group, Row, Stripe, segment_for, stripe_of
from bcp.protocols import Backend, Buffer
from bcp.runtime.threads import in_thread
from bcp.tiers.digests import blank_of, key_of
from bcp.tiers.folder import INTENTS, LAYOUTS, NodeFolder
from bcp.tiers.intent import decode_intent, encode_intent
from bcp.tiers.near import Copy
from bcp.tiers.notes import LEFT, Mark
from bcp.tiers.packing import packed, unpacked
from bcp.tiers.parity_files import known_key, stripe_key
from bcp.tiers.refusals import ReadOnly

__all__ = [
    "Rebuilt",
    "group_of",
    "held_group",
    "held_parity",
    "known_intent",
    "rebuilt_copies",
    "row_of",
    "stripes_in",
    "xor",
]

PIECE_BYTES = 8 << 20
"""Bytes of each other host that are read at once."""


class Rebuilt(ReadOnly):
    """A :class:`~bcp.protocols.Backend` that rebuilds the files of one host of a group; it writes and lists nothing."""

    def __init__(
        self,
        operation: str,
        members: Sequence[Sequence[int]],
        lost: int,
        stripes: Mapping[int, Backend],
        copies: Mapping[int, Sequence[Backend]],
    ) -> None:
        """Take what is left of a group.

        Args:
            operation: id of the save.
            members: ranks whose files each host of the group has had.
            lost: number of the host whose files are wanted.
            stripes: the memory with the stripe of each other host, by its number.
            copies: memories with the files of each rank of these.

        """
        self._operation, self._members, self._lost = operation, members, lost
        self._stripes, self._copies = stripes, copies
        self._rows: dict[int, Row] = {}

    def __repr__(self) -> str:
        return f"Rebuilt(ranks {[*self._members[self._lost]]} of operation {self._operation} from parity)"

    async def get(self, key: str) -> Buffer:
        """Return a receipt, an intent or the layout of the lost host: each other one of the group has them, too."""
        directory, _, name = key.partition("/")
        if directory == LAYOUTS:
            return await self._layout(key)
        mark = Mark.of(name) if directory == INTENTS else None
        owner = owner_of(key) if mark is None else (mark.rank, mark.operation)
        if owner is None or owner[1] != self._operation or owner[0] not in self._members[self._lost]:
            raise FileNotFoundError(f"{self!r} has no {key}")
        intent, receipt = await self._known(owner[0], self._lost)
        if mark is not None:
            return encode_intent(intent.with_receipt(encode_receipt(blank_of(receipt))))
        if key != receipt_key(owner[0], self._operation):
            raise FileNotFoundError(f"{self!r} has no {key}")
        return intent.receipt

    async def read_into(self, key: str, start: int, out: memoryview) -> None:
        """Fill ``out`` from a file's bytes.

        Raises:
            CorruptError: what is left of the group does not fit together, or has lost a file.
            StorageError: a host of the group does not answer.

        """
        row = await self._row(self._lost)
        try:
            where = row.segments(key, start, start + out.nbytes)
        except KeyError:
            raise FileNotFoundError(f"{self!r} has no {key}") from None
        if sum(stop - first for _, first, stop in where) != out.nbytes:
            raise CorruptError(f"{self!r}: {key} is shorter than {start + out.nbytes} bytes")
        done = 0
        for segment, first, last in where:
            for begin in range(first, last, PIECE_BYTES):
                end = min(begin + PIECE_BYTES, last)
                await self._rebuild(segment, begin, out[done : done + end - begin])
                done += end - begin

    async def _rebuild(self, segment: int, start: int, out: memoryview) -> None:
        """Fill ``out`` from a segment: its stripe without what all other hosts have in there."""
        size = len(self._members)
        stripe = stripe_of(self._lost, segment, size)
        await self._stripes[stripe].read_into(stripe_key(self._operation), start, out)
        other = memoryview(bytearray(out.nbytes))
        for member in {*range(size)} - {self._lost, stripe}:
            row, done = await self._row(member), 0
            for key, first, last in row.pieces(segment_for(member, stripe, size), start, start + out.nbytes):
                await self._read(key, first, other[done : done + last - first])
                done += last - first
            if done:
                await in_thread(xor, out[:done], other[:done])

    async def _read(self, key: str, start: int, out: memoryview) -> None:
        """Fill ``out`` from a file that a host of the group has, or another one."""
        owner = owner_of(key)
        assert owner is not None  # noqa: S101 -- rows have keys of data files
        errors = list[Exception]()
        for files in self._copies[owner[0]]:
            try:
                return await files.read_into(key, start, out)
            except (FileNotFoundError, CorruptError, StorageError) as error:
                errors.append(error)
        raise self._needs(key, errors)

    async def _row(self, member: int) -> Row:
        """Return how the files of a host were cut."""
        if member not in self._rows:
            receipts = [(await self._known(rank, member))[1] for rank in self._members[member]]
            self._rows[member] = row_of(receipts, len(self._members))
        return self._rows[member]

    async def _known(self, rank: int, member: int) -> tuple[Intent, Receipt]:
        """Return intent and receipt of a rank from a host that has put its files into a stripe."""
        key, errors = known_key(Mark(self._operation, rank)), list[Exception]()
        for files in (files for number, files in self._stripes.items() if number != member):
            try:
                return decode_intent(bytes(await get_small(files, key)), f"{key} from {files!r}")
            except (FileNotFoundError, CheckpointError, StorageError) as error:
                errors.append(error)
        raise self._needs(key, errors)

    async def _layout(self, key: str) -> Buffer:
        errors = list[Exception]()
        for files in self._stripes.values():
            try:
                return await get_small(files, key)
            except (FileNotFoundError, CorruptError, StorageError) as error:
                errors.append(error)
        raise self._needs(key, errors)

    def _needs(self, key: str, errors: Sequence[Exception]) -> CheckpointError | StorageError:
        """Return the error of a file that nobody has, or of one that a silent host may have."""
        words = "; ".join(str(error) or "it is missing" for error in errors) or "no host has it"
        kind = StorageError if any(isinstance(error, StorageError) for error in errors) else CorruptError
        return kind(f"{self!r} needs {key}: {words}")

    async def aclose(self) -> None:
        """Close the connections to other hosts."""
        for files in {id(each): each for each in self._stripes.values()}.values():
            await files.aclose()


def xor(out: memoryview, other: memoryview) -> None:
    """Add bytes to others without carry; both are as long."""
    whole = np.frombuffer(out, np.uint8)
    np.bitwise_xor(whole, np.frombuffer(other, np.uint8), out=whole)


def row_of(receipts: Sequence[Receipt], size: int) -> Row:
    """Cut the files of a host for the other hosts of a group of so many.

    Args:
        receipts: of its ranks, in their order.
        size: hosts of the group.

    """
    files = [(key_of(receipt, file), file) for receipt in receipts for file in receipt.files]
    return Row.cut(
        [key for key, _ in files],
        [file.blocks.stored_start for _, file in files],
        [file.stored_nbytes for _, file in files],
        size - 1,
    )


# -- what hosts tell each other --------------------------------------------------------------------


def held_parity(folder: NodeFolder) -> tuple[bytes, ...]:
    """List the records of this host's stripes that count, encoded. Blocks."""
    found, ended = [], folder.ended()
    for operation in sorted(folder.parity.ages()):
        with folder.parity.holding(operation) as record:
            if record is not None and ended.get(operation) != LEFT:
                found.append(record.encode())
    return tuple(found)


def known_intent(folder: NodeFolder, mark: Mark) -> Intent | None:
    """Return the intent of files on another host, with their receipt; None without parity of them. Blocks."""
    with folder.parity.holding(mark.operation) as record:
        try:
            data = None if record is None else (folder.root / known_key(mark)).read_bytes()
        except FileNotFoundError:
            return None
        return None if data is None else decode_intent(data, known_key(mark))[0]


def stripes_in(told: Iterable[Sequence[bytes]]) -> list[list[Stripe]]:
    """Return the stripes of each host, for the plan.

    Args:
        told: the records of each host, encoded.

    Raises:
        MessageError: a record cannot be decoded.

    """
    members: dict[tuple[bytes, ...], tuple[tuple[int, ...], ...]] = {}  # the hosts of a group tell the same
    found: list[list[Stripe]] = []
    for host in told:
        found.append([])
        for record in map(ParityRecord.decode, host):
            if record.ranks not in members:
                members[record.ranks] = tuple(tuple(unpacked(each).tolist()) for each in record.ranks)
            found[-1].append(Stripe(record.operation, record.place, members[record.ranks]))
    return found


def held_group(group: Group) -> HeldGroup:
    """Return a group as a part of a message."""
    return HeldGroup(tuple(packed(each) for each in group.members), packed(group.holder))


def group_of(held: HeldGroup) -> Group:
    """Undo :func:`held_group`."""
    return Group(tuple(tuple(unpacked(each).tolist()) for each in held.ranks), unpacked(held.holder))


def rebuilt_copies(whole: Whole, places: Sequence[Copy], copies: Mapping[int, Sequence[Copy]]) -> dict[int, Copy]:
    """Return, for each rank whose files follow from parity, the copy that rebuilds them.

    Args:
        whole: the snapshot.
        places: the memory of each host, by its number.
        copies: the files of each rank, as hosts have them.

    """
    found, is_held = dict[int, Copy](), whole.is_held()
    files = {rank: [copy.files for copy in there] for rank, there in copies.items()}
    for group in whole.groups:
        stripes = {number: places[host].files for number, host in enumerate(group.holder.tolist()) if host >= 0}
        for member, ranks in enumerate(group.members):
            if group.rebuilds(member, is_held):
                others = {number: each for number, each in stripes.items() if number != member}
                copy = Copy(REBUILT, Rebuilt(whole.operation, group.members, member, others, files), "host")
                found |= dict.fromkeys(ranks, copy)
    return found
