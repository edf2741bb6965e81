"""Which parts of an object have arrived, and whether they tile it.

Keys and versions of objects, and how bytes are handed over.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from bcp.errors import InputError, StorageError
from bcp.protocols import Buffer, Version

__all__ = ["Tiling", "check_key", "check_prefix", "content_version", "scatter"]

_LARGE_BYTES = 64 << 10
# From here on numpy copies, which lets other threads run, in the same time; 4 KiB take a memoryview 0.4 us, numpy 2.4.


def check_key(key: str) -> str:
    """Return the key, or raise :class:`~bcp.errors.InputError` where it could mean something outside of the root.

    A key is relative and '/'-separated, without empty, ``.`` and ``..`` segments, NUL and backslash.
    """
    segments = key.split("/")
    if "" in segments or "." in segments or ".." in segments or "\0" in key or "\\" in key:
        raise InputError(
            f"key {key!r} is not allowed; use a relative key such as 'model/rank0.safetensors', "
            "without empty, '.' or '..' segments, backslash or NUL"
        )
    return key


def check_prefix(prefix: str) -> str:
    """Return a folder's prefix: empty, or a key and a slash. Raises :class:`~bcp.errors.InputError` otherwise."""
    if prefix and not (prefix.endswith("/") and check_key(prefix[:-1])):
        raise InputError(f"prefix {prefix!r} is no folder's; end it with '/', or pass '' for the root")
    return prefix


def content_version(data: Buffer) -> Version:
    """Return the digest of an object's contents, for backends whose storage has no versions of its own."""
    return xxhash.xxh3_128_hexdigest(data)


def scatter(source: memoryview, outs: Sequence[memoryview]) -> None:
    """Fill flat buffers one after the other; ``source`` has as many bytes as they."""
    start = 0
    for out in outs:
        end = start + len(out)
        if len(out) < _LARGE_BYTES:
            out[:] = source[start:end]
        else:
            np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(source[start:end], np.uint8))
        start = end


class Tiling:
    """Collects the parts of one object; every backend's writer checks them before the object may appear.

    Not locked: call it from the event loop only.
    """

    def __init__(self, where: str, nbytes: int | None) -> None:
        """Start with no part.

        Args:
            where: backend and key, for messages.
            nbytes: size of the whole object, or None where it is not known.

        """
        self._where = where
        self._nbytes = nbytes
        self._parts: list[tuple[int, int, int]] = []

    def __repr__(self) -> str:
        return f"<Tiling of {self._where}: {len(self._parts)} parts, {self._written()} of {self._nbytes} bytes>"

    def add(self, index: int, offset: int, nbytes: int) -> None:
        """Note a part that has been written."""
        self._parts.append((index, offset, nbytes))

    def check(self) -> int:
        """Return the size of the object in bytes.

        Raises:
            StorageError: parts are missing, given twice, overlap or leave a gap, or the size is another one.

        """
        end = 0
        for expected, (index, offset, nbytes) in enumerate(sorted(self._parts)):
            if index != expected:
                problem = f"part {index} was written twice" if index < expected else f"part {expected} is missing"
                raise StorageError(f"{self._where}: {problem}; write every part 0, 1, 2 ... once")
            if offset != end:
                problem = f"a gap of {offset - end} bytes" if offset > end else f"an overlap of {end - offset} bytes"
                raise StorageError(
                    f"{self._where}: {problem} between part {index}, which starts at byte {offset}, and the parts "
                    f"before it, which end at byte {end}; together the parts have to tile the object"
                )
            end = offset + nbytes
        if self._nbytes is not None and end != self._nbytes:
            raise StorageError(f"{self._where}: {end} bytes were written and {self._nbytes} were announced")
        return end

    def _written(self) -> int:
        return sum(nbytes for _, _, nbytes in self._parts)
