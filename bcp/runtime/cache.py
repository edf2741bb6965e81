"""The one cache of bcp: the last few values by key, as plans by digest and versions of objects by name."""

from __future__ import annotations

from typing import Generic, TypeVar

from bcp.runtime.process import process_lock

__all__ = ["LruCache"]

K = TypeVar("K")
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """The last few values by key; the one that was used longest ago makes room. Safe to share between threads."""

    def __init__(self, capacity: int = 8) -> None:
        if capacity < 1:
            raise ValueError(f"capacity={capacity} must be at least 1")
        self.capacity = capacity
        self.hits = 0
        self.misses = 0
        self._values: dict[K, V] = {}
        self._lock = process_lock()

    def get(self, key: K) -> V | None:
        """Return the value of that key, or None; counts a hit or a miss."""
        with self._lock:
            if key not in self._values:
                self.misses += 1
                return None
            self.hits += 1
            self._values[key] = self._values.pop(key)
            return self._values[key]

    def put(self, key: K, value: V) -> None:
        """Remember a value."""
        with self._lock:
            self._values.pop(key, None)
            self._values[key] = value
            if len(self._values) > self.capacity:
                del self._values[next(iter(self._values))]

    def forget(self, key: K) -> None:
        """Forget the value of that key; one that is not there is no error."""
        with self._lock:
            self._values.pop(key, None)

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"LruCache({len(self)} of {self.capacity} values, {self.hits} hits, {self.misses} misses)"
