"""What ranks do in loads whose rounds run over a process group of torch's."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import torch
from ranks import HOST
from torch import distributed as dist
from torch.distributed import TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import bcp
from bcp import _calls
from bcp._load import reads as transport
from bcp.coordinators import GrpcCoordinator, process_group
from bcp.coordinators.process_group import GroupExchange
from bcp.protocols import Coordinator

MIB = 1 << 20
DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.float64, torch.int16)
TIMEOUTS = {"stop": (4.0, 30.0), "kill when joining": (4.0, 30.0)}
"""Seconds of silence. The longer one is for a machine that is too busy for the other; otherwise nobody waits."""
NEVER = 3600.0
SIZE = 4
VICTIM = 2
HOW = ("kill", "stop", "raise", "kill when joining")


def values(rows: int) -> dict[str, torch.Tensor]:
    """Return tensors of all kinds and of odd sizes, of about 8 KiB a row."""
    generator = torch.Generator().manual_seed(rows)
    made = {}
    for number, dtype in enumerate(DTYPES):
        count = rows * (1021 - number) // dtype.itemsize * dtype.itemsize + 3 * dtype.itemsize
        raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
        made[f"w{number}"] = raw > 100 if dtype is torch.bool else raw.view(dtype)
    return {**made, "empty": torch.empty(0), "one": torch.tensor(7.0)}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Compare bit by bit."""
    return all(
        torch.equal(one[name].reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8))
        for name in one
        if one[name].numel()
    )


def zeros(rows: int) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in values(rows).items()}


@contextlib.contextmanager
def opened(*, on_device: bool = False) -> Iterator[list[int]]:
    """List how many rounds each exchange over a group has had; ``on_device``: take host memory for a device."""
    rounds: list[int] = []
    close, device = GroupExchange.aclose, _calls.exchange_device

    async def aclose(self: GroupExchange, *, failed: bool) -> None:
        rounds.append(self._rounds)
        await close(self, failed=failed)

    def as_device(*args: Any) -> torch.device:
        assert device(*args) is None
        return torch.device("cpu")

    GroupExchange.aclose = aclose  # type: ignore[method-assign]  # put back below
    if on_device:
        _calls.exchange_device = as_device  # type: ignore[assignment]  # same
    try:
        yield rounds
    finally:
        GroupExchange.aclose = close  # type: ignore[method-assign]  # same
        _calls.exchange_device = device


def threads() -> list[str]:
    """Name the threads of exchanges and of gloo in this process."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            names.append((task / "comm").read_text().strip())
    mine = [thread.name for thread in threading.enumerate() if thread.name.startswith("bcp-process-group")]
    return sorted(mine + [name for name in names if "gloo" in name])


def options(way: str, exchange: str) -> bcp.LoadOptions:
    """Return the options of one way to load."""
    more: dict[str, Any] = {}
    if way == "codecs":
        more["codecs"] = [bcp.extend.Codec("zlib", encode=zlib.compress, decode=zlib.decompress)]
    if way == "edited":

        async def look(loaded: Any) -> Any:
            return loaded

        more["edit"] = lambda graph: graph.after("h2d", bcp.extend.Stage("look", look))
    return bcp.LoadOptions(
        exchange=exchange,  # type: ignore[arg-type]  # a literal, as a string
        read_bytes=MIB,
        exchange_bytes=2 * MIB,
        verify=way != "unverified",
        **more,
    )


def replicated(path: Path, way: str, rows: int, *, on_device: bool) -> tuple[bool, int, int, list[int]]:
    """Load what all ranks want, over sockets and over gloo; return if all is right, bytes received, and rounds."""
    codecs = options(way, "gloo").codecs
    bcp.save(path, {"model": values(rows)}, options=bcp.SaveOptions(codecs=codecs, part_bytes=MIB))
    before = threads()
    targets = {exchange: zeros(rows) for exchange in ("sockets", "gloo")}
    with opened(on_device=on_device) as rounds:
        received = [
            bcp.load(path, {"model": target}, options=options(way, exchange)).received_nbytes
            for exchange, target in targets.items()
        ]
    assert threads() == before
    right = all(same(values(rows), target) for target in targets.values())
    return right, received[0], received[1], rounds


def resharded(path: Path) -> tuple[bool, list[int]]:
    """Save shards of rows, and load columns that two ranks want each, over gloo."""
    whole = torch.arange(1031 * 514, dtype=torch.float32).reshape(1031, 514)
    bcp.save(path, {"model": {"w": distribute_tensor(whole, init_device_mesh("cpu", (4,)), [Shard(0)])}})
    mesh = init_device_mesh("cpu", (2, 2))
    target = distribute_tensor(torch.zeros_like(whole), mesh, [Replicate(), Shard(1)])
    with opened() as rounds:
        bcp.load(path, {"model": {"w": target}}, options=options("plain", "gloo"))
    wanted = distribute_tensor(whole, mesh, [Replicate(), Shard(1)])
    assert isinstance(target, DTensor)
    return torch.equal(target.to_local(), wanted.to_local()), rounds


def subgroups(path: Path) -> tuple[bool, list[int]]:
    """Load in two halves of the job at once, each of which has a coordinator of its own."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = dist.get_rank() // 2
    ranks = GrpcCoordinator.over(halves[half])
    own, target = path / str(half), zeros(600 + half)
    bcp.save(own, {"model": values(600 + half)}, coordinator=ranks)
    with opened() as rounds:
        bcp.load(own, {"model": target}, options=options("plain", "gloo"), coordinator=ranks)
    return same(values(600 + half), target), rounds


def beside_new_groups(path: Path) -> bool:
    """Load in the background while the training thread makes groups, with which it communicates."""
    bcp.save(path, {"model": values(600)})
    target, right = zeros(600), True
    load = threading.Thread(
        target=lambda: bcp.load(path, {"model": target}, options=options("plain", "gloo")), name="background load"
    )
    load.start()
    for _ in range(3):
        number = torch.ones(1)
        dist.all_reduce(number, group=dist.new_group())
        right = right and number.item() == SIZE
    load.join()
    return right and same(values(600), target)


def disagree(path: Path) -> str:
    """Ask for another exchange on one rank; return what the load says."""
    bcp.save(path, {"model": values(2)})
    exchange = "gloo" if dist.get_rank() == VICTIM else "sockets"
    try:
        bcp.load(path, {"model": zeros(2)}, options=options("plain", exchange))
    except bcp.BcpError as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def without_nccl(path: Path) -> str:
    """Ask for NCCL, which is not there; return what the load says."""
    bcp.save(path, {"model": values(2)})
    target = zeros(2)
    try:
        bcp.load(path, {"model": target}, options=options("plain", "nccl"))
    except bcp.InputError as error:
        assert same(target, zeros(2))
        return str(error)
    return "loaded"


def cancelled(path: Path) -> tuple[str, bool]:
    """Cancel ``aload`` on one rank in the middle of its rounds, then load again; return what the first one said."""
    coordinator = GrpcCoordinator.over()
    bcp.save(path, {"model": values(1500)})
    before, target = threads(), zeros(1500)
    said = anyio.run(_cancelled, path, target, coordinator)
    assert threads() == before, (said, threads(), before)
    bcp.load(path, {"model": target}, options=options("plain", "gloo"), coordinator=coordinator)
    assert threads() == before
    return said, same(values(1500), target)


def cancelled_while_joining(path: Path) -> tuple[str, bool]:
    """Cancel ``aload`` on one rank when all others have failed to join its group, then load again."""
    coordinator = GrpcCoordinator.over()
    bcp.save(path, {"model": values(600)})
    target, rank, make, join = zeros(600), dist.get_rank(), process_group._gloo_group, transport.join_group

    def broken(*_: Any) -> Any:
        (path / f"failed {rank}").touch()
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1")

    def others_fail() -> None:
        while len(list(path.glob("failed *"))) < SIZE - 1:
            time.sleep(0.01)

    async def wait(scope: anyio.CancelScope) -> None:
        await anyio.to_thread.run_sync(others_fail)
        scope.cancel()
        await anyio.sleep_forever()

    async def load() -> str:
        with anyio.CancelScope() as scope:
            if rank == VICTIM:
                transport.join_group = lambda *_, **__: wait(scope)  # type: ignore[assignment]  # put back below
            try:
                await bcp.aload(path, {"model": target}, options=options("plain", "gloo"), coordinator=coordinator)
            except bcp.BcpError as error:
                return f"{type(error).__name__} {getattr(error, 'rank', error)}"
        return "cancelled" if scope.cancelled_caught else "loaded"

    process_group._gloo_group = broken
    try:
        said = anyio.run(load)
    finally:
        process_group._gloo_group, transport.join_group = make, join
    bcp.load(path, {"model": target}, options=options("plain", "gloo"), coordinator=coordinator)
    return said, same(values(600), target)


def _with(name: str, stage: Callable[[Any], Any], timeout: float = NEVER) -> bcp.LoadOptions:
    """Return options with a custom stage behind that one, and a timeout."""
    return replace(
        options("plain", "gloo"), edit=lambda graph: graph.after(name, bcp.extend.Stage("mine", stage)), timeout=timeout
    )


async def _cancelled(path: Path, target: dict[str, torch.Tensor], coordinator: Coordinator) -> str:
    with anyio.CancelScope() as scope:

        async def cancel(loaded: Any) -> Any:
            if dist.get_rank() == VICTIM and loaded.item.round == 2:
                scope.cancel()
            return loaded

        try:
            await bcp.aload(path, {"model": target}, options=_with("h2d", cancel), coordinator=coordinator)
        except bcp.PeerError as error:
            return f"PeerError {error.rank}"
    return "cancelled" if scope.cancelled_caught else "loaded"


# -- processes of their own, one of which comes to harm -----------------------------------------


def main(rank: int, port: int, directory: Path, how: str, timeout: float) -> None:
    """Load three times: well, with a victim, and once more; write down what came of the second."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    _meet(port, "first", rank, SIZE)
    path, target = directory / "ckpt", zeros(1500)
    bcp.save(path, {"model": values(1500)})
    bcp.load(path, {"model": target}, options=options("plain", "gloo"))
    before = threads()
    outcome = _harmed(path, target, how, timeout)
    if how == "kill when joining":  # gloo waits for the absent one, in a thread that bcp has left behind
        for _ in range(900):
            if threads() != before:
                time.sleep(0.1)
    assert threads() == before, (threads(), before)
    if how != "raise":  # the victim is gone
        dist.distributed_c10d._abort_process_group()
        _meet(port, "second", sorted({*range(SIZE)} - {VICTIM}).index(rank), SIZE - 1)
    bcp.load(path, {"model": target}, options=options("plain", "gloo"))
    assert same(values(1500), target)
    (directory / f"{rank}").write_text(json.dumps(outcome))
    os._exit(0)  # the first group waits for its dead member otherwise


def _meet(port: int, prefix: str, rank: int, size: int) -> None:
    store = dist.PrefixStore(prefix, TCPStore(HOST, port, is_master=False, wait_for_workers=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))


def _harmed(path: Path, target: dict[str, torch.Tensor], how: str, timeout: float) -> list[Any]:
    """Load; the victim comes to harm between two rounds."""
    harm: dict[str, Callable[[], None]] = {
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "raise": _raise,
    }
    if how == "kill when joining" and dist.get_rank() == VICTIM:
        transport.join_group = lambda *_, **__: harm["kill"]()  # type: ignore[assignment]  # this process ends with it

    async def harmed(loaded: Any) -> Any:
        if dist.get_rank() == VICTIM and loaded.item.round == 2 and how in harm:
            harm[how]()
        return loaded

    try:
        bcp.load(path, {"model": target}, options=_with("h2d", harmed, timeout))
    except bcp.PeerError as error:
        return ["PeerError", error.rank, str(error)]
    except bcp.BcpError as error:
        return [type(error).__name__, dist.get_rank(), str(error)]
    return ["loaded", None, ""]


def _raise() -> None:
    raise RuntimeError("a bug in a stage")
