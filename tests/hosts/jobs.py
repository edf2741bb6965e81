"""Jobs whose ranks are on the hosts of a :class:`~network.Network`, and may be killed and started again.

A rank is a forked process with everything imported, so that a job of four ranks is there in half a second. It does what
the test tells it, one function after another; a function that raises is an outcome like any other.
"""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from network import Network, enter
from ranks import forkserver
from torch import distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["HUNG", "Job", "Store"]

HUNG = "no answer"
"""The outcome of a rank that has not answered in time."""

PORT = 29_500


class Store:
    """A TCPStore on a host, in a process of its own: as torchrun's agent serves it, it outlives the ranks."""

    def __init__(self, network: Network, host: int, port: int = PORT) -> None:
        self.host, self.port = host, port
        ours, theirs = forkserver().Pipe()
        self._folder = tempfile.TemporaryDirectory()
        self._pipe = ours
        self._process = forkserver().Process(
            target=_serve_store, args=(theirs, port, *_seat(network, host, self._folder.name)), daemon=True
        )
        self._process.start()
        ours.recv()

    def signal(self, number: int) -> None:
        """Send the server's process a signal."""
        os.kill(self._process.pid, number)

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._folder.cleanup()


class Job:
    """One rank for each entry of ``placement``, a host's number.

    Attributes:
        size: how many ranks there are.
    """

    def __init__(
        self,
        network: Network,
        placement: Sequence[int],
        init: Callable[[int], str],
        *,
        environment: Callable[[int], Mapping[str, str]] = lambda _: {},
    ) -> None:
        """Start the ranks, which join a gloo group.

        Args:
            network: the hosts.
            placement: the host of each rank.
            init: returns the init_method of a rank.
            environment: returns variables of a rank.

        """
        self.size = len(placement)
        self._folder = tempfile.TemporaryDirectory()
        self._processes, self._pipes = [], list[Connection]()
        for rank, host in enumerate(placement):
            ours, theirs = forkserver().Pipe()
            where = _seat(network, host, self._folder.name)
            variables = {"GLOO_SOCKET_IFNAME": "eth0", **environment(rank)}
            process = forkserver().Process(
                target=_be_rank, args=(theirs, where, variables, init(rank), rank, self.size), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        started = self.collect(60.0)
        if any(outcome is not None for outcome in started.values()):
            self.close()
            raise AssertionError(f"the process group did not come up: {started}")

    def __repr__(self) -> str:
        return f"Job(size={self.size})"

    def begin(self, function: Callable[..., Any], *args: Any, ranks: Iterable[int] | None = None) -> None:
        """Let ranks call ``function(*args)``; all of them by default."""
        for rank in range(self.size) if ranks is None else ranks:
            self._pipes[rank].send_bytes(pickle.dumps((function, args)))

    def collect(self, timeout: float, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """Return what the ranks' calls came to: a result, an exception, or :data:`HUNG`."""
        outcomes: dict[int, Any] = {}
        wanted = list(range(self.size) if ranks is None else ranks)
        deadline = time.monotonic() + timeout
        while len(outcomes) < len(wanted):
            waiting = {self._pipes[rank]: rank for rank in wanted if rank not in outcomes}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                outcomes |= dict.fromkeys(waiting.values(), HUNG)
            for pipe in ready:
                try:
                    outcomes[waiting[pipe]] = pickle.loads(pipe.recv_bytes())  # noqa: S301 -- from our own child
                except (EOFError, ConnectionError):
                    outcomes[waiting[pipe]] = "dead"
        return outcomes

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = 60.0, ranks: Iterable[int] | None = None
    ) -> dict[int, Any]:
        """Do both."""
        chosen = None if ranks is None else list(ranks)
        self.begin(function, *args, ranks=chosen)
        return self.collect(timeout, chosen)

    def signal(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a rank's process a signal."""
        os.kill(self._processes[rank].pid, number)

    def close(self) -> None:
        """Kill all ranks, as a launcher does before it starts them anew."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


Seat = tuple[str, str, Path]


def _seat(network: Network, host: int, folder: str) -> Seat:
    """Return what a process needs to be on a host."""
    file = Path(folder) / f"hosts.{host}"
    file.write_text(network.hosts_file(host))
    return network.space(host), network.name(host), file


def _serve_store(pipe: Connection, port: int, *seat: Any) -> None:
    enter(*seat)
    store = dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)  # noqa: S104 -- as agents do
    pipe.send(store.port)
    signal.pause()


def _be_rank(pipe: Connection, seat: Seat, variables: Mapping[str, str], init: str, rank: int, size: int) -> None:
    """Be one rank: join the group, then run what comes until the test ends or leaves us."""
    enter(*seat)
    os.environ.update(variables)
    torch.set_num_threads(1)
    try:
        _join(init, rank, size)
    except BaseException as error:
        pipe.send_bytes(pickle.dumps(repr(error)))
        raise
    pipe.send_bytes(pickle.dumps(None))
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())  # noqa: S301 -- from our own parent
        except EOFError:
            return
        try:
            outcome = pickle.dumps(function(*args))
        except Exception as error:  # noqa: BLE001 -- an outcome
            outcome = pickle.dumps(error)
        pipe.send_bytes(outcome)


def _join(init: str, rank: int, size: int) -> None:
    """Make the process group; an agent's store is used as torchrun's workers use it."""
    timeout = timedelta(seconds=60)
    if init.startswith("agent://"):
        host, _, port = init.removeprefix("agent://").rpartition(":")
        store = dist.TCPStore(host.strip("[]"), int(port), size, is_master=False, timeout=timeout)
        # gloo does not survive its own keys of earlier ranks: it gets others, and bcp the store with all keys
        fresh = dist.PrefixStore(os.environ["ATTEMPT"], store)
        dist.init_process_group("gloo", store=fresh, rank=rank, world_size=size, timeout=timeout)
        group = dist.group.WORLD
        backend, _ = distributed_c10d._world.pg_map[group]
        distributed_c10d._world.pg_map[group] = backend, dist.PrefixStore("default_pg", store)
    else:
        dist.init_process_group("gloo", init_method=init, rank=rank, world_size=size, timeout=timeout)
