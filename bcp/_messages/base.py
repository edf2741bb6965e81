"""The base class of all messages: strict encoding and decoding as MessagePack.

A message is written by another process, which may run another version of bcp. So a decoder takes nothing for granted:
each struct refuses unknown fields, wrong types and numbers out of bounds. msgspec allocates no more than a message has
bytes, whatever lengths it claims.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Annotated, Any, Self, SupportsFloat, SupportsIndex, TypeVar

import msgspec

from bcp.errors import MessageError

__all__ = [
    "Count",
    "Message",
    "Rank",
    "Seconds",
    "decode_any",
    "decode_either",
    "expect",
    "plain",
    "prepare",
    "refused",
]

Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
"""A rank's number."""

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""A number of things, of bytes or of steps."""

Seconds = Annotated[float, msgspec.Meta(ge=0)]
"""A duration; it may be infinite, but is a number."""

DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for bytes that are no message of the wanted type."""


def plain(value: object) -> str | int | float:
    """Return the plain value of an instance of a subclass, as ``torch.__version__`` and numpy's numbers are."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, SupportsIndex):
        return index(value)
    if isinstance(value, SupportsFloat):
        return float(value)
    raise TypeError(f"a message has a value of {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=plain)


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, tag_field="type"):
    """A message, whose class name and field names are sent with it.

    Subclasses check bounds that a type cannot say in ``__post_init__``, by :func:`expect`. A message that every rank
    sends is ``array_like``: it has no field names, but the number of its fields is checked.

    Example::

        class Plan(Message, frozen=True):
            step: Count
            saves: bool

        assert Plan.decode(Plan(15, True).encode()) == Plan(15, True)

    """

    def encode(self) -> bytes:
        """Return the bytes of the message. A lone surrogate, as of a file name that is no UTF-8, is sent escaped."""
        try:
            return _encoder.encode(self)
        except UnicodeEncodeError:
            return msgspec.msgpack.encode(_escaped(msgspec.to_builtins(self, builtin_types=(bytes,), enc_hook=plain)))

    @classmethod
    def decode(cls, data: bytes, sender: int | None = None) -> Self:
        """Decode a message of this class from ``sender``. Raises MessageError if ``data`` is no such message."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except DECODE_ERRORS as error:
            raise refused(cls.__name__, data, error, sender) from error

    @classmethod
    def decode_all(cls, messages: Sequence[bytes]) -> list[Self]:
        """Decode a message of each rank, by rank. Raises MessageError as :meth:`decode` does."""
        return [cls.decode(message, rank) for rank, message in enumerate(messages)]


A = TypeVar("A", bound=Message)
B = TypeVar("B", bound=Message)


def decode_either(first: type[A], second: type[B], data: bytes, sender: int | None = None) -> A | B:
    """Decode a message of one of two classes, which its tag tells. Raises MessageError as Message.decode does."""
    kinds: Any = first | second
    message: A | B = decode_any(kinds, f"{first.__name__} or {second.__name__}", data, sender)
    return message


def decode_any(kinds: Any, name: str, data: bytes, sender: int | None = None) -> Any:
    """Decode a message of a union of classes, which errors call ``name``. Raises MessageError if it is of none."""
    try:
        return msgspec.msgpack.decode(data, type=kinds)
    except DECODE_ERRORS as error:
        raise refused(name, data, error, sender) from error


def prepare(module: str, *others: Any) -> None:
    """Let msgspec read the annotations of all messages of a module now, and of other types that are decoded.

    Otherwise msgspec reads them in the first decode, by Python code. Another thread, or a fork, that comes in between
    decodes by half a description, and crashes.
    """
    for kind in (*(subclass for subclass in Message.__subclasses__() if subclass.__module__ == module), *others):
        msgspec.msgpack.Decoder(kind)


def expect(*sound: bool, reason: str) -> None:
    """Raise ValueError, which a decoder turns into a MessageError, unless all conditions hold."""
    if not all(sound):
        raise ValueError(reason)


def refused(name: str, data: bytes | memoryview | int, reason: object, sender: int | None = None) -> MessageError:
    """Return the error for a message that cannot be used; ``data`` may also be the number of its bytes."""
    origin = "" if sender is None else f" of rank {sender}"
    nbytes = data if isinstance(data, int) else len(data)
    return MessageError(
        f"the message {name}{origin} cannot be decoded, {nbytes} bytes: {reason}; "
        "run the same version of bcp on all ranks"
    )


def _escaped(value: Any) -> Any:
    """Escape the lone surrogates of all texts."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_escaped(key): _escaped(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(element) for element in value]
    return value
