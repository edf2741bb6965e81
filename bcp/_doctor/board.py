"""The keys of one session in the job's store: each rank puts a few up, and others look at them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import anyio

from bcp._doctor.times import left
from bcp.coordinators.store_client import StoreClient
from bcp.errors import PeerError

__all__ = ["Board"]

T = TypeVar("T")

_AT_ONCE = 256  # keys in one look
_LEAST_SECONDS = 0.3  # that a store has to answer, also at the end of a step
_PAUSE = 0.05  # seconds between two looks, for up to 1,000 ranks; more look less often


class Board:
    """The store's keys below one prefix that no other session has. Every call is bounded by a deadline.

    All methods raise :class:`~bcp.errors.PeerError` where the store fails or is silent.
    """

    def __init__(self, client: StoreClient, prefix: str, world_size: int) -> None:
        """Prepare; nothing is sent."""
        self._client = client
        self._prefix = prefix
        self._pause = _PAUSE * max(1.0, world_size / 1000)

    def __repr__(self) -> str:
        """Show the place in the store."""
        return f"<Board {self._prefix!r} in {self._client.name}>"

    async def post(self, until: float, name: str, number: int, value: object) -> None:
        """Put a value up under a name and a rank's number."""
        await self.call(until, lambda: self._client.store.set(self._key(name, number), json.dumps(value)))

    async def posted(self, until: float, name: str, numbers: Iterable[int]) -> dict[int, Any]:
        """Wait until these ranks' values are there; return those that are when the time is up."""
        wanted, found = list(numbers), dict[int, Any]()
        while True:
            late = not left(until)
            found |= await self.call(until, partial(self._seen, name, wanted, late))
            wanted = [number for number in wanted if number not in found]
            if late or not wanted:
                return found
            await anyio.sleep(min(self._pause, left(until)))

    async def count(self, until: float, name: str) -> None:
        """Count this rank in."""
        await self.call(until, lambda: self._client.store.add(self._key(name), 1))

    async def counted(self, until: float, name: str, number: int) -> bool:
        """Wait until so many have been counted in; return whether they have."""
        while await self.call(until, lambda: self._client.store.add(self._key(name), 0)) < number:
            if not left(until):
                return False
            await anyio.sleep(min(self._pause, left(until)))
        return True

    async def call(self, until: float, function: Callable[[], T]) -> T:
        """Call a function in the client's thread."""
        began = time.monotonic()
        with anyio.move_on_after(max(left(until), _LEAST_SECONDS)):
            return await self._client.call(function)
        raise PeerError(0, f"{self._client.name} has not answered for {time.monotonic() - began:.1f} s")

    def _seen(self, name: str, numbers: Sequence[int], late: bool) -> dict[int, Any]:  # noqa: FBT001 -- private
        """Return values that are there; of a group that is not complete, only at the end. Blocks."""
        found = dict[int, Any]()
        for start in range(0, len(numbers), _AT_ONCE):
            some = numbers[start : start + _AT_ONCE]
            if not self._client.store.check([self._key(name, number) for number in some]):
                some = [number for number in some if late and self._client.store.check([self._key(name, number)])]
            if some:
                values = self._client.store.multi_get([self._key(name, number) for number in some])
                found |= {number: json.loads(bytes(value)) for number, value in zip(some, values, strict=True)}
        return found

    def _key(self, *names: object) -> str:
        return "/".join((self._prefix, *map(str, names)))
