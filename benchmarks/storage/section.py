"""One kind of storage: its server, its clients, and rounds in which all ways take their turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Self

from benchmarks.storage.clients import Place
from benchmarks.storage.counting import PAYLOAD, CountingServer, Stored, serve
from benchmarks.storage.payload import payload_crc, payload_digest
from benchmarks.storage.worker import Cost, be_idle, be_worker

__all__ = ["KINDS", "Sample", "Samples", "Section", "Way"]

GB = 1e9
KINDS = ("write", "read")
_PATIENCE_SECONDS = 10.0


class Way(NamedTuple):
    """A client, and one of its ways to write or to read."""

    kind: str
    client: str
    name: str

    def __str__(self) -> str:
        return f"{self.client}: {self.name}"


class Sample(NamedTuple):
    """One transfer: bytes a second, CPU seconds a GB, and the longest stall of its loop and of an idle one, in ms."""

    rate: float
    cpu: float
    stall: float
    control: float


@dataclass(slots=True)
class Samples:
    """The samples of each way."""

    taken: dict[Way, list[Sample]] = field(default_factory=dict)

    def add(self, way: Way, sample: Sample) -> None:
        """Take note of one."""
        self.taken.setdefault(way, []).append(sample)

    def ways(self, kind: str) -> list[Way]:
        """List the ways to write or to read."""
        return [way for way in self.taken if way.kind == kind]

    def rate(self, way: Way) -> float:
        """Return the median of bytes a second."""
        return statistics.median(sample.rate for sample in self.taken[way])

    def cpu(self, way: Way) -> float:
        """Return the median of CPU seconds a GB."""
        return statistics.median(sample.cpu for sample in self.taken[way])

    def calmest(self, way: Way) -> Sample:
        """Return the sample with the least stall beyond that of the idle loop."""
        return min(self.taken[way], key=lambda sample: (sample.stall - sample.control, sample.stall))

    def best(self, kind: str, clients: Sequence[str]) -> Way | None:
        """Return the quickest way of some clients; None if there is none."""
        ways = [way for way in self.ways(kind) if way.client in clients]
        return max(ways, key=self.rate, default=None)


class Process:
    """A process that answers by a pipe."""

    def __init__(self, function: Callable[..., None], *args: object) -> None:
        self.pipe, theirs = _context().Pipe()
        self._process = _context().Process(target=function, args=(theirs, *args), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, question: object) -> Any:
        """Ask, and wait for the answer."""
        self.pipe.send(question)
        return self.pipe.recv()

    def close(self) -> None:
        """End it."""
        self.pipe.close()
        self._process.join(_PATIENCE_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@cache
def _context() -> ForkServerContext:
    context = get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.storage.worker"])
    return context


class Section:
    """Clients of one kind of storage, open; the first transfer of each way is checked and does not count."""

    def __init__(self, clients: Sequence[str], place: Place, server: Process | None = None) -> None:
        self.samples = Samples()
        self._place = place
        self._server = server
        self._stack = ExitStack()
        try:
            self._idle = self._start(be_idle)
            self._workers = {client: self._start(be_worker, client, place) for client in clients}
            self._ways = [
                Way(kind, client, name)
                for client, worker in self._workers.items()
                for kind, names in worker.ask(("ways",)).items()
                for name in names
            ]
            for kind in KINDS:
                for way in self._ways:
                    if way.kind == kind:
                        self._transfer(way, is_checked=True)
        except BaseException:
            self._stack.close()
            raise

    def _start(self, function: Callable[..., None], *args: object) -> Process:
        process = Process(function, *args)
        self._stack.callback(process.close)
        return process

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def rounds(self, kind: str, count: int) -> Samples:
        """Let all ways of a kind take turns; each round begins with another one. Return the samples of these rounds."""
        ways, fresh = [way for way in self._ways if way.kind == kind], Samples()
        for number in range(count):
            first = number % len(ways)
            for way in ways[first:] + ways[:first]:
                sample = self._transfer(way, is_checked=False)
                self.samples.add(way, sample)
                fresh.add(way, sample)
        return fresh

    def _transfer(self, way: Way, *, is_checked: bool) -> Sample:
        """Let one client write or read once, and make sure that it did."""
        name = self._name(way)
        if self._server is not None:
            self._server.ask(is_checked)
        cost: Cost = self._workers[way.client].ask(("transfer", way.kind, way.name, name))
        control: float = self._idle.ask((cost.began, cost.ended))
        if way.kind == "read":
            self._check_read(way)
        elif self._server is not None:
            check_written(way, name, self._place.nbytes, *self._server.ask(not is_checked))
        seconds = cost.ended - cost.began
        nbytes = self._place.nbytes
        return Sample(nbytes / seconds, cost.cpu_seconds / nbytes * GB, 1e3 * cost.stall_seconds, 1e3 * control)

    def _name(self, way: Way) -> str:
        """Return the object that a way writes or reads; on a real server the client itself has written it."""
        if self._server is None:
            return f"object-{list(self._workers).index(way.client)}"
        return PAYLOAD if way.kind == "read" else f"object-{self._ways.index(way)}"

    def _check_read(self, way: Way) -> None:
        if self._workers[way.client].ask(("digest",)) != payload_digest(self._place.nbytes):
            raise SystemExit(f"{way} has read other bytes than there are")


def check_written(way: Way, name: str, nbytes: int, counted: int, objects: Mapping[str, Stored]) -> None:
    """Refuse a write unless the server has received all of the payload, in order and nothing twice."""
    from bcp.backends.objects.parts import combined  # noqa: PLC0415 -- a package of extras

    mine = [objects[one] for one in sorted(objects) if one == name or one.startswith(f"{name}/")]
    if len(mine) != len(objects) or sum(one.nbytes for one in mine) != nbytes or counted != nbytes:
        raise SystemExit(f"{way} has sent {counted} bytes of {nbytes}, and left {sorted(objects)}")
    if combined((one.crc, one.nbytes) for one in mine) != payload_crc(nbytes):
        raise SystemExit(f"{way} has written other bytes than it was given")


@contextmanager
def counting(
    clients: Sequence[str], kind: type[CountingServer], nbytes: int, latency: float = 0.0
) -> Iterator[Section]:
    """Open clients of a counting server."""
    server = Process(serve, kind, nbytes, latency)
    try:
        with Section(clients, Place(server.pipe.recv(), nbytes), server) as section:
            yield section
    finally:
        server.close()


@contextmanager
def hdfs(clients: Sequence[str], nbytes: int) -> Iterator[Section]:
    """Open clients of a NameNode and a DataNode, which share one JVM and the disk."""
    mini_hdfs = import_module("tests.servers.hdfs").MiniHdfs  # needs Java, and downloads Hadoop at first
    with (
        TemporaryDirectory() as folder,
        mini_hdfs(Path(folder), 1) as server,
        Section(clients, Place(server.url, nbytes)) as section,
    ):
        yield section


@contextmanager
def local(clients: Sequence[str], nbytes: int, folder: Path) -> Iterator[Section]:
    """Open clients of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as inside, Section(clients, Place(inside, nbytes)) as section:
        yield section
