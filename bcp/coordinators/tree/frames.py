"""The bytes of a frame on an edge of the tree, and of the payloads of many ranks in it.

A frame is its kind, the number of the operation, the number of the step, and a body that depends on the kind. Numbers
are varints (7 bits a byte, the lowest first), so that most frames are 3 bytes and their body. Payloads of many ranks
have each distinct value once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_digest

__all__ = [
    "ACKNOWLEDGING",
    "DIGEST_BYTES",
    "Frame",
    "FrameError",
    "Kind",
    "Values",
    "bytes_of",
    "digest_of",
    "joined",
    "pack_number",
    "pieces_of",
    "text_of",
    "unpack_number",
]


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """A sequence of byte strings, many of them equal.

    The wire has the number of distinct values, their lengths, and their bytes. An index of 1, 2 or 4 bytes for each
    member follows, unless all are equal. The number of members is known, and not written.
    """

    distinct: tuple[bytes, ...]  # the values, in the order of their first appearance
    index: NDArray[np.uint32]  # for each member the index of its value

    def __len__(self) -> int:
        return len(self.index)

    @classmethod
    def of(cls, members: Iterable[bytes]) -> Values:
        """Return the sequence of these members."""
        known: dict[bytes, int] = {}
        indices = [known.setdefault(member, len(known)) for member in members]
        return cls(tuple(known), np.array(indices, np.uint32))

    @classmethod
    def joined(cls, pieces: Sequence[Values]) -> Values:
        """Concatenate sequences. A Python step is spent on each distinct value, none on a member."""
        known: dict[bytes, int] = {}
        indices = []
        for piece in pieces:
            table = np.array([known.setdefault(value, len(known)) for value in piece.distinct], np.uint32)
            indices.append(table[piece.index])
        return cls(tuple(known), np.concatenate(indices) if indices else np.zeros(0, np.uint32))

    def split(self, sizes: Sequence[int]) -> list[Values]:
        """Return the pieces of these sizes; the reverse of :meth:`joined`."""
        pieces = np.split(self.index, np.cumsum(sizes)[:-1])
        return [self._of_indices(piece) for piece in pieces]

    def members(self) -> list[bytes]:
        """Return the whole sequence."""
        return [self.distinct[index] for index in self.index.tolist()]

    def pack(self) -> bytes:
        """Return the bytes of the sequence."""
        lengths = b"".join(pack_number(len(value)) for value in self.distinct)
        indices = self.index.astype(_width(len(self.distinct))).tobytes() if len(self.distinct) > 1 else b""
        return b"".join((pack_number(len(self.distinct)), lengths, *self.distinct, indices))

    @classmethod
    def unpack(cls, data: bytes, count: int) -> Values:
        """Read a sequence of ``count`` members. Raises :class:`~bcp.coordinators.tree.frames.FrameError`."""
        size, offset = unpack_number(data, 0)
        if not (0 < size <= count and size <= len(data)):
            raise FrameError(f"{size} distinct values for {count} ranks, in {len(data)} bytes")
        lengths = []
        for _ in range(size):
            length, offset = unpack_number(data, offset)
            lengths.append(length)
        width = _width(size)
        expected = offset + sum(lengths) + (count * width.itemsize if size > 1 else 0)
        if len(data) != expected:
            raise FrameError(f"values of {count} ranks in {len(data)} bytes instead of {expected}")
        distinct = []
        for length in lengths:
            distinct.append(data[offset : offset + length])
            offset += length
        indices = np.frombuffer(data, width, offset=offset) if size > 1 else np.zeros(count, width)
        if indices.max() >= size:
            raise FrameError(f"value {indices.max()} of {size} distinct ones")
        return cls(tuple(distinct), indices.astype(np.uint32))

    def _of_indices(self, indices: NDArray[np.uint32]) -> Values:
        """Return the members that have these indices."""
        if len(self.distinct) == 1:
            return Values(self.distinct, indices)
        used, first, inverse = np.unique(indices, return_index=True, return_inverse=True)
        by_appearance = np.argsort(first)
        rank_of = np.empty_like(by_appearance)
        rank_of[by_appearance] = np.arange(len(used))
        distinct = tuple(self.distinct[index] for index in used[by_appearance].tolist())
        return Values(distinct, rank_of[inverse].astype(np.uint32))


def _width(size: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype("<u1") if size <= 1 << 8 else np.dtype("<u2") if size <= 1 << 16 else np.dtype("<u4")


DIGEST_BYTES = 4
"""Length of a digest of an operation's name. Different names agree once in 4 billion times, and are mistakes anyway."""

PIECE_BYTES = 64 << 10
"""Length of a piece of a large frame. Each piece is a sign of life, and takes 2.6 s at 0.2 Mbit/s."""

_LONGEST_NUMBER = 9  # bytes: 63 bits


class FrameError(ValueError):
    """Bytes that are no frame, or an impossible frame: the other side is damaged, or an impostor."""


class Kind(IntEnum):
    """The meaning of a frame."""

    JOIN = 1  # this rank has begun the operation; body: a digest of the operation's name
    BEAT = 2  # a sign of life; body: the number of messages received so far
    LEFT = 3  # this rank has left the operation in peace, after all its other frames; body: as of BEAT
    UP = 4  # the payloads of the ranks of a subtree in a step; body: a digest of the step's verb, and Values
    DOWN = 5  # the answer to a step, the same for all
    EACH = 6  # the answers to a step, for the ranks of a subtree; body: Values
    SAY = 7  # this rank's name of the step, for a neighbour that has another one; step 0 is the operation
    ABORT = 8  # the operation has ended; body: an encoded bcp._messages.coordination.Abort
    OLD = 9  # the operation is over on this rank; body: the number of the next one
    BYE = 10  # this rank talks no more
    ASK = 11  # a sign of life from a rank that has heard nothing for a while; body: as of BEAT
    HEARD = 12  # the answer to ASK of the node itself, and sent after many bytes; body: as of BEAT, or empty


ACKNOWLEDGING = frozenset({Kind.BEAT, Kind.LEFT, Kind.ASK, Kind.HEARD})
"""Frames that say how many messages have been received."""


_KINDS = frozenset(Kind)
_PIECE, _LAST = 254, 255
"""First bytes of messages that carry the next bytes of a frame, and its last ones; no frame begins so."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message between neighbours."""

    kind: Kind
    operation: int = 0
    step: int = 0
    body: bytes = b""

    def pack(self) -> bytes:
        """Return the bytes of the frame."""
        return b"".join((bytes((self.kind,)), pack_number(self.operation), pack_number(self.step), self.body))

    @classmethod
    def unpack(cls, data: bytes) -> Frame:
        """Read a frame. Raises :class:`FrameError`."""
        if not data or data[0] not in _KINDS:
            raise FrameError(f"a frame of {len(data)} bytes that begins with {data[:1].hex()!r} is of no known kind")
        operation, offset = unpack_number(data, 1)
        step, offset = unpack_number(data, offset)
        return cls(Kind(data[0]), operation, step, data[offset:])


def pieces_of(frame: bytes) -> Iterator[bytes]:
    """Yield the messages that carry a frame: itself, or its pieces if it is long."""
    if len(frame) <= PIECE_BYTES:
        yield frame
        return
    for start in range(0, len(frame), PIECE_BYTES):
        kind = _PIECE if start + PIECE_BYTES < len(frame) else _LAST
        yield bytes((kind,)) + frame[start : start + PIECE_BYTES]


def joined(message: bytes, begun: list[bytes]) -> bytes | None:
    """Return the frame that a message completes, else None after adding the message to ``begun``, the pieces so far.

    A frame that begins ends an incomplete one: its sender has dropped the rest.
    """
    kind = message[0] if message else None
    if kind not in (_PIECE, _LAST):
        begun.clear()
        return message
    begun.append(message[1:])
    if kind == _PIECE:
        return None
    frame = b"".join(begun)
    begun.clear()
    return frame


def digest_of(text: str) -> bytes:
    """Return the digest that is sent in place of a text that should be the same everywhere."""
    return xxh3_64_digest(bytes_of(text))[:DIGEST_BYTES]


def pack_number(number: int) -> bytes:
    """Write a number from 0 to 2**63 - 1."""
    packed = bytearray()
    while number > 0x7F:  # noqa: PLR2004 -- 7 bits
        packed.append(number & 0x7F | 0x80)
        number >>= 7
    packed.append(number)
    return bytes(packed)


def unpack_number(data: bytes, offset: int) -> tuple[int, int]:
    """Return the number at a position, and the position behind it. Raises :class:`FrameError`."""
    number = 0
    for position in range(offset, min(offset + _LONGEST_NUMBER, len(data))):
        number |= (data[position] & 0x7F) << 7 * (position - offset)
        if data[position] < 0x80:  # noqa: PLR2004 -- the last byte
            return number, position + 1
    raise FrameError(f"a frame of {len(data)} bytes has no number at byte {offset}")


def bytes_of(text: str) -> bytes:
    """Encode a text; file names in it may be no Unicode."""
    return text.encode(errors="backslashreplace")


def text_of(body: bytes) -> str:
    """Decode a text for people; bytes that are no UTF-8 are escaped."""
    return body.decode(errors="backslashreplace")
