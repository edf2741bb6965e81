"""One rank's report to rank 0, and the deadlines of the steps.

The deadlines keep all steps together within the timeout. Lists of ranks and hosts are written for people, and are short
for many ranks.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields

import torch

from bcp._messages.doctor import Finding, RankReport, Way
from bcp._version import __version__

__all__ = [
    "FoundError",
    "Report",
    "Times",
    "in_words",
    "left",
    "ranks_in_words",
    "span",
    "while_short",
]

_MOST = 6  # names in one list


def while_short(names: Sequence[str], most: int = _MOST) -> str:
    """Join names with commas; of many, give the first ones and the number of the others."""
    more = len(names) - most
    return ", ".join(names) if more <= 0 else f"{', '.join(names[:most])} and {more} more"


def in_words(noun: str, names: Sequence[str]) -> str:
    """Name things of a kind, as in ``"hosts h1, h2"``."""
    return f"{noun}{'s' * (len(names) != 1)} {while_short(names)}"


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Name ranks, as in ``"ranks 0-7, 9"``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    single = len(runs) == 1 and runs[0][0] == runs[0][1]
    pieces = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return f"rank{'s' * (not single)} {while_short(pieces)}"


def span(names: Sequence[str]) -> str:
    """Name the first and the last of many."""
    return ", ".join(names) if len(names) < 3 else f"{names[0]} .. {names[-1]}"  # noqa: PLR2004 -- both ends are all


_MEETING, _MEETING_OF_OTHERS = 0.5, 0.6  # parts of the timeout; others wait longer, to hear rank 0 say who is missing
_ALL = 0.92  # the rest is for the end of the process
_SHOWN, _LOOKED, _EXAMINED, _REPORTED = 0.3, 0.55, 0.65, 0.85  # parts of the time between the meeting and the end


class Times:
    """The deadlines of one rank, as ``time.monotonic()`` counts.

    Attributes:
        meeting_seconds: the longest duration of the meeting in the store.
        met: the end of the meeting.
        shown: the end of publishing addresses and files for other ranks.
        looked: the end of reading those of other ranks.
        examined: the end of all checks and their clean-up.
        reported: the end of gathering all ranks' reports.
        judged: the end of telling rank 0's verdict.
    """

    def __init__(self, timeout: float, rank: int) -> None:
        began = time.monotonic()
        self.meeting_seconds = (_MEETING_OF_OTHERS if rank else _MEETING) * timeout
        self.met = began + self.meeting_seconds
        self._end = began + _ALL * timeout
        self._longest = (_ALL - _MEETING) * timeout
        self.meet()

    def __repr__(self) -> str:
        return f"<Times: {left(self._end):.1f} s are left>"

    def meet(self) -> None:
        """Set the deadlines after the meeting from now on, as all ranks do."""
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


_MOST_FINDINGS = 8  # of one rank; of more, the number is told


class FoundError(Exception):
    """A finding that ends the examination of a rank.

    Attributes:
        finding: the finding.
        tell: tells the other ranks, after the user: a launcher may end this process when they end.
    """

    def __init__(self, finding: Finding, tell: Callable[[], Awaitable[None]] | None = None) -> None:
        super().__init__(finding.text)
        self.finding = finding
        self.tell = tell


@dataclass(slots=True)
class Report:
    """All that one rank knows.

    Attributes:
        rank: the rank.
        findings: the defects found.
        more: the number of further findings that each check has left out.
        versions: of bcp, torch and Python.
        store_seconds: the duration of a call of the store.
        address: the host's listening address; empty if this rank does not lead the host.
        interface: the address' interface, and the variable that chose it, if one did.
        ways: the number of hosts that a leader has reached; 1 for another rank that has reached its leader.
        slowest: seconds of the slowest way that works.
        clock: the way to rank 0, if a leader has one.
    """

    rank: int
    findings: list[Finding] = field(default_factory=list)
    more: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(
        default_factory=lambda: {"bcp": __version__, "torch": torch.__version__, "Python": platform.python_version()}
    )
    store_seconds: float = 0.0
    address: str = ""
    interface: str = ""
    ways: int = 0
    slowest: float = 0.0
    clock: Way | None = None

    def add(self, finding: Finding) -> None:
        """Add a finding, or count it if there are many of its check."""
        if sum(other.check == finding.check for other in self.findings) < _MOST_FINDINGS:
            self.findings.append(finding)
        else:
            self.more[finding.check] = self.more.get(finding.check, 0) + 1

    def message(self) -> RankReport:
        """Return the message for rank 0."""
        facts = {attribute.name: getattr(self, attribute.name) for attribute in fields(self)}
        return RankReport(**facts | {"findings": tuple(self.findings)})

    @classmethod
    def of(cls, message: RankReport) -> Report:
        """Undo :meth:`message`."""
        facts = {attribute.name: getattr(message, attribute.name) for attribute in fields(cls)}
        return cls(**facts | {"findings": list(message.findings)})
