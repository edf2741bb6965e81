"""One rank's report to rank 0, as JSON in the store."""

from __future__ import annotations

import platform
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from bcp._version import __version__

__all__ = ["Finding", "FoundError", "Report", "Way"]

_MOST_FINDINGS = 8  # of one rank; of more, the number is told


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        check: the check that found it.
        text: how it goes on after the rank or the host, as in ``"cannot reach host h4"``.
        do: how to mend it.
        of_host: whether it is true of the rank's host, and not only of the rank.
    """

    check: str
    text: str
    do: str = ""
    of_host: bool = False


class FoundError(Exception):
    """A finding with which a rank cannot go on.

    Attributes:
        finding: the finding.
        tell: tells the other ranks, once the user has been told: a launcher may end this process when they end.
    """

    def __init__(self, finding: Finding, tell: Callable[[], Awaitable[None]] | None = None) -> None:
        """Take the finding."""
        super().__init__(finding.text)
        self.finding = finding
        self.tell = tell


@dataclass(frozen=True, slots=True)
class Way:
    """A connection to another host that has worked.

    Attributes:
        seconds: how long it took to connect and to hear the answer.
        ahead: how far the other host's clock is ahead of this one's, by half of ``seconds`` more or less.
    """

    seconds: float
    ahead: float


@dataclass(slots=True)
class Report:
    """All that one rank knows.

    Attributes:
        rank: the rank.
        findings: what is wrong.
        more: how many further findings each check has left out.
        versions: of bcp, torch and Python.
        store_seconds: how long the store takes to answer.
        address: where the host listens; empty if this rank does not lead it.
        interface: the address' interface, and the variable that chose it, if one did.
        ways: how many hosts a leader has reached; 1 for another rank that has reached its leader.
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
        if sum(each.check == finding.check for each in self.findings) < _MOST_FINDINGS:
            self.findings.append(finding)
        else:
            self.more[finding.check] = self.more.get(finding.check, 0) + 1

    def data(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Report:
        """Undo :meth:`data`."""
        clock = data["clock"] and Way(**data["clock"])
        return cls(**{**data, "findings": [Finding(**each) for each in data["findings"]], "clock": clock})
