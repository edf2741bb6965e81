"""The keys of one operation in a torch Store: payloads, signs of life, the abort, and who deletes what."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

from bcp.coordinators.messages import LEFT, Abort, PeerInfo
from bcp.coordinators.roll_call import RollCall

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["Mailbox"]

_CHUNK_BYTES = 4 << 20  # TCPStore's server drops a connection that sends a value above 8 MiB (torch 2.13)


class Mailbox:
    """One rank's access to the keys of one operation. Nothing waits for a key.

    Every method blocks until the store has answered, and is called in the client's thread.
    Payloads are deleted by whoever reads them last, all other keys by the last rank that leaves. So nobody ever
    gets a key that may have been deleted since it was checked; ``Store.get`` would block for minutes.

    Attributes:
        roll: finds the other ranks; the keys lie below the session that it agrees on.
        number: the operation's.
    """

    def __init__(self, roll: RollCall, number: int, rank: int, world_size: int) -> None:
        self.roll = roll
        self.number = number
        self._rank = rank
        self._world_size = world_size
        self._posted: list[str] = []

    def __repr__(self) -> str:
        return f"<Mailbox of operation {self.number} of {self.roll!r}>"

    # -- signs of life ------------------------------------------------------------------------

    def meet(self) -> bool:
        """Say whether all ranks are known to be there. Nothing else can be said before, but why the operation ended."""
        return self.roll.look() is not None

    def join(self, hello: PeerInfo) -> None:
        """Say hello; the first sign of life follows it, so that whoever sees the sign can read the hello."""
        self.publish("hello", json.dumps(asdict(hello)).encode())
        self.beat(0)

    def beat(self, count: int) -> None:
        """Give a sign of life."""
        self.publish("beat", str(count).encode())

    def beats(self, ranks: Sequence[int]) -> dict[int, bytes | None]:
        """Return the last sign of life of each of these ranks, or None where there is none yet."""
        keys = {self._key("beat", rank): rank for rank in ranks}
        here = self._present(list(keys))
        signs: dict[int, bytes | None] = dict.fromkeys(ranks)
        if here:
            values = self._store.multi_get(here)
            signs.update((keys[key], bytes(value)) for key, value in zip(here, values, strict=True))
        return signs

    def hello(self, rank: int) -> PeerInfo:
        """Return what a rank said that has given a sign of life."""
        return PeerInfo(**json.loads(self._store.get(self._key("hello", rank))))

    def publish(self, name: str, data: bytes) -> None:
        """Say something small about this rank, for all who care, until the operation is over."""
        self._set(self._key(name, self._rank), data)

    def published(self, name: str, rank: int) -> bytes | None:
        """Return what a rank has published, or None where it has not yet."""
        key = self._key(name, rank)
        return bytes(self._store.get(key)) if self._store.check([key]) else None

    # -- the end ------------------------------------------------------------------------------

    def abort(self, abort: Abort) -> None:
        """End the operation for all ranks, unless another rank has ended it already."""
        if self.roll.answer is None:
            self.roll.tell(self.number, abort)
        elif self.aborted() is None:
            self._set(self._key("abort"), json.dumps(asdict(abort)).encode())

    def aborted(self) -> Abort | None:
        """Return why the operation ended, if it did."""
        if not self._store.check([self._key("abort")]):
            return None
        return Abort(**json.loads(self._store.get(self._key("abort"))))

    def leave(self) -> None:
        """Leave the operation; the last rank to do so deletes the operation's keys."""
        if self.roll.answer is None:
            self.roll.attend()
            return
        self.publish("beat", LEFT)
        if self._store.add(self._key("left"), 1) < self._world_size:
            return
        ranks = range(self._world_size)
        self._delete(*(self._key(name, rank) for name in ("hello", "beat", "card") for rank in ranks))
        self._delete(self._key("abort"), self._key("left"))
        if self.number == 0:
            self.roll.forget()

    def sweep(self) -> bool:
        """After :meth:`leave`: say whether all ranks have left; if so, delete the payloads that nobody read."""
        if self.roll.answer is None:
            return True
        if self._store.check([self._key("left")]):
            return False
        self._delete(*self._posted)
        return True

    # -- payloads -----------------------------------------------------------------------------

    def post(self, name: str, data: bytes) -> None:
        """Publish a payload. The first chunk is written last: where it is, all of them are."""
        key = self._key(name)
        starts = range(0, max(len(data), 1), _CHUNK_BYTES)
        keys = [f"{key}/{number}" for number in range(len(starts))]
        self._posted.extend(keys)
        for chunk, start in reversed(list(zip(keys, starts, strict=True))):
            head = len(starts).to_bytes(4, "big") if start == 0 else b""
            self._set(chunk, head + data[start : start + _CHUNK_BYTES])

    def posted(self, names: Sequence[str]) -> bool:
        """Say whether all these payloads are there."""
        return self._store.check([f"{self._key(name)}/0" for name in names])

    def take(self, name: str, readers: int = 1) -> bytes:
        """Return a payload that is there; the last of so many readers deletes it."""
        key = self._key(name)
        first = bytes(self._store.get(f"{key}/0"))
        keys = [f"{key}/{number}" for number in range(int.from_bytes(first[:4], "big"))]
        data = b"".join([first[4:], *(bytes(self._store.get(chunk)) for chunk in keys[1:])])
        if readers == 1:
            self._delete(*keys)
        elif self._store.add(f"{key}/read", 1) == readers:
            self._delete(*keys, f"{key}/read")
        return data

    # -- keys ---------------------------------------------------------------------------------

    @property
    def _store(self) -> Store:
        return self.roll.client.store

    def _present(self, keys: list[str]) -> list[str]:
        """Return those keys that are there: one call where all are, else one for each."""
        if not keys or self._store.check(keys):
            return keys
        return [key for key in keys if self._store.check([key])]

    def _key(self, *names: object) -> str:
        return self.roll.key("operation", self.number, *names)

    def _set(self, key: str, data: bytes) -> None:
        self._store.set(key, data)  # type: ignore[arg-type]  # torch takes bytes, its stub says str

    def _delete(self, *keys: str) -> None:
        """Delete keys, where the store can."""
        for key in keys:
            with suppress(RuntimeError, NotImplementedError):  # some stores cannot; they keep the keys
                self._store.delete_key(key)
