"""Frames of an edge of the tree, as bytes.

A frame is its kind, the number of the operation, the number of the step, and a body that depends on the kind. Numbers
are varints (7 bits a byte, the lowest first), so that most frames are 3 bytes and their body.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from xxhash import xxh3_64_digest

from bcp.coordinators.hello import Abort

__all__ = [
    "DIGEST_BYTES",
    "Frame",
    "FrameError",
    "Kind",
    "abort_of",
    "body_of_abort",
    "bytes_of",
    "digest_of",
    "joined",
    "pack_number",
    "pieces_of",
    "text_of",
    "unpack_number",
]

DIGEST_BYTES = 4
"""Length of a digest of an operation's name. Different names agree once in 4 billion times, and are mistakes anyway."""

PIECE_BYTES = 64 << 10
"""Length of a piece of a large frame. Each piece is a sign of life, and takes 2.6 s at 0.2 Mbit/s."""

_LONGEST_NUMBER = 9  # bytes: 63 bits


class FrameError(ValueError):
    """Bytes that are no frame, or one that makes no sense: the other side is damaged, or is not what it says it is."""


class Kind(IntEnum):
    """The meaning of a frame.

    Attributes:
        JOIN: this rank has begun the operation; body: a digest of what it is doing.
        BEAT: a sign of life.
        LEFT: this rank has left the operation in peace, and all that it had to say has been said.
        UP: what the ranks of a subtree give in a step; body: a digest of the step's verb, and Values.
        DOWN: the answer to a step, the same for all.
        EACH: the answers to a step, for the ranks of a subtree; body: Values.
        SAY: this rank's own words for the step, for one that differs; step 0 is the operation.
        ABORT: the operation has ended; body: see ``body_of_abort``.
        OLD: the operation is over on this rank; body: the number of the next one.
        BYE: this rank talks no more.
    """

    JOIN = 1
    BEAT = 2
    LEFT = 3
    UP = 4
    DOWN = 5
    EACH = 6
    SAY = 7
    ABORT = 8
    OLD = 9
    BYE = 10


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
        """Return its bytes."""
        return b"".join((bytes((self.kind,)), pack_number(self.operation), pack_number(self.step), self.body))

    @classmethod
    def unpack(cls, data: bytes) -> Frame:
        """Read a frame. Raises :class:`FrameError`."""
        if not data or data[0] not in _KINDS:
            raise FrameError(f"a frame of {len(data)} bytes that begins with {data[:1].hex()!r} is of no known kind")
        operation, at = unpack_number(data, 1)
        step, at = unpack_number(data, at)
        return cls(Kind(data[0]), operation, step, data[at:])


def pieces_of(frame: bytes) -> Iterator[bytes]:
    """Yield the messages that carry a frame: itself, or its pieces if it is long."""
    if len(frame) <= PIECE_BYTES:
        yield frame
        return
    for start in range(0, len(frame), PIECE_BYTES):
        kind = _PIECE if start + PIECE_BYTES < len(frame) else _LAST
        yield bytes((kind,)) + frame[start : start + PIECE_BYTES]


def joined(message: bytes, begun: list[bytes]) -> bytes | None:
    """Return the frame that is complete with a message; ``begun`` are the pieces so far, and one more afterwards.

    A frame that begins ends one that is not complete: its sender has dropped the rest.
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
    """Return what is sent in place of a text that is expected to be the same everywhere."""
    return xxh3_64_digest(bytes_of(text))[:DIGEST_BYTES]


def pack_number(number: int) -> bytes:
    """Write a number from 0 to 2**63 - 1."""
    packed = bytearray()
    while number > 0x7F:  # noqa: PLR2004 -- 7 bits
        packed.append(number & 0x7F | 0x80)
        number >>= 7
    packed.append(number)
    return bytes(packed)


def unpack_number(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at a place, and the place behind it. Raises :class:`FrameError`."""
    number = 0
    for position in range(at, min(at + _LONGEST_NUMBER, len(data))):
        number |= (data[position] & 0x7F) << 7 * (position - at)
        if data[position] < 0x80:  # noqa: PLR2004 -- the last byte
            return number, position + 1
    raise FrameError(f"a frame of {len(data)} bytes has no number at byte {at}")


def body_of_abort(abort: Abort) -> bytes:
    """Write down why an operation ended."""
    return bytes((abort.disagreement,)) + pack_number(abort.rank) + bytes_of(abort.message)


def abort_of(body: bytes) -> Abort:
    """Read why an operation ended. Raises :class:`FrameError`."""
    rank, at = unpack_number(body, 1)
    return Abort(rank, text_of(body[at:]), disagreement=bool(body[0]))


def bytes_of(text: str) -> bytes:
    """Write a text; file names in it may be no Unicode."""
    return text.encode(errors="backslashreplace")


def text_of(body: bytes) -> str:
    """Read a text; what is no UTF-8 is shown as such, since it is for people only."""
    return body.decode(errors="backslashreplace")
