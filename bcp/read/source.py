"""An open checkpoint: its storage, its table of contents, and the receipts read so far."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from bcp.format.foreign_files import is_unread
from bcp.format.metadata import Metadata
from bcp.format.receipt import FileReceipt, Receipt
from bcp.interop.recognise import folder_of
from bcp.options import LoadOptions
from bcp.protocols import Backend, at_once_of
from bcp.read.receipts import fetch_receipts, file_of
from bcp.read.references import ReferringBackend

__all__ = ["Source"]


@dataclass(frozen=True, slots=True)
class Source:
    """An open checkpoint.

    Attributes:
        backend: storage under the checkpoint's path.
        path: the path as the caller said it, for messages.
        metadata: layout and commit record.
        options: how to read.
        rank: the reader, for messages.
        receipts: receipts by rank, those read so far.
    """

    backend: Backend
    path: str
    metadata: Metadata
    options: LoadOptions
    rank: int = 0
    receipts: dict[int, Receipt] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        backend: Backend,
        path: str,
        metadata: Metadata,
        options: LoadOptions,
        rank: int = 0,
        *,
        beside: Backend | None = None,
    ) -> Source:
        """Open a checkpoint whose table of contents is known; ``backend`` is that of the caller's path.

        ``beside`` is a view of it that knows what is beside the path; None for the backend itself.
        """
        receipts: dict[int, Receipt] = {}
        return cls(_root(backend, metadata, receipts, beside), path, metadata, options, rank, receipts)

    def through(self, backend: Backend) -> Source:
        """Return the same checkpoint, read through another backend of the caller's path."""
        return replace(self, backend=_root(backend, self.metadata, self.receipts))

    @property
    def io_workers(self) -> int:
        """How many reads are under way at once."""
        return self.options.io_workers or at_once_of(self.backend)

    async def read_receipts(self, ranks: Iterable[int]) -> Mapping[int, Receipt]:
        """Read the missing receipts of those ranks; return all receipts read so far. Foreign files have none.

        Raises CorruptError if a receipt is missing, damaged, or not the one of the commit.
        """
        if self.metadata.foreign is not None:
            return self.receipts
        missing = set(ranks) - self.receipts.keys()
        self.receipts.update(await fetch_receipts(self.backend, self.metadata, missing))
        return self.receipts

    def file_of(self, rank: int, kind: int, nbytes: int | None = None) -> tuple[str, FileReceipt]:
        """Return key and receipt of a rank's data file, as :func:`~bcp.read.receipts.file_of`.

        The rank's receipt has been read.
        """
        return file_of(self.metadata, self.receipts[rank], kind, nbytes)

    def value(self, row: int) -> str | None:
        """Return the JSON text of a value, by its row in the layout; None if its owner's receipt lacks it.

        The receipt of its owner has been read.
        """
        name, foreign = self.metadata.layout.objects[row], self.metadata.foreign
        if foreign is not None:
            return foreign.values.get(name)
        return self.receipts[int(self.metadata.layout.object_rank[row])].objects.get(name)

    def is_unread(self, row: int) -> bool:
        """Whether a value, by its row in the layout, is one of another library that bcp cannot read."""
        foreign = self.metadata.foreign
        return foreign is not None and is_unread(foreign.values[self.metadata.layout.objects[row]])


def _root(
    backend: Backend, metadata: Metadata, receipts: Mapping[int, Receipt], beside: Backend | None = None
) -> Backend:
    """Return the backend that keys are relative to: of the caller's path, or of the folder of a caller's file.

    Files of a checkpoint with references are whole there.
    """
    if metadata.commit.refers:
        return ReferringBackend(backend, metadata, receipts, beside)
    is_file = metadata.foreign is not None and metadata.foreign.is_file
    return folder_of(backend) if is_file else backend
