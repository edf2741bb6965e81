"""A snapshot in the memories of several hosts as one storage that a load reads: nearest copy first, each block checked.

A damaged block, a host that does not answer and a missing file lead to the next copy. So the ordinary load gets what
the save has written, or an error that names all copies.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from bcp._log import log
from bcp.backends.small import get_small
from bcp.errors import CorruptError, InputError, StorageError
from bcp.format.checksums import digests
from bcp.format.container import digest
from bcp.format.metadata import METADATA_KEY, Commit, decode_metadata, receipt_key
from bcp.format.receipt import Blocks, decode_receipt, receipt_digest
from bcp.plan.shards import KINDS
from bcp.protocols import Backend, Buffer, ObjectInfo, PartWriter, Version
from bcp.runtime.threads import in_thread

__all__ = ["Copy", "NearBackend"]

KEY = re.compile(r"([a-z_]+)/(?:[0-9a-f]{2}-)?(\d{5,})-[0-9a-f]{16}\.(?:safetensors|arrow)")


@dataclass(frozen=True, slots=True)
class Copy:
    """A place that has files of some ranks.

    Attributes:
        name: for messages and counts, as in "this host".
        files: the place; keys are those of the checkpoint.
    """

    name: str
    files: Backend


class NearBackend:
    """A :class:`~bcp.protocols.Backend` that reads one snapshot, and writes nothing.

    Attributes:
        read_nbytes: bytes that were read from each copy, by its name.
        passed_over: how often a copy was passed over for the next one, by its name.
    """

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
        self._blocks: dict[str, Blocks] = {}

    def __repr__(self) -> str:
        return f"NearBackend(operation {self._commit.operation} in memory)"

    # -- reads -------------------------------------------------------------------------------------

    async def get(self, key: str) -> Buffer:
        """Read the metadata, or a receipt that is the one of the commit."""
        if key == METADATA_KEY:
            return self._metadata
        _, rank = self._named(key)
        reasons = []
        for copy in self._copies.get(rank, ()):
            try:
                data = await get_small(copy.files, key)
            except (FileNotFoundError, CorruptError, StorageError) as error:
                reasons.append(self._pass_over(copy, key, str(error) or "it is missing"))
                continue
            if receipt_digest(data) == self._commit.receipt(rank):
                self.read_nbytes[copy.name] += memoryview(data).nbytes
                return data
            reasons.append(self._pass_over(copy, key, "it is not the receipt of this save"))
        raise self._lost(key, reasons)

    async def read_into(self, key: str, start: int, out: memoryview) -> None:
        """Fill ``out`` from the first copy whose blocks have their checksums."""
        kind, rank = self._named(key)
        blocks = await self._blocks_of(kind, rank, key)
        reasons = []
        for copy in self._copies.get(rank, ()):
            try:
                await copy.files.read_into(key, start, out)
            except (FileNotFoundError, CorruptError, StorageError) as error:
                reasons.append(self._pass_over(copy, key, str(error) or "it is missing"))
                continue
            if not (wrong := await in_thread(_wrong, blocks, start, out)):
                self.read_nbytes[copy.name] += out.nbytes
                return
            reasons.append(self._pass_over(copy, key, wrong))
        raise self._lost(key, reasons)

    async def version(self, key: str) -> Version | None:
        """Return the digest of the metadata; there is nothing else that changes."""
        return digest(self._metadata).hex() if key == METADATA_KEY else None

    async def list(self, prefix: str = "") -> Sequence[ObjectInfo]:
        """List the metadata alone: what is there beside it is known by the layout."""
        return [ObjectInfo(METADATA_KEY, len(self._metadata))] if METADATA_KEY.startswith(prefix) else []

    # -- writes ------------------------------------------------------------------------------------

    async def put(self, key: str, data: Buffer) -> None:
        """Refuse."""
        del data
        raise self._refused(key)

    async def put_if(self, key: str, data: Buffer, expected: Version | None) -> Version | None:
        """Refuse."""
        del data, expected
        raise self._refused(key)

    @asynccontextmanager
    async def open_write(self, key: str, nbytes: int | None = None) -> AsyncIterator[PartWriter]:
        """Refuse."""
        del nbytes
        raise self._refused(key)
        yield  # it is a generator

    async def delete(self, keys: Sequence[str]) -> None:
        """Refuse."""
        raise self._refused(", ".join(keys))

    async def aclose(self) -> None:
        """Close the connections to other hosts."""
        for copy in {id(each): each for copies in self._copies.values() for each in copies}.values():
            await copy.files.aclose()

    # -- details -----------------------------------------------------------------------------------

    async def _blocks_of(self, kind: str, rank: int, key: str) -> Blocks:
        """Return the blocks of a data file, with their checksums."""
        if key not in self._blocks:
            receipt = decode_receipt(await self.get(receipt_key(rank, self._commit.operation)), key)
            file = receipt.file(KINDS.index(kind))
            if file is None:
                raise CorruptError(f"{key} is no file of rank {rank} in operation {self._commit.operation}")
            self._blocks[key] = file.blocks
        return self._blocks[key]

    def _named(self, key: str) -> tuple[str, int]:
        """Return the kind and the rank in a key. Raises FileNotFoundError for other names."""
        match = KEY.fullmatch(key)
        if match is None:
            raise FileNotFoundError(f"{self!r} has no {key}")
        return match[1], int(match[2])

    def _pass_over(self, copy: Copy, key: str, reason: str) -> str:
        self.passed_over[copy.name] += 1
        log.warning("a copy in memory is passed over", copy=copy.name, key=key, reason=reason)
        return f"{copy.name}: {reason}"

    def _lost(self, key: str, reasons: Sequence[str]) -> CorruptError:
        words = "; ".join(reasons) or "no host has it"
        return CorruptError(f"{key} of operation {self._commit.operation} cannot be read from memory ({words})")

    def _refused(self, key: str) -> InputError:
        return InputError(f"{self!r} is read only, and {key!r} cannot be written or deleted there")


def _wrong(blocks: Blocks, start: int, out: memoryview) -> str:
    """Name the first whole block in the read bytes that has another checksum; empty for none."""
    first = int(np.searchsorted(blocks.stored_start, start))
    ends = blocks.stored_start + blocks.stored_length
    stop = int(np.searchsorted(ends, start + out.nbytes, side="right"))
    if first >= stop:
        return ""
    offset = int(blocks.stored_start[first]) - start
    lengths = blocks.stored_length[first:stop].tolist()
    for row, found in enumerate(digests([out[offset : offset + sum(lengths)]], lengths), first):
        if found != blocks.checksum[row]:
            at = int(blocks.stored_start[row])
            return f"bytes {at} to {at + int(blocks.stored_length[row])} have checksum {found.hex()}"
    return ""
