"""Deltas of tensors: zstd streams of what has changed between the bytes of two versions."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from bcp.errors import CorruptError, InputError, MissingExtraError
from bcp.runtime.imports import imported

__all__ = ["ENCODINGS", "MOST_POSITIONS", "Bytes", "apply", "changed", "check_zstandard", "digest", "pack", "unpack"]

Bytes: TypeAlias = npt.NDArray[np.uint8]

ENCODINGS = ("xor", "overwrite")
MOST_POSITIONS = 1 << 32
"""Bytes of a tensor that the positions of ``overwrite`` can name."""

LEVEL = 1
COUNT_BYTES = POSITION_BYTES = 4
_own = threading.local()


@cache
def _zstandard() -> Any:
    try:
        return imported("zstandard")
    except ImportError as error:
        raise MissingExtraError(
            "publications need zstandard, which is not installed: pip install 'bcp-checkpoint[publish]'"
        ) from error


def check_zstandard() -> None:
    """Raise MissingExtraError if the package is not installed."""
    _zstandard()


def digest(data: Bytes) -> str:
    """Return the xxh3-128 of a tensor's bytes, in hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data.data)


def pack(old: Bytes, new: Bytes, encoding: str) -> bytes | None:
    """Return the zstd stream that leads from old to new bytes; None if they are equal.

    The old bytes are written over, where the array allows it.

    Raises:
        InputError: the tensor is too large for the positions of ``overwrite``.

    """
    if encoding == "xor":
        content = _xor(old, new, out=old)
        return _compressed(content) if content.any() else None
    if len(new) > MOST_POSITIONS:
        raise InputError(
            f"a tensor of {len(new)} bytes is too large for encoding='overwrite', whose positions have 32 bits; pass "
            "encoding='xor'"
        )
    places = np.flatnonzero(old != new)
    if not len(places):
        return None
    head = np.array([len(places)], "<u4")
    parts = [head.view(np.uint8), places.astype("<u4").view(np.uint8), new[places]]
    return _compressed(np.concatenate(parts))


def _xor(one: Bytes, other: Bytes, out: Bytes) -> Bytes:
    """Return the bytes of one array XOR those of another, in ``out`` if it can be written."""
    return np.bitwise_xor(one, other, out=out if out.flags.writeable else None)


def _compressed(content: Bytes) -> bytes:
    if not hasattr(_own, "compressor"):  # it may not be used by two threads at once
        _own.compressor = _zstandard().ZstdCompressor(level=LEVEL)
    stream: bytes = _own.compressor.compress(content)
    return stream


def unpack(stream: bytes, nbytes: int, encoding: str, where: str) -> Bytes:
    """Decompress a stream for a tensor of so many bytes. Memory is taken once the size is known to be possible.

    Raises:
        CorruptError: the stream is damaged, or of another tensor; the message begins with ``where``.

    """
    zstandard = _zstandard()
    most = nbytes if encoding == "xor" else COUNT_BYTES + (POSITION_BYTES + 1) * nbytes
    try:
        size = zstandard.get_frame_parameters(stream).content_size
        if size > most or (encoding == "xor" and size != nbytes):
            raise CorruptError(
                f"{where}: its delta has {size} bytes, and the tensor has {nbytes}: the delta is damaged, or of "
                "another tensor; publish an anchor"
            )
        content = np.frombuffer(zstandard.ZstdDecompressor().decompress(stream, allow_extra_data=False), np.uint8)
    except zstandard.ZstdError as error:
        raise CorruptError(f"{where}: its delta is damaged ({error}); publish an anchor") from error
    if len(content) != size or (encoding == "overwrite" and not _is_sound(content, nbytes)):
        raise CorruptError(f"{where}: the positions of its delta lie outside of {nbytes} bytes; publish an anchor")
    return content


def _is_sound(content: Bytes, nbytes: int) -> bool:
    """Whether count, positions and values agree with each other and with the size of the tensor."""
    if len(content) < COUNT_BYTES:
        return False
    count = int(content[:COUNT_BYTES].view("<u4")[0])
    if len(content) != COUNT_BYTES + count * (POSITION_BYTES + 1):
        return False
    places = _places(content)
    return not count or int(places.max()) < nbytes


def _places(content: Bytes) -> npt.NDArray[np.uint32]:
    count = int(content[:COUNT_BYTES].view("<u4")[0])
    places: npt.NDArray[np.uint32] = content[COUNT_BYTES : COUNT_BYTES + POSITION_BYTES * count].view("<u4")
    return places


def apply(old: Bytes, content: Bytes, encoding: str) -> Bytes:
    """Return the new bytes of a tensor. The old ones are written over, where the array allows it."""
    if encoding == "xor":
        return _xor(old, content, out=old)
    new, places = old if old.flags.writeable else old.copy(), _places(content)
    new[places] = content[COUNT_BYTES + places.nbytes :]
    return new


def changed(content: Bytes, itemsize: int, encoding: str) -> npt.NDArray[np.int64]:
    """Return the flat indices of the elements that an unpacked stream changes, ascending."""
    if encoding == "xor":
        return np.flatnonzero(content.reshape(-1, itemsize).any(axis=1)).astype(np.int64)
    return np.unique(_places(content).astype(np.int64) // itemsize)
