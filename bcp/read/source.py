"""An open checkpoint: its storage, its table of contents, and the receipts read so far."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from bcp.format.metadata import Metadata
from bcp.format.receipt import FileReceipt, Receipt
from bcp.options import LoadOptions
from bcp.protocols import Backend, at_once_of
from bcp.read.receipts import fetch_receipts, file_of

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

    @property
    def io_workers(self) -> int:
        """How many reads are under way at once."""
        return self.options.io_workers or at_once_of(self.backend)

    async def read_receipts(self, ranks: Iterable[int]) -> Mapping[int, Receipt]:
        """Read the missing receipts of those ranks; return all receipts read so far.

        Raises CorruptError if a receipt is missing, damaged, or not the one of the commit.
        """
        missing = set(ranks) - self.receipts.keys()
        self.receipts.update(await fetch_receipts(self.backend, self.metadata, missing))
        return self.receipts

    def file_of(self, rank: int, kind: int, nbytes: int | None = None) -> tuple[str, FileReceipt]:
        """Return key and receipt of a rank's data file, as :func:`~bcp.read.receipts.file_of`.

        The rank's receipt has been read.
        """
        return file_of(self.metadata, self.receipts[rank], kind, nbytes)
