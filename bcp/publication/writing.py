"""The safetensors files of a version: whole tensors of an anchor, and the streams of a delta."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bcp.errors import InputError
from bcp.interop.safetensors_files import CODES, LENGTH_BYTES, MOST_HEADER_BYTES
from bcp.plan.write.files import framed
from bcp.protocols import Backend, PartWriter, flat_view
from bcp.publication.batches import batches, on_all_cores
from bcp.publication.encoding import Bytes, digest, pack
from bcp.publication.sources import Entry, S, Sized, Weights
from bcp.runtime.threads import in_thread

__all__ = ["Kept", "Written", "anchor_groups", "write_anchor", "write_delta"]

ALIGNMENT = 64
PART_BYTES = 32 << 20
FILE_BYTES = 256 << 20
"""Bytes of streams that wait for their file."""


@dataclass(slots=True)
class Written:
    """The files of a version so far.

    Attributes:
        files: the file of each tensor, relative to the version's folder.
        digests: the digest of each tensor that was read.
        nbytes: bytes of tensors or streams.
    """

    files: dict[str, str] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    nbytes: int = 0


class Kept(Protocol):
    """The tensors of the version before, and a place for those of the new one."""

    async def old(self, name: str) -> Bytes:
        """Read a tensor of the version before. The caller may write to the array."""

    async def keep(self, digest: str, data: Bytes) -> None:
        """Take a new tensor, for the delta of the next version."""


def anchor_groups(tensors: Sequence[S], shard_bytes: int) -> list[list[S]]:
    """Return the tensors of each file of an anchor, in the order of the file: larger elements first."""
    groups = batches(tensors, _nbytes, shard_bytes)
    return [sorted(group, key=lambda each: -each.itemsize) for group in groups]


async def write_anchor(backend: Backend, tag: str, weights: Weights, shard_bytes: int, kept: Kept) -> Written:
    """Write all tensors to a version's folder, each read once and one at a time.

    Args:
        backend: the folder.
        tag: at the end of the names of files.
        weights: the tensors.
        shard_bytes: bytes of tensors in a file, at most; a larger tensor has a file of its own.
        kept: takes the tensors.

    Raises:
        InputError: the header of a file is longer than readers take.
        CorruptError: a file of the source is damaged.
        StorageError: storage failed.

    """
    written = Written()
    for number, ordered in enumerate(anchor_groups(weights, shard_bytes), 1):
        key = f"model-{number:05d}-{tag}.safetensors"
        table = {each.name: (CODES[each.dtype], each.shape, each.nbytes) for each in ordered}
        header = _header(key, table, {"format": "pt"})
        nbytes = sum(each.nbytes for each in ordered)
        async with backend.open_write(key, len(header) + nbytes) as writer:
            parts = _Parts(writer)
            await parts.write(header)
            for each in ordered:
                data = await each.read()
                written.digests[each.name] = await in_thread(digest, data)
                await parts.write(data.data)
                await kept.keep(written.digests[each.name], data)
        written.files |= {each.name: key for each in ordered}
        written.nbytes += nbytes
    return written


async def write_delta(
    backend: Backend,
    tag: str,
    weights: Weights,
    old_digests: Mapping[str, str],
    kept: Kept,
    encoding: str,
    *,
    has_file: bool,
) -> Written:
    """Write the streams of all tensors that differ from the version before. The base of equal ones is not read.

    Args:
        backend: the version's folder.
        tag: at the end of the names of files; may have a folder in front.
        weights: the tensors of the new version.
        old_digests: digests of the version before.
        kept: the tensors of the version before; takes the new ones.
        encoding: ``"xor"`` or ``"overwrite"``.
        has_file: write a file though nothing has changed: a version without one would have no folder.

    Raises:
        InputError: a tensor is too large for ``overwrite``.
        CorruptError: a file of the source or of the version before is damaged.
        StorageError: storage failed.

    """
    written, streams = Written(), _Streams(backend, tag)
    for batch in batches(weights, _nbytes):
        by_name = {entry.name: entry for entry in batch}

        async def packed(name: str, by_name: Mapping[str, Entry] = by_name) -> tuple[str, bytes | None]:
            new = await by_name[name].read()
            found = await in_thread(digest, new)
            await kept.keep(found, new)
            if found == old_digests[name]:
                return found, None
            return found, await in_thread(pack, await kept.old(name), new, encoding)

        for name, (found, stream) in zip(by_name, await on_all_cores(backend, by_name, packed), strict=True):
            written.digests[name] = found
            if stream is not None:
                await streams.add(name, stream, written)
    if streams.waiting or (has_file and not written.files):
        await streams.flush(written)
    return written


class _Streams:
    """Streams that wait for their file. ``#`` in the tag is the number of the file."""

    def __init__(self, backend: Backend, tag: str) -> None:
        self.waiting: dict[str, bytes] = {}
        self._backend, self._tag = backend, tag
        self._nbytes, self._number = 0, 1

    async def add(self, name: str, stream: bytes, written: Written) -> None:
        """Take a stream; write a file once there are enough."""
        self.waiting[name] = stream
        self._nbytes += len(stream)
        if self._nbytes >= FILE_BYTES:
            await self.flush(written)

    async def flush(self, written: Written) -> None:
        """Write a file. Its metadata have the digests of the new tensors, where readers of SGLang look."""
        key, streams = self._tag.replace("#", f"{self._number:05d}"), self.waiting
        table = {name: (CODES["uint8"], (len(stream),), len(stream)) for name, stream in streams.items()}
        header = _header(key, table, {name: written.digests[name] for name in streams})
        async with self._backend.open_write(key, len(header) + self._nbytes) as writer:
            parts = _Parts(writer)
            await parts.write(header)
            for stream in streams.values():
                await parts.write(stream)
        written.files |= dict.fromkeys(streams, key)
        written.nbytes += self._nbytes
        self.waiting, self._nbytes, self._number = {}, 0, self._number + 1


def _nbytes(tensor: Sized) -> int:
    return tensor.nbytes


def _header(key: str, table: Mapping[str, tuple[str, tuple[int, ...], int]], notes: Mapping[str, str]) -> bytes:
    """Return the header of a file with these tensors: dtype, shape and bytes of each, in file order."""
    content: dict[str, object] = {"__metadata__": notes}
    at = 0
    for name, (code, shape, nbytes) in table.items():
        content[name] = {"dtype": code, "shape": shape, "data_offsets": (at, at + nbytes)}
        at += nbytes
    header = framed(content, ALIGNMENT)
    if len(header) - LENGTH_BYTES > MOST_HEADER_BYTES:
        raise InputError(
            f"{key}: the header for {len(table)} tensors has {len(header)} bytes, and {MOST_HEADER_BYTES} is the most "
            "of safetensors; choose a smaller shard_bytes="
        )
    return header


class _Parts:
    """Writes bytes one after the other, in parts of a bounded size."""

    def __init__(self, writer: PartWriter) -> None:
        self._writer = writer
        self._index = self._offset = 0

    async def write(self, data: bytes | memoryview) -> None:
        """Write the next bytes."""
        view = flat_view(data)
        for start in range(0, len(view), PART_BYTES):
            part = view[start : start + PART_BYTES]
            await self._writer.write_part(self._index, self._offset, part)
            self._index += 1
            self._offset += len(part)
