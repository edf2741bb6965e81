"""Jobs whose ranks are on the hosts of a :class:`~network.Network`, and may be killed and started again.

A rank is a forked process with everything imported, so that a job of four ranks is there in half a second. It does what
the test tells it, one function after another; a function that raises is an outcome like any other.
"""

from __future__ import annotations

import inspect
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from datetime import timedelta
from functools import partial, wraps
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import anyio
import torch
from patience import patiently
from ranks import forkserver
from torch import distributed as dist
from torch.distributed import distributed_c10d

import bcp
from benchmarks.network import Network, enter

__all__ = ["HUNG", "LONG", "SLOW", "Job", "Store", "with_more_time"]

HUNG = "no answer"
"""The outcome of a rank that has not answered in time."""

DEAD = "dead"
"""The outcome of a rank whose process has ended."""

PORT = 29_500
SLOW = 600.0
"""Seconds more that a machine with other work may need; on an idle one none of them is needed."""
LONG = 1000.0
"""Timeout of operations in which nobody is to be silent; more than :data:`SLOW`."""
_TIMEOUT = timedelta(seconds=60)


def with_more_time(*seconds: float, hosts: int = 4) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test with the first ``timeout`` of operations, and if it fails with the next one.

    Each call has new hosts, ``network``, and an empty folder, ``tmp_path``. A machine with other work may silence
    a rank for longer than the first timeout.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def check(made: Callable[..., Network], folder: Path, given: Mapping[str, Any], timeout: float) -> None:
            own = folder / f"{timeout:.0f}"
            own.mkdir()
            with closing(made(hosts)) as network:
                test(network=network, tmp_path=own, timeout=timeout, **given)

        @wraps(test)
        def run(networks: Callable[..., Network], tmp_path: Path, **given: Any) -> None:
            patiently(partial(check, networks, tmp_path, given), *seconds)

        names = [name for name in inspect.signature(test).parameters if name not in ("network", "tmp_path", "timeout")]
        kind = inspect.Parameter.KEYWORD_ONLY
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # pytest reads it
            [inspect.Parameter(name, kind) for name in ("networks", "tmp_path", *names)]
        )
        return run

    return decorate


class Store:
    """A TCPStore on a host, in a process of its own: as torchrun's agent serves it, it outlives the ranks."""

    def __init__(self, network: Network, host: int, port: int = PORT) -> None:
        self.host, self.port = host, port
        ours, theirs = forkserver().Pipe()
        self._folder = tempfile.TemporaryDirectory()
        self._pipe = ours
        self._process = forkserver().Process(
            target=_serve_store, args=(theirs, port, *seat(network, host, self._folder.name)), daemon=True
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


class Ranks:
    """Processes that do what they are told, by rank.

    Attributes:
        size: how many ranks there are.
    """

    def __init__(self, processes: Sequence[Any], pipes: Sequence[Connection]) -> None:
        self.size = len(processes)
        self._processes, self._pipes = processes, pipes

    def __repr__(self) -> str:
        return f"{type(self).__name__}(size={self.size})"

    def begin(self, function: Callable[..., Any], *args: Any, ranks: Iterable[int] | None = None) -> None:
        """Let ranks call ``function(*args)``; all of them by default."""
        for rank in range(self.size) if ranks is None else ranks:
            with suppress(BrokenPipeError):  # it is dead, and will be found so
                self._pipes[rank].send_bytes(pickle.dumps((function, args)))

    def collect(self, timeout: float, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """Return what the ranks' calls came to: a result, an exception, :data:`HUNG` or :data:`DEAD`."""
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
                    outcomes[waiting[pipe]] = DEAD
        return outcomes

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = SLOW, ranks: Iterable[int] | None = None
    ) -> dict[int, Any]:
        """Do both."""
        chosen = None if ranks is None else list(ranks)
        self.begin(function, *args, ranks=chosen)
        return self.collect(timeout, chosen)

    def reach(self, function: Callable[..., Any], *args: Any, marks: Path) -> None:
        """Let all ranks call ``function(*args, marks)``; return when each has come to :func:`halt` or :func:`mark`."""
        self.begin(function, *args, marks)
        deadline = time.monotonic() + SLOW
        while not marks.is_dir() or len(list(marks.iterdir())) < self.size:
            assert time.monotonic() < deadline, "not all ranks came so far"
            time.sleep(0.01)

    def pid(self, rank: int) -> int:
        """Return a rank's process."""
        return int(self._processes[rank].pid)

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


class Job(Ranks):
    """One rank for each entry of ``placement``, a host's number."""

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
        self._folder = tempfile.TemporaryDirectory()
        processes, pipes = [], []
        size = len(placement)
        for rank, host in enumerate(placement):
            ours, theirs = forkserver().Pipe()
            where = seat(network, host, self._folder.name)
            variables = {"GLOO_SOCKET_IFNAME": "eth0", **environment(rank)}
            process = forkserver().Process(
                target=_be_rank, args=(theirs, where, variables, init(rank), rank, size), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        super().__init__(processes, pipes)
        started = self.collect(SLOW)
        if any(outcome is not None for outcome in started.values()):
            self.close()
            raise AssertionError(f"the process group did not come up: {started}")

    def close(self) -> None:
        """Kill all ranks."""
        super().close()
        self._folder.cleanup()


def halt(marks: Path) -> bcp.extend.Stage:
    """Return a stage that shows that this rank has come so far, and goes on when there is a file ``go``."""

    async def run(item: object) -> object:
        mark(marks)
        while not (marks / "go").exists():  # noqa: ASYNC110 -- another process makes it
            await anyio.sleep(0.02)
        return item

    return bcp.extend.Stage("halt", run)


def mark(marks: Path) -> None:
    """Show that this rank has come so far."""
    marks.mkdir(exist_ok=True)
    (marks / str(dist.get_rank())).touch()


Seat = tuple[str, str, Path]


def seat(network: Network, host: int, folder: str) -> Seat:
    """Return what a process needs to be on a host."""
    file = Path(folder) / f"hosts.{host}"
    file.write_text(network.hosts_file(host))
    return network.space(host), network.name(host), file


def _serve_store(pipe: Connection, port: int, *seat: Any) -> None:
    enter(*seat)
    store = dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)  # noqa: S104 -- as agents do
    pipe.send(store.port)
    signal.pause()


def _be_rank(pipe: Connection, where: Seat, variables: Mapping[str, str], init: str, rank: int, size: int) -> None:
    """Be one rank: join the group, then run what comes until the test ends or leaves us."""
    enter(*where)
    os.environ.update(variables)
    torch.set_num_threads(1)
    try:
        _join(init, rank, size)
    except BaseException as error:
        pipe.send_bytes(pickle.dumps(repr(error)))
        raise
    pipe.send_bytes(pickle.dumps(None))
    serve(pipe)


def serve(pipe: Connection) -> None:
    """Call what comes, one after another, until the test ends."""
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
    if init.startswith("agent://"):
        host, _, port = init.removeprefix("agent://").rpartition(":")
        join(host.strip("[]"), int(port), rank, size, fresh=os.environ["ATTEMPT"])
    else:
        dist.init_process_group("gloo", init_method=init, rank=rank, world_size=size, timeout=_TIMEOUT)


def join(host: str, port: int, rank: int, size: int, *, fresh: str) -> None:
    """Make the process group over a store that has keys of earlier ranks.

    Gloo connects to addresses of ranks that have ended, if it finds them. It gets keys below ``fresh``, and bcp finds
    the store with all keys.
    """
    store = dist.TCPStore(host, port, size, is_master=False, timeout=_TIMEOUT)
    own = dist.PrefixStore(fresh, store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=_TIMEOUT)
    group = dist.group.WORLD
    backend, _ = distributed_c10d._world.pg_map[group]
    distributed_c10d._world.pg_map[group] = backend, dist.PrefixStore("default_pg", store)
