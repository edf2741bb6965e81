"""One life of the job, from its log and from the ends of its processes."""

from __future__ import annotations

import os
import select
import signal
from dataclasses import dataclass, field
from typing import Any

from benchmarks.soak.kills import Moment
from benchmarks.soak.rules import SAVE_EVERY

__all__ = ["Kill", "Life", "Line", "lost_steps"]

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kill:
    """A kill that hit a live rank.

    Attributes:
        moment: its plan.
        at: when, in monotonic seconds.
        phase: the work of the run just then: ``"start"``, ``"resume"``, ``"step"``, ``"save"`` or ``"sweep"``.
    """

    moment: Moment
    at: float
    phase: str


@dataclass(slots=True)
class Life:
    """The ranks between two restarts.

    Attributes:
        number: how many restarts came before.
        ranks: how many ranks there are.
        processes: file descriptor of each live process, by rank.
        words: last word of each rank.
        resumed: the step that all ranks resumed from; None before.
        passed_over: the steps that were passed over, and the reasons.
        steps: the newest step that rank 0 has ended; None before the first.
        saves: steps whose saves have begun.
        commits: how many commits there were.
        kill: what ended this life.
        newest_at_end: the newest committed step once all processes had ended.
        ended_at: when they had, in monotonic seconds.
        resumed_at: when rank 0 had resumed.
        digest: of the last weights.
        wrong: all that was not to be, in words.
    """

    number: int
    ranks: int
    processes: dict[int, int] = field(default_factory=dict)
    words: dict[int, str] = field(default_factory=dict)
    resumed: int | None = None
    passed_over: list[Any] = field(default_factory=list)
    steps: int | None = None
    saves: list[int] = field(default_factory=list)
    commits: int = 0
    kill: Kill | None = None
    newest_at_end: int | None = None
    ended_at: float | None = None
    resumed_at: float | None = None
    digest: str = ""
    wrong: list[str] = field(default_factory=list)

    def hear(self, line: Line) -> None:
        """Take a line of the log."""
        word, rank = line["word"], line["rank"]
        self.words[rank] = word
        if word == "start":
            self.processes[rank] = os.pidfd_open(line["pid"])
        elif word == "resumed":
            if self.resumed not in (None, line["step"]):
                self.wrong.append(f"rank {rank} resumed from {line['step']}, another from {self.resumed}")
            self.resumed, self.passed_over = line["step"], line["passed_over"]
            self.resumed_at = line["at"]
        elif rank != 0:
            return
        elif word == "step":
            self.steps = line["step"]
        elif word == "save":
            self.saves.append(line["step"])
        elif word == "end":
            self.digest = line["digest"]

    @property
    def complete(self) -> bool:
        """Whether all ranks have started."""
        return len(self.words) == self.ranks

    def ended(self) -> list[int]:
        """Return the ranks whose processes have ended."""
        poll = select.poll()
        for descriptor in self.processes.values():
            poll.register(descriptor, select.POLLIN)
        ended = {descriptor for descriptor, _ in poll.poll(0)}
        return [rank for rank, descriptor in self.processes.items() if descriptor in ended]

    def strike(self, moment: Moment, at: float, phase: str) -> bool:
        """Kill the victim if all ranks are alive; return whether they were."""
        if self.ended():
            return False
        signal.pidfd_send_signal(self.processes[moment.victim], signal.SIGKILL)
        self.kill = Kill(moment, at, phase)
        return True

    def close(self) -> None:
        """Forget the processes."""
        for descriptor in self.processes.values():
            os.close(descriptor)
        self.processes.clear()

    def phase(self, newest: int, *, sweeps: bool) -> str:
        """Return the work of the run just now.

        Args:
            newest: the newest committed step.
            sweeps: whether there are more checkpoints than the run keeps.

        """
        if self.steps is None:
            return "start" if "start" in self.words.values() else "resume" if self.resumed is None else "step"
        if self.steps // SAVE_EVERY * SAVE_EVERY > newest:
            return "save"
        return "sweep" if sweeps else "step"


def lost_steps(life: Life, resumed: int) -> tuple[int, int]:
    """Return how many steps of a life were lost, and how many of them ran while the lost save was in flight."""
    last = resumed if life.steps is None else life.steps
    begun = [step for step in life.saves if step > resumed]
    return max(0, last - resumed), max(0, last - begun[0]) if begun else 0
