"""The ranks of one library, as the measuring process sees them: it tells them what to do, and watches what they use."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import distributed as dist

from benchmarks.speed.cases import Case
from benchmarks.speed.libraries import LIBRARIES
from benchmarks.speed.usage import Usage, resident
from benchmarks.speed.worker import Place, be_worker

__all__ = ["Crew", "LibraryFailedError"]

LOOK_SECONDS = 0.05
PATIENCE_SECONDS = 10.0
SLOWEST = ("seconds", "returned", "blocking")
"""What the slowest rank decides; of everything else that several ranks say, the sum counts."""


class LibraryFailedError(RuntimeError):
    """A library raised or died; the message says how."""


class Crew:
    """Processes that hold one state together, and one library that is open in them."""

    def __init__(self, library: str, case: Case, nbytes: int, *, filled: bool) -> None:
        self.library, self.case = library, case
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        for rank in range(case.ranks):
            ours, theirs = _context().Pipe()
            place = Place(library, case, nbytes, filled, rank, self._store.port)
            process = _context().Process(target=be_worker, args=(theirs, place))  # no daemon: it may have children
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        try:
            ready = self._answers([])
        except BaseException:
            self._end()
            raise
        brief = LIBRARIES[library].brief if case.brief else ()
        self.ways: dict[str, list[str]] = {
            kind: [way for way in ready[0][kind] if not brief or way in brief]
            for kind in ("saves", "backgrounds", "loads")
        }
        self.nbytes: int = sum(one["nbytes"] for one in ready)
        self._base = [resident(process.pid) for process in self._processes]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            for pipe in self._pipes:
                pipe.send(None)
        self._end()

    def _end(self) -> None:
        """Hang up; processes that do not end by themselves then are killed."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(PATIENCE_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()

    def measure(self, command: str, way: str, path: Path) -> dict[str, float]:
        """Let them save or load, and return what it took.

        Seconds are the slowest rank's. ``cpu`` and ``memory`` are of all ranks and their children; ``memory`` is the
        most that was resident beyond what was before the first command, that is, beyond the state itself.
        """
        usages = [Usage(process.pid) for process in self._processes]
        self._send(command, way, path)
        values = combined(self._answers(usages))
        cpu = sum(usage.cpu for usage in usages) - values.get("training_cpu", 0.0)
        memory = sum(usage.peak - base for usage, base in zip(usages, self._base, strict=True))
        return values | {"cpu": cpu, "memory": max(memory, 0)}

    def digest(self) -> list[str]:
        """Return a checksum of what each rank holds."""
        self._send("digest")
        return [answer["digest"] for answer in self._answers([])]

    def clear(self) -> None:
        """Put zeros into the state."""
        self._send("clear")
        self._answers([])

    def _send(self, *command: object) -> None:
        for pipe in self._pipes:
            pipe.send(command)

    def _answers(self, usages: Sequence[Usage]) -> list[dict[str, Any]]:
        """Wait for every rank's answer, and look at what they use meanwhile."""
        answers: dict[Connection, dict[str, Any]] = {}
        while len(answers) < len(self._pipes):
            for pipe in wait([pipe for pipe in self._pipes if pipe not in answers], LOOK_SECONDS):
                answers[pipe] = self._answer(pipe)  # type: ignore[index,arg-type]  # only connections are waited for
            for usage in usages:
                usage.look()
        return [answers[pipe] for pipe in self._pipes]

    def _answer(self, pipe: Connection) -> dict[str, Any]:
        try:
            good, answer = pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise LibraryFailedError(f"{self.library}: a process died") from error
        if not good:
            raise LibraryFailedError(f"{self.library} failed:\n{answer}")
        return dict(answer)


def combined(answers: Sequence[dict[str, float]]) -> dict[str, float]:
    """Make one answer of those of all ranks; ``balance`` is the largest share of the bytes by the mean one."""
    values: dict[str, float] = {}
    for name in answers[0]:
        each = [answer[name] for answer in answers]
        values[name] = max(each) if name in SLOWEST else sum(each)
    if "nbytes" in values and len(answers) > 1:
        values["balance"] = max(answer["nbytes"] for answer in answers) * len(answers) / values["nbytes"]
    return values


@cache
def _context() -> ForkServerContext:
    """Return what starts processes: all from one that has torch imported already, which saves 4 s each time."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "benchmarks.speed.worker"])  # an optimizer imports _dynamo
    return context
