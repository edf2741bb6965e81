"""The keys of a roll call, and the answer that it ends with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bcp.coordinators.hello import Abort
from bcp.coordinators.hosts import Host
from bcp.coordinators.store_client import StoreClient

__all__ = ["AT_ONCE", "Answer", "Ended", "Keys"]

AT_ONCE = 256
"""Keys in one look."""


class Ended(NamedTuple):
    """An operation that has ended, and why."""

    number: int
    abort: Abort


@dataclass(frozen=True, slots=True)
class Answer:
    """Facts that rank 0 tells a rank once all are there.

    Attributes:
        session: of these processes; no others have had it.
        token: their secret.
        first: hostname of rank 0.
        elsewhere: some of the job's other hosts.
        text: rank 0's words for this rank alone.
    """

    session: str
    token: str = field(repr=False)
    first: str
    elsewhere: tuple[Host, ...]
    text: str

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Answer:
        """Undo ``dataclasses.asdict``, from JSON."""
        return cls(**{**data, "elsewhere": tuple(map(Host.of, data["elsewhere"]))})


class Keys:
    """Keys below a prefix, whose values are JSON. All calls but :meth:`name` block until the store has answered."""

    def __init__(self, client: StoreClient, prefix: str) -> None:
        """Prepare; nothing is sent."""
        self._client = client
        self._prefix = prefix

    def __repr__(self) -> str:
        """Show the prefix."""
        return f"<Keys {self._prefix!r}>"

    def name(self, *names: object) -> str:
        """Return a whole key."""
        return "/".join((self._prefix, *map(str, names)))

    def set(self, value: object, *names: object) -> None:
        """Set a key."""
        self._client.store.set(self.name(*names), json.dumps(value))

    def set_all(self, values: Mapping[int, object], name: str) -> None:
        """Set a key of each rank."""
        keys, texts = [self.name(name, rank) for rank in values], list(map(json.dumps, values.values()))
        self._client.store.multi_set(keys, texts)  # type: ignore[attr-defined]  # torch's stub lacks it

    def get(self, *names: object) -> Any | None:
        """Return a value, or None if there is none yet."""
        found = self.get_all([self.name(*names)])
        return found[0] if found else None

    def get_all(self, keys: list[str]) -> list[Any]:
        """Return the values of all these keys if they are all there, else nothing."""
        store = self._client.store
        return [json.loads(bytes(value)) for value in store.multi_get(keys)] if store.check(keys) else []

    def delete(self, *names: object) -> None:
        """Delete a key, if the store can."""
        with suppress(RuntimeError, NotImplementedError):
            self._client.store.delete_key(self.name(*names))
