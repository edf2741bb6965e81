"""Stripes between agents: the files of any lost host follow from them, byte for byte, or nothing does."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from kept import kept
from tasks import on_ranks

import bcp
from bcp._messages.tiers import Sources
from bcp.agent.copying import Copier
from bcp.agent.loop import Agent
from bcp.agent.pace import Pace
from bcp.agent.serve import MemoryServer
from bcp.backends import LocalBackend
from bcp.errors import CorruptError
from bcp.format.metadata import receipt_key
from bcp.plan.parity import Row
from bcp.protocols import Backend
from bcp.tiers.digests import digested
from bcp.tiers.folder import NodeFolder
from bcp.tiers.notes import COMMITTED, COPYING, LEFT, Mark
from bcp.tiers.packing import unpacked
from bcp.tiers.parity import Rebuilt
from bcp.tiers.parity_files import operation_in
from bcp.tiers.recovery import Hosts

TOKEN = b"the token of this job"
SIZE = 3


class Group:
    """Hosts of one group; host 0 has two ranks, and each other one has one."""

    def __init__(self, root: Path, stack: ExitStack, size: int = SIZE) -> None:
        self.root, self.size, self.operations = root, size, dict[int, str]()
        self.ranks = [(0, 1), *((host + 1,) for host in range(1, size))]
        self.folders = [NodeFolder(root / f"h{host}") for host in range(size)]
        for folder in self.folders:
            folder.put_token(TOKEN)
        self.servers = [stack.enter_context(MemoryServer(folder, "127.0.0.1")) for folder in self.folders]
        names = tuple(f"h{host}" for host in range(size))
        hosts = Hosts(names, tuple(f"127.0.0.1:{server.address[1]}" for server in self.servers))
        for host, folder in enumerate(self.folders):
            folder.put_sources(hosts.in_parity_with(f"h{host}", max(size, 3), 1))
        self.restarted()

    def restarted(self) -> None:
        self.copiers = [Copier(folder, 0.01, Pace(None)) for folder in self.folders]

    def keep(self, step: int, *, numel: int = 300_000, **more: Any) -> str:
        """Let a step be in the memories of all."""
        direct, world = self.root / f"direct-{step}", self.size + 1
        values = torch.arange(numel, dtype=torch.float32) * (step + 0.5)

        async def save(rank: int, ranks: Any) -> None:
            states = {"model": {f"w{rank}": values[: numel // (rank + 1)] + rank}, "extra_states": {"at": step}}
            await bcp.asave(direct, states, options=bcp.SaveOptions(record=False), coordinator=ranks)

        assert on_ranks(world, save) == [None] * world
        operation = self.operations[step] = bcp.Checkpoint(direct).operation
        for host, folder in enumerate(self.folders):
            kept(direct, folder.root, self.ranks[host], place=f"step-{step}", step=step, **{"copied": True, **more})
            for rank in self.ranks[host]:
                os.utime(folder.root / "intents" / Mark(operation, rank).name, (step, step))
        return operation

    def round(self, *hosts: int) -> list[bool]:
        """Let these hosts ask once, or all."""
        chosen = hosts or range(self.size)
        return [asyncio.run(self.copiers[host].round(self.folders[host].sources())) for host in chosen]

    def have(self, host: int) -> list[int]:
        """Return the steps of which a host has stripes."""
        steps = {operation: step for step, operation in self.operations.items()}
        return sorted(steps[each] for each in self.folders[host].parity.ages())

    def rebuilt(self, step: int, lost: int) -> Rebuilt:
        others: dict[int, Backend] = {host: self.folders[host].files for host in range(self.size) if host != lost}
        copies = {rank: [files] for host, files in others.items() for rank in self.ranks[host]}
        return Rebuilt(self.operations[step], self.ranks, lost, others, copies)

    def check(self, step: int, lost: int) -> None:
        """Compare all files of a lost host with those of the direct save."""
        files, operation = self.rebuilt(step, lost), self.operations[step]
        count = 0
        for rank in self.ranks[lost]:
            for path in self.root.glob(f"direct-{step}/*/{rank:05d}-{operation}.*"):
                key, data = path.relative_to(self.root / f"direct-{step}").as_posix(), path.read_bytes()
                count += 1
                if key == receipt_key(rank, operation):
                    assert bytes(asyncio.run(files.get(key))) == data
                    continue
                for start, stop in ((0, len(data)), (len(data) // 3, len(data) // 2), (len(data) - 1, len(data))):
                    out = bytearray(stop - start)
                    asyncio.run(files.read_into(key, start, memoryview(out)))
                    assert out == data[start:stop], (key, start, stop)
        assert count >= 2

    def inodes(self, host: int) -> set[int]:
        return {path.stat().st_ino for path in (self.folders[host].root / "parity").glob("*.xor")}


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    with ExitStack() as stack:
        yield Group(tmp_path, stack)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_the_files_of_any_lost_host_follow_from_the_others(size: int, tmp_path: Path) -> None:
    with ExitStack() as stack:
        group = Group(tmp_path, stack, size)
        operation = group.keep(1)
        assert all(group.round())
        assert not group.folders[0].is_copied(operation, size - 1), "nobody has told it yet"
        assert all(group.round())
        for lost in range(size):
            group.check(1, lost)
            assert group.folders[lost].is_copied(operation, size - 1)
            assert not group.folders[lost].is_copied(operation, size)


def test_a_stripe_has_a_share_of_a_copy(tmp_path: Path) -> None:
    """The rows of other hosts are cut into four segments, at blocks."""
    with ExitStack() as stack:
        group = Group(tmp_path, stack, 5)
        operation = group.keep(1, numel=4_000_000)
        group.round()
        rows = []
        for host, folder in enumerate(group.folders):
            files = folder.data_files()
            rows.append(sum(path.stat().st_size for rank in group.ranks[host] for path in files[Mark(operation, rank)]))
        for host, folder in enumerate(group.folders):
            others = [nbytes for other, nbytes in enumerate(rows) if other != host]
            assert folder.parity.stripe(operation).stat().st_size <= max(others) / 4 + (1 << 20)


def test_a_stripe_waits_for_all_hosts(group: Group) -> None:
    group.keep(1)
    with group.folders[1].arranging():
        late = group.folders[1].join(7)
    assert all(group.round())
    assert [group.have(host) for host in range(SIZE)] == [[]] * SIZE
    late.close()
    group.keep(2, copied=False)
    group.folders[2].end(group.keep(3), LEFT)
    assert group.round(0) == [True]
    assert group.have(0) == [], "host 2 has given up what the others offer"


def test_memory_of_old_stripes_is_used_again(group: Group) -> None:
    for step in (1, 2):
        group.keep(step)
        group.round()
    before = group.inodes(0)
    assert len(before) == 2
    for step in (3, 4, 5):
        group.keep(step)
        group.round()
        assert group.have(0) == [step - 1, step]
        assert group.inodes(0) == before
        group.check(step, 1)
        group.check(step - 1, 2)
    known = {path.name.partition("-")[2] for path in (group.folders[0].root / "parity").glob("0*-*")}
    assert known == {group.operations[4], group.operations[5]}


def test_a_snapshot_that_a_job_goes_on_from_keeps_its_stripes_until_storage_has_it(group: Group) -> None:
    first = group.keep(1)
    group.round()
    for folder in group.folders:
        folder.want(first)
    for step in (2, 3, 4):
        group.keep(step)
        group.round()
        assert group.have(0)[0] == 1
        group.check(1, 2)
    for folder in group.folders:
        folder.end(first, COMMITTED)
    group.keep(5)
    group.round()
    assert group.have(0) == [4, 5]


def test_stripes_of_another_size_leave_nothing_behind(group: Group) -> None:
    for step, numel in enumerate((300_000, 300_000, 500, 900_000, 500), 1):
        group.keep(step, numel=numel)
        group.round()
        group.check(step, 2)
    assert group.have(1) == [4, 5]
    assert len(group.inodes(1)) == 2


def test_an_agent_that_starts_again_tells_what_it_has(group: Group) -> None:
    operation = group.keep(1)
    group.round()
    before = [folder.parity.ages() for folder in group.folders]
    group.restarted()
    group.round()
    group.round()
    assert [folder.parity.ages() for folder in group.folders] == before
    assert group.folders[0].is_copied(operation, SIZE - 1)


def test_damaged_files_go_into_no_stripe(group: Group) -> None:
    first = group.keep(1)
    [path] = (group.folders[0].root / "model").glob(f"00000-{first}*")
    good = path.read_bytes()
    asyncio.run(_digest(group.folders[0], first))
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert not all(group.round(1, 2))
    path.write_bytes(good)
    assert all(group.round())
    for lost in range(SIZE):
        group.check(1, lost)


async def _digest(folder: NodeFolder, operation: str) -> None:
    for rank in (0, 1):
        with folder.holding(Mark(operation, rank)) as held:
            assert held is not None
            await digested(folder.files, held.blank)


def test_a_stripe_that_is_killed_is_made_again(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in there already is no part of the next try."""
    group.keep(1)
    with monkeypatch.context() as patch:
        patch.setattr("bcp.tiers.parity_files.ParityFiles.mark", _killed)
        with pytest.raises(KeyboardInterrupt):
            group.round(0)
    assert group.have(0) == []
    group.restarted()
    group.round()
    assert group.have(0) == [1]
    group.check(1, 1)


def _killed(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_full_memory_keeps_what_is_there(
    group: Group, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group.keep(1)
    group.round()
    group.keep(2)

    def full(_: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, f"no room for {nbytes} bytes")

    with monkeypatch.context() as patch:
        patch.setattr("bcp.tiers.folder.fallocate", full)
        assert group.round(0, 0) == [False, False]
    assert caplog.text.count("is not made yet") == 1, "it is told once"
    assert group.have(0) == [1]
    group.round()
    assert group.have(0) == [1, 2]


def test_a_host_that_is_away_is_asked_again(group: Group) -> None:
    """Those that answer learn meanwhile what this host has."""
    operation = group.keep(1)
    group.round()
    there = group.folders[0].sources()
    group.folders[0].put_sources(Sources(there.nodes, (there.addresses[0], "127.0.0.1:1"), there.place))
    assert group.round(0) == [False]
    assert (group.folders[2].root / "copied" / f"{operation}-1").exists()
    assert group.folders[0].troubles(COPYING).keys() == {there.nodes[1]}
    group.folders[0].put_sources(there)
    assert group.round(0) == [True]
    assert not group.folders[0].troubles(COPYING)


def test_a_stripe_of_an_earlier_group_stays(group: Group) -> None:
    """The job goes on from its snapshot without a lost host, whose files follow from it."""
    group.keep(1)
    group.round()
    hosts = Hosts(("h0", "h1"), tuple(f"127.0.0.1:{server.address[1]}" for server in group.servers[:2]))
    for host in range(2):
        group.folders[host].put_sources(hosts.in_parity_with(f"h{host}", 3, 1))
    assert all(group.round(0, 1))
    group.check(1, 2)
    group.keep(2)
    group.round(0, 1)
    group.check(1, 2)
    group.keep(3)
    group.round(0, 1)
    assert group.have(0) == [2, 3]


def test_a_run_without_parity_gives_stripes_back(group: Group) -> None:
    group.keep(1)
    group.round()
    group.folders[0].put_sources(Sources((), ()))
    later = max(group.folders[0].parity.ages().values())
    group.folders[0].want(group.operations[1])
    for step in (2, 3, 4):
        assert group.have(0) == [1]
        if step == 4:
            group.folders[0].end(group.operations[1], COMMITTED)
        operation = group.keep(step)
        for rank in group.ranks[0]:
            os.utime(group.folders[0].root / "intents" / Mark(operation, rank).name, (later + step, later + step))
        group.round(0)
    assert group.have(0) == []
    assert not [*(group.folders[0].root / "parity").iterdir()]


def test_what_is_given_up_counts_no_more(group: Group) -> None:
    first = group.keep(1)
    group.round()
    with group.folders[0].parity.holding(first) as record:
        assert record is not None
        assert [unpacked(each).tolist() for each in record.ranks] == [[*each] for each in group.ranks]
        assert not group.folders[0].parity.give_back(first), "somebody reads it"
    group.folders[0].leave_behind(first)
    assert group.have(0) == [1]
    group.folders[0].leave_behind("")
    group.folders[1].clear()
    for host in (0, 1):
        assert group.have(host) == []
        assert not [*(group.folders[host].root / "parity").iterdir()]


def test_damaged_records_count_for_nothing(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    first, second = group.keep(1), ""
    group.round()
    second = group.keep(2)
    group.round()
    parity = group.folders[0].parity
    torn, other = (parity.root / f"{each}.record" for each in (first, second))
    other.write_bytes(torn.read_bytes())
    torn.write_bytes(torn.read_bytes()[:-3])
    for operation in (first, second):
        with parity.holding(operation) as record:
            assert record is None
    assert caplog.text.count("counts for nothing") == 2


def test_what_cannot_be_rebuilt_is_named(group: Group) -> None:
    operation = group.keep(1)
    group.round()
    files, key = group.rebuilt(1, 1), f"model/00002-{operation}.safetensors"
    with pytest.raises(FileNotFoundError, match="has no model/00009"):
        asyncio.run(files.read_into(f"model/00009-{operation}.safetensors", 0, memoryview(bytearray(4))))
    with pytest.raises(FileNotFoundError, match="has no optimizer/00002"):
        asyncio.run(files.get(f"optimizer/00002-{operation}.safetensors"))
    with pytest.raises(CorruptError, match="is shorter than"):
        asyncio.run(files.read_into(key, 1 << 30, memoryview(bytearray(4))))
    for path in group.folders[0].data_files()[Mark(operation, 0)]:
        path.unlink()
    with pytest.raises(CorruptError, match=f"needs .*/00000-{operation}"):
        asyncio.run(
            group.rebuilt(1, 1).read_into(key, 0, memoryview(bytearray((group.root / "direct-1" / key).stat().st_size)))
        )
    for path in (group.folders[0].root / "parity").glob("0*-*"):
        path.unlink()
    with pytest.raises(CorruptError, match=f"needs parity/00002-{operation}: "):
        asyncio.run(_alone(group, operation))


async def _alone(group: Group, operation: str) -> object:
    """Ask the one host that is left, which has lost what it knew."""
    files = Rebuilt(operation, group.ranks, 1, {0: LocalBackend(group.folders[0].root)}, {})
    return await files.get(receipt_key(2, operation))


def test_agents_make_a_snapshot_durable_without_a_lost_host(group: Group) -> None:
    """The next host of the group rebuilds its files once the snapshot is stuck, and only that one."""
    direct, store = group.root / "direct-1", LocalBackend(group.root / "store")
    operation = group.keep(1)
    group.round()
    shutil.rmtree(group.folders[0].root)
    agents = [Agent(group.folders[host], str(store.root), f"n{host}", patience_seconds=0.0) for host in (1, 2)]
    for _ in range(3):
        for agent in agents:
            asyncio.run(agent.round(store, is_alone=True))
            agent._next_try.clear()
            asyncio.run(agent._copier.round(agent.folder.sources()))
    assert bcp.Checkpoint(store.root / "step-1").verify()
    for path in direct.glob(f"*/0*-{operation}.*"):
        assert (store.root / "step-1" / path.relative_to(direct)).read_bytes() == path.read_bytes()
    assert [{mark.rank for mark in group.folders[host].copies()} for host in (1, 2)] == [{0, 1}, set()]


def test_a_lost_host_is_rebuilt_from_hosts_that_have_moved(group: Group) -> None:
    """The others have come back with other addresses, which the job has told since."""
    operation = group.keep(1)
    group.round()
    shutil.rmtree(group.folders[0].root)
    with MemoryServer(group.folders[2], "127.0.0.1") as server:
        for old in group.servers:
            old.__exit__()
        sources = group.folders[1].sources()
        moved = f"127.0.0.1:{server.address[1]}"
        addresses = tuple(moved if name == "h2" else "" for name in sources.nodes)
        group.folders[1].put_sources(Sources(sources.nodes, addresses, sources.place))
        group.copiers[1].stuck.add(operation)
        group.round(1)
    assert {mark.rank for mark in group.folders[1].marks()} == {0, 1, 2}


def test_a_host_that_answers_is_not_rebuilt(group: Group) -> None:
    operation = group.keep(1)
    group.round()
    for copier in group.copiers:
        copier.stuck.add(operation)
    assert all(group.round())
    assert not any(folder.copies() for folder in group.folders)


def test_a_host_that_cannot_be_rebuilt_is_tried_again(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    operation = group.keep(1)
    group.round()
    stripe = group.folders[2].parity.stripe(operation)
    data = stripe.read_bytes()
    stripe.write_bytes(bytes(each ^ 1 for each in data))
    shutil.rmtree(group.folders[0].root)
    group.copiers[1].stuck.add(operation)
    assert group.round(1, 1) == [False, False]
    assert caplog.text.count("are not rebuilt yet") == 1, "it is told once"
    assert not [mark for mark in group.folders[1].marks() if mark.rank in (0, 1)]
    trouble = f"a lost host in operation {operation}"
    assert trouble in group.folders[1].troubles(COPYING)
    stripe.write_bytes(data)
    group.round(1)
    assert trouble not in group.folders[1].troubles(COPYING)
    assert {mark.rank for mark in group.folders[1].marks()} == {0, 1, 2}


def test_a_host_alone_has_no_parity() -> None:
    assert Hosts(("h0",), ("h0:1",)).in_parity_with("h0", 3, 1) == Sources((), ())


@pytest.mark.parametrize(
    ("key", "operation"),
    [
        ("parity/0123456789abcdef.xor", "0123456789abcdef"),
        ("parity/00007-0123456789abcdef", "0123456789abcdef"),
        ("parity/0123456789abcdef.record", ""),
        ("parity/../0123456789abcdef.xor", ""),
        ("parity/0123456789abcdef.xor/../../token", ""),
        ("parity/.0123456789abcdef.xor", ""),
        ("model/00007-0123456789abcdef", ""),
    ],
)
def test_which_keys_are_parity(key: str, operation: str) -> None:
    """Others are read by nobody."""
    assert operation_in(key) == operation


def test_hosts_without_tensors() -> None:
    row = Row.cut([], [], [], 3)
    assert [row.nbytes(segment) for segment in range(3)] == [0, 0, 0]
    assert row.pieces(1, 0, 10) == []


@pytest.mark.parametrize("count", range(2, 12))
@pytest.mark.parametrize("most", [3, 4, 8])
@pytest.mark.parametrize("stride", [1, 3])
def test_each_host_is_told_by_as_many_as_it_asks(count: int, most: int, stride: int) -> None:
    """The numbers by which stripes are noted are those of different hosts."""
    names = tuple(f"h{host}" for host in range(count))
    hosts = Hosts(names, names)
    sources = {name: hosts.in_parity_with(name, most, stride) for name in names}
    for name in names:
        numbers = sorted(
            each.nodes.index(name) for other, each in sources.items() if other != name and name in each.nodes
        )
        assert numbers == [*range(len(sources[name].nodes))]
        assert 1 <= len(numbers) < most
        assert len({sources[each].place for each in (name, *sources[name].nodes)}) == len(numbers) + 1
