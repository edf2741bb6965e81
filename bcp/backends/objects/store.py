"""The protocol of a kind of object store: single requests, each of which may fail.

A store makes one attempt and tells its outcome. Retries, limits, splitting and checks of stored bytes are the
business of :class:`~bcp.backends.objects.backend.ObjectBackend`, so that all stores have the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bcp.protocols import ObjectInfo, Unfinished, Version

__all__ = ["ConditionError", "If", "RequestError", "Stat", "Store", "Upload"]


@dataclass(frozen=True, slots=True)
class Stat:
    """A store's record of one object: its size in bytes, and the version of its contents."""

    nbytes: int
    version: Version


@dataclass(frozen=True, slots=True)
class If:
    """A condition of a write: the object still has this version; None: there is no object."""

    version: Version | None


class ConditionError(Exception):
    """The condition of a request does not hold; nothing was changed by it."""


class RequestError(Exception):
    """One request failed.

    Attributes:
        said: the server's or the client's words, without any secret.
        transient: whether the same request may succeed later.
        slow_down: whether the server asks for fewer requests, as by 429, 503 or SlowDown.
        unreachable: whether no server could be connected to.
        after: seconds that the server asks to wait; None where it says nothing.
    """

    def __init__(
        self,
        message: str,
        *,
        transient: bool = False,
        slow_down: bool = False,
        unreachable: bool = False,
        after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.said = message
        self.transient = transient or slow_down
        self.slow_down = slow_down
        self.unreachable = unreachable
        self.after = after


class Upload(Protocol):
    """One large object on its way into a store. Nobody sees it before :meth:`finish`."""

    async def part(self, index: int, offset: int, data: memoryview) -> None:
        """Store part ``index``; once more after an error, which replaces the bytes of the first attempt.

        Several parts may be under way at once, in any order. The buffer is not used any more when this returns.
        """

    async def finish(self) -> None:
        """Let the object appear whole, with a checksum that the store has compared; may be called again after an error.

        Raises:
            RequestError: as for every request.
            CorruptError: the store has other bytes than were sent.

        """

    async def abort(self) -> None:
        """Remove all parts. Nothing is left when this returns; also after a failed :meth:`finish`."""


class Store(Protocol):
    """Objects below one root; keys are relative to it. Any event loop may use it, and a forked child.

    Methods raise :class:`RequestError` where a request fails, ``FileNotFoundError`` for an absent object, and
    :class:`ConditionError` where a condition does not hold. No method retries, and none may wait for ever: every call
    can be cancelled, and leaves nothing behind then that :meth:`unfinished` does not list.

    Attributes:
        name: of bucket and root, for messages, as in ``"s3://bucket/run"``; without secrets.
        least_part: bytes that every part but the last has to have.
        most_part: bytes that a part or an object may have in one request.
        most_parts: how many parts an upload may have.
        most_keys: how many objects one call of :meth:`delete` may have.
        at_once: how many parts or reads shall be under way at once.
    """

    name: str
    least_part: int
    most_part: int
    most_parts: int
    most_keys: int
    at_once: int

    async def put(self, key: str, data: memoryview, condition: If | None = None) -> Version:
        """Store an object by one request; return its version."""

    async def stat(self, key: str) -> Stat | None:
        """Return size and version of an object; None if there is none."""

    async def get(self, key: str) -> tuple[bytes, Version]:
        """Read an object whole."""

    async def read(self, key: str, start: int, out: memoryview, version: Version | None) -> tuple[int, Version]:
        """Fill ``out`` from byte ``start`` on; return how many bytes there were, and the object's version.

        With ``version`` the object has to have that one, else :class:`ConditionError`. ``out`` is not written to any
        more when this returns or raises. No byte at or after ``start``: 0.
        """

    async def list(self, prefix: str, after: str | None) -> tuple[Sequence[ObjectInfo], str | None]:
        """Return one page of the objects whose key starts with a prefix, in any order, and where the next one begins.

        ``after`` is the second result of the call for the page before, and None for the first page. After the last page
        the second result is None.
        """

    async def folders(self, prefix: str, after: str | None) -> tuple[Sequence[str], str | None]:
        """Return a page of the names of the folders directly below a prefix, which is empty or ends with a slash.

        Pages are those of :meth:`list`. Names have no slash, and come in any order.
        """

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete at most ``most_keys`` objects; absent ones are no error. May delete some and fail then."""

    async def begin(self, key: str, nbytes: int | None) -> Upload:
        """Begin to upload an object of so many bytes; None where that is not known."""

    async def unfinished(self, after: str | None) -> tuple[Sequence[Unfinished], str | None]:
        """Return a page of the uploads that were neither finished nor aborted, of other processes too.

        Pages are those of :meth:`list`. Two of them may have the same upload.
        """

    async def discard(self, unfinished: Unfinished) -> None:
        """Remove one of those with its parts; an absent one is no error."""

    async def aclose(self) -> None:
        """Close connections. Idempotent."""
