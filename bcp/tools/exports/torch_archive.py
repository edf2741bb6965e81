"""Archives as ``torch.save`` writes them, laid out before any byte is written: a pickle, and the bytes of storages.

An archive is a zip file without compression. A pickle names storages by keys, and a record of the archive has the bytes
of each. They begin at multiples of 64 bytes, so that ``torch.load(mmap=True)`` maps them. The CRC-32 of a record stands
behind it and in the directory at the end, so that the bytes can be streamed.
"""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bcp.interop.torch_pickle import STORAGES
from bcp.plan.box import Box
from bcp.plan.strided import row_major
from bcp.runtime.imports import imported
from bcp.stages.memcpy import bytes_of, bytes_row_of, torch_dtype
from bcp.tools.exports.streamed import TargetFile

__all__ = ["Stored", "write_archive"]

FOLDER = "archive"
ALIGNMENT = 64
MOST = 0xFFFFFFFF
"""From here on a size or an offset needs the 64-bit fields of zip64."""

LOCAL = struct.Struct("<4s5H3I2H")
CENTRAL = struct.Struct("<4s6H3I5H2I")
END64 = struct.Struct("<4sQ2H2I4Q")
LOCATOR = struct.Struct("<4sIQI")
END = struct.Struct("<4s4H2IH")
VERSION, VERSION64 = 20, 45
FIELD = struct.Struct("<2H")
ZIP64, FILLER = 1, int.from_bytes(b"FB", "little")
HAS_DESCRIPTOR = 1 << 3
DATE = 33
"""The first of January 1980, the first day of zip."""

STORAGE_CLASSES = {dtype: name for name, dtype in STORAGES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A tensor in the place of the real one in an object to be pickled. The same object stands for the same storage.

    Attributes:
        row: the tensor, as a row of the checkpoint's layout.
        box: the block of the tensor.
        dtype: its dtype in the archive, by torch's name.
        itemsize: bytes of an element.
    """

    row: int
    box: Box
    dtype: str
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        return self.box.numel * self.itemsize


def write_archive(file: TargetFile, value: Any) -> int:
    """Lay out an archive at the end of a file: ``torch.load`` of these bytes returns the value.

    Args:
        file: the file; the archive begins at a multiple of 64 bytes.
        value: plain values, tensors in host memory, and :class:`Stored` in the places of other tensors.

    Returns:
        The first byte of the archive in the file.

    """
    file.pad(ALIGNMENT)
    start = file.nbytes
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(value)
    archive = _Archive(file)
    archive.text("data.pkl", stream.getvalue())
    archive.text(".format_version", b"1")
    archive.text(".storage_alignment", str(ALIGNMENT).encode())
    archive.text("byteorder", b"little")
    for key, storage in enumerate(pickler.storages):
        archive.storage(f"data/{key}", storage)
    archive.text("version", b"3\n")
    archive.end()
    return start


# -- the pickle ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Storage:
    """A storage as the pickle names it."""

    kind: str  # name of its class
    key: int
    numel: int  # elements of that class


class _Pickler(pickle.Pickler):
    """Pickles tensors as torch does, and notes their storages in order."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=2)
        self.storages: list[Stored | torch.Tensor] = []
        self._known: dict[int, _Storage] = {}

    def persistent_id(self, obj: Any) -> Any:
        """Return the name of a storage; None for other objects."""
        if isinstance(obj, _Storage):
            return "storage", getattr(torch, obj.kind), str(obj.key), "cpu", obj.numel
        return None

    def reducer_override(self, obj: Any) -> Any:
        """Return how a tensor is rebuilt; NotImplemented for other objects."""
        if isinstance(obj, Stored):
            return self._rebuilt(obj, obj.box.lengths, obj.dtype)
        if type(obj) is torch.Tensor:
            return self._rebuilt(obj.detach().contiguous(), tuple(obj.shape), str(obj.dtype).removeprefix("torch."))
        return NotImplemented

    def _rebuilt(self, stored: Stored | torch.Tensor, shape: tuple[int, ...], dtype: str) -> Any:
        """Return function and arguments that rebuild a tensor."""
        kind = STORAGE_CLASSES.get(dtype, "UntypedStorage")
        is_typed = dtype in STORAGE_CLASSES
        storage = self._known.get(id(stored))
        if storage is None:
            numel = Box.whole(shape).numel
            size = numel if is_typed else numel * torch_dtype(dtype).itemsize
            storage = self._known[id(stored)] = _Storage(kind, len(self.storages), size)
            self.storages.append(stored)  # and so keeps its id
        arguments: tuple[Any, ...] = (storage, 0, shape, row_major(shape), False, OrderedDict())
        functions = imported("torch._utils")
        if is_typed:
            return functions._rebuild_tensor_v2, arguments  # noqa: SLF001 -- the name that files have
        return functions._rebuild_tensor_v3, (*arguments, torch_dtype(dtype))  # noqa: SLF001 -- the same


# -- the zip file --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Record:
    """A record of the archive, as the directory lists it."""

    name: bytes
    at: int  # first byte of its header, counted from the start of the archive
    nbytes: int
    flags: int
    checksum: Callable[[Sequence[int]], int]  # its CRC-32, from the checksums of elements

    @property
    def sizes(self) -> bytes:
        """The values that need 64 bits, in the order of zip64."""
        large = [self.nbytes] * 2 * (self.nbytes >= MOST) + [self.at] * (self.at >= MOST)
        return FIELD.pack(ZIP64, 8 * len(large)) + struct.pack(f"<{len(large)}Q", *large) if large else b""

    def entry(self, checksums: Sequence[int]) -> bytes:
        """Return its entry in the directory."""
        size, at, extra = min(self.nbytes, MOST), min(self.at, MOST), self.sizes
        version = VERSION64 if extra else VERSION
        numbers = (version, version, self.flags, 0, 0, DATE, self.checksum(checksums), size, size)
        head = CENTRAL.pack(b"PK\1\2", *numbers, len(self.name), len(extra), 0, 0, 0, 0, at)
        return head + self.name + extra


class _Archive:
    """Lays out records one after the other."""

    def __init__(self, file: TargetFile) -> None:
        self._file = file
        self._start = file.nbytes
        self._records: list[_Record] = []

    def text(self, name: str, data: bytes) -> None:
        """Add a record of known bytes."""
        checksum = zlib.crc32(data)
        self._begin(name, len(data), lambda _: checksum, checksum)
        self._file.fixed(data)

    def storage(self, name: str, stored: Stored | torch.Tensor) -> None:
        """Add the bytes of a tensor. Their checksum stands behind them, unless there are none, as torch has it."""
        if isinstance(stored, torch.Tensor):
            data = bytes(bytes_of(bytes_row_of(stored))) if stored.nbytes else b""
            known = zlib.crc32(data)
            record = self._begin(name, len(data), lambda _: known)
            self._file.fixed(data)
        else:
            record = self._begin(name, stored.nbytes, lambda checksums: checksums[number])
            number = self._file.elements(stored.row, stored.box, stored.dtype, stored.itemsize)
        if record.nbytes:
            descriptor = struct.Struct("<4sI2Q" if max(record.nbytes, record.at) >= MOST else "<4s3I")
            head, size = b"PK\7\10", record.nbytes
            self._file.sealed(descriptor.size, lambda found: descriptor.pack(head, record.checksum(found), size, size))

    def _begin(
        self, name: str, nbytes: int, checksum: Callable[[Sequence[int]], int], known: int | None = None
    ) -> _Record:
        """Add the header of a record, up to its first byte. ``known`` is its checksum, if no descriptor follows."""
        text, at = f"{FOLDER}/{name}".encode(), self._file.nbytes - self._start
        flags = HAS_DESCRIPTOR if known is None and nbytes else 0
        begins = at + LOCAL.size + len(text) + FIELD.size
        if max(nbytes, at) >= MOST:  # torch computes the place of a storage so, and may look for it there
            begins += FIELD.size + 16 * (nbytes >= MOST) + 8 * (at >= MOST)
        begins += -begins % ALIGNMENT
        extra = FIELD.pack(ZIP64, 16) + struct.pack("<2Q", nbytes, nbytes) if nbytes >= MOST else b""
        filler = begins - at - LOCAL.size - len(text) - len(extra) - FIELD.size
        extra += FIELD.pack(FILLER, filler) + b"Z" * filler
        version, size = VERSION64 if nbytes >= MOST else VERSION, min(nbytes, MOST)
        numbers = (version, flags, 0, 0, DATE, known or 0, size, size, len(text), len(extra))
        self._file.fixed(LOCAL.pack(b"PK\3\4", *numbers) + text + extra)
        self._records.append(_Record(text, at, nbytes, flags, checksum))
        return self._records[-1]

    def end(self) -> None:
        """Add the directory."""
        records, at = self._records, self._file.nbytes - self._start
        nbytes = sum(CENTRAL.size + len(record.name) + len(record.sizes) for record in records)
        count = len(records)
        end64 = END64.pack(b"PK\6\6", END64.size - 12, VERSION64, VERSION64, 0, 0, count, count, nbytes, at)
        locator = LOCATOR.pack(b"PK\6\7", 0, at + nbytes, 1)
        few = min(count, 0xFFFF)
        end = END.pack(b"PK\5\6", 0, 0, few, few, min(nbytes, MOST), min(at, MOST), 0)
        self._file.sealed(nbytes, lambda checksums: b"".join(record.entry(checksums) for record in records))
        self._file.fixed(end64 + locator + end)
