"""Until when each step may last, so that all steps together keep the timeout."""

from __future__ import annotations

import time

__all__ = ["Times", "left"]

_MEETING, _MEETING_OF_OTHERS = 0.5, 0.6  # parts of the timeout; others wait longer, to hear rank 0 say who is missing
_ALL = 0.92  # the rest is for the end of the process
_SHOWN, _LOOKED, _EXAMINED, _REPORTED = 0.3, 0.55, 0.65, 0.85  # parts of the time between the meeting and the end


class Times:
    """The deadlines of one rank, as ``time.monotonic()`` counts.

    Attributes:
        meeting_seconds: how long the meeting in the store may take.
        met: when it has to be over.
        shown: the same of what others look at: addresses and files.
        looked: of looking at what others have shown.
        examined: of all checks, and of what they clean up.
        reported: of all ranks' reports.
        judged: of rank 0's verdict.
    """

    def __init__(self, timeout: float, rank: int) -> None:
        """Begin now."""
        began = time.monotonic()
        self.meeting_seconds = (_MEETING_OF_OTHERS if rank else _MEETING) * timeout
        self.met = began + self.meeting_seconds
        self._end = began + _ALL * timeout
        self._longest = (_ALL - _MEETING) * timeout
        self.meet()

    def __repr__(self) -> str:
        """Show how much time is left."""
        return f"<Times: {left(self._end):.1f} s are left>"

    def meet(self) -> None:
        """Count from now, as all ranks do who have just met."""
        met = time.monotonic()
        seconds = min(self._longest, left(self._end))
        self.shown = met + _SHOWN * seconds
        self.looked = met + _LOOKED * seconds
        self.examined = met + _EXAMINED * seconds
        self.reported = met + _REPORTED * seconds
        self.judged = met + seconds


def left(deadline: float) -> float:
    """Return the seconds until a deadline, 0 after it."""
    return max(0.0, deadline - time.monotonic())
