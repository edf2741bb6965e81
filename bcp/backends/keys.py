"""What a key may look like, and how bytes are handed over."""

from __future__ import annotations

from bcp.errors import InputError
from bcp.protocols import Buffer

__all__ = ["check_key", "flat_view"]


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


def flat_view(data: Buffer) -> memoryview:
    """Return a flat view of single bytes of any contiguous buffer, without a copy."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(bytearray())
