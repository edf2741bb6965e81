"""What a process and its children use, read from outside, through /proc: looking costs them nothing."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["Usage", "cpu_seconds", "forget_peak", "resident"]

TICKS = os.sysconf("SC_CLK_TCK")


class Usage:
    """CPU seconds and peak memory of a process and its children from one moment on. Call :meth:`look` meanwhile."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._cpu = cpu_seconds(pid)
        self._children = 0
        forget_peak(pid)

    def look(self) -> None:
        """Take note of what the children hold now; for the process itself, the kernel keeps the peak."""
        held = sum(_status(child, "RssAnon") for child in _descendants(self._pid))
        self._children = max(self._children, held)

    @property
    def cpu(self) -> float:
        """CPU seconds since the beginning, all threads and all children, to 10 ms."""
        return cpu_seconds(self._pid) - self._cpu

    @property
    def peak(self) -> int:
        """The most bytes that were resident since the beginning.

        Of children only what is their own counts, not what they share with the process or map from files.
        """
        return _status(self._pid, "VmHWM") + self._children


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a process, its children, and children that have ended have used so far."""
    total = 0
    for one in (pid, *_descendants(pid)):
        with suppress(OSError):  # a child that has just ended is in its parent's count
            fields = Path(f"/proc/{one}/stat").read_text("utf-8").rpartition(")")[2].split()
            total += sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
    return total / TICKS


def resident(pid: int) -> int:
    """Return how many bytes of a process are resident, and of its children what is their own."""
    return _status(pid, "VmRSS") + sum(_status(child, "RssAnon") for child in _descendants(pid))


def forget_peak(pid: int) -> None:
    """Let the kernel's peak (VmHWM) begin again at what is resident now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", "utf-8")


def _descendants(pid: int) -> list[int]:
    """List the children of a process, and theirs."""
    found: list[int] = []
    with suppress(OSError):  # it has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text("utf-8").split():
                found += [int(child), *_descendants(int(child))]
    return found


def _status(pid: int, field: str) -> int:
    """Return a size from /proc/<pid>/status in bytes; 0 where there is none any more."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text("utf-8").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) << 10
    return 0
