"""What rank 0 does for all: refuse or open, divide, commit, sweep (paper sec. 3.3, 5.2)."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import xxhash

from bcp._log import log
from bcp._version import __version__
from bcp.errors import ExistsError
from bcp.metadata import METADATA_KEY, Commit, encode_layout, encode_metadata, operation_of
from bcp.options import SaveOptions
from bcp.pipeline import planning
from bcp.plan.cache import PlanCache
from bcp.plan.save.divide import divide
from bcp.plan.save.survey import Survey, gather, survey
from bcp.plan.save.wire import encode_shares
from bcp.protocols import Backend, Sweeper

__all__ = ["BLOCK_BYTES", "Opening", "Root"]

BLOCK_BYTES = 1 << 20
_layouts: PlanCache[bytes] = PlanCache(16)


@dataclass(frozen=True, slots=True)
class Opening:
    """What rank 0 says first: the operation's id, and whether everyone has the plan already."""

    operation: str
    cached: bool

    def encode(self) -> bytes:
        """Return 9 bytes."""
        return bytes.fromhex(self.operation) + bytes([self.cached])

    @classmethod
    def decode(cls, data: bytes) -> Opening:
        """Undo :meth:`encode`."""
        return cls(data[:8].hex(), bool(data[8]))


@dataclass(slots=True)
class Root:
    """The coordinator's side of a save (paper sec. 3.3); its methods run on rank 0 only.

    Attributes:
        path: where the checkpoint goes, for messages.
        backend: the same, for bytes.
        world_size: how many ranks save together.
        options: how to save.
        framework: name of the planner; known when this rank has taken stock.
        found: digest of the metadata that was there when the save began; b"" for none.
        key: of the plan.
        plan: who holds the same as whom; known where there is no plan yet.
        layout: encoded; the unchanging part of the metadata.
        committing: the metadata has been written, or may have been.
        operation: id of the save.
    """

    path: str
    backend: Backend
    world_size: int
    options: SaveOptions
    framework: str = ""
    found: bytes = b""
    key: bytes = b""
    plan: Survey = field(init=False)
    layout: bytes = b""
    committing: bool = False
    operation: str = field(default_factory=lambda: secrets.token_hex(8))

    async def open(self, hellos: Sequence[bytes]) -> bytes:
        """Refuse to harm a checkpoint; else say whether the plan that everyone has still holds."""
        self.found = await _committed(self.backend)
        if self.found and not self.options.overwrite:
            raise ExistsError(
                f"{self.path} holds a committed checkpoint; pass overwrite=True to replace it, or save elsewhere"
            )
        self.key = hellos[0]
        self.layout = _layouts.get(self.key) or b""
        cached = bool(self.layout) and all(hello == self.key for hello in hellos)
        return Opening(self.operation, cached).encode()

    async def survey(self, hellos: Sequence[bytes]) -> bytes:
        """Find out who holds the same as whom; ask one rank of each kind what that is."""
        self.plan = await planning(self._survey, hellos)
        self.key = self.plan.key
        return self.plan.encode()

    def _survey(self, hellos: Sequence[bytes]) -> Survey:
        return survey(hellos, balance=self.options.balance, block_bytes=BLOCK_BYTES)

    def divide(self, messages: Sequence[bytes]) -> Sequence[bytes]:
        """Plan the save: dedup, balance, offsets, exact cover."""
        world = gather(self.plan, messages)
        division = divide(world, balance=self.options.balance, block_bytes=BLOCK_BYTES)
        self.layout = encode_layout(division.layout)
        _layouts.put(self.key, self.layout)
        return encode_shares(division)

    async def commit(self, digests: Sequence[bytes]) -> bytes:
        """Write the metadata, last of all: from here on the checkpoint exists (paper sec. 5.2, integrity check)."""
        if await _committed(self.backend) != self.found:
            raise ExistsError(
                f"another job committed a checkpoint at {self.path} while operation {self.operation} was saving there; "
                "this one was not committed: give every job a path of its own"
            )
        record = Commit(
            operation=self.operation,
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
            framework=self.framework,
            codecs=tuple(codec.name for codec in self.options.codecs),
            part_bytes=self.options.part_bytes,
            version=__version__,
            receipts=b"".join(digests),
        )
        self.committing = True
        await self.backend.put(METADATA_KEY, encode_metadata(self.layout, record))
        await self._sweep()
        return b""

    async def _sweep(self) -> None:
        """Delete what the replaced checkpoint and saves that died have left behind; the new one is safe already."""

        def stale(key: str) -> bool:
            # a key with more than one slash belongs to a role; no put of the metadata is under way any more
            other = operation_of(key) not in {None, self.operation} and key.count("/") == 1
            return other or key == METADATA_KEY

        try:
            if isinstance(self.backend, Sweeper):
                await self.backend.sweep(stale)
            left = [info.key for info in await self.backend.list() if stale(info.key) and info.key != METADATA_KEY]
            if left:
                await self.backend.delete(left)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the checkpoint is committed
            log.warning("old files were not deleted", path=self.path, operation=self.operation, error=repr(error))


async def _committed(backend: Backend) -> bytes:
    """Return the digest of the metadata that is there, or b""."""
    try:
        return xxhash.xxh3_128_digest(await backend.get(METADATA_KEY))
    except FileNotFoundError:
        return b""
