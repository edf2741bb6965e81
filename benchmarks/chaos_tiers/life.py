"""One life of the job: its processes, what they tell, and their end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import msgspec
import psutil

from benchmarks.chaos_tiers.job import PER_HOST, Line, Order, forked
from benchmarks.chaos_tiers.memories import kill
from benchmarks.chaos_tiers.network import Network

__all__ = ["LOOK_SECONDS", "SILENCE_SECONDS", "HungError", "Life"]

ROOT = Path(__file__).parents[2]
SILENCE_SECONDS = 400.0
"""After so many seconds a job that does not do what it is to do hangs, on a busy machine too."""

LOOK_SECONDS = 0.02

WARM = ["benchmarks.chaos_tiers.job", "torch._dynamo", "bcp.runs.run", "bcp.tiers.saving", "bcp._load", "bcp._save"]
WARM += ["bcp._save.leader", "bcp.runs.tiered", "bcp.planners.fsdp2", "bcp.planners.torch_native", "pyarrow.compute"]
WARM += [
    "anyio._backends._asyncio",
    "bcp.coordinators.tree",
    "bcp.interop",
    "bcp.read.foreign",
    "torch._inductor.utils",
]
"""What each rank would import by itself, for seconds of a processor."""

SHOWN = 6_000
PASSED_OVER = "a copy of a snapshot is passed over"


class HungError(Exception):
    """The job has not come to a point in time."""


class Life:
    """The processes of one life."""

    def __init__(self, network: Network, work: Path, number: int, order: Order, *, by_torchrun: bool) -> None:
        """Start them.

        Args:
            network: of the hosts.
            work: directory for lines and output.
            number: of the life.
            order: for the ranks.
            by_torchrun: whether one torchrun on each host starts them.

        """
        self.order, self.size = order, len(order.hosts) * PER_HOST
        self._log, self._errors = Path(order.log), work / f"life-{number}.out"
        self._log.touch()
        self._read, self._lines = 0, list[Line]()
        self._forks: list[ForkServerProcess] = []
        self._torchruns: dict[int, subprocess.Popen[bytes]] = {}
        address = network.address(order.hosts[0]), 20_000 + number % 10_000
        if by_torchrun:
            path = work / f"life-{number}.json"
            path.write_bytes(msgspec.json.encode(order))
            self._start_torchrun(network, path, address)
        else:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(WARM)
            for rank in range(self.size):
                host = network.hosts[order.hosts[rank // PER_HOST]]
                words = order, rank, host, address, str(self._errors)
                self._forks.append(context.Process(target=forked, args=words))
                self._forks[-1].start()

    def _start_torchrun(self, network: Network, order: Path, address: tuple[str, int]) -> None:
        count = len(self.order.hosts)
        with self._errors.open("ab") as out:
            for place, host in enumerate(self.order.hosts):
                command = [*network.command(host), sys.executable, "-m", "torch.distributed.run"]
                command += [f"--nnodes={count}", f"--node-rank={place}", f"--nproc-per-node={PER_HOST}"]
                command += [f"--master-addr={address[0]}", f"--master-port={address[1]}", "--max-restarts=0"]
                command += ["-m", "benchmarks.chaos_tiers.job", str(order)]
                self._torchruns[host] = subprocess.Popen(  # noqa: S603 -- our own
                    command, cwd=ROOT, stdout=out, stderr=out, start_new_session=True
                )

    # -- what the ranks tell -----------------------------------------------------------------------

    def lines(self, word: str) -> list[Line]:
        """Return all lines with a word."""
        data = self._log.read_bytes()
        whole = data[self._read : data.rfind(b"\n") + 1]
        self._read += len(whole)
        self._lines += [msgspec.json.decode(line, type=Line) for line in whole.splitlines()]
        return [line for line in self._lines if line.word == word]

    def step_of_all(self, word: str) -> int:
        """Return the newest step of which all ranks have told this; 0 for none."""
        newest = dict.fromkeys(range(self.size), 0)
        for line in self.lines(word):
            newest[line.rank] = max(newest[line.rank], line.step)
        return min(newest.values())

    def newest(self) -> int:
        """Return the newest step whose save a rank has begun."""
        return max((line.step for line in [*self.lines("begin"), *self.lines("resume")]), default=0)

    def operations(self) -> dict[str, int]:
        """Return the steps of the saves that a rank has marked, by operation."""
        return {line.text: line.step for line in self.lines("mark")}

    def wait(self, is_true: Callable[[], object], what: str) -> None:
        """Wait until something is true.

        Raises:
            HungError: it does not become true, or the ranks have ended.

        """
        end, has_ended = time.monotonic() + SILENCE_SECONDS, False
        while not is_true():
            if has_ended:
                raise HungError(f"the ranks have ended before {what}:\n{self.words()}")
            if time.monotonic() > end:
                raise HungError(f"not in {SILENCE_SECONDS:.0f} s: {what}:\n{self.words()}")
            has_ended = not self._is_any_alive()
            time.sleep(LOOK_SECONDS)

    def words(self) -> str:
        """Return the end of what the ranks have written."""
        return f"{self._lines[-12:]}\n{self._written()[-SHOWN:]}"

    def passed_over(self) -> list[str]:
        """Return the log lines about copies of files that were passed over for the next copy."""
        return [line for line in self._written().splitlines() if PASSED_OVER in line]

    def _written(self) -> str:
        return self._errors.read_text(errors="replace") if self._errors.exists() else ""

    # -- their end ---------------------------------------------------------------------------------

    def alive(self) -> list[bool]:
        """Say of each rank that has begun whether it lives."""
        if self._forks:
            return [each.is_alive() for each in self._forks]
        return [self._process(int(line.text)) is not None for line in self.lines("start")]

    def codes(self) -> list[int | None]:
        """Return the exit codes of ranks that were forked."""
        return [each.exitcode for each in self._forks]

    def kill(self, ranks: Sequence[int]) -> None:
        """Kill ranks; all of them are killed before one of them can answer the loss of another."""
        for rank in ranks:
            if self._forks:
                self._forks[rank].kill()
        there = {line.rank: int(line.text) for line in self.lines("start")} if self._torchruns else {}
        for rank in {*ranks} & there.keys():
            if (process := self._process(there[rank])) is not None:
                kill([process])

    def _process(self, number: int) -> psutil.Process | None:
        """Return a living rank of torchrun by its number, which may be another process's now."""
        try:
            process = psutil.Process(number)
            is_rank = self.order.log.replace(".lines", ".json") in process.cmdline()  # which a zombie does not have
        except psutil.NoSuchProcess:
            return None
        return process if is_rank else None

    def kill_torchrun(self, host: int) -> None:
        """Kill the torchrun of a host that is lost."""
        if host in self._torchruns:
            self._torchruns[host].kill()

    def ranks_of(self, host: int) -> list[int]:
        """Return the ranks on a host."""
        return [rank for rank in range(self.size) if self.order.hosts[rank // PER_HOST] == host]

    def end(self, what: str) -> None:
        """Wait until all processes have ended.

        Raises:
            HungError: they do not end.

        """
        end = time.monotonic() + SILENCE_SECONDS
        while self._is_any_alive():
            if time.monotonic() > end:
                raise HungError(f"not in {SILENCE_SECONDS:.0f} s: the end of all ranks, {what}:\n{self.words()}")
            time.sleep(LOOK_SECONDS)

    def close(self) -> None:
        """Kill whatever is left."""
        self.kill(range(self.size))
        for process in self._torchruns.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for fork in self._forks:
            fork.kill()
            fork.join()
            fork.close()
        self._forks = []

    def _is_any_alive(self) -> bool:
        return any(each.is_alive() for each in self._forks) or any(
            each.poll() is None for each in self._torchruns.values()
        )
