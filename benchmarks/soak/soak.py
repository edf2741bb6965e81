"""Run the job below torchrun, kill its ranks, and watch its folder."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.soak.kills import Moment
from benchmarks.soak.life import Life, Line
from benchmarks.soak.rules import KEEP, SAVE_EVERY, Retention
from benchmarks.soak.watch import Watch

__all__ = ["RANKS", "Outcome", "StoreOf", "soak"]

StoreOf = Literal["rank 0", "torchrun"]

RANKS = 4
ROOT = Path(__file__).parents[2]
SILENCE_SECONDS = 180.0
"""After so many seconds without any news the job is given up."""

LAST_STEPS = 15
"""Kills that are left over come so many steps before the last step, at the latest."""

LAST_WAIT = 0.05
"""Most seconds until such a kill."""


@dataclass(slots=True)
class Outcome:
    """The history of one job.

    Attributes:
        lives: all lives, in order.
        retention: the judge of the folder.
        ledger: contents of the ledger, at the end.
        seconds: from the start of torchrun to its end.
        status: its exit status.
        errors: its standard error.
    """

    lives: list[Life] = field(default_factory=list)
    retention: Retention = field(default_factory=Retention)
    ledger: dict[str, object] = field(default_factory=dict)
    seconds: float = 0.0
    status: int = -1
    errors: str = ""


def soak(work: Path, steps: int, plan: Sequence[Moment], *, store: StoreOf = "rank 0") -> Outcome:
    """Train to the last step while ranks are killed as planned, one in each life.

    Args:
        work: an empty directory for the run's folder, the log and torchrun's output.
        steps: the last step.
        plan: the kills.
        store: whose process has the job's store: that of rank 0, which dies with it, or that of torchrun.

    Raises:
        TimeoutError: nothing happened for minutes.

    """
    soaked = _Soak(work, steps, plan, store)
    try:
        return soaked.run()
    finally:
        soaked.close()


class _Soak:
    """Turns changes of the folder, lines of the log and ends of processes into kills and an outcome."""

    def __init__(self, work: Path, steps: int, plan: Sequence[Moment], store: StoreOf) -> None:
        self._work, self._steps, self._store = work, steps, store
        self._plan = list(plan)
        self._due: float | None = None
        self._outcome = Outcome()
        self._folder = work / "run"
        self._folder.mkdir()
        (work / "log").mkdir()
        self._log = (work / "log" / "lines").open("ab+")
        self._rest = b""
        self._watch = Watch(self._folder, log=work / "log")
        self._torchrun: subprocess.Popen[bytes] | None = None

    def run(self) -> Outcome:
        """Start torchrun, and go on until it has ended."""
        began = heard = time.monotonic()
        self._torchrun = torchrun = self._started()
        over = os.pidfd_open(torchrun.pid)
        try:
            while torchrun.poll() is None:
                if self._wait(over):
                    heard = time.monotonic()
                elif time.monotonic() - heard > SILENCE_SECONDS:
                    raise TimeoutError(f"no news for {SILENCE_SECONDS} s of {self._life}:\n{self._errors()}")
                self._look()
        finally:
            os.close(over)
        self._look()
        outcome = self._outcome
        outcome.seconds, outcome.status = time.monotonic() - began, torchrun.returncode
        outcome.errors = self._errors()
        outcome.retention.run_ended(self._steps)
        outcome.ledger = json.loads((self._folder / "run.json").read_bytes())
        return outcome

    def close(self) -> None:
        """End torchrun and its ranks if they are still there."""
        if self._torchrun is not None and self._torchrun.poll() is None:
            self._torchrun.terminate()
            self._torchrun.wait(60)
        for life in self._outcome.lives:
            life.close()
        self._watch.close()
        self._log.close()

    def _started(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"]
        command += [f"--nproc-per-node={RANKS}", f"--max-restarts={len(self._plan) + 5}"]
        command += ["-m", "benchmarks.soak.job", str(self._folder), self._log.name, str(self._steps)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = str(int(self._store == "rank 0"))
        with (self._work / "output").open("wb") as output, (self._work / "errors").open("wb") as errors:
            return subprocess.Popen(command, cwd=ROOT, env=environ, stdout=output, stderr=errors)  # noqa: S603 -- our own

    def _errors(self) -> str:
        return (self._work / "errors").read_text(errors="replace")

    def _wait(self, over: int) -> bool:
        """Wait for any news, and for the next kill; return whether there is news."""
        poll = select.poll()
        poll.register(over, select.POLLIN)
        poll.register(self._watch.fileno(), select.POLLIN)
        life = self._life
        if life is not None and life.ended_at is None:
            gone = life.ended()
            for rank, descriptor in life.processes.items():
                if rank not in gone:
                    poll.register(descriptor, select.POLLIN)
        seconds = 1.0 if self._due is None else max(0.0, self._due - time.monotonic())
        return bool(poll.poll(1000 * min(seconds, 1.0))) or self._due is not None

    @property
    def _life(self) -> Life | None:
        return self._outcome.lives[-1] if self._outcome.lives else None

    def _look(self) -> None:
        """Take all news. Processes come first: nobody changes the folder after the last one has ended."""
        life, retention = self._life, self._outcome.retention
        gone = [] if life is None or life.ended_at is not None else life.ended()
        for change in self._watch.changes():
            if retention.see(change, time.monotonic()) is not None and life is not None:
                life.commits += 1
                self._aim("sweep", life.commits)
        if 0 in gone:  # rank 0 alone deletes; the others may take seconds to end after it
            retention.deleter_ended()
        retention.look(time.monotonic())
        for line in self._lines():
            self._hear(line)
        if life is not None and gone:
            self._bury(life, gone)
        self._kill()

    def _lines(self) -> list[Line]:
        """Return the new whole lines of the log."""
        *lines, self._rest = (self._rest + self._log.read()).split(b"\n")
        return [json.loads(line) for line in lines]

    def _hear(self, line: Line) -> None:
        """Take a line of the log, which may be the first one of a new life."""
        lives = self._outcome.lives
        if line["life"] >= len(lives):
            lives.append(Life(line["life"], RANKS))
        life = lives[line["life"]]
        life.hear(line)
        if life.complete and line["word"] == "start":
            self._aim("start", 1)
            self._aim("any", 1)
        elif line["word"] == "resume" and self._plan and line["rank"] == self._plan[0].victim:
            self._aim("resume", 1)
        elif line["rank"] == 0 and line["word"] == "step":
            assert life.resumed is not None  # noqa: S101 -- the line before said so
            ended = line["step"] - life.resumed
            self._aim("step", ended)
            if line["step"] % SAVE_EVERY == 0:
                self._aim("save", ended // SAVE_EVERY)
            if line["step"] >= self._steps - LAST_STEPS and self._plan and life.kill is None:
                latest = time.monotonic() + self._plan[0].wait % LAST_WAIT
                self._due = latest if self._due is None else min(self._due, latest)

    def _aim(self, kind: str, count: int) -> None:
        """Fix the time of the kill if this is what it waits for."""
        life = self._life
        if self._due is None and self._plan and life is not None and life.kill is None:
            moment = self._plan[0]
            if (moment.kind, moment.count) == (kind, count):
                self._due = time.monotonic() + moment.wait

    def _kill(self) -> None:
        """Kill if it is time."""
        life, now, retention = self._life, time.monotonic(), self._outcome.retention
        if self._due is None or now < self._due or life is None or not life.complete:
            return
        phase = life.phase(retention.newest, sweeps=len(retention.committed) > KEEP)
        if life.strike(self._plan[0], now, phase):
            self._plan.pop(0)
        self._due = None

    def _bury(self, life: Life, gone: Sequence[int]) -> None:
        """Take note of processes that have ended."""
        if life.kill is None and not life.digest and not life.wrong:
            life.wrong.append(f"ranks {gone} have ended by themselves")
        if len(gone) < RANKS or not life.complete:
            return
        life.ended_at, life.newest_at_end = time.monotonic(), self._outcome.retention.newest
        self._due = None
        life.close()
