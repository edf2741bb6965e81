"""A checkpoint whose blocks lie partly in earlier checkpoints of its run, as one storage with whole files.

A read of a packed file is cut by the table ``kept`` of its receipt, into reads of the file itself and of files in the
folders of other steps. What touches in one file is read at once. So the plan, the graph and the checks of a load know
nothing of references.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bcp.backends.passing import PassingBackend
from bcp.backends.scattered import read_scattered
from bcp.backends.siblings import folder_name, sibling
from bcp.errors import CorruptError, InputError
from bcp.format.checksums import cut
from bcp.format.kept import KeptRun, stretches
from bcp.format.metadata import Metadata, owner_of
from bcp.format.receipt import FileReceipt, Receipt
from bcp.plan.shards import KINDS
from bcp.protocols import (
    Backend,
)
from bcp.read.receipts import fetch_receipts

__all__ = ["ReferringBackend"]


class ReferringBackend(PassingBackend):
    """A view of a checkpoint with references. Packed files are read as whole ones; all else is that of the backend."""

    def __init__(
        self, own: Backend, metadata: Metadata, receipts: Mapping[int, Receipt], beside: Backend | None = None
    ) -> None:
        """Take the checkpoint; nothing is read yet.

        Args:
            own: storage over the checkpoint.
            metadata: of the checkpoint.
            receipts: those that a reader has read, by rank. Others are read when they are needed.
            beside: view of the storage that knows what is beside the checkpoint; None: ``own``.

        """
        super().__init__(own)
        self._beside = own if beside is None else beside
        self._metadata, self._receipts = metadata, receipts
        self._files: dict[str, tuple[str, FileReceipt | None]] = {}
        self._folders: dict[int, Backend] = {}

    # -- reads of data -----------------------------------------------------------------------------

    async def read_scattered(self, key: str, start: int, outs: Sequence[memoryview]) -> None:
        """Fill the buffers from the whole file.

        Raises CorruptError if an earlier checkpoint is not there any more.
        """
        stored, file = await self._file_of(key)
        if file is None:
            await read_scattered(self.whole, key, start, outs)
            return
        stop = start + sum(map(len, outs))
        parts = stretches(file.kept, file.blocks.stored_start, file.blocks.stored_length, start, stop)
        if stop > file.stored_nbytes:
            raise CorruptError(f"{key} has {file.stored_nbytes} bytes, and bytes {start} to {stop} were asked for")
        for part, views in zip(parts, cut(outs, [part.nbytes for part in parts]), strict=True):
            if part.run is None:
                await read_scattered(self.whole, stored, part.start, views)
            else:
                await self._read_kept(key, part.run, part.start, views)

    async def _read_kept(self, key: str, run: KeptRun, start: int, outs: Sequence[memoryview]) -> None:
        """Read bytes of another checkpoint."""
        folder = await self._folder(run.step)
        try:
            await read_scattered(folder, run.key, start, outs)
        except (FileNotFoundError, CorruptError) as error:
            why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
            raise CorruptError(_lost(key, run, why)) from error

    async def lost(self, key: str) -> str:
        """Say which file of an earlier checkpoint a packed file has lost; "" for none.

        The last byte of each such file that belongs to the packed file is read.

        Args:
            key: of the file, as if it were whole.

        """
        _, file = await self._file_of(key)
        ends: dict[tuple[int, str], tuple[int, KeptRun]] = {}
        for run in () if file is None else file.kept:
            if run.count and file is not None:
                nbytes = int(file.blocks.stored_length[run.first : run.first + run.count].sum())
                before, _ = ends.get(run.source, (0, run))
                ends[run.source] = max(before, run.start + nbytes), run
        for stop, run in ends.values():
            try:
                await self._read_kept(key, run, stop - 1, [memoryview(bytearray(1))])
            except CorruptError as error:
                return str(error)
        return ""

    async def where(self, key: str, start: int) -> str:
        """Return folder and key of the file of another step that has a byte of a whole file; "" for its own bytes."""
        _, file = await self._file_of(key)
        if file is None:
            return ""
        parts = stretches(file.kept, file.blocks.stored_start, file.blocks.stored_length, start, start + 1)
        run = parts[0].run if parts else None
        return "" if run is None else f"{folder_name(run.step)}/{run.key}"

    async def _file_of(self, key: str) -> tuple[str, FileReceipt | None]:
        """Return the key under which a file is stored, and its receipt if it is packed."""
        if key in self._files:
            return self._files[key]
        owner, commit = owner_of(key), self._metadata.commit
        kind = key.partition("/")[0]
        found: tuple[str, FileReceipt | None] = key, None
        if owner is None or kind not in KINDS:
            return found
        rank, operation = owner
        if rank < self._metadata.layout.world_size and commit.operation_of(rank) == operation:
            receipt = self._receipts.get(rank)
            if receipt is None:
                receipt = (await fetch_receipts(self.whole, self._metadata, [rank]))[rank]
            file = receipt.file(KINDS.index(kind))
            if file is not None and file.kept:
                found = receipt.key_of(file), file
        self._files[key] = found
        return found

    async def _folder(self, step: int) -> Backend:
        """Return storage over the folder of another step. Raises InputError if it cannot be known."""
        if step not in self._folders:
            folder = await sibling(self._beside, folder_name(step))
            if folder is None:
                raise InputError(
                    f"the checkpoint has blocks in {folder_name(step)} beside it, and {type(self.whole).__name__} does "
                    "not say what is beside it: pass a path or URL"
                )
            self._folders[step] = folder
        return self._folders[step]


def _lost(key: str, run: KeptRun, why: str) -> str:
    return (
        f"{key} keeps blocks in {folder_name(run.step)}/{run.key}, which {why}: step {run.step} was deleted or damaged "
        "by other means than bcp; restore it, or load an older checkpoint"
    )
