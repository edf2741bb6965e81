"""Calls of a store that hangs, fails, or does not even let a client connect."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import pytest
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401 -- registers the backend "fake"
from forked import run_forked
from logs import without_torchs_warnings
from ranks import ended, started
from torch.distributed import DistNetworkError, DistStoreError, FileStore, HashStore, PrefixStore, Store, TCPStore

import bcp
from bcp.coordinators import GrpcCoordinator
from bcp.coordinators.store_client import StoreClient
from bcp.coordinators.tree.rendezvous import StoreRendezvous
from bcp.errors import InputError, PeerError

pytestmark = pytest.mark.anyio


class Hung(HashStore):
    """A store whose server is stopped until it is let on."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()
        self.let_on = threading.Event()
        self.threads: set[threading.Thread] = set()

    def check(self, keys: list[str]) -> bool:
        self.threads.add(threading.current_thread())
        self.asked.set()
        self.let_on.wait(60)
        return super().check(keys)


async def given_up(client: StoreClient, hung: Hung, function: Callable[[], object]) -> None:
    """Call a function of a hung store, and give the call up once the thread is in it."""
    while True:
        try:
            await client.call(function, seconds=0.1)
        except PeerError:
            if hung.asked.is_set():
                raise


@pytest.fixture
def hung() -> Iterator[Hung]:
    store = Hung()
    yield store
    store.let_on.set()


async def test_a_call_that_hangs_is_given_up_and_names_the_store(hung: Hung) -> None:
    client = StoreClient(hung)
    with pytest.raises(PeerError, match=r"the store \(Hung\) has not answered for \d.*restart the job") as caught:
        await given_up(client, hung, lambda: client.store.check(["a"]))
    assert caught.value.rank == 0
    assert client.stuck
    assert "has not answered" in client.silence(0.0)


async def test_later_calls_wait_for_the_one_that_hangs_in_one_thread(hung: Hung) -> None:
    client, made = StoreClient(hung), list[int]()
    with pytest.raises(PeerError):
        await given_up(client, hung, lambda: made.append(0) or client.store.check(["a"]))
    for number in range(1, 4):
        with pytest.raises(PeerError):
            await client.call(lambda number=number: made.append(number) or client.store.check(["a"]), seconds=0.1)
    assert "0 calls wait" in repr(client)  # what was given up before it began is forgotten
    hung.let_on.set()
    assert await client.call(lambda: client.store.check(["a"]), seconds=60.0) is False
    assert made == [0]
    assert len(hung.threads) == 1
    assert not client.stuck
    assert client.silence(60.0) == ""


async def test_a_cancelled_caller_leaves_the_call_behind(hung: Hung) -> None:
    client = StoreClient(hung)
    first = asyncio.create_task(client.call(lambda: client.store.check(["a"])))
    await asyncio.to_thread(hung.asked.wait, 60)
    second = asyncio.create_task(client.call(lambda: client.store.set("b", "")))
    await asyncio.sleep(0)
    for task in (first, second):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    hung.let_on.set()
    assert await client.call(lambda: client.store.check(["b"])) is False  # the second was never made


async def test_it_connects_at_the_first_call_and_again_where_that_failed() -> None:
    attempts = []

    def connect(store: Store) -> Store:
        attempts.append(store)
        if len(attempts) == 1:
            raise DistNetworkError("connection refused")
        return store

    store = HashStore()
    client = StoreClient(store, connect)
    assert not attempts
    with pytest.raises(PeerError, match=r"failed after \d+\.\d s: DistNetworkError: connection refused; its server"):
        await client.call(lambda: client.store.set("a", "1"))
    await client.call(lambda: client.store.set("a", "1"))
    assert client.call_blocking(lambda: client.store.get("a"), seconds=60.0) == b"1"
    assert attempts == [store, store]


@pytest.mark.parametrize("kind", [DistNetworkError, DistStoreError, RuntimeError, ConnectionResetError])
async def test_what_a_store_raises_becomes_a_peer_error(kind: type[Exception]) -> None:
    def fail() -> None:
        raise kind("reset by peer")

    client = StoreClient(HashStore())
    with pytest.raises(PeerError, match=rf"{kind.__name__}: reset by peer") as caught:
        await client.call(fail)
    assert isinstance(caught.value.__cause__, kind)
    with pytest.raises(PeerError):
        client.call_blocking(fail, seconds=60.0)


async def test_a_bug_stays_one() -> None:
    with pytest.raises(ZeroDivisionError):
        await StoreClient(HashStore()).call(lambda: 1 // 0)


def test_the_name_says_where_the_store_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    nested = PrefixStore("a", PrefixStore("b", store))
    at = f"the store at 127.0.0.1:{store.port}"
    assert StoreClient(nested).name == f"{at} (served as a rule by the process of rank 0)"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    assert StoreClient(nested).name == f"{at} (served by torchrun's agent on that host)"
    path = str(tmp_path / "store")
    assert StoreClient(PrefixStore("a", FileStore(path, 1))).name == f"the store in the file {path}"
    client = StoreClient(store)
    assert StoreClient.of(client) is client


HANGS = """
import sys
from bcp.coordinators.store_client import StoreClient
from bcp.coordinators.tree.rendezvous import StoreRendezvous
from bcp.errors import PeerError
from torch.distributed import TCPStore
import anyio, socket

listener = socket.create_server(("127.0.0.1", 0))  # accepts, and never answers
port = listener.getsockname()[1]

def connect(_):
    return TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)

client = StoreClient(TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False), connect)
try:
    anyio.run(lambda: client.call(lambda: client.store.get("a"), seconds=0.1))
except PeerError:
    sys.exit(7)
"""


def test_a_call_that_hangs_does_not_hold_up_the_end_of_the_process(tmp_path: Path) -> None:
    program = tmp_path / "hangs.py"
    program.write_text(HANGS)
    process = run_forked([sys.executable, program], timeout=240)
    assert (process.returncode, process.stdout, without_torchs_warnings(process.stderr)) == (7, "", "")


# -- process groups ----------------------------------------------------------------------------------


def join_by_file(rank: int, folder: Path) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder / 'meeting'}")
    for number in range(2):
        bcp.save(folder / str(number), {"extra_states": {"rank": rank}})
    bcp.save(folder / "2", {"extra_states": {"rank": rank}}, coordinator=GrpcCoordinator.over())
    loaded: dict[str, int] = {}
    bcp.load(folder / "2", {"extra_states": loaded})
    assert loaded == {"rank": rank}
    dist.destroy_process_group()
    bcp.save(folder / f"alone{rank}", {"extra_states": loaded})


@pytest.mark.dist
def test_ranks_that_meet_in_a_file_and_go_on_without_a_group(tmp_path: Path) -> None:
    assert ended(started(2, join_by_file, tmp_path), 240) == [0, 0]


def test_a_group_that_was_destroyed_is_refused() -> None:
    dist.init_process_group("fake", rank=1, world_size=2, store=HashStore())
    try:
        group, other = dist.new_group([0, 1]), dist.new_group([0])
        dist.destroy_process_group(group)
        with pytest.raises(InputError, match="was destroyed, or never was a process group; pass one in use"):
            GrpcCoordinator.over(group)
        with pytest.raises(InputError, match="not a member"):
            GrpcCoordinator.over(other)
    finally:
        dist.destroy_process_group()
    with pytest.raises(InputError, match="there is no process group"):
        GrpcCoordinator.over()


async def test_the_first_operation_ends_after_its_timeout(hung: Hung) -> None:
    client = StoreClient(hung)
    with pytest.raises(PeerError):
        await given_up(client, hung, lambda: client.store.check(["a"]))
    ranks = GrpcCoordinator(1, 2, StoreRendezvous(client, "job", 1, 2, 16))
    with anyio.fail_after(60):
        for _ in range(2):
            with pytest.raises(PeerError, match=r"the store .* has not answered for") as caught:
                async with ranks.begin("save", 0.5) as agreement:
                    await agreement.gather_broadcast("commit", b"", None)
            assert caught.value.rank == 0
    assert len(hung.threads) == 1
