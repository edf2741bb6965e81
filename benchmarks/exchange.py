"""The exchange of bulk data between hosts, beside plain sockets, and a load over a network with one slow uplink.

    python -m benchmarks.exchange [--quick] [--json FILE] [--check]

Hosts are network namespaces of this machine, so this needs root and iproute2. Sockets and exchange send the same bytes
in turn, and share the machine's cores: their ratio is a figure, their speed says more of the machine.
"""

from __future__ import annotations

import itertools
import multiprocessing
import resource
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import anyio
import torch
import torch.distributed as dist

import bcp
from bcp.coordinators import GrpcCoordinator
from bcp.coordinators.process_group import GroupExchange, join_group
from bcp.protocols import Agreement
from benchmarks.figures import Figures, arguments
from benchmarks.network import Network, enter, missing

MIB = 1 << 20
RAW_PORT, TREE_PORT, STORE_PORT = 29_700, 29_701, 29_702
CALL_BYTES = 1 << 20
TIMEOUT = 120.0
UPLINK_MBIT, SLOW_MBIT = 1000, 100

Ranks = tuple[int, int]
"""A rank, and how many there are."""


class Cost(NamedTuple):
    """Seconds and CPU that one rank needed to send and receive."""

    seconds: float
    cpu_seconds: float
    nbytes_sent: int


class Crew:
    """One process on each host of a network."""

    def __init__(self, network: Network, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipes: list[Connection] = []
        self._processes = []
        for host in network.hosts:
            ours, theirs = context.Pipe()
            file = folder / f"hosts.{host}"
            file.write_text(network.hosts_file(host), "utf-8")
            seat = (network.space(host), network.name(host), file)
            process = context.Process(target=_work, args=(theirs, seat, host - 1, len(network.hosts)), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Let all call ``function((rank, size), *args)`` at once; return the results by rank."""
        for pipe in self._pipes:
            pipe.send((function, args))
        return [pipe.recv() for pipe in self._pipes]

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.kill()
            process.join()


def _work(pipe: Connection, seat: tuple[str, str, Path], rank: int, size: int) -> None:
    enter(*seat)
    torch.set_num_threads(1)
    while True:
        function, args = pipe.recv()
        pipe.send(function((rank, size), *args))


# -- plain sockets ------------------------------------------------------------------------------


def raw_pair(ranks: Ranks, nbytes: int) -> Cost:
    """Send from rank 0 to rank 1 over one connection, in calls of 1 MiB."""
    rank, _ = ranks
    if rank > 1:
        return Cost(0.0, 0.0, 0)
    buffer = memoryview(bytearray(CALL_BYTES))
    if rank == 1:
        with (
            socket.create_server((_address(1), RAW_PORT)) as listener,
            listener.accept()[0] as connection,
            _cost() as cost,
        ):
            while connection.recv_into(buffer):
                pass
        return cost(0)
    with _connected(_address(1)) as connection, _cost() as cost:
        for _ in range(nbytes // CALL_BYTES):
            connection.sendall(buffer)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)  # until the other side has read all, and closes
    return cost(nbytes)


def raw_all(ranks: Ranks, nbytes: int) -> Cost:
    """Send from every rank to every other one at once, with a thread for each direction of each pair."""
    rank, size = ranks
    with socket.create_server((_address(rank), RAW_PORT), backlog=size) as listener:
        out = [_connected(_address(peer)) for peer in range(size) if peer != rank]
        into = [listener.accept()[0] for _ in out]
    with _cost() as cost:
        threads = [threading.Thread(target=_drain, args=[each]) for each in into]
        threads += [threading.Thread(target=_pour, args=[each, nbytes]) for each in out]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for each in (*out, *into):
        each.close()
    return cost(nbytes * (size - 1))


def _drain(connection: socket.socket) -> None:
    buffer = memoryview(bytearray(CALL_BYTES))
    while connection.recv_into(buffer):
        pass


def _pour(connection: socket.socket, nbytes: int) -> None:
    buffer = bytes(CALL_BYTES)
    for _ in range(nbytes // CALL_BYTES):
        connection.sendall(buffer)
    connection.shutdown(socket.SHUT_WR)


def _connected(address: str) -> socket.socket:
    for _ in range(200):
        try:
            return socket.create_connection((address, RAW_PORT))
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"nobody listens on {address} port {RAW_PORT}")


# -- bcp ----------------------------------------------------------------------------------------


def exchanged(ranks: Ranks, nbytes: int, rounds: int) -> Cost:
    """Send from every rank to every other one by :meth:`Agreement.all_to_all`; rounds after the first one count."""
    rank, size = ranks

    async def work() -> Cost:
        send = [b"" if peer == rank else bytes(nbytes) for peer in range(size)]
        receive = [bytearray(len(data)) for data in send]
        async with _coordinator(ranks).begin("exchange", TIMEOUT) as agreement:
            await agreement.all_to_all(send, receive)
            await _meet(agreement)
            with _cost() as cost:
                for _ in range(rounds):
                    await agreement.all_to_all(send, receive)
                await _meet(agreement)
            return cost(rounds * nbytes * (size - 1))

    return anyio.run(work)


def grouped(ranks: Ranks, nbytes: int, rounds: int) -> Cost:
    """Do the same over a gloo group, as a load with ``exchange="gloo"`` makes one."""
    rank, size = ranks
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=f"tcp://{_address(0)}:{STORE_PORT}", rank=rank, world_size=size)

    async def work() -> Cost:
        nonce = str(next(_nonces))
        group = await join_group(nonce, rank, size, device=None, patience=TIMEOUT)
        exchange = GroupExchange(group, rank, device=None, on_stream=nullcontext, report=_raised)
        send = [torch.zeros(0 if peer == rank else nbytes, dtype=torch.uint8) for peer in range(size)]
        receive = [torch.zeros_like(tensor) for tensor in send]
        async with _coordinator(ranks).begin("exchange", TIMEOUT) as agreement:
            await exchange.all_to_all(send, receive)
            await _meet(agreement)
            with _cost() as cost:
                for _ in range(rounds):
                    await exchange.all_to_all(send, receive)
                await _meet(agreement)
            await exchange.aclose(failed=False)
            return cost(rounds * nbytes * (size - 1))

    return anyio.run(work)


async def _raised(_: int, cause: str) -> Exception:
    return RuntimeError(cause)


async def _meet(agreement: Agreement) -> None:
    async def nothing(_: Sequence[bytes]) -> bytes:
        return b""

    await agreement.gather_broadcast("meet", b"", nothing)


def saved(ranks: Ranks, path: Path, nbytes: int) -> None:
    """Save a replicated model, and load it once, so that everything is imported and in the page cache."""
    coordinator = _coordinator(ranks)
    bcp.save(path, {"model": _model(nbytes, 1.0)}, coordinator=coordinator, overwrite=True)
    bcp.load(path, {"model": _model(nbytes, 0.0)}, coordinator=coordinator)


def loaded(ranks: Ranks, path: Path, nbytes: int) -> float:
    """Load it on all ranks, each of which reads a part and sends it to the others; return the seconds."""
    model, coordinator = _model(nbytes, 0.0), _coordinator(ranks)
    began = time.perf_counter()
    bcp.load(path, {"model": model}, coordinator=coordinator)
    seconds = time.perf_counter() - began
    if not all(bool((tensor == 1.0).all()) for tensor in model.values()):
        raise SystemExit(f"rank {ranks[0]} loaded other values than were saved")
    return seconds


def _model(nbytes: int, value: float) -> dict[str, torch.Tensor]:
    return {f"w{number}": torch.full((nbytes // 64,), value) for number in range(16)}


_nonces = itertools.count()  # all ranks call equally often
_coordinators: dict[Ranks, GrpcCoordinator] = {}


def _coordinator(ranks: Ranks) -> GrpcCoordinator:
    rank, size = ranks
    if ranks not in _coordinators:
        addresses = [f"{_address(peer)}:{TREE_PORT}" for peer in range(size)]
        _coordinators[ranks] = GrpcCoordinator.at(rank, addresses, "a secret of this benchmark")
    return _coordinators[ranks]


def _address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


@contextmanager
def _cost() -> Iterator[Callable[[int], Cost]]:
    """Measure what the block costs; yields what returns it, given the bytes that were sent."""
    ends: list[float] = []
    began, cpu = time.perf_counter(), _cpu()
    yield lambda nbytes: Cost(ends[0] - began, ends[1] - cpu, nbytes)
    ends += [time.perf_counter(), _cpu()]


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# -- the figures --------------------------------------------------------------------------------


@contextmanager
def crew_of(hosts: int) -> Iterator[tuple[Network, Crew, Path]]:
    """Play a network, with a process on each host and a folder that all share."""
    with (
        TemporaryDirectory() as folder,
        closing(Network(hosts)) as network,
        closing(Crew(network, Path(folder))) as crew,
    ):
        yield network, crew, Path(folder)


def _rate_and_cpu(costs: Sequence[Cost]) -> tuple[float, float]:
    """Return bytes a second of all ranks together, and CPU seconds a GB."""
    nbytes = sum(cost.nbytes_sent for cost in costs)
    return nbytes / max(cost.seconds for cost in costs), sum(cost.cpu_seconds for cost in costs) / nbytes * 1e9


def throughput(figures: Figures, hosts: int, rounds: int) -> None:
    """Compare the exchange with sockets, in turn."""
    figures.head(f"{hosts} hosts, 64 MiB for each pair: all bytes a second, and CPU of both sides")
    nbytes = 64 * MIB
    ways = {
        "one pair of sockets": partial(raw_pair, nbytes=nbytes * 16),
        "sockets between all": partial(raw_all, nbytes=nbytes * 4),
        "all_to_all": partial(exchanged, nbytes=nbytes, rounds=4),
        "gloo group": partial(grouped, nbytes=nbytes, rounds=4),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    with crew_of(hosts) as (_, crew, _folder):
        for _ in range(rounds):
            for name, way in ways.items():
                found[name].append(_rate_and_cpu(crew.run(way)))
    medians = {name: tuple(map(statistics.median, zip(*each, strict=True))) for name, each in found.items()}
    for name, (rate, cpu) in medians.items():
        figures.add(f"{name}", rate / 1e6, "MB/s")
        figures.add(f"{name}: CPU", cpu, "s/GB")
    (pair_rate, pair_cpu), (rate, cpu) = medians["one pair of sockets"], medians["all_to_all"]
    figures.add(f"{hosts} hosts: all_to_all beside one pair of sockets", rate / pair_rate, "", 0.7, least=True)
    figures.add(f"{hosts} hosts: its CPU beside theirs, per GB", cpu / pair_cpu, "", 2.0)
    figures.add(f"{hosts} hosts: gloo group beside all_to_all", medians["gloo group"][0] / rate, "")


def slow_uplink(figures: Figures, nbytes: int, rounds: int) -> None:
    """Load a replicated model over equal uplinks, and over such of which one has a tenth."""
    figures.head(f"4 hosts load {nbytes // MIB} MiB, wanted by all of them, over uplinks of {UPLINK_MBIT} Mbit/s")
    with crew_of(4) as (network, crew, folder):
        path = folder / "checkpoint"
        crew.run(saved, path, nbytes)
        for host in network.hosts:
            network.rate(host, UPLINK_MBIT)
        equal = [max(crew.run(loaded, path, nbytes)) for _ in range(rounds)]
        network.rate(3, SLOW_MBIT)
        slow = [max(crew.run(loaded, path, nbytes)) for _ in range(rounds)]
    figures.add("equal uplinks", statistics.median(equal), "s")
    figures.add(f"one of {SLOW_MBIT} Mbit/s", statistics.median(slow), "s")
    figures.add("one slow uplink costs at most", statistics.median(slow) / statistics.median(equal), "x", 3.0)


def main() -> int:
    """Run everything."""
    options = arguments(__doc__)
    if why := missing():
        raise SystemExit(f"benchmarks.exchange plays a network of hosts, which this machine cannot: {why}")
    figures = Figures()
    for hosts in (2, 4):
        throughput(figures, hosts, 3 if options.quick else 7)
    slow_uplink(figures, (128 if options.quick else 512) * MIB, 1 if options.quick else 3)
    return figures.close(options)


if __name__ == "__main__":
    sys.exit(main())
