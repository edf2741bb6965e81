"""Agents make a save durable as the trainers would have done, whoever dies at whatever point."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from interleave import Dead, Turns, orders
from kept import kept, marks_of
from tasks import on_ranks

import bcp
from bcp.agent.commit import Outcome
from bcp.agent.generation import advance
from bcp.backends import LocalBackend, MemoryBackend
from bcp.errors import CorruptError, StorageError
from bcp.format.metadata import DRAIN, METADATA_KEY, decode_metadata
from bcp.protocols import Backend
from bcp.testing.storage_fakes import CountingBackend, FaultyBackend
from bcp.tiers.folder import NodeFolder
from bcp.tiers.records import record_key

WORLD = 4
NODES = ((0, 1), (2, 3))


@pytest.fixture(scope="module")
def direct(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of four ranks that was saved directly: what agents have to make, byte for byte."""
    path = tmp_path_factory.mktemp("direct") / "step-1"
    states = {
        "model": {f"w{n}": torch.arange(n * 900, (n + 1) * 900, dtype=torch.float32) for n in range(6)},
        "extra_states": {"epoch": 3},
    }

    async def save(_: int, ranks: Any) -> None:
        await bcp.asave(path, states, options=bcp.SaveOptions(record=False), coordinator=ranks)

    assert on_ranks(WORLD, save) == [None] * WORLD
    return path


class Hosts:
    """Two hosts with the files of two ranks each, and one storage."""

    def __init__(self, direct: Path, root: Path, name: str, **more: Any) -> None:
        self.direct = direct
        MemoryBackend.forget(name)
        self.store = MemoryBackend(name)
        self.folders = [kept(direct, root / f"node-{number}", ranks, **more) for number, ranks in enumerate(NODES)]

    @property
    def operation(self) -> str:
        return next(iter(marks_of(self.folders[0]))).operation

    def advance(self, node: int, store: Backend | None = None, folder: NodeFolder | None = None) -> Awaitable[Outcome]:
        """Let the agent of one host go on."""
        folder = folder or self.folders[node]
        return advance(folder, marks_of(self.folders[node]), store or self.store, "the place", f"n{node}")

    def stored(self) -> Mapping[str, bytes]:
        return {key: bytes(data) for key, data in self.store._objects.items()}

    def check(self) -> None:
        """Check that storage has what a direct save has written, and nothing else."""
        wanted = {path.relative_to(self.direct).as_posix(): path.read_bytes() for path in self.direct.rglob("*.*")}
        found = dict(self.stored())
        commits = [decode_metadata(each.pop(METADATA_KEY), "").commit for each in (wanted, found)]
        assert replace(commits[0], created="") == replace(commits[1], created="")
        assert found == wanted

    def forget(self) -> None:
        """Begin anew: nothing is in storage, and no file has been digested."""
        for key in self.stored():
            del self.store._objects[key]
        for folder in self.folders:
            for receipt in (folder.root / "receipts").glob("*"):
                receipt.unlink()


@pytest.fixture
def hosts(direct: Path, tmp_path: Path) -> Hosts:
    return Hosts(direct, tmp_path, str(tmp_path))


def test_what_agents_have_drained_is_what_the_trainers_would_have_written(hosts: Hosts) -> None:
    assert asyncio.run(hosts.advance(0)) is Outcome.WAITING
    assert METADATA_KEY not in hosts.stored()
    assert asyncio.run(hosts.advance(0)) is Outcome.WAITING
    assert asyncio.run(hosts.advance(1)) is Outcome.COMMITTED
    hosts.check()
    assert asyncio.run(hosts.advance(0)) is Outcome.COMMITTED
    hosts.check()


def test_it_loads_in_another_layout(hosts: Hosts, tmp_path: Path) -> None:
    store = LocalBackend(tmp_path / "store")
    assert asyncio.run(hosts.advance(0, store)) is Outcome.WAITING
    assert asyncio.run(hosts.advance(1, store)) is Outcome.COMMITTED
    target = {f"w{n}": torch.zeros(900) for n in range(6)}
    bcp.load(tmp_path / "store", {"model": target, "extra_states": {"epoch": 0}})
    assert all(torch.equal(target[f"w{n}"], torch.arange(n * 900, (n + 1) * 900.0)) for n in range(6))


class Dying(CountingBackend):
    """A backend whose process dies at the n-th operation of all, before it or after it."""

    def __init__(self, inner: Backend, deaths: list[int]) -> None:
        super().__init__(inner)
        self._deaths = deaths

    async def before(self, operation: str, key: str) -> None:
        del operation, key
        self._deaths[0] -= 1
        if not self._deaths[0]:
            raise Dead


@pytest.mark.parametrize("node", range(2))
def test_an_agent_that_dies_at_any_operation_loses_nothing(node: int, hosts: Hosts) -> None:
    """Its first life ends before each operation on memory or storage; then both agents go on."""
    points = 0
    while True:
        hosts.forget()
        deaths = [points + 1]
        asyncio.run(hosts.advance(1 - node))
        own = NodeFolder(hosts.folders[node].root)
        own.files = Dying(own.files, deaths)  # type: ignore[assignment]  # a fake
        try:
            outcome = asyncio.run(hosts.advance(node, Dying(hosts.store, deaths), own))
        except Dead:
            points += 1
        else:
            assert outcome is Outcome.COMMITTED
            break
        assert asyncio.run(hosts.advance(node)) is Outcome.COMMITTED
        assert asyncio.run(hosts.advance(1 - node)) is Outcome.COMMITTED
        hosts.check()
    assert points > 40


class Stepped(CountingBackend):
    """Storage whose operations that other hosts see wait for their turn."""

    def __init__(self, inner: Backend, turns: Turns, me: int) -> None:
        super().__init__(inner)
        self._turns, self._me = turns, me

    async def before(self, operation: str, key: str) -> None:
        if operation in ("put", "put_if", "list", "delete", "version") and "receipts/" not in key:
            await self._turns.step(self._me, f"{operation} {key}")


@pytest.mark.parametrize(("changes", "deaths"), [(2, 0), (1, 1), pytest.param(3, 1, marks=pytest.mark.long)])
def test_two_agents_at_once_in_any_order(changes: int, deaths: int, hosts: Hosts) -> None:
    """One commit at most is let through, and a committed checkpoint is whole at every moment."""
    agents: list[Callable[[Turns, int], Awaitable[Outcome]]] = [
        lambda turns, me: hosts.advance(0, Stepped(hosts.store, turns, me)),
        lambda turns, me: hosts.advance(1, Stepped(hosts.store, turns, me)),
    ]

    def look() -> None:
        if METADATA_KEY in hosts.stored():
            files = {path.relative_to(hosts.direct).as_posix() for path in hosts.direct.rglob("*.*")}
            assert files <= {*hosts.stored()}

    count = 0
    for turns in orders(changes=changes, deaths=deaths):
        hosts.forget()
        try:
            results = asyncio.run(turns.run(agents, look))
            assert not [each for each in results if not isinstance(each, Outcome | Dead)], results
            for node in (0, 1, 0):
                asyncio.run(hosts.advance(node))
            hosts.check()
        except BaseException as error:
            error.add_note("\n".join(turns.taken))
            raise
        count += 1
    assert count > 20


# -- another checkpoint at the same place ------------------------------------------------------------


def test_a_checkpoint_of_somebody_else_is_not_replaced(hosts: Hosts) -> None:
    bcp.save(hosts.store, {"model": {"w": torch.ones(3)}}, options=bcp.SaveOptions(record=False))
    before = hosts.stored()
    assert [asyncio.run(hosts.advance(node)) for node in range(2)] == [Outcome.REFUSED] * 2
    assert hosts.stored() == before


def test_the_checkpoint_that_the_save_names_is_replaced_and_its_files_go(direct: Path, tmp_path: Path) -> None:
    store = MemoryBackend(str(tmp_path))
    bcp.save(store, {"model": {"w": torch.ones(3)}}, options=bcp.SaveOptions(record=False))
    hosts = Hosts(direct, tmp_path, "other", replaces=bcp.Checkpoint(store).operation)
    hosts.store = store
    assert [asyncio.run(hosts.advance(node)) for node in range(2)] == [Outcome.WAITING, Outcome.COMMITTED]
    hosts.check()


def test_a_late_host_does_not_bring_back_an_older_save(direct: Path, tmp_path: Path) -> None:
    """Both saves may replace the same checkpoint: the first commit wins, and the other finds another one there."""
    store = MemoryBackend(str(tmp_path))
    bcp.save(store, {"model": {"w": torch.ones(3)}}, options=bcp.SaveOptions(record=False))
    hosts = Hosts(direct, tmp_path, "other", replaces=bcp.Checkpoint(store).operation)
    hosts.store = store
    assert asyncio.run(hosts.advance(0)) is Outcome.WAITING
    bcp.save(store, {"model": {"w": torch.zeros(3)}}, overwrite=True, options=bcp.SaveOptions(record=False))
    newer = bcp.Checkpoint(store).operation
    assert not asyncio.run(store.list(DRAIN))  # the save has deleted the record with the files
    assert [asyncio.run(hosts.advance(node)) for node in (1, 0)] == [Outcome.REFUSED] * 2
    assert bcp.Checkpoint(store).operation == newer
    assert bcp.Checkpoint(store).verify()


def test_an_upload_that_is_under_way_keeps_its_place_from_being_deleted(hosts: Hosts) -> None:
    assert asyncio.run(hosts.advance(0)) is Outcome.WAITING
    with pytest.raises(bcp.UncommittedError):
        bcp.tools.remove(hosts.store)
    bcp.save(hosts.store, {"model": {"w": torch.ones(3)}}, options=bcp.SaveOptions(record=False))
    record = record_key("n0", hosts.operation)
    asyncio.run(hosts.store.put(record, b"late"))
    with pytest.raises(bcp.InputError, match=hosts.operation):
        bcp.tools.remove(hosts.store)
    assert bcp.tools.remove(hosts.store, force=True).kept == (record,)


def test_remains_of_an_upload_go_with_their_record(hosts: Hosts) -> None:
    assert asyncio.run(hosts.advance(0)) is Outcome.WAITING
    [remains] = bcp.tools.collect(hosts.store, min_age_seconds=0)
    assert (remains.operation, remains.files, remains.deleted) == (hosts.operation, len(NODES[0]) * 3 + 1, True)
    assert not hosts.stored()


def test_the_record_of_a_late_host_goes_with_its_checkpoint(hosts: Hosts) -> None:
    assert [asyncio.run(hosts.advance(node)) for node in range(2)] == [Outcome.WAITING, Outcome.COMMITTED]
    asyncio.run(hosts.store.put(record_key("n0", hosts.operation), b"late"))
    assert bcp.Checkpoint(hosts.store).verify()
    assert not bcp.tools.remove(hosts.store).kept
    assert not hosts.stored()


# -- damage and outages ------------------------------------------------------------------------------


def test_a_bit_that_flips_behind_the_digest_is_not_committed(hosts: Hosts) -> None:
    with pytest.raises(StorageError, match="full"):
        asyncio.run(hosts.advance(0, FaultyBackend(hosts.store, "open_write", StorageError("full"))))
    file = next(path for path in sorted(hosts.folders[0].root.glob("model/*")) if path.stat().st_size > 900)
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(data)
    with pytest.raises(CorruptError, match=rf"a file in memory has changed.*{file.name}"):
        asyncio.run(hosts.advance(0))
    assert asyncio.run(hosts.advance(1)) is Outcome.WAITING
    assert METADATA_KEY not in hosts.stored()


def test_a_file_that_has_gone_is_named(hosts: Hosts) -> None:
    file = min(hosts.folders[0].root.glob("model/*"))
    file.unlink()
    with pytest.raises(CorruptError, match=rf"{file.name} has gone"):
        asyncio.run(hosts.advance(0))


def test_a_damaged_layout_is_named(hosts: Hosts) -> None:
    [layout] = (hosts.folders[0].root / "layouts").iterdir()
    layout.write_bytes(layout.read_bytes()[:-1])
    with pytest.raises(CorruptError, match=f"{layout.name} is damaged"):
        asyncio.run(hosts.advance(0))


@pytest.mark.parametrize("operation", ["version", "get", "put", "open_write", "write_part", "commit", "list", "put_if"])
def test_an_outage_ends_the_round_and_the_next_one_goes_on(operation: str, hosts: Hosts) -> None:
    asyncio.run(hosts.advance(1))
    with pytest.raises(StorageError, match="away"):
        asyncio.run(hosts.advance(0, FaultyBackend(hosts.store, operation, StorageError("away"))))
    assert asyncio.run(hosts.advance(0)) is Outcome.COMMITTED
    hosts.check()


def test_files_that_were_deleted_in_storage_are_not_committed(hosts: Hosts) -> None:
    asyncio.run(hosts.advance(0))
    asyncio.run(hosts.store.delete([next(key for key in hosts.stored() if key.startswith("model/"))]))
    with pytest.raises(StorageError, match="not there as they were written"):
        asyncio.run(hosts.advance(1))
    assert METADATA_KEY not in hosts.stored()


def test_the_bytes_of_a_share_are_sent_once(hosts: Hosts) -> None:
    store = CountingBackend(hosts.store)
    for _ in range(3):
        asyncio.run(hosts.advance(0, store))
    files = list(hosts.folders[0].root.glob("[me]*/*"))
    assert sum(store.written[f"{path.parent.name}/{path.name}"] for path in files) == sum(
        path.stat().st_size for path in files
    )


def test_files_that_were_taken_away_are_gone(hosts: Hosts) -> None:
    marks = marks_of(hosts.folders[0])
    assert all(hosts.folders[0].take(mark) for mark in marks)
    assert asyncio.run(advance(hosts.folders[0], marks, hosts.store, "the place", "n0")) is Outcome.GONE
    assert not hosts.stored()


def test_a_record_names_its_host_and_save() -> None:
    assert record_key("n0", "0123456789abcdef") == "drain/n0-0123456789abcdef"
