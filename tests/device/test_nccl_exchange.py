"""Loads with ``exchange="nccl"`` on accelerators that run late, over a stand-in for NCCL's process group.

The stand-in keeps the order that torch documents: its stream waits for the caller's, and the caller's for its own.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from late import accelerators

import bcp
from bcp import _calls
from bcp._load import reads as transport
from bcp.coordinators import memory_coordinators
from bcp.protocols import Coordinator

MIB = 1 << 20
SIZE = 2


class Nccl:
    """What all ranks of a stand-in share."""

    def __init__(self) -> None:
        self.meet = threading.Barrier(SIZE)
        self.called: dict[int, tuple[Sequence[torch.Tensor], torch.cuda.Event]] = {}
        self.done: dict[int, torch.cuda.Event] = {}
        self.log: list[tuple[int, str]] = []
        self.queueing = threading.Lock()


class Group:
    """A rank's backend of NCCL: what :class:`~bcp.coordinators.process_group.GroupExchange` calls of it."""

    def __init__(self, nccl: Nccl, rank: int) -> None:
        self.nccl, self.rank = nccl, rank
        self.stream = torch.cuda.Stream(rank)

    def size(self) -> int:
        return SIZE

    def alltoall(self, receive: Sequence[torch.Tensor], send: Sequence[torch.Tensor]) -> Work:
        nccl = self.nccl
        assert all(tensor.is_cuda and tensor.is_contiguous() for tensor in (*receive, *send))
        nccl.called[self.rank] = send, torch.cuda.current_stream(self.rank).record_event()
        nccl.meet.wait(60)
        with nccl.queueing, torch.cuda.stream(self.stream):
            if nccl.meet.broken:
                raise RuntimeError("aborted")
            for peer in range(SIZE):
                sent, ready = nccl.called[peer]
                assert sent[self.rank].shape == receive[peer].shape
                self.stream.wait_event(ready)
            self.stream.wait_event(nccl.called[self.rank][1])
            for peer in range(SIZE):
                if receive[peer].numel():
                    receive[peer].copy_(nccl.called[peer][0][self.rank], non_blocking=True)
            nccl.done[self.rank] = self.stream.record_event()
        nccl.meet.wait(60)
        nccl.log.append((self.rank, "alltoall"))
        return Work(self.rank, list(nccl.done.values()))

    def shutdown(self) -> None:
        self.nccl.log.append((self.rank, "shutdown"))

    def abort(self) -> None:
        self.nccl.log.append((self.rank, "abort"))
        self.nccl.meet.abort()
        with self.nccl.queueing:
            for device in range(SIZE):  # kernels of NCCL have ended when it returns
                torch.cuda.synchronize(device)


class Work:
    def __init__(self, rank: int, done: list[torch.cuda.Event]) -> None:
        self.rank, self.done = rank, done

    def wait(self) -> None:
        for event in self.done:
            torch.cuda.current_stream(self.rank).wait_event(event)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Nccl:
    """Let loads with ``exchange="nccl"`` run over a stand-in; rank r has device r."""
    made = Nccl()

    async def join_group(_: str, rank: int, __: int, **___: Any) -> Group:
        return Group(made, rank)

    def device(_: str, coordinator: Coordinator) -> torch.device:
        return torch.device("cuda", coordinator.rank)

    monkeypatch.setattr(transport, "join_group", join_group)
    monkeypatch.setattr(_calls, "exchange_device", device)
    return made


def model(device: str | torch.device, fill: float | None = None) -> dict[str, torch.Tensor]:
    """Return tensors large and small, contiguous and not, of several dtypes."""
    generator = torch.Generator().manual_seed(1)
    made = {f"w{n}": torch.rand((300_007 + n,), generator=generator) for n in range(6)}
    made |= {f"b{n}": torch.rand((n,), generator=generator).to(torch.bfloat16) for n in (1, 3, 70)}
    made["t"] = torch.rand((501, 1003), generator=generator).t()
    if fill is not None:
        made = {name: torch.full_like(tensor, fill) for name, tensor in made.items()}
    return {name: tensor.to(device) for name, tensor in made.items()}


def options(**more: Any) -> bcp.LoadOptions:
    return bcp.LoadOptions(exchange="nccl", read_bytes=MIB, exchange_bytes=2 * MIB, **more)


async def load(path: Path, targets: Sequence[dict[str, torch.Tensor]], *each: bcp.LoadOptions) -> list[Any]:
    """Load on all ranks; return each one's report, or the error's type and the rank to blame."""
    outcomes: list[Any] = [None] * SIZE

    async def one(rank: int, coordinator: Coordinator) -> None:
        try:
            outcomes[rank] = await bcp.aload(
                path, {"model": targets[rank]}, options=each[rank % len(each)], coordinator=coordinator
            )
        except bcp.BcpError as error:
            outcomes[rank] = type(error), getattr(error, "rank", rank)  # not its traceback, which holds buffers

    async with anyio.create_task_group() as group:
        for rank, coordinator in enumerate(memory_coordinators(SIZE)):
            group.start_soon(one, rank, coordinator)
    return outcomes


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mixed", [False, True])
def test_chunks_go_from_device_to_device(tmp_path: Path, nccl: Nccl, seed: int, mixed: bool) -> None:  # noqa: FBT001
    bcp.save(tmp_path, {"model": model("cpu")})
    with accelerators(devices=SIZE, seed=seed) as machine:
        targets = [model(f"cuda:{rank}", 0.0) for rank in range(SIZE)]
        if mixed:  # a rank may have targets in host memory, or nothing else
            targets[0]["w1"] = torch.zeros_like(model("cpu")["w1"])
            targets[1] = model("cpu", 0.0)
        reports = anyio.run(load, tmp_path, targets, options())
        for target in targets:
            for name, tensor in model("cpu").items():
                assert torch.equal(target[name].cpu(), tensor), name
    assert not machine.final
    assert all(report.received_nbytes > MIB for report in reports)
    rounds = nccl.log.count((0, "alltoall"))
    assert rounds > 1
    assert sorted(nccl.log) == sorted([(r, "alltoall") for r in (0, 1)] * rounds + [(r, "shutdown") for r in (0, 1)])


def test_a_rank_that_fails_aborts_the_group_on_all(tmp_path: Path, nccl: Nccl) -> None:
    bcp.save(tmp_path, {"model": model("cpu")})

    async def fail(loaded: Any) -> Any:
        if loaded.item.round == 1:
            raise RuntimeError("a bug in a stage")
        return loaded

    bad = options(edit=lambda graph: graph.after("h2d", bcp.extend.Stage("mine", fail)))
    with accelerators(devices=SIZE, seed=1) as machine:
        targets = [model(f"cuda:{rank}", 0.0) for rank in range(SIZE)]
        outcomes = anyio.run(load, tmp_path, targets, options(), bad)
        gc.collect()  # while locked memory can still be unlocked
    assert not machine.final
    assert outcomes == [(bcp.PeerError, 1), (bcp.StageError, 1)]
    assert {what for _, what in nccl.log} <= {"alltoall", "abort"}
    assert {rank for rank, what in nccl.log if what == "abort"} == {0, 1}
