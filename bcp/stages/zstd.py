"""A codec that every load knows: zstd over bytes that are grouped by their place in the elements.

Exponents of a tensor's elements are much alike, and their last bits are noise. Grouped, the exponents lie together,
and zstd finds them; it leaves the noise as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from bcp.errors import CorruptError, InputError, MissingExtraError
from bcp.protocols import Buffer, Codec, flat_view
from bcp.runtime.imports import imported

__all__ = ["NAME", "zstd"]

NAME = "bcp.zstd"

Bytes: TypeAlias = npt.NDArray[np.uint8]

WIDTHS = (1, 2, 4, 8)
"""Bytes of elements. The first byte of an encoded part has the one that it was grouped by."""

LENGTH = np.dtype("<u8")
"""Lengths of the compressed planes, which follow."""

SAMPLES, SAMPLE_BYTES = 4, 16 << 10
"""A part is grouped by the width whose samples are the smallest: tensors of several types may share it."""

MOST_BYTES = 8 << 30
"""A plane that claims to decode to more is damaged."""

LEVELS = range(1, 20)

_own = threading.local()


def zstd(level: int = 1, workers: int = 2) -> Codec:
    """Return a codec that compresses, without loss, and that loads know by themselves.

    Weights shrink by a fifth to a third; the lower half of fp32 that was bf16 goes whole. Compression takes a core for
    some hundred MB/s, so it pays where storage is slower: :func:`bcp.choose_codecs` measures that. Loads and all tools
    read such checkpoints without ``codecs=``. They read whole parts, into memory of their own.

    Args:
        level: 1 is the fastest; up to 19. Higher ones gain little for weights.
        workers: parts that are encoded or decoded at once.

    Raises:
        InputError: there is no such level.
        MissingExtraError: the package zstandard is not installed.

    Example::

        bcp.save("ckpt/step-200", states, options=bcp.SaveOptions(codecs=[bcp.zstd()]))
        bcp.load("ckpt/step-200", states)

    """
    if isinstance(level, bool) or level not in LEVELS:
        raise InputError(f"level={level!r} is no level of zstd; pass a whole number from 1 to {LEVELS[-1]}")
    _zstandard()
    return Codec(NAME, partial(_encode, level), _decode, workers)


@cache
def _zstandard() -> Any:
    try:
        return imported("zstandard")
    except ImportError as error:
        raise MissingExtraError(
            f"the codec {NAME} needs zstandard, which is not installed: pip install 'bcp-checkpoint[zstd]'"
        ) from error


def _encode(level: int, data: Buffer) -> Buffer:
    """Compress a part."""
    own = np.frombuffer(flat_view(data), np.uint8)
    width = _best_width(level, own)
    streams = [_compressed(level, plane) for plane in _planes(own, width)]
    return b"".join([bytes([width]), np.array(list(map(len, streams)), LENGTH).tobytes(), *streams])


def _decode(data: Buffer) -> Buffer:
    """Undo it.

    Raises:
        CorruptError: these are no bytes of this codec.

    """
    view = flat_view(data)
    what = f"{NAME}: a part of {len(view)} bytes"
    width = view[0] if len(view) else 0
    if width not in WIDTHS:
        raise CorruptError(f"{what} begins with {width}, and only {WIDTHS} are possible: it is damaged")
    begin = 1 + LENGTH.itemsize * width
    if len(view) < begin:
        raise CorruptError(f"{what} is shorter than its header: it is damaged")
    ends = begin + np.cumsum(np.frombuffer(view[1:begin], LENGTH).astype(object))
    if ends[-1] != len(view):
        raise CorruptError(f"{what} has streams of {ends[-1] - begin} bytes: it is damaged")
    return _joined([_expanded(view[start:stop], what) for start, stop in pairwise([begin, *ends])], what).data


def _expanded(stream: memoryview, what: str) -> Bytes:
    """Decompress a stream. Raises CorruptError before memory is taken for an impossible size."""
    zstandard = _zstandard()
    try:
        nbytes = zstandard.get_frame_parameters(stream).content_size
        if nbytes > MOST_BYTES:
            raise CorruptError(f"{what} claims to have {nbytes} bytes: it is damaged")
        content = zstandard.ZstdDecompressor().decompress(stream, allow_extra_data=False) if nbytes else b""
    except zstandard.ZstdError as error:
        raise CorruptError(f"{what} cannot be decoded ({error}): it is damaged") from error
    return np.frombuffer(content, np.uint8)


def _best_width(level: int, data: Bytes) -> int:
    """Return the width by which samples become the smallest."""
    starts = np.linspace(0, max(len(data) - SAMPLE_BYTES, 0), SAMPLES).astype(np.int64) // WIDTHS[-1] * WIDTHS[-1]
    samples = [data[start : start + SAMPLE_BYTES] for start in np.unique(starts)]

    def stored(width: int) -> int:
        return sum(len(_compressed(level, plane)) for each in samples for plane in _planes(each, width))

    return min(WIDTHS, key=stored)


def _planes(data: Bytes, width: int) -> list[Bytes]:
    """Return the first bytes of all elements, the second ones, and so on. A last element may be cut off."""
    return [np.ascontiguousarray(data[place::width]) for place in range(width)]


def _joined(planes: Sequence[Bytes], what: str) -> Bytes:
    """Undo :func:`_planes`. Raises CorruptError if the planes are not those of one part."""
    nbytes, width = sum(map(len, planes)), len(planes)
    if [len(plane) for plane in planes] != [len(range(place, nbytes, width)) for place in range(width)]:
        raise CorruptError(f"{what} has streams of {[len(plane) for plane in planes]} bytes: it is damaged")
    data = np.empty(nbytes, np.uint8)
    for place, plane in enumerate(planes):
        data[place::width] = plane
    return data


def _compressed(level: int, data: Bytes) -> bytes:
    compressors = vars(_own).setdefault("compressors", {})  # one may not be used by two threads at once
    if level not in compressors:
        compressors[level] = _zstandard().ZstdCompressor(level=level)
    stream: bytes = compressors[level].compress(data)
    return stream
