"""The zip file of ``torch.save`` by reference: where its entries lie. Nothing is decompressed, for torch stores as is.

The file may be a range of a larger one, as in a ``.distcp`` file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from bcp.errors import CheckpointError, CorruptError
from bcp.interop.reading import Opened

__all__ = ["TAIL_BYTES", "Entry", "Zip"]

END, END64, CENTRAL, LOCAL = b"PK\x05\x06", b"PK\x06\x06", b"PK\x01\x02", b"PK\x03\x04"
END_BYTES, LOCATOR_BYTES, CENTRAL_BYTES, LOCAL_BYTES = 22, 20, 46, 30
END64_BYTES = 56
MOST_DIRECTORY_BYTES = 256 << 20
FULL32 = 0xFFFFFFFF
TAIL_BYTES = 4096
"""Bytes of the first read, at the end of a zip: torch writes no comment there."""

DAMAGED = "is truncated or damaged; get the file again"


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry as the zip's directory has it.

    Attributes:
        name: its name, without the folder in front.
        full: its name in the zip.
        header: first byte of its local header, counted from the first byte of the zip.
        nbytes: bytes of its data.
    """

    name: str
    full: str
    header: int
    nbytes: int


def _directory(tail: bytes, start: int, where: str) -> tuple[int, int]:
    """Find the zip's directory: its first byte, from the start of the zip, and its number of bytes.

    ``tail`` is the end of the zip, from byte ``start`` on. Raises CorruptError if there is no end of a directory.
    """
    end = tail.rfind(END)
    if end < 0 or len(tail) - end < END_BYTES:
        raise CorruptError(f"{where} {DAMAGED}: it has no end of a zip")
    disks, nbytes, first = struct.unpack_from("<4xI4xII", tail, end)
    place = start + end
    at = end - LOCATOR_BYTES - END64_BYTES
    if at >= 0 and tail[at : at + 4] == END64:  # torch always writes one
        nbytes, first = struct.unpack_from("<40xQQ", tail, at)
        place = start + at
    if disks or first + nbytes != place:
        raise CorruptError(
            f"{where} {DAMAGED}: its directory is said to lie in bytes {first} to {first + nbytes}, and ends at {place}"
        )
    return first, nbytes


def _entries(data: bytes, limit: int, where: str) -> Iterator[Entry]:
    """Yield the entries of a directory; data ends before byte ``limit`` of the zip."""
    at = 0
    while at < len(data):
        if data[at : at + 4] != CENTRAL or at + CENTRAL_BYTES > len(data):
            raise CorruptError(f"{where} {DAMAGED}: its directory has no entry at byte {at}")
        flags, method, stored, nbytes, name_length, extra_length, comment, header = struct.unpack_from(
            "<8xHH8xIIHHH8xI", data, at
        )
        name_at = at + CENTRAL_BYTES
        extra_at = name_at + name_length
        name = data[name_at:extra_at].decode("utf-8", "replace")
        extra = data[extra_at : extra_at + extra_length]
        at = extra_at + extra_length + comment
        nbytes, stored, header = _large(extra, (nbytes, stored, header))
        if method or flags & 1 or stored != nbytes:
            raise CheckpointError(f"{where}: {name} is compressed or encrypted; save the file anew with torch.save")
        if header + LOCAL_BYTES + nbytes > limit:
            raise CorruptError(f"{where} {DAMAGED}: {name} is said to have {nbytes} bytes from byte {header}")
        yield Entry(name.partition("/")[2], name, header, nbytes)


def _large(extra: bytes, numbers: tuple[int, int, int]) -> Iterator[int]:
    """Replace numbers of more than 32 bits by their values in the extra field."""
    values: list[int] = []
    at = 0
    while at + 4 <= len(extra):
        tag, length = struct.unpack_from("<HH", extra, at)
        if tag == 1:
            count = min(length, len(extra) - at - 4) // 8
            values = list(struct.unpack_from(f"<{count}Q", extra, at + 4))
        at += 4 + length
    return (values.pop(0) if number == FULL32 and values else number for number in numbers)


def _data_start(header: bytes, entry: Entry, where: str) -> int:
    """Return the first byte of an entry's data, from the start of the zip; ``header`` is its local header.

    Raises CorruptError if the header is another entry's.
    """
    lengths: tuple[int, int] = struct.unpack_from("<26xHH", header) if len(header) >= LOCAL_BYTES else (0, 0)
    name = header[LOCAL_BYTES : LOCAL_BYTES + lengths[0]].decode("utf-8", "replace")
    if header[:4] != LOCAL or name != entry.full:
        raise CorruptError(f"{where} {DAMAGED}: {entry.full} does not begin at byte {entry.header}")
    return entry.header + LOCAL_BYTES + lengths[0] + lengths[1]


@dataclass(frozen=True, slots=True)
class Zip:
    """A zip in a file.

    Attributes:
        opened: the folder.
        key: the file.
        start: first byte of the zip in the file.
        nbytes: bytes of the zip.
        entries: its entries by their names without the folder in front.
    """

    opened: Opened
    key: str
    start: int
    nbytes: int
    entries: Mapping[str, Entry]

    @classmethod
    async def of(cls, opened: Opened, key: str, start: int, nbytes: int) -> Zip:
        """Read the directory of a zip.

        Raises:
            CorruptError: it is truncated or damaged, or has two entries of a name.
            CheckpointError: an entry is compressed.

        """
        where = f"{opened.path}/{key}"
        tail_bytes = min(nbytes, TAIL_BYTES)
        tail = await opened.read(key, start + nbytes - tail_bytes, tail_bytes)
        first, length = _directory(tail, nbytes - tail_bytes, where)
        if length > MOST_DIRECTORY_BYTES:
            raise CorruptError(f"{where} {DAMAGED}: its directory is said to have {length} bytes")
        skipped = first - (nbytes - tail_bytes)
        data = tail[skipped : skipped + length] if skipped >= 0 else await opened.read(key, start + first, length)
        return cls(opened, key, start, nbytes, _by_name(data, first, where))

    async def looked_ahead(self, names: Iterable[str]) -> Zip:
        """Return the same zip with the local headers of these entries read, several at once."""
        spans = [(self.key, self.start + entry.header, self._header_stop(entry)) for entry in map(self._entry, names)]
        return replace(self, opened=await self.opened.looked_ahead(spans))

    async def data_start(self, name: str) -> int:
        """Return the first byte of an entry's data, from the start of the file."""
        entry, where = self._entry(name), f"{self.opened.path}/{self.key}"
        begin = self.start + entry.header
        header = await self.opened.read(self.key, begin, self._header_stop(entry) - begin)
        first = _data_start(header, entry, where)
        if first + entry.nbytes > self.nbytes:
            raise CorruptError(f"{where} {DAMAGED}: {name} ends behind the file")
        return self.start + first

    async def read(self, name: str, most: int) -> bytes:
        """Read an entry whole; it may have ``most`` bytes."""
        entry = self._entry(name)
        if entry.nbytes > most:
            where = f"{self.opened.path}/{self.key}"
            raise CorruptError(f"{where}: {name} has {entry.nbytes} bytes, and {most} is the most")
        return await self.opened.read(self.key, await self.data_start(name), entry.nbytes)

    def _header_stop(self, entry: Entry) -> int:
        """Return the byte of the file behind an entry's local header and name."""
        return self.start + entry.header + LOCAL_BYTES + len(entry.full.encode())

    def _entry(self, name: str) -> Entry:
        if name not in self.entries:
            raise CorruptError(f"{self.opened.path}/{self.key} {DAMAGED}: its zip has no {name}")
        return self.entries[name]


def _by_name(data: bytes, limit: int, where: str) -> dict[str, Entry]:
    """Return the entries of a directory by name. Raises CorruptError for two entries of a name."""
    entries: dict[str, Entry] = {}
    for entry in _entries(data, limit, where):
        if entry.name in entries:
            raise CorruptError(f"{where} {DAMAGED}: its zip has {entry.name} twice")
        entries[entry.name] = entry
    return entries
