"""Rank 0's part of a save: refuse or open, divide, commit, sweep (paper sec. 3.3, 5.2)."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from bcp._log import log
from bcp._save.rivals import check_not_replaced, taken
from bcp._save.written import check_written, data_nbytes, receipt_digests
from bcp._version import __version__
from bcp.errors import ExistsError, StorageError
from bcp.metadata import METADATA_KEY, Commit, encode_layout, encode_metadata, operation_of, receipt_key
from bcp.options import SaveOptions
from bcp.pipeline import planning
from bcp.plan.cache import PlanCache
from bcp.plan.save.divide import divide
from bcp.plan.save.survey import Survey, gather, survey
from bcp.plan.save.wire import DIGEST_BYTES, encode_shares
from bcp.plan.units import check_shared
from bcp.protocols import Backend, ObjectInfo, Sweeper, Unfinished, Version
from bcp.telemetry.store import FOLDER as TELEMETRY
from bcp.telemetry.store import outdated

__all__ = ["BLOCK_BYTES", "Opening", "Root"]

BLOCK_BYTES = 1 << 20
_layouts: PlanCache[bytes] = PlanCache(16)


@dataclass(frozen=True, slots=True)
class Opening:
    """Rank 0's first answer to all ranks.

    Attributes:
        operation: id of the save.
        cached: whether every rank has the plan already.
        found: version of the metadata that was there when the save began; None for none.
        trace: trace context of rank 0; empty for none.
    """

    operation: str
    cached: bool
    found: Version | None
    trace: str

    def encode(self) -> bytes:
        """Return 9 bytes, a line with the trace context, and the version's bytes."""
        return bytes.fromhex(self.operation) + bytes([self.cached]) + f"{self.trace}\n{self.found or ''}".encode()

    @classmethod
    def decode(cls, data: bytes) -> Opening:
        """Undo :meth:`encode`."""
        trace, _, found = data[9:].decode().partition("\n")
        return cls(data[:8].hex(), bool(data[8]), found or None, trace)


@dataclass(slots=True)
class Root:
    """The coordinator's side of a save (paper sec. 3.3); its methods run on rank 0 only.

    Attributes:
        path: where the checkpoint goes, for messages.
        backend: the same, for bytes.
        world_size: how many ranks save together.
        options: how to save.
        trace: trace context of this rank; empty for none.
        framework: name of the planner; known when this rank has taken stock.
        found: version of the metadata that was there when the save began; None for none.
        key: of the plan.
        plan: who holds the same as whom; known where there is no plan yet.
        layout: encoded; the unchanging part of the metadata.
        committing: the metadata has been written, or may have been; false again if another job's was there first.
        operation: id of the save.
        all_nbytes: bytes that all ranks wrote into data files; known once the save is committed.
    """

    path: str
    backend: Backend
    world_size: int
    options: SaveOptions
    trace: str = ""
    framework: str = ""
    found: Version | None = None
    key: bytes = b""
    plan: Survey = field(init=False)
    layout: bytes = b""
    committing: bool = False
    operation: str = field(default_factory=lambda: secrets.token_hex(8))
    all_nbytes: int | None = None

    async def open(self, hellos: Sequence[bytes]) -> bytes:
        """Refuse to harm a checkpoint; else say whether the plan that everyone has still holds."""
        self.found = await self.backend.version(METADATA_KEY)
        if self.found is not None and not self.options.overwrite:
            raise ExistsError(
                f"{self.path} holds a committed checkpoint; pass overwrite=True to replace it, or save elsewhere"
            )
        check_shared([hello[DIGEST_BYTES:] for hello in hellos])
        self.key = hellos[0][:DIGEST_BYTES]
        self.layout = _layouts.get(self.key) or b""
        cached = bool(self.layout) and all(hello[:DIGEST_BYTES] == self.key for hello in hellos)
        return Opening(self.operation, cached, self.found, self.trace).encode()

    async def survey(self, hellos: Sequence[bytes]) -> bytes:
        """Group ranks with equal tables, and ask one rank of each group for its table."""
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

    async def commit(self, messages: Sequence[bytes]) -> bytes:
        """Write the metadata, last of all: from here on the checkpoint exists (paper sec. 5.2, integrity check).

        Files of other saves are listed before and deleted after. A listed save began before this commit, so it found
        other metadata than this save's and cannot commit any more. A save that begins later loses nothing. All ranks
        have written their files by then. So an upload of this save that is still open is one that nobody knows of: the
        answer to its beginning was lost.

        Raises:
            ExistsError: another job has committed here since the save began.
            StorageError: files of this save are missing, or storage failed.

        """
        listed = await self._listed(messages)
        unfinished = await self._unfinished()
        record = Commit(
            operation=self.operation,
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
            framework=self.framework,
            codecs=tuple(codec.name for codec in self.options.codecs),
            part_bytes=self.options.part_bytes,
            version=__version__,
            receipts=receipt_digests(messages),
        )
        self.committing = True
        version = await self.backend.put_if(METADATA_KEY, encode_metadata(self.layout, record), self.found)
        if version is None:
            self.committing = False
            raise await taken(self.backend, self.path, self.operation, self.found)
        await self._check_place(version)
        self.all_nbytes = await planning(data_nbytes, messages)
        await self._sweep(listed, unfinished)
        return b""

    async def _listed(self, messages: Sequence[bytes]) -> Sequence[ObjectInfo]:
        """List all objects, once; among them has to be every file that a rank says it has written."""
        listed = await self.backend.list()
        try:
            await check_written(
                self.backend, self.path, messages, listed, self.operation, encoded=bool(self.options.codecs)
            )
        except StorageError as error:
            await check_not_replaced(self.backend, self.path, self.operation, self.found, error)
            raise
        return listed

    async def _unfinished(self) -> Sequence[Unfinished]:
        try:
            return await self.backend.unfinished() if isinstance(self.backend, Sweeper) else []
        except StorageError as error:  # nothing is swept then; the commit needs none of it
            log.warning("unfinished files were not listed", path=self.path, operation=self.operation, error=repr(error))
            return []

    async def _check_place(self, version: Version) -> None:
        """Check that the metadata was put beside the data: somebody may have moved the directory away meanwhile."""
        try:
            await self.backend.get(receipt_key(0, self.operation))
        except FileNotFoundError as error:
            now = await self.backend.version(METADATA_KEY)
            if now not in (version, None):
                return  # the next save has replaced this one already
            if now is not None:
                await self.backend.delete([METADATA_KEY])  # it names files that are not there
            raise StorageError(
                f"{self.path}: the files of operation {self.operation} disappeared during its commit; it is not "
                "committed there. The directory was deleted or moved away: save again"
            ) from error

    async def _sweep(self, listed: Sequence[ObjectInfo], unfinished: Sequence[Unfinished]) -> None:
        """Delete the files of the replaced checkpoint and of saves that cannot commit any more."""

        def stale(key: str) -> bool:
            return _is_of_a_save(key) and operation_of(key) != self.operation

        try:
            left = [one for one in unfinished if _is_of_a_save(one.key) or one.key == METADATA_KEY]
            left += [one for one in unfinished if one.key.startswith(TELEMETRY)]
            if left and isinstance(self.backend, Sweeper):
                await self.backend.discard(left)
            keys = [info.key for info in listed if stale(info.key)] + outdated(listed)
            if keys:
                await self.backend.delete(keys)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the checkpoint is committed
            log.warning("old files were not deleted", path=self.path, operation=self.operation, error=repr(error))


def _is_of_a_save(key: str) -> bool:
    """Whether this is the key of a data file or receipt; one with more than one slash belongs to a role."""
    return operation_of(key) is not None and key.count("/") == 1
