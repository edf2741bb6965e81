"""What becomes of the snapshots of one rank: told to those who follow its saves, also behind the end of a save."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from bcp._log import log
from bcp._messages.tiers import Drift
from bcp._text import hidden
from bcp.events import SaveResult, TierEvent, TierHappening
from bcp.telemetry.watch import Watch

__all__ = ["Followed", "Followers"]


@dataclass(frozen=True, slots=True)
class Followed:
    """A snapshot of this rank that all ranks have marked.

    Attributes:
        watch: of its save, for what happens behind the end.
        released: when all ranks had marked, in monotonic seconds.
        nbytes: of this rank's files.
        records: what each rank has recorded of the save; on rank 0 only, and empty if nothing is recorded.
    """

    watch: Watch
    released: float
    nbytes: int
    records: Sequence[bytes] = ()

    def tell(self, what: TierHappening, said: str = "") -> float:
        """Tell what has happened; return the seconds since the call of the save."""
        watch, now = self.watch, time.monotonic()
        seconds = now - watch.started
        watch(TierEvent(what, watch.step, watch.operation, now, seconds, self.nbytes, said=hidden(said)))
        return seconds


class Followers:
    """The newest snapshots of this rank, by operation."""

    def __init__(self) -> None:
        self._followed: dict[str, Followed] = {}
        self._troubled: frozenset[str] = frozenset()

    def released(self, watch: Watch, result: SaveResult, live: Collection[str]) -> None:
        """Tell that all ranks have marked a snapshot; forget those that no recovery needs.

        Args:
            watch: of the save, which ends now.
            result: of the save.
            live: operations that a recovery may need.

        """
        followed = Followed(watch.sequel(), time.monotonic(), result.nbytes)
        self._followed = {name: each for name, each in self._followed.items() if name in live}
        self._followed[result.operation] = followed
        seconds = followed.released - watch.started
        watch(TierEvent("released", watch.step, result.operation, followed.released, seconds, result.nbytes))

    def recorded(self, operation: str, records: Sequence[bytes]) -> None:
        """Keep what the ranks have recorded of a save, until it is durable."""
        self._followed[operation] = replace(self._followed[operation], records=records)

    def troubles(self, watch: Watch, troubles: Mapping[str, str]) -> None:
        """Tell of each host that copies have begun to fail with.

        Args:
            watch: of a save that is under way.
            troubles: the last error with each host.

        """
        now = time.monotonic()
        for host in troubles.keys() - self._troubled:
            watch(TierEvent("unreachable", watch.step, "", now, place=host, said=hidden(troubles[host])))
        self._troubled = frozenset(troubles)

    def drifted(self, watch: Watch, drifts: Sequence[Drift]) -> None:
        """Tell of files whose replicas have differed.

        Args:
            watch: of a save that is under way.
            drifts: what agents have found, each once.

        """
        now = time.monotonic()
        for each in drifts:
            log.warning("replicas have drifted: %s", each.said, step=each.step, host=each.host)
            said = hidden(each.said)
            watch(TierEvent("drifted", each.step, each.operation, now, None, each.nbytes, each.host, said))

    def copied(self, operation: str) -> None:
        """Tell that all hosts have their copies of a snapshot."""
        if operation in self._followed:
            self._followed[operation].tell("copied")

    def of(self, operation: str) -> Followed | None:
        """Return a snapshot of this life; None if it is not known any more."""
        return self._followed.get(operation)
