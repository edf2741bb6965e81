"""Copies between agents: whole and checked, or not at all; the next one takes the memory of the one before the last."""

from __future__ import annotations

import asyncio
import errno
import os
import time
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
from bcp.agent.serve import MemoryServer, serving
from bcp.backends import LocalBackend
from bcp.tiers.copies import needed_operations
from bcp.tiers.digests import digested
from bcp.tiers.folder import NodeFolder
from bcp.tiers.notes import COMMITTED, COPYING, LEFT, Mark, Noted
from bcp.tiers.recovery import Hosts
from bcp.tiers.status import look

TOKEN = b"the token of this job"
WORLD = 2


class Two:
    """Two hosts: rank 0 trains on the first and rank 1 on the second; the second one copies the first."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.root, self.operations = root, dict[int, str]()
        self.source, self.folder = NodeFolder(root / "source"), NodeFolder(root / "copies")
        for folder in (self.source, self.folder):
            folder.put_token(TOKEN)
        self.server = stack.enter_context(MemoryServer(self.source, "127.0.0.1"))
        self.folder.put_sources(Sources(("source",), (f"127.0.0.1:{self.server.address[1]}",)))
        self.copier = self.restarted()

    def restarted(self) -> Copier:
        self.copier = Copier(self.folder, 0.01, Pace(None))
        return self.copier

    def keep(self, step: int, *, numel: int = 9_000, **more: Any) -> str:
        """Let a step be in the memories of both."""
        direct, states = self.root / f"direct-{step}", {"model": {"w": torch.full((numel,), float(step))}}

        async def save(_: int, ranks: Any) -> None:
            await bcp.asave(direct, states, options=bcp.SaveOptions(record=False), coordinator=ranks)

        assert on_ranks(WORLD, save) == [None] * WORLD
        operation = self.operations[step] = bcp.Checkpoint(direct).operation
        for rank, folder in enumerate((self.source, self.folder)):
            kept(direct, folder.root, [rank], place=f"step-{step}", step=step, **{"copied": True, **more})
            mark = Mark(operation, rank)
            os.utime(folder.root / "intents" / mark.name, (step, step))
        return operation

    def fetch(self) -> bool:
        return asyncio.run(self.copier.round(self.folder.sources()))

    def copied(self) -> list[int]:
        """Return the steps that the second host has whole copies of."""
        known = {operation: step for step, operation in self.operations.items()}
        copies = self.folder.copies()
        return sorted(known[mark.operation] for mark in self.folder.marks() if mark in copies)

    def inodes(self) -> set[int]:
        return {path.stat().st_ino for path in (self.folder.root / "model").glob("00000-*")}


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    with ExitStack() as stack:
        yield Two(tmp_path, stack)


def test_a_copy_is_the_file(two: Two) -> None:
    operation = two.keep(1)
    assert two.fetch()
    for path in two.source.root.glob(f"*/00000-{operation}*"):
        copy = two.folder.root / path.relative_to(two.source.root)
        assert copy.read_bytes() == path.read_bytes(), path
    assert two.copied() == [1]
    assert two.source.is_copied(operation, 1), "the source knows"
    assert not two.source.is_copied(operation, 2)


def test_only_what_trainers_have_chosen_is_copied(two: Two) -> None:
    two.keep(1)
    two.keep(2, copied=False)
    two.source.end(two.keep(3), LEFT)
    assert two.fetch()
    assert two.copied() == [1]


def test_a_snapshot_is_offered_once_all_ranks_of_its_host_have_marked_it(two: Two) -> None:
    two.keep(1)
    with two.source.arranging():
        late = two.source.join(7)
    assert two.fetch()
    assert two.copied() == []
    late.close()
    assert two.fetch()
    assert two.copied() == [1]


def test_the_snapshot_that_a_job_goes_on_from_is_copied_whatever_its_save_has_planned(two: Two) -> None:
    """All copied ones before it are given up. Ranks of this life may have other numbers than its files."""
    two.keep(1)
    second = two.keep(2, copied=False)
    two.source.end(two.operations[1], LEFT)
    two.source.want(second)
    with two.source.arranging():
        member = two.source.join(7)
    assert two.fetch()
    assert two.copied() == [2]
    assert two.source.is_copied(second, 1)
    member.close()


def test_copies_of_a_lost_host_stay_until_storage_has_the_snapshot_that_a_job_goes_on_from(two: Two) -> None:
    first = two.keep(1)
    assert two.fetch()
    os.utime(two.folder.root / "copies" / Mark(first, 0).name, (1, 1))
    two.folder.put_sources(Sources((), ()))
    two.folder.want(first)
    for step in (2, 3, 4):
        two.keep(step)
    two.copier._tidy()
    assert two.copied() == [1]
    two.folder.end(first, COMMITTED)
    two.copier._tidy()
    assert two.copied() == []


def test_a_durable_snapshot_is_not_copied_because_a_job_goes_on_from_it(two: Two) -> None:
    second = two.keep(2, copied=False)
    two.source.want(second)
    two.source.end(second, COMMITTED)
    assert two.fetch()
    assert two.copied() == []


def test_copies_do_not_make_a_snapshot_newer(two: Two) -> None:
    """What a host offers are its own files: those of an older snapshot may come from others later."""
    two.keep(1)
    assert two.fetch()
    second = two.keep(2)
    two.source.note_copies([Mark(two.operations[1], 1)], "third")
    kept(two.root / "direct-1", two.source.root, [1], place="step-1", step=1, copied=True)
    assert two.fetch()
    assert two.copied() == [1, 2]
    assert two.source.is_copied(second, 1)


def test_memory_of_old_copies_is_used_again(two: Two) -> None:
    """The newest one stays, and the one before: other hosts may not have the newest yet."""
    for step in (1, 2):
        two.keep(step)
        assert two.fetch()
    before = two.inodes()
    assert len(before) == 2
    for step in (3, 4, 5):
        two.keep(step)
        assert two.fetch()
        assert two.copied() == [step - 1, step]
        assert two.inodes() == before
    assert {mark.operation for mark in two.folder.copies()} == {two.operations[4], two.operations[5]}


def test_copies_of_another_size_leave_nothing_behind(two: Two) -> None:
    for step, numel in enumerate((9_000, 9_000, 500, 20_000, 500), 1):
        two.keep(step, numel=numel)
        assert two.fetch()
    assert two.copied() == [4, 5]
    assert len(two.inodes()) == 2


def test_damaged_files_are_no_copies(two: Two) -> None:
    two.keep(1)
    assert two.fetch()
    second = two.keep(2)
    [path] = (two.source.root / "model").glob(f"00000-{second}*")
    good = path.read_bytes()
    asyncio.run(_digest(two.source, second))
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert not two.fetch()
    assert two.copied() == [1]
    path.write_bytes(good)
    assert two.fetch()
    assert two.copied() == [1, 2]


async def _digest(folder: NodeFolder, operation: str) -> None:
    with folder.holding(Mark(operation, 0)) as held:
        assert held is not None
        await digested(folder.files, held.blank)


def test_a_fetch_that_is_killed_is_made_again(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole copies stay meanwhile, and files of the interrupted one are used again."""
    two.keep(1)
    assert two.fetch()
    two.keep(2)
    with monkeypatch.context() as patch:
        patch.setattr(NodeFolder, "prepare", _killed)
        with pytest.raises(KeyboardInterrupt):
            two.fetch()
    assert two.copied() == [1]
    two.restarted()
    two.keep(3)
    assert two.fetch()
    assert two.copied() == [1, 3]
    assert len(two.inodes()) == 2


def _killed(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_full_memory_keeps_what_is_there(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    two.keep(1)
    assert two.fetch()
    two.keep(2)

    def full(_: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, f"no room for {nbytes} bytes")

    with monkeypatch.context() as patch:
        patch.setattr("bcp.tiers.folder.fallocate", full)
        assert not two.fetch()
    assert two.copied() == [1]
    assert two.fetch()
    assert two.copied() == [1, 2]


def test_a_source_that_is_away_is_asked_again(two: Two, caplog: pytest.LogCaptureFixture) -> None:
    two.keep(1)
    there = two.folder.sources()
    two.folder.put_sources(Sources(("source",), ("127.0.0.1:1",)))
    assert not two.fetch()
    assert not two.fetch()
    assert caplog.text.count("is not copied yet") == 1, "it is told once"
    assert "127.0.0.1" in two.folder.troubles(COPYING)["source"]
    two.folder.put_sources(there)
    assert two.fetch()
    assert two.copied() == [1]
    assert two.folder.troubles(COPYING) == {}
    assert look(two.source.root).copied is None, "nobody is to copy the second host"
    two.source.put_sources(Sources(("copies",), ("127.0.0.1:1",)))
    assert look(two.source.root).copied == look(two.source.root).kept, "each host is copied as often as it copies"


def test_copies_are_drained_where_their_host_is_lost(two: Two) -> None:
    """Its agent never says that it is done, so the other one sends its copies, too."""
    two.keep(1)
    assert two.fetch()
    store = LocalBackend(two.root / "store")
    agent = Agent(two.folder, str(store.root), "n1", patience_seconds=0.0)
    asyncio.run(agent.round(store, is_alone=False))
    assert not (store.root / "step-1" / "metadata.arrow").exists()
    agent._next_try.clear()
    asyncio.run(agent.round(store, is_alone=False))
    assert bcp.Checkpoint(store.root / "step-1").verify()
    assert two.folder.ended() == {two.operations[1]: "COMMITTED"}


def test_copies_alone_wait_for_their_host(two: Two) -> None:
    two.keep(1)
    assert two.fetch()
    assert two.folder.take(Mark(two.operations[1], 1))
    store = LocalBackend(two.root / "store")
    agent = Agent(two.folder, str(store.root), "n1", patience_seconds=3600.0)
    for _ in range(3):
        assert not asyncio.run(agent.round(store, is_alone=True))
    assert not store.root.exists() or not any(store.root.iterdir())


def test_a_run_that_has_ended_well_leaves_no_copies(two: Two) -> None:
    """An agent that ends gives everything back then, and only then."""
    two.keep(1)
    assert two.fetch()
    agent = Agent(two.folder, str(two.root / "store"), "n1", patience_seconds=0.0, poll_seconds=0.01)
    asyncio.run(agent.run())
    assert two.copied() == [1], "the job may come back"
    two.folder.finish()
    asyncio.run(agent.run())
    assert not two.folder.copies()
    assert not two.folder.data_files()
    two.folder.begin(1)
    assert not two.folder.is_finished()


def test_an_agent_that_starts_again_serves_at_the_port_that_others_know(two: Two) -> None:
    with serving(two.folder, "127.0.0.1"):
        before = two.folder.address()
    assert two.folder.address() == ""
    with serving(two.folder, "127.0.0.1"):
        assert two.folder.address() == before
        other = NodeFolder(two.root / "other")
        other.put_port(int(before.rpartition(":")[2]))
        with serving(other, "127.0.0.1"):
            assert other.address() != before, "it is taken"


def test_a_pace() -> None:
    pace, began = Pace(1e6), time.monotonic()

    async def take() -> None:
        await asyncio.gather(*(pace.take(50_000) for _ in range(5)))

    asyncio.run(take())
    assert time.monotonic() - began >= 0.2  # the first one goes at once


def noted(name: str, *ages: float) -> dict[Mark, Noted]:
    return {Mark(f"{int(age):016x}", 0): Noted(name, age) for age in ages}


@pytest.mark.parametrize(
    ("copies", "whole", "sources", "own", "needed"),
    [
        (noted("a", 1, 2, 3), [1, 2, 3], ["a"], [], [3, 2]),
        (noted("a", 1, 2, 3), [1, 2], ["a"], [], [3, 2]),
        (noted("a", 1, 2, 3), [1], ["a"], [], [3, 1]),
        (noted("a", 1, 2, 3), [], ["a"], [], [3]),
        (noted("gone", 1, 2), [1, 2], ["a"], [1.5], [2]),
        (noted("gone", 1, 2), [1, 2], ["a"], [2.5], [2]),
        (noted("gone", 1, 2), [1, 2], ["a"], [2.5, 3.5], []),
        (noted("gone", 1, 2), [1], ["a"], [0.5], [1]),
        ({}, [], ["a"], [], []),
    ],
)
def test_which_copies_stay(
    copies: dict[Mark, Noted], whole: list[int], sources: list[str], own: list[float], needed: list[int]
) -> None:
    marks = [Mark(f"{each:016x}", 0) for each in whole]
    ages = {f"own {age}": age for age in own}
    assert needed_operations(copies, marks, sources, ages) == {f"{each:016x}" for each in needed}


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("copies", range(4))
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_each_host_is_copied_as_often_as_it_copies(count: int, copies: int, stride: int) -> None:
    """And the numbers by which copies are noted are the same on all hosts."""
    names = tuple(f"h{host}" for host in range(count))
    hosts = Hosts(names, names)
    sources = [hosts.copied_by(name, copies, stride).nodes for name in names]
    assert all(name not in chosen for name, chosen in zip(names, sources, strict=True))
    for number in range(len(sources[0])):
        assert sorted(chosen[number] for chosen in sources) == sorted(names)
    if count > copies * stride:
        assert len(sources[0]) == copies
