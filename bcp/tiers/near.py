"""A snapshot in the memories of several hosts as one storage that a load reads: nearest copy first, each block checked.

A damaged block, a host that does not answer and a missing file lead to the next copy. Storage is the last one, where
agents may have sent the same files already. So the ordinary load gets what the save has written, or an error that names
all copies.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import anyio
import numpy as np

from bcp._log import log
from bcp._text import hidden
from bcp.backends.scattered import read_scattered
from bcp.backends.small import get_small
from bcp.errors import CheckpointError, CorruptError, InputError, StorageError
from bcp.events import TierEvent, emit
from bcp.format.checksums import cut, digests
from bcp.format.container import digest
from bcp.format.metadata import METADATA_KEY, Commit, decode_metadata, owner_of, receipt_key
from bcp.format.receipt import Blocks, decode_receipt, receipt_digest
from bcp.plan.shards import KINDS
from bcp.protocols import Backend, Buffer, ObjectInfo, Version, flat_view
from bcp.runtime.threads import in_thread
from bcp.tiers.refusals import ReadOnly

__all__ = ["READ_BYTES", "Copy", "NearBackend", "UnreachableError"]

RESTART_SECONDS = 15.0
"""For an agent that has died: its parent starts it again, and a read without another copy waits for it."""

NAP_SECONDS = 0.5

READ_BYTES = 64 << 20
"""The largest read of a recovery: each one passes all stages of a load, so that few large ones are faster."""

PIECE_BYTES = 4 << 20
"""Blocks of so many bytes are read and compared while they are in the processor's cache."""


class UnreachableError(StorageError):
    """A host with a copy did not answer, and no other copy can be used. The snapshot may be whole."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A place that has files of some ranks.

    Attributes:
        name: for messages and counts, as in "this host".
        files: the place; keys are those of the checkpoint.
        kind: of the place.
    """

    name: str
    files: Backend
    kind: Literal["here", "host", "storage"] = "here"


@dataclass(frozen=True, slots=True)
class Passed:
    """A copy that was passed over, and the reason.

    Attributes:
        copy: the copy.
        reason: for messages.
        is_certain: whether the copy is damaged or missing; False for a place that failed.
    """

    copy: Copy
    reason: str
    is_certain: bool


class NearBackend(ReadOnly):
    """A :class:`~bcp.protocols.Backend` that reads one snapshot, and writes nothing.

    Attributes:
        checks_blocks: readers need not compare whole blocks with their checksums once more.
        read_nbytes: bytes that were read from each copy, by its name.
        passed_over: how often a copy was passed over for the next one, by its name.
    """

    checks_blocks = True

    def __init__(self, metadata: bytes, copies: Mapping[int, Sequence[Copy]]) -> None:
        """Take the snapshot.

        Args:
            metadata: as a commit would have stored them.
            copies: of the files of each rank that has saved, nearest first.

        """
        self.read_nbytes: Counter[str] = Counter()
        self.passed_over: Counter[str] = Counter()
        self._metadata = metadata
        self._commit: Commit = decode_metadata(metadata, METADATA_KEY).commit
        self._copies = copies
        self._receipts: dict[str, Buffer] = {}
        self._blocks: dict[str, Blocks] = {}

    def __repr__(self) -> str:
        return f"NearBackend(operation {self._commit.operation} in memory)"

    @property
    def metrics(self) -> Mapping[str, float]:
        """Those of the step, as the save was given them."""
        return self._commit.metrics

    # -- reads -------------------------------------------------------------------------------------

    async def get(self, key: str) -> Buffer:
        """Read the metadata, or a receipt that is the one of the commit."""
        if key == METADATA_KEY:
            return self._metadata
        if key in self._receipts:
            return self._receipts[key]
        rank = self._rank(key)

        async def read(copy: Copy) -> str:
            data = await get_small(copy.files, key)
            if receipt_digest(data) != self._commit.receipt(rank):
                return "it is not the receipt of this save"
            self.read_nbytes[copy.name] += memoryview(data).nbytes
            self._receipts[key] = data
            return ""

        await self._try_copies(rank, key, read)
        return self._receipts[key]

    async def read_into(self, key: str, start: int, out: memoryview) -> None:
        """Fill ``out`` from the first copy whose blocks have their checksums."""
        await self.read_scattered(key, start, [flat_view(out)])

    async def read_scattered(self, key: str, start: int, outs: Sequence[memoryview]) -> None:
        """Fill the buffers from the first copy whose blocks have their checksums."""
        rank = self._rank(key)
        blocks = await self._blocks_of(rank, key)

        async def read(copy: Copy) -> str:
            wrong = await _read_checked(copy.files, key, start, outs, blocks)
            self.read_nbytes[copy.name] += 0 if wrong else sum(map(len, outs))
            return wrong

        await self._try_copies(rank, key, read)

    async def version(self, key: str) -> Version | None:
        """Return the digest of the metadata; there is nothing else that changes."""
        return digest(self._metadata).hex() if key == METADATA_KEY else None

    async def list(self, prefix: str = "") -> Sequence[ObjectInfo]:
        """List the metadata alone: what is there beside it is known by the layout."""
        return [ObjectInfo(METADATA_KEY, len(self._metadata))] if METADATA_KEY.startswith(prefix) else []

    async def aclose(self) -> None:
        """Close the connections to other hosts and to storage."""
        for copy in {id(each): each for copies in self._copies.values() for each in copies}.values():
            await copy.files.aclose()

    # -- details -----------------------------------------------------------------------------------

    async def _try_copies(self, rank: int, key: str, read: Callable[[Copy], Awaitable[str]]) -> None:
        """Read from the nearest copy that is intact.

        Hosts that fail are asked again for a while, if no other copy can be used.

        Args:
            rank: that has saved the file.
            key: of the file.
            read: reads from a copy, and says what is wrong with it; an empty text if all is well.

        """
        until, copies, damaged = time.monotonic() + RESTART_SECONDS, self._copies.get(rank, ()), list[Passed]()
        told = set[tuple[str, str]]()
        while True:
            passed = []
            for copy in copies:
                try:
                    wrong = await read(copy)
                except (FileNotFoundError, CheckpointError, InputError, StorageError) as error:
                    failed = isinstance(error, StorageError) and copy.kind != "here"
                    reason = str(error) or "it is missing"
                    passed.append(self._pass_over(copy, key, reason, told, is_certain=not failed))
                    continue
                if not wrong:
                    return
                passed.append(self._pass_over(copy, key, wrong, told))
            lost = self._lost(key, [*damaged, *passed])
            if not isinstance(lost, UnreachableError) or time.monotonic() > until:
                raise lost
            damaged += [each for each in passed if each.is_certain]
            copies = [each.copy for each in passed if not each.is_certain]
            await anyio.sleep(NAP_SECONDS)

    async def _blocks_of(self, rank: int, key: str) -> Blocks:
        """Return the blocks of a data file, with their checksums."""
        if key not in self._blocks:
            receipt = decode_receipt(await self.get(receipt_key(rank, self._commit.operation)), key)
            file = receipt.file(KINDS.index(key.partition("/")[0]))
            if file is None:
                raise CorruptError(f"{key} is no file of rank {rank} in operation {self._commit.operation}")
            self._blocks[key] = file.blocks
        return self._blocks[key]

    def _rank(self, key: str) -> int:
        """Return the rank in a key of this save. Raises FileNotFoundError for other names."""
        owner = owner_of(key)
        if owner is None or owner[1] != self._commit.operation:
            raise FileNotFoundError(f"{self!r} has no {key}")
        return owner[0]

    def _pass_over(
        self, copy: Copy, key: str, reason: str, told: set[tuple[str, str]], *, is_certain: bool = True
    ) -> Passed:
        """Note that a copy cannot be used; count and tell each reason once in one read."""
        if (copy.name, reason) not in told:
            told.add((copy.name, reason))
            self.passed_over[copy.name] += 1
            now, said = time.monotonic(), hidden(f"{key}: {reason}")
            emit(TierEvent("passed_over", None, self._commit.operation, now, place=copy.name, said=said))
            log.warning("a copy of a snapshot is passed over", copy=copy.name, key=key, reason=reason)
        return Passed(copy, f"{copy.name}: {reason}", is_certain)

    def _lost(self, key: str, passed: Sequence[Passed]) -> CorruptError | StorageError:
        """Return the error of a file without a copy: a host that failed comes first, then storage, then damage."""
        words = "; ".join(each.reason for each in passed) or "no host has it"
        what = f"{key} of operation {self._commit.operation} cannot be read from memory ({words})"
        failed = {each.copy.kind for each in passed if not each.is_certain}
        if "host" in failed:
            return UnreachableError(
                f"{what}. The snapshot may be whole, and stays: see that the agents of these hosts run, and resume "
                "again. resume(step=...) and resume(fresh=True) give it up"
            )
        return StorageError(what) if failed else CorruptError(what)


@runtime_checkable
class PieceReader(Protocol):
    """Storage that fills buffers piece by piece, and lets each piece be looked at while it is in the cache."""

    async def read_pieces(
        self, key: str, start: int, pieces: Sequence[Sequence[memoryview]], arrived: Callable[[int], None]
    ) -> None:
        """Fill the buffers of all pieces, one after the other; call ``arrived`` with the number of each full one."""


async def _read_checked(files: Backend, key: str, start: int, outs: Sequence[memoryview], blocks: Blocks) -> str:
    """Fill buffers, and name the first whole block that has another checksum; return an empty text for none."""
    first, stop = blocks.whole_in(start, start + sum(map(len, outs)))
    before = [int(blocks.stored_start[first]) - start] if first < stop else []
    rows = np.split(np.arange(first, stop), np.flatnonzero(np.diff(blocks.stored_start[first:stop] // PIECE_BYTES)) + 1)
    pieces = cut(outs, [*before, *(int(blocks.stored_length[each].sum()) for each in rows)])
    wrong = list[str]()

    def arrived(number: int) -> None:
        if not before or not 0 < number <= len(rows):
            return
        these = rows[number - 1]
        found = digests(pieces[number], blocks.stored_length[these].tolist())
        for row, name in zip(these.tolist(), found, strict=True):
            if name != blocks.checksum[row] and not wrong:
                at = int(blocks.stored_start[row])
                wrong.append(f"bytes {at} to {at + int(blocks.stored_length[row])} have checksum {name.hex()}")

    if isinstance(files, PieceReader):
        await files.read_pieces(key, start, pieces, arrived)
    else:
        await read_scattered(files, key, start, outs)
        await in_thread(_each, len(pieces), arrived)
    return "".join(wrong)


def _each(count: int, call: Callable[[int], None]) -> None:
    for number in range(count):
        call(number)
