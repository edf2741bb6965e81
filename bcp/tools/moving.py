"""Move the data files of one checkpoint between the folder of its run and a cold place, and lose none.

A file is copied, read back and compared with its checksums. Only then, and once the run's record names the place, is
the file in the run's folder deleted. A copy in a cold place goes with its checkpoint alone: so a move in each direction
at once deletes one of the two files, never both.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bcp._deletion import delete_copied, delete_unnamed
from bcp._log import log
from bcp.backends.cold import ColdPlace, ColdPlaces, OpenPlace, cold_name, hot_name, stored_record
from bcp.backends.cooled import CooledBackend, cooled_child, is_data_file
from bcp.errors import CheckpointError, CorruptError, ExistsError, NotACheckpointError, StorageError
from bcp.format.metadata import METADATA_KEY, Metadata, decode_metadata, operation_of
from bcp.format.receipt import FileReceipt
from bcp.pipeline import unwrap_stage_errors
from bcp.plan.layout import named_files
from bcp.protocols import Backend, Sweeper, Unfinished, at_once_of
from bcp.read.opening import read_metadata
from bcp.read.receipts import RANKS_AT_ONCE, fetch_receipts, file_of
from bcp.read.verification import compare
from bcp.read.windows import windows_of
from bcp.runtime.threads import in_thread_gc_paused
from bcp.tools.checked_copy import copy_data_file

__all__ = ["Move", "Moved", "discard", "unfinished_of"]


REPLACED = "it was saved again, edited or deleted meanwhile"


@dataclass(frozen=True, slots=True)
class Moved:
    """The outcome of a move.

    Attributes:
        files: number of moved files.
        nbytes: bytes of these files.
        reason: why the files stay; "" if they do not.
    """

    files: int = 0
    nbytes: int = 0
    reason: str = ""


@dataclass(slots=True)
class Move:
    """The move of one checkpoint.

    Attributes:
        run: storage over the folder of the run.
        where: URL or path of the run.
        name: of the checkpoint's folder.
        places: the cold places of the run.
        told: called with the bytes of each part that was copied.
        copied: bytes by the keys of the files that were copied or found to be copied.
        has_stale: whether the cold place has copies of a save that was replaced.
    """

    run: Backend
    where: str
    name: str
    places: ColdPlaces
    told: Callable[[int], object]
    copied: dict[str, int] = field(default_factory=dict)
    has_stale: bool = False

    @property
    def path(self) -> str:
        """The checkpoint, for messages."""
        return f"{self.where}/{self.name}"

    @property
    def view(self) -> CooledBackend:
        """The checkpoint's folder, with the files in cold places."""
        return cooled_child(self.run, self.name, self.places)

    async def data_sizes(self) -> Mapping[str, int]:
        """Return the sizes of the data files in the run's folder, by their keys."""
        return {info.key: info.nbytes for info in await self.view.hot.list() if is_data_file(info.key)}

    # -- to the cold place -------------------------------------------------------------------------

    async def cool(self, place: OpenPlace) -> Moved:
        """Copy, compare, and delete in the run's folder. The run's record names the place already.

        Raises:
            CorruptError: a file is missing or damaged. Nothing was deleted.
            StorageError: storage failed, or the copy differs from the file. Another call ends the work.

        """
        hot = self.view.hot
        version = await hot.version(METADATA_KEY)
        try:
            reason = await self._copy_all(place)
        except (CheckpointError, StorageError):  # a deletion takes the copies, too
            if version is not None and await hot.version(METADATA_KEY) == version:
                raise
            reason = REPLACED
        if not reason and not await delete_copied(hot, list(self.copied), version or ""):
            reason = REPLACED
        if reason == REPLACED or self.has_stale:
            await self.sweep(place)
        return Moved(reason=reason) if reason else Moved(len(self.copied), sum(self.copied.values()))

    async def _copy_all(self, place: OpenPlace) -> str:
        """Copy and compare all files; return a reason why they have to stay, or ""."""
        hot, cold = self.view.hot, place.folder(self.name)
        metadata = await self._opened()
        if metadata is None:
            return "it was written by another library, and has no checksums"
        promoted = await self._promoted(place)
        there, copies = await self.data_sizes(), {info.key: info.nbytes for info in await cold.list()}
        self.has_stale = any(operation_of(hot_name(name)) not in metadata.commit.operations for name in copies)
        async for key, file in self._data_files(hot, metadata):
            if key in there:
                await self._copy_to(cold, key, file, copies.get(cold_name(key)))
            elif not await self._lies_cold(key, file):
                raise CorruptError(f"{self.path}/{key} is missing; restore it")
        return "" if await self._promoted(place) == promoted else "it was promoted meanwhile"

    async def sweep(self, place: OpenPlace) -> Sequence[str]:
        """Delete copies in a cold place that the metadata in the run's folder do not name; return those that went.

        Raises:
            StorageError: storage failed.

        """
        await place.check()
        keys = [info.key for info in await self.view.cold_files()]
        kept = set(await delete_unnamed(self.view, keys)) if keys else set()
        if gone := [key for key in keys if key not in kept]:
            log.info("copies in a cold place are deleted, for no checkpoint names them", run=self.path, count=len(gone))
        return gone

    async def _copy_to(self, cold: Backend, key: str, file: FileReceipt, copied: int | None) -> None:
        """Copy a file, unless that was done, and compare the copy. A damaged copy is made anew once."""
        is_new = copied != file.stored_nbytes
        if is_new and not await self._was_copied(cold, key, file):
            return
        wrong = await _wrong(cold, cold_name(key), file)
        if wrong and not is_new:
            log.warning("a copy in a cold place is damaged, and is made anew", checkpoint=self.path, reason=wrong)
            if not await self._was_copied(cold, key, file):
                return
            wrong = await _wrong(cold, cold_name(key), file)
        if wrong:
            raise StorageError(f"the copy of {self.path}/{key} differs from the file, which stays: {wrong}; call again")
        self.copied[key] = file.stored_nbytes

    async def _was_copied(self, cold: Backend, key: str, file: FileReceipt) -> bool:
        """Copy a file; False if another move has done it, and has deleted the file."""
        try:
            await copy_data_file(self.view.hot, key, cold, cold_name(key), file, self.told)
        except (CorruptError, StorageError):
            if key in await self.data_sizes() or not await self._lies_cold(key, file):
                raise
            return False
        return True

    async def _lies_cold(self, key: str, file: FileReceipt) -> bool:
        """Whether a cold place has a file of this size."""
        sizes = {info.key: info.nbytes for info in await self.view.cold_files()}
        return sizes.get(key) == file.stored_nbytes

    async def _promoted(self, place: OpenPlace) -> float | None:
        """Return the time of the last promotion. Readers have to find the copies: raise if the record lacks them."""
        record, _ = await stored_record(self.run, self.where)
        if self.name not in record.cooled or ColdPlace(place.url, place.mark) not in record.places:
            raise StorageError(f"{self.where}: the record of cold places was changed by others meanwhile; call again")
        return record.promoted.get(self.name)

    # -- back --------------------------------------------------------------------------------------

    async def promote(self) -> Moved:
        """Copy the missing files back, and compare them. The copies in cold places stay.

        Raises:
            CorruptError: a file is missing, or all of its copies are damaged.
            ExistsError: another save has committed meanwhile.
            NotACheckpointError: the checkpoint was deleted meanwhile.
            StorageError: storage failed. Another call ends the work.

        """
        hot = self.view.hot
        version = await hot.version(METADATA_KEY)
        metadata = await self._opened()
        if metadata is None:
            return Moved()
        there, left = await self.data_sizes(), await unfinished_of(hot)
        async for key, file in self._data_files(hot, metadata):
            if there.get(key) != file.stored_nbytes:
                await self._copy_back(hot, key, file)
        now = await hot.version(METADATA_KEY)
        if now != version:
            await delete_unnamed(hot, list(self.copied))
            if now is None:
                raise NotACheckpointError(f"{self.path} was deleted while it was promoted; nothing is left to do")
            raise ExistsError(f"another save has committed at {self.path} while it was promoted; nothing is left to do")
        await discard(hot, [each for each in left if operation_of(each.key) in metadata.commit.operations])
        return Moved(len(self.copied), sum(self.copied.values()))

    async def _copy_back(self, hot: Backend, key: str, file: FileReceipt) -> None:
        """Copy one file back, from the first place with a sound copy."""
        reasons = []
        for place in await self.places.of(self.name):
            await place.check()
            try:
                await copy_data_file(place.folder(self.name), cold_name(key), hot, key, file, self.told)
            except CorruptError as error:
                reasons.append(f"{place.url}: {error}")
                continue
            wrong = await _wrong(hot, key, file)
            if wrong and key not in await self.data_sizes():
                raise StorageError(f"{self.path}/{key} was moved to a cold place again meanwhile; call again")
            if wrong:
                raise StorageError(f"{self.path}/{key} differs from its copy in {place.url}: {wrong}; call again")
            self.copied[key] = file.stored_nbytes
            return
        words = "; ".join(reasons) or "no cold place is known for it"
        raise CorruptError(f"{self.path}/{key} is missing, and cannot be promoted ({words}); restore it")

    # -- both --------------------------------------------------------------------------------------

    async def _opened(self) -> Metadata | None:
        """Return the metadata; None for files of another library."""
        data = await read_metadata(self.view.hot, self.path)
        metadata = await in_thread_gc_paused(decode_metadata, data, f"{self.path}/{METADATA_KEY}")
        return metadata if metadata.foreign is None else None

    async def _data_files(self, hot: Backend, metadata: Metadata) -> AsyncGenerator[tuple[str, FileReceipt], None]:
        """Yield keys and receipts of all data files that the metadata name, as they are stored."""
        layout = metadata.layout
        columns = (layout.file_rank.tolist(), layout.file_kind.tolist(), layout.file_nbytes.tolist())
        nbytes = {(rank, kind): size for rank, kind, size in zip(*columns, strict=True)}
        named = named_files(layout)
        for first in range(0, layout.world_size, RANKS_AT_ONCE):
            ranks = range(first, min(first + RANKS_AT_ONCE, layout.world_size))
            with unwrap_stage_errors():
                receipts = await fetch_receipts(hot, metadata, ranks)
            for rank in ranks:
                for file in receipts[rank].files:
                    if (rank, file.kind) in named:
                        _, whole = file_of(metadata, receipts[rank], file.kind, nbytes.get((rank, file.kind)))
                        yield receipts[rank].key_of(whole), whole.own()


async def unfinished_of(backend: Backend) -> Sequence[Unfinished]:
    """List the unfinished writes that a killed move may have left, if the backend can."""
    return await backend.unfinished() if isinstance(backend, Sweeper) else ()


async def discard(backend: Backend, left: Sequence[Unfinished]) -> None:
    """Remove unfinished writes of files that are whole now. Another move that is writing one of them finds it whole."""
    if left and isinstance(backend, Sweeper):
        await backend.discard(left)


async def _wrong(backend: Backend, key: str, file: FileReceipt) -> str:
    """Read a file back, and say which of its blocks differs from its checksum; "" for none."""
    found = await compare(backend, windows_of(key, file), at_once_of(backend), lambda _: None)
    return next((damage.words for damage in found.damage), "")
