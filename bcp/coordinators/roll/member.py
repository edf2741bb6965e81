"""The part of every other rank in the roll call."""

from __future__ import annotations

import secrets
import time
from dataclasses import asdict

from bcp.coordinators.hello import Abort
from bcp.coordinators.hosts import Host
from bcp.coordinators.roll.keys import Answer, Ended, Keys

__all__ = ["Member"]

_SILENT_SECONDS = 5.0  # how long rank 0 may show nothing before it counts as absent


class Member:
    """Shows itself beside rank 0's nonce, and looks for rank 0's answer.

    Attributes:
        heard: the last operation that another rank has ended meanwhile.
    """

    def __init__(self, keys: Keys, rank: int) -> None:
        """Prepare."""
        self.heard: Ended | None = None
        self._keys = keys
        self._rank = rank
        self._nonce = secrets.token_hex(8)
        self._told: Ended | None = None
        self._root: str | None = None  # rank 0's nonce, as seen last
        self._ticks = 0  # rank 0's, as seen last
        self._alive: float | None = None  # when rank 0 was last known to be alive
        self._looked = False

    def __repr__(self) -> str:
        """Show the rank."""
        return f"<Member {self._rank}, {'rank 0 was never seen' if self._root is None else 'rank 0 was seen'}>"

    def look(self, host: Host) -> Answer | None:
        """Show this rank beside the present rank 0's nonce; return the answer if it is there."""
        shown = self._look_at_root(host)
        nonce, data = self._keys.get("answer", self._rank) or (None, {})
        answer = Answer.of(data) if nonce == self._nonce else None
        if shown is not None and (self._alive is not None or answer is not None):
            self.heard = shown
        return answer

    def tell(self, ended: Ended) -> None:
        """Let rank 0 know that an operation has ended, and so all others."""
        self._told = ended
        self._keys.set([self._root, ended.number, asdict(ended.abort)], "ended")

    def absent(self) -> int | None:
        """Return 0 if rank 0 shows no sign of life; a member knows of no other rank."""
        silent = self._alive is None or time.monotonic() - self._alive > _SILENT_SECONDS
        return 0 if silent else None

    def _look_at_root(self, host: Host) -> Ended | None:
        """Look for rank 0's sign of life, and show this rank to a new one; return what rank 0 tells."""
        first, self._looked = not self._looked, True
        shown = self._keys.get("root")
        if shown is None:
            return None
        root, ticks, told = shown
        if root != self._root:
            self._root = root
            if self._told is not None:
                self.tell(self._told)
            self._keys.set([self._nonce, root, asdict(host)], "here", self._rank)
            alive = not first  # the first look may find an earlier process's
        else:
            alive = ticks != self._ticks
        self._ticks = ticks
        if alive:
            self._alive = time.monotonic()
        return None if told is None else Ended(told[0], Abort(**told[1]))
