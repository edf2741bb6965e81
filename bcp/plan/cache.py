"""Plans of layouts seen before: planning once, not at every save (paper sec. 4.1)."""

from __future__ import annotations

from typing import Generic, TypeVar

import xxhash

from bcp.runtime.process import process_lock

__all__ = ["PlanCache", "plan_id"]

V = TypeVar("V")


def plan_id(digests: bytes, *, balance: str, block_bytes: int) -> bytes:
    """Return 16 bytes that name a division: it is a function of the ranks' tables, in rank order, and these options.

    Args:
        digests: :func:`bcp.plan.write.survey.digest` of every rank's table, 16 bytes each, in the order of the ranks.
        balance: as in :func:`bcp.plan.write.divide.divide_writes`.
        block_bytes: the same.

    """
    return xxhash.xxh3_128_digest(f"{balance} {block_bytes}\n".encode() + digests)


class PlanCache(Generic[V]):
    """The last few plans, by digest; the one that was used longest ago makes room. Safe to share between threads.

    Attributes:
        hits: how often a plan was found.
        misses: how often not.
    """

    def __init__(self, capacity: int = 8) -> None:
        if capacity < 1:
            raise ValueError(f"capacity={capacity} must be at least 1")
        self.capacity = capacity
        self.hits = 0
        self.misses = 0
        self._plans: dict[bytes, V] = {}
        self._lock = process_lock()

    def get(self, key: bytes) -> V | None:
        """Return the plan of that digest, or None; counts a hit or a miss."""
        with self._lock:
            if key not in self._plans:
                self.misses += 1
                return None
            self.hits += 1
            self._plans[key] = self._plans.pop(key)
            return self._plans[key]

    def put(self, key: bytes, plan: V) -> None:
        """Remember a plan."""
        with self._lock:
            self._plans.pop(key, None)
            self._plans[key] = plan
            if len(self._plans) > self.capacity:
                del self._plans[next(iter(self._plans))]

    def __len__(self) -> int:
        return len(self._plans)

    def __repr__(self) -> str:
        return f"PlanCache({len(self)} of {self.capacity} plans, {self.hits} hits, {self.misses} misses)"
