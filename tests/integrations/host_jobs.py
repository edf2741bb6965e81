"""Jobs of trainers as processes: run them, kill them in a save, and read what they print."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
HANG_SECONDS = 300.0
"""Ends a hang, on a busy machine too."""


@dataclass(frozen=True, slots=True)
class Job:
    """A program beside this file that trains with a trainer.

    Its last arguments are the folder of the run, and what is asked of this life. It ends with
    :func:`host_side.report` on rank 0.

    Attributes:
        program: file name.
        arguments: of all lives, such as a strategy.
        world_size: ranks; more than one run under torchrun.
        hang_seconds: ends a hang.
    """

    program: str
    arguments: tuple[str, ...] = ()
    world_size: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    hang_seconds: float = HANG_SECONDS

    def run(self, folder: Path, *asked: str) -> dict[str, Any]:
        """Run it to its end, and return what rank 0 reported."""
        done = subprocess.run(  # noqa: S603 -- a program of this folder
            self._command(folder, *asked),
            env=self._environment(folder),
            capture_output=True,
            text=True,
            timeout=self.hang_seconds,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
        return result

    def kill_in_save(self, folder: Path, number: int, *asked: str) -> None:
        """Run it until its save of this number is writing; then kill all of its processes at once."""
        held = folder.with_name(f"{folder.name}-held")
        held.unlink(missing_ok=True)
        environment = self._environment(folder) | {"HOLD_SAVE": str(number), "HELD": str(held)}
        log = folder.with_name(f"{folder.name}-killed.log")
        with log.open("w") as output:
            running = subprocess.Popen(  # noqa: S603 -- as above
                self._command(folder, *asked), env=environment, stdout=output, stderr=output, start_new_session=True
            )
            deadline = time.monotonic() + self.hang_seconds
            try:
                while not held.exists() and running.poll() is None and time.monotonic() < deadline:
                    time.sleep(0.02)
                assert held.exists(), log.read_text()[-8000:]
            finally:
                _kill_group(running)

    def _command(self, folder: Path, *asked: str) -> list[str]:
        program = [str(HERE / self.program), *self.arguments, str(folder), *asked]
        if self.world_size == 1:
            return [sys.executable, *program]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*torchrun, f"--nproc-per-node={self.world_size}", *program]

    def _environment(self, folder: Path) -> dict[str, str]:
        paths = [str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")]
        quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        built = {
            "TORCH_EXTENSIONS_DIR": str(folder.parent.parent / "extensions")
        }  # DeepSpeed compiles one, once a session
        known = {**built, **os.environ, "PYTHONPATH": os.pathsep.join(paths), "HOME": str(folder.parent)}
        return {**known, **quiet, **self.environment}


def _kill_group(running: subprocess.Popen[bytes]) -> None:
    """Kill a job whose processes torchrun has put into sessions of their own."""
    pids = [running.pid, *_below(running.pid)]
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    running.wait()


def _below(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that they have."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split() if entry.name.isdigit() else []
        except OSError:
            continue
        if fields:
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found
