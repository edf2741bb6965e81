from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401 -- registers the backend "fake"
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

import bcp.coordinators
from bcp._messages.coordination import Abort
from bcp.coordinators import GrpcCoordinator, SoloCoordinator, coordinator, memory_coordinators
from bcp.coordinators.hosts import private_connection, reconnected
from bcp.coordinators.peers import LEFT, Heartbeats
from bcp.coordinators.tree.coordinator import FANOUT
from bcp.coordinators.tree.frames import Frame, Kind
from bcp.coordinators.tree.operation_state import FailureDetector, OperationState
from bcp.coordinators.tree.relay import LocalMember
from bcp.coordinators.tree.rendezvous import Place, StoreRendezvous
from bcp.errors import InputError
from bcp.protocols import Agreement, Coordinator
from bcp.testing.coordinator_suite import CoordinatorSuite, run_ranks


class TestMemory(CoordinatorSuite):
    def coordinators(self, world_size: int) -> Sequence[Coordinator]:
        return memory_coordinators(world_size)


@pytest.fixture(scope="module")
def server() -> TCPStore:
    """Return a server; shared, since every tenth start of one takes 5 s in torch."""
    return TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)


@pytest.mark.anyio
async def test_file_store(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    coordinators = [
        GrpcCoordinator(rank, 2, StoreRendezvous(FileStore(path, 2), "tree", rank, 2, FANOUT)) for rank in range(2)
    ]
    assert await run_ranks(coordinators, answer) == [b"01", b"01"]
    assert await run_ranks(coordinators, answer) == [b"01", b"01"]


async def answer(rank: int, agreement: Agreement) -> bytes:
    async def join(gathered: Sequence[bytes]) -> bytes:
        return b"".join(gathered)

    await agreement.gather_scatter("plan", b"", list)
    await agreement.all_to_all([b"x", b""] if rank == 1 else [b"", b""], [bytearray(), bytearray(1 - rank)])
    return await agreement.gather_broadcast("commit", b"%d" % rank, join)


@pytest.mark.parametrize("connect", [private_connection, reconnected])
def test_a_private_connection_does_not_wait_for_others(connect: object, server: TCPStore) -> None:
    assert callable(connect)
    private: Store = connect(PrefixStore("group", server))
    waiting = threading.Thread(target=server.get, args=[connect.__name__])
    waiting.start()
    private.set("a", "1")  # would wait until the other thread has its answer, on the same connection
    assert private.get("a") == b"1"
    assert waiting.is_alive()
    reconnected(server).set(connect.__name__, "")
    waiting.join()


def test_a_fork_cannot_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = memory_coordinators(1)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(InputError, match="fork"):
        ranks[0].begin("save", 1.0)


@pytest.mark.anyio
async def test_solo() -> None:
    async with SoloCoordinator().begin("save", 1.0) as agreement:
        assert await agreement.gather_scatter("plan", b"1", lambda gathered: [gathered[0] + b"!"]) == b"1!"
        received = bytearray(3)
        await agreement.all_to_all([b"xyz"], [received])
        assert received == b"xyz"
        with pytest.raises(InputError):
            await agreement.all_to_all([b"xyz"], [bytearray(4)])
        assert await agreement.bandwidth() == math.inf
    with pytest.raises(ZeroDivisionError):
        async with SoloCoordinator().begin("save", 1.0):
            raise ZeroDivisionError


def test_the_package_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        bcp.coordinators.Nonsense  # noqa: B018 -- looking it up is the test


# -- which coordinator -----------------------------------------------------------------------


def test_the_given_one_is_used() -> None:
    solo = SoloCoordinator()
    assert coordinator(solo) is solo


def test_alone_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert isinstance(coordinator(), SoloCoordinator)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert isinstance(coordinator(), SoloCoordinator)


def test_a_launcher_without_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(InputError, match=r"WORLD_SIZE=8.*init_process_group.*SoloCoordinator"):
        coordinator()
    with pytest.raises(InputError, match="init_process_group"):
        GrpcCoordinator.over()


def test_one_coordinator_for_each_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for _ in range(2):
        dist.init_process_group("fake", rank=1, world_size=2, store=HashStore())
        try:
            first = coordinator()
            assert coordinator() is first
            assert isinstance(first, GrpcCoordinator)
            assert (first.rank, first.world_size) == (1, 2)
            seen.append(first)
            assert repr(GrpcCoordinator.over()) != repr(first)  # no key in common
        finally:
            dist.destroy_process_group()
    assert seen[0] is not seen[1]
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert isinstance(coordinator(), SoloCoordinator)


# -- who is alive ----------------------------------------------------------------------------


def test_heartbeats_name_the_rank_that_is_silent_longest() -> None:
    heartbeats = Heartbeats([1, 2, 3], now=100.0)
    assert heartbeats.lost(5.0, now=105.0) is None
    heartbeats.note(1, b"1", now=103.0)
    heartbeats.note(2, b"1", now=101.0)
    assert heartbeats.lost(5.0, now=106.0) == (3, 6.0, False)
    heartbeats.note(3, b"1", now=106.0)
    heartbeats.note(1, b"1", now=107.0)  # the same sign again is no sign
    assert heartbeats.lost(5.0, now=107.0) == (2, 6.0, True)
    heartbeats.note(2, LEFT, now=107.0)
    assert heartbeats.lost(5.0, now=107.5) is None
    assert heartbeats.lost(5.0, now=108.5) == (1, 5.5, True)
    assert heartbeats.left == {2}


def test_a_watcher_that_slept_names_nobody() -> None:
    heartbeats = Heartbeats([1], now=0.0)
    heartbeats.note(1, b"1", now=1.0)
    heartbeats.note(1, b"99", now=1000.0)  # the first look after a long sleep
    assert heartbeats.lost(5.0, now=1000.0) is None


def test_a_failure_detector_does_not_count_the_seconds_of_its_own_sleep() -> None:
    detector = FailureDetector(timeout=5.0, pause=1.0, now=100.0)
    detector.watch([1, 2])
    detector.note(1)
    assert detector.look(now=101.0) is None
    assert detector.look(now=1000.0) is None  # asleep for 899 s, of which 2 count
    assert detector.awake == 3.0
    detector.note(2)
    for second in (1001.0, 1002.0):
        assert detector.look(now=second) is None
    assert detector.look(now=1003.0) == (1, 6.0, True)
    detector.leave(1)
    assert detector.look(now=1004.0) is None


class MiddleNode:
    """The node of rank 1 between 0 and 2, whose edges are quiet for as many seconds as a test says."""

    rank = 1
    place = Place(1, 3, parent=0, children=(2,), sizes=(1,))

    def __init__(self) -> None:
        self.seconds = {0: 0.0, 2: 0.0}
        self.sent: list[tuple[int, Kind]] = []
        self.renewed: list[int] = []

    def send(self, rank: int, frame: Frame) -> None:
        self.sent.append((rank, frame.kind))

    def name(self, rank: int) -> str:
        return f"rank {rank}"

    def connected(self, rank: int) -> bool:
        return rank in self.seconds

    def quiet(self, rank: int) -> float:
        return self.seconds[rank]

    def renew(self, rank: int) -> None:
        self.renewed.append(rank)

    def trouble(self, rank: int) -> str:
        raise AssertionError(f"rank {rank} is blamed")

    def absent(self) -> int | None:
        return None

    def silence(self, seconds: float) -> str:
        raise AssertionError(f"the store is blamed after {seconds} s")

    def announce(self, number: int, abort: Abort) -> None:
        raise AssertionError(f"operation {number} ends: {abort}")


def test_a_silent_edge_is_asked_and_dialled_anew_and_no_other_one() -> None:
    node = MiddleNode()
    state = OperationState(0, node)
    state.begin(LocalMember("save", 10.0, 1.0, lambda _, __: None, lambda _: None), 0.0)
    node.sent.clear()
    node.seconds = {0: 900.0, 2: 900.0}
    state.beat(900.0)  # the rank slept itself: 2 s of them count
    assert node.sent == [(0, Kind.BEAT), (2, Kind.BEAT)]
    for second in range(1, 8):
        node.sent.clear()
        node.seconds = {0: 900.0 + second, 2: 0.5}
        state.beat(900.0 + second)
        assert node.sent == [(0, Kind.BEAT if second < 2 else Kind.ASK), (2, Kind.BEAT)]
        assert node.renewed == [0] * max(0, second - 2)
