"""Time in one life of a run, for policies that count days."""

from __future__ import annotations

import time

from bcp._log import log

__all__ = ["RunClock"]

JUMP_SECONDS = 60.0
"""A host's clock that is further off was set: NTP slews smaller errors."""


class RunClock:
    """Unix seconds of one life of a job, which no change of the host's clock moves.

    Retention compares times of commits. If it followed a clock that is set forward, it would delete young checkpoints.
    """

    def __init__(self) -> None:
        self._start, self._steady = time.time(), _seconds_since_boot()
        self._complained = False

    def now(self) -> float:
        """Return the host's time at the start of the life, plus the seconds since; warn, once, if the host differs."""
        now = self._start + _seconds_since_boot() - self._steady
        ahead = time.time() - now
        if abs(ahead) > JUMP_SECONDS and not self._complained:
            self._complained = True
            log.warning(
                "the host's clock was set %s by %.0f s while the run was going on; the run counts its own seconds",
                "forward" if ahead > 0 else "back",
                abs(ahead),
            )
        return now

    def complain_of_future(self, newest: float) -> None:
        """Warn if the newest checkpoint was committed later than now, in Unix seconds."""
        if newest > self._start + JUMP_SECONDS:
            log.warning(
                "the newest checkpoint was committed %.0f s later than this host's time: the clock of one of the hosts "
                "is wrong. Policies of days keep checkpoints of the future",
                newest - self._start,
            )


def _seconds_since_boot() -> float:
    """Return seconds that go on while the machine is suspended, as those of ``time.monotonic()`` do not."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
