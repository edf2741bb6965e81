"""Jobs that torchrun starts on the hosts of a :class:`~network.Network`, and starts again."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from jobs import SLOW, Ranks, join, seat, serve
from ranks import forkserver
from torch import distributed as dist

from benchmarks.network import Network, enter

__all__ = ["Torchrun"]

_STAND_IN = Path(__file__).with_name("stand_in.py")
_PORT = 29_400
_RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=2,join_timeout=600"


@dataclass(frozen=True)
class _Worker:
    """A rank that torchrun has started; ``size`` is how many there are."""

    host: int
    rank: int
    size: int
    process: Any
    pipe: Connection


class Torchrun:
    """An agent on each host, which starts one rank, and starts it again when torchrun does."""

    def __init__(
        self, network: Network, nodes: str, hosts: Iterable[int], environment: Mapping[str, str] | None = None
    ) -> None:
        """Start an agent on each of these hosts. ``nodes`` are torchrun's; ``environment`` is for agents and ranks."""
        self._network = network
        self._nodes = nodes
        self._environment = dict(environment or {})
        self._folder = tempfile.TemporaryDirectory()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{self._folder.name}/tests")
        self._listener.listen(64)
        self._agents: dict[int, Any] = {}
        self._started: list[_Worker] = []
        self._fresh: list[_Worker] = []
        self._attempts = 0
        for host in hosts:
            self.start(host)
        self._let_in()

    def __repr__(self) -> str:
        return f"Torchrun({self._nodes}, agents on {sorted(self._agents)})"

    def start(self, host: int) -> None:
        """Start a host's agent."""
        words = [
            f"--nnodes={self._nodes}",
            "--nproc-per-node=1",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self._network.address(1)}:{_PORT}",
            f"--rdzv-conf={_RENDEZVOUS}",
            "--rdzv-id=job",
            f"--local-addr={self._network.address(host)}",
            "--max-restarts=100",
            "--no-python",
            sys.executable,
            *("-S", "-E", str(_STAND_IN), f"{self._folder.name}/tests"),
        ]
        variables = {"HOST": str(host), "GLOO_SOCKET_IFNAME": "eth0", **self._environment}
        self._agents[host] = forkserver().Process(
            target=_be_agent,
            args=(words, variables, self._log(host), self._gate(host), *self._seat(host)),
            daemon=True,
        )
        self._agents[host].start()

    def lose(self, host: int) -> None:
        """Let a host lose its power: nobody hears of it any more."""
        self._network.port(host, up=False)
        self._agents.pop(host).kill()
        for worker in self._started:
            if worker.host == host:
                worker.process.kill()

    def regain(self, host: int) -> None:
        """Let a host come back, with an agent."""
        self._network.port(host, up=True)
        self.start(host)

    def ranks(self, size: int, timeout: float = SLOW) -> Ranks:
        """Return the ranks that torchrun starts next, once there are so many and they have a process group."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self._admit(deadline)
            alive = {worker.rank: worker for worker in self._fresh if worker.process.is_alive()}
            if len(alive) == size and all(worker.size == size for worker in alive.values()):
                self._fresh.clear()
                self._attempts += 1
                workers = [alive[rank] for rank in range(size)]
                ranks = Ranks([worker.process for worker in workers], [worker.pipe for worker in workers])
                if set((came := ranks.run(_meet, self._attempts, timeout=60.0)).values()) == {None}:
                    return ranks
                print(f"no process group: {came}")  # noqa: T201 -- for whom a test fails
                ranks.begin(os._exit, 1)  # as a training script does
        raise AssertionError(f"torchrun did not start {size} ranks in time:\n{self._logs()}")

    def close(self) -> None:
        """Kill all."""
        for agent in self._agents.values():
            agent.kill()
        for worker in self._started:
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()
        for agent in self._agents.values():
            agent.join()
        self._listener.close()
        self._folder.cleanup()

    def _let_in(self) -> None:
        """Let the agents meet once all are ready to, host 1 first, which has their store.

        When the fewest hosts have come, the others have 2 s, and agents of a slow machine may need 5 s to be ready.
        """
        deadline = time.monotonic() + SLOW
        while not all(self._gate(host)[0].exists() for host in self._agents) and time.monotonic() < deadline:
            time.sleep(0.02)
        self._gate(1)[1].touch()
        while not _listens(self._agents[1].pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        for host in self._agents:
            self._gate(host)[1].touch()

    def _gate(self, host: int) -> tuple[Path, Path]:
        """Return the file that an agent makes when it is ready, and the one that it waits for then."""
        return Path(f"{self._folder.name}/ready.{host}"), Path(f"{self._folder.name}/open.{min(host, 2)}")

    def _admit(self, deadline: float) -> None:
        """Fork a rank for each stand-in that asks; wait shortly for one."""
        while wait([self._listener], min(0.1, max(0.0, deadline - time.monotonic()))):
            stand_in, _ = self._listener.accept()
            with stand_in, stand_in.makefile("rb") as stream:
                if not (line := stream.readline()):
                    continue
                variables = json.loads(line)
                host = int(variables["HOST"])
                ours, theirs = forkserver().Pipe()
                process = forkserver().Process(
                    target=_be_rank, args=(stand_in, theirs, variables, *self._seat(host)), daemon=True
                )
                process.start()
                theirs.close()
            worker = _Worker(host, int(variables["RANK"]), int(variables["WORLD_SIZE"]), process, ours)
            self._started.append(worker)
            self._fresh.append(worker)

    def _seat(self, host: int) -> tuple[str, str, Path]:
        return seat(self._network, host, self._folder.name)

    def _log(self, host: int) -> Path:
        return Path(f"{self._folder.name}/log.{host}")

    def _logs(self) -> str:
        return "\n".join(
            f"--- host {host}\n{self._log(host).read_text()[-3000:]}"
            for host in self._network.hosts
            if self._log(host).exists()
        )


def _listens(process: int) -> bool:
    """Tell whether the agents' port is open in the network of a process."""
    table = "".join(Path(f"/proc/{process}/net/{name}").read_text() for name in ("tcp", "tcp6"))
    sockets = map(str.split, table.splitlines())
    return any(words[1].endswith(f":{_PORT:04X}") and words[3] == "0A" for words in sockets)  # 0A: it listens


def _be_agent(words: list[str], variables: Mapping[str, str], log: Path, gate: tuple[Path, Path], *where: Any) -> None:
    """Be ``torchrun``, as soon as it is let in."""
    from torch.distributed import run  # noqa: PLC0415 -- the agents alone need it

    enter(*where)
    os.environ.update(variables)
    with log.open("a") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    gate[0].touch()
    while not gate[1].exists():
        time.sleep(0.02)
    run.main(words)


def _be_rank(stand_in: socket.socket, pipe: Connection, variables: Mapping[str, str], *where: Any) -> None:
    """Be one rank, in a worker's environment, as long as the worker lives."""
    enter(*where)
    os.environ.clear()
    os.environ.update(variables)
    torch.set_num_threads(1)
    threading.Thread(target=_follow, args=[stand_in], daemon=True).start()
    serve(pipe)


def _follow(stand_in: socket.socket) -> None:
    stand_in.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


def _meet(attempt: int) -> None:
    """Make the process group, as training scripts do."""
    if os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True":
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        join(host, port, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), fresh=str(attempt))
    else:
        dist.init_process_group("gloo", timeout=timedelta(seconds=30))
