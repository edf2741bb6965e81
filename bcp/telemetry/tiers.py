"""Metrics of snapshots in the memory of the hosts: ends of saves, ages of the tiers, and the queue to storage."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from opentelemetry.metrics import Counter, Meter, Observation

from bcp.events import LOST, OWN_HOST, REBUILT, STORED, TIER_HAPPENINGS, TierEvent
from bcp.telemetry.watch import Watch

__all__ = ["Tier", "TierCounters", "TierStates"]

Tier = Literal["memory", "copies", "storage"]

PLACES = {OWN_HOST: "own host", REBUILT: "parity", STORED: "storage"}
"""Labels of places; all other hosts have one."""

REACHED: Mapping[str, Tier] = {"released": "memory", "copied": "copies", "durable": "storage"}
"""Tiers that have a snapshot from an event on."""

ENDS = LOST | {"durable", "unwatched"}
"""Events that take a snapshot out of the queue to storage."""

COUNTED = tuple(what for what in TIER_HAPPENINGS if what != "read")


class TierCounters:
    """The counters of events, and of bytes by the place that they were read from."""

    def __init__(self, meter: Meter) -> None:
        self.events: Counter = meter.create_counter("bcp.tier.events", "{event}", "Events of snapshots in memory")
        self.read: Counter = meter.create_counter("bcp.tier.read", "By", "Bytes that resumptions from memory read")

    def begin(self) -> None:
        """Let the counter be zero before it counts."""
        for what in COUNTED:
            self.events.add(0, {"event": what})

    def count(self, event: TierEvent) -> None:
        """Count an event. Hosts have no label each, for a job has many."""
        if event.what == "read":
            self.read.add(event.nbytes, {"place": PLACES.get(event.place, "other hosts")})
        else:
            self.events.add(1, {"event": event.what})


@dataclass(frozen=True, slots=True)
class _OnItsWay:
    """A snapshot that agents have.

    Attributes:
        released: when all ranks had marked it, by ``time.monotonic()``.
        nbytes: of this rank's files.
    """

    released: float
    nbytes: int


@dataclass(slots=True)
class TierStates:
    """The newest state in each tier, and the snapshots that are on their way to storage, as one rank knows them.

    Attributes:
        held: until when training's work is in the newest state of each tier, by ``time.time()``.
        queue: the snapshots that are on their way, by rank and operation.
    """

    held: dict[Tier, float] = field(default_factory=dict)
    queue: dict[tuple[int, str], _OnItsWay] = field(default_factory=dict)
    _newest: dict[int, tuple[str, float]] = field(default_factory=dict)

    def holds(self, tier: Tier, until: float) -> None:
        """Take note of a state in a tier, unless a newer one is known."""
        self.held[tier] = max(until, self.held.get(tier, until))

    def take(self, watch: Watch, event: TierEvent) -> float | None:
        """Take note of an event; return the lag of a snapshot that has become durable, in seconds."""
        if event.what in REACHED:
            self.holds(REACHED[event.what], watch.time)
        key = watch.rank, event.operation
        if event.what == "released":
            self._newest[watch.rank] = event.operation, event.moment
        elif event.what == "draining":
            operation, moment = self._newest.get(watch.rank, ("", 0.0))
            self.queue[key] = _OnItsWay(moment if operation == event.operation else event.moment, event.nbytes)
        elif event.what in ENDS:
            ended = self.queue.pop(key, None)
            if event.what == "durable" and ended is not None:
                return event.moment - ended.released
        return None

    def ages(self) -> Iterator[Observation]:
        """Yield the age of the newest state in each tier."""
        for tier, until in list(self.held.items()):
            yield Observation(max(time.time() - until, 0.0), {"tier": tier})

    def waiting(self) -> Iterator[Observation]:
        """Yield how many snapshots are on their way to storage; nothing before the first snapshot in memory."""
        if self._newest:
            yield Observation(len(self.queue))

    def nbytes(self) -> Iterator[Observation]:
        """Yield the bytes of these; nothing before the first snapshot in memory."""
        if self._newest:
            yield Observation(sum(each.nbytes for each in list(self.queue.values())))
