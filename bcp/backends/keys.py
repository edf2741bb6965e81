"""Keys and versions of objects, and how bytes are handed over."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from bcp.errors import InputError
from bcp.protocols import Buffer, Version

__all__ = ["check_key", "check_prefix", "content_version", "scatter"]

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
    """Return the prefix of a folder's keys, or raise :class:`~bcp.errors.InputError` where it is none.

    It is empty, or a key and a slash.
    """
    if prefix and not (prefix.endswith("/") and check_key(prefix[:-1])):
        raise InputError(f"prefix {prefix!r} is no folder's; end it with '/', or pass '' for the root")
    return prefix


def content_version(data: Buffer) -> Version:
    """Return the digest of an object's contents, for backends whose storage has no versions of its own."""
    return xxhash.xxh3_128_hexdigest(data)


def scatter(source: memoryview, outs: Sequence[memoryview]) -> None:
    """Fill flat buffers one after the other; ``source`` has as many bytes as they."""
    at = 0
    for out in outs:
        end = at + len(out)
        if len(out) < _LARGE_BYTES:
            out[:] = source[at:end]
        else:
            np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(source[at:end], np.uint8))
        at = end
