"""The contents of a file of ``torch.save``: its value, and the bytes at which tensors of the value begin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bcp.errors import CheckpointError, CorruptError
from bcp.interop.catalogue import DTYPES
from bcp.interop.reading import Opened
from bcp.interop.torch_pickle import TORCH_NAMES, Stored, torch_value
from bcp.interop.torch_zip import Zip
from bcp.interop.unpickle import Allowed
from bcp.runtime.threads import in_thread_gc_paused

__all__ = ["Name", "TorchContent", "check_contiguous", "torch_content"]

BATCH = 1024
MOST_PICKLE_BYTES = 1 << 30
Name = tuple[str, str]
"""Kind and name."""


@dataclass(frozen=True, slots=True)
class TorchContent:
    """A file of ``torch.save``.

    Attributes:
        archive: the zip.
        value: what was saved, with :class:`~bcp.interop.torch_pickle.Stored` for tensors.
        pickle_nbytes: bytes of the pickle: the value has fewer parts.
    """

    archive: Zip
    value: Any
    pickle_nbytes: int

    @property
    def key(self) -> str:
        """The file, relative to the folder."""
        return self.archive.key

    @property
    def where(self) -> str:
        """The file in messages."""
        return f"{self.archive.opened.path}/{self.key}"

    async def places(self, tensors: Mapping[Name, Stored]) -> dict[Name, int]:
        """Return the byte of the file at which each tensor begins.

        Raises:
            CheckpointError: a tensor is strided.
            CorruptError: a tensor ends behind its storage.

        """
        for name, tensor in tensors.items():
            check_contiguous(tensor, name, self.where)
        start_of = await self._starts({tensor.key for tensor in tensors.values()})
        found: dict[Name, int] = {}
        for name, tensor in tensors.items():
            first, entry = tensor.offset * DTYPES[tensor.dtype], self.archive.entries[f"data/{tensor.key}"]
            if first + tensor.nbytes > entry.nbytes:
                raise CorruptError(
                    f"{self.where}: {name[0]} tensor {name[1]!r} is said to end with byte {first + tensor.nbytes} of a "
                    f"storage of {entry.nbytes} bytes; get the file again"
                )
            found[name] = start_of[tensor.key] + first
        return found

    async def _starts(self, storages: Iterable[str]) -> dict[str, int]:
        """Return the first byte of each storage."""
        ordered = sorted(storages, key=lambda storage: (len(storage), storage))  # by number, as they lie in the file
        found: dict[str, int] = {}
        for first in range(0, len(ordered), BATCH):
            some = ordered[first : first + BATCH]
            ahead = await self.archive.looked_ahead(f"data/{storage}" for storage in some)
            found |= {storage: await ahead.data_start(f"data/{storage}") for storage in some}
        return found


async def torch_content(
    opened: Opened, key: str, allowed: Allowed = TORCH_NAMES, span: tuple[int, int] | None = None
) -> TorchContent:
    """Read the value of a file of ``torch.save``, or of a part of a file; no tensor is read.

    ``span`` has first byte and end of the part.

    Raises:
        CheckpointError: the pickle names something that is not ``allowed``, or a big-endian host saved the file.
        CorruptError: the file is damaged.

    """
    where = f"{opened.path}/{key}"
    start, stop = span or (0, opened.sizes[key])
    archive = await Zip.of(opened, key, start, stop - start)
    if "byteorder" in archive.entries and await archive.read("byteorder", 16) != b"little":
        raise CheckpointError(f"{where} was saved by a big-endian host; save it anew on a little-endian one")
    pickle = await archive.read("data.pkl", MOST_PICKLE_BYTES)
    value = await in_thread_gc_paused(torch_value, pickle, where, allowed)
    return TorchContent(archive, value, len(pickle))


def check_contiguous(tensor: Stored, name: Name, where: str) -> None:
    """Raise CheckpointError for a strided tensor."""
    if not tensor.is_contiguous:
        raise CheckpointError(
            f"{where}: {name[0]} tensor {name[1]!r} of shape {list(tensor.shape)} has strides "
            f"{list(tensor.stride)}, and bcp reads contiguous tensors by reference; save it with .contiguous()"
        )
