"""What an agent does with several snapshots: the newest first, and none for ever."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from kept import kept
from tasks import on_ranks

import bcp
from bcp.agent.commit import Outcome
from bcp.agent.loop import Agent
from bcp.backends import LocalBackend
from bcp.runs.ledger import Ledger
from bcp.testing.storage_fakes import FaultyBackend
from bcp.tiers.folder import NodeFolder
from bcp.tiers.notes import LEFT, STORING, SUPERSEDED
from bcp.tiers.status import look


def saved(path: Path, step: int) -> Path:
    async def save(_: int, ranks: Any) -> None:
        await bcp.asave(
            path, {"model": {"w": torch.full((600,), step)}}, options=bcp.SaveOptions(record=False), coordinator=ranks
        )

    assert on_ranks(2, save) == [None] * 2
    return path


class Host:
    """A host with some snapshots, and its agent."""

    def __init__(self, root: Path) -> None:
        self.root, self.store = root, LocalBackend(root / "store")
        self.folder = NodeFolder(root / "node")
        self.agent = self.restarted()

    def restarted(self) -> Agent:
        self.agent = Agent(self.folder, str(self.store.root), "n0", patience_seconds=0.0)
        return self.agent

    def keep(self, step: int, ranks: tuple[int, ...] = (0, 1), **more: Any) -> str:
        """Let the files of some ranks of a step be in memory, ``step`` seconds after the epoch."""
        direct = saved(self.root / f"direct-{step}", step)
        before = {*self.folder.marks()}
        kept(direct, self.folder.root, ranks, place=f"step-{step}", step=step, **more)
        for mark in {*self.folder.marks()} - before:
            os.utime(self.folder.root / "intents" / mark.name, (step, step))
        return bcp.Checkpoint(direct).operation

    def round(self, *, is_alone: bool = False, store: Any = None) -> bool:
        return asyncio.run(self.agent.round(store or self.store, is_alone=is_alone))

    def durable(self) -> set[int]:
        return {int(path.parent.name.removeprefix("step-")) for path in self.store.root.glob("*/metadata.arrow")}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_what_is_promised_becomes_durable_and_the_rest_stays_in_memory(host: Host) -> None:
    host.keep(1)
    host.keep(2, durable=False)
    assert host.round()
    assert host.durable() == {1}
    assert host.round(is_alone=True)
    assert host.durable() == {1, 2}


def test_without_trainers_the_newest_one_alone_becomes_durable(host: Host) -> None:
    for step in (1, 2, 3):
        host.keep(step, durable=False)
    assert host.round(is_alone=True)
    assert host.durable() == {3}


def test_a_newest_one_that_other_hosts_lack_leads_to_the_one_before(host: Host) -> None:
    host.keep(1, durable=False)
    host.keep(2, durable=False, ranks=(1,))
    assert not host.round(is_alone=True)
    assert host.durable() == set()
    assert not host.round(is_alone=True), "step 2 may come still"
    assert host.durable() == {1}


def test_an_older_one_that_waits_for_other_hosts_ends_with_a_newer_commit(host: Host) -> None:
    """The other host's memory of step 1 went for a newer snapshot, so that nobody will ever complete it."""
    lost = host.keep(1, ranks=(0,))
    assert not host.round()
    host.keep(2)
    host.round()
    assert host.durable() == {2}
    assert host.round()
    assert host.folder.ended()[lost] == SUPERSEDED


def test_an_agent_that_starts_again_knows_of_newer_commits(host: Host) -> None:
    newer = host.keep(2)
    assert host.round()
    host.keep(1, ranks=(0,))
    host.restarted()
    assert not host.round()
    assert host.round()
    assert host.folder.ended()[newer] == Outcome.COMMITTED.name


def test_a_place_that_is_taken_ends_the_snapshot(host: Host) -> None:
    bcp.save(host.store.root / "step-1", {"model": {"w": torch.ones(3)}}, options=bcp.SaveOptions(record=False))
    operation = host.keep(1)
    assert host.round()
    assert host.folder.ended()[operation] == Outcome.REFUSED.name


def test_a_damaged_snapshot_ends_and_the_older_one_goes_on(host: Host) -> None:
    host.keep(1)
    damaged = host.keep(2)
    for path in host.folder.root.glob(f"model/*{damaged}*"):
        path.unlink()
    assert host.round()
    assert host.folder.ended()[damaged].startswith("DAMAGED: ")
    assert host.durable() == {1}


def test_storage_that_is_away_is_asked_again_later(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    host.keep(1)
    away = FaultyBackend(host.store, "version", bcp.StorageError("away"))
    assert not host.round(store=away)
    assert "a snapshot is not durable yet" in caplog.text
    assert not host.round(), "not at once"
    assert [*host.folder.troubles(STORING).values()] == ["step 1: away"]
    assert look(host.folder.root).troubles == ("step 1: away",)
    host.agent._next_try.clear()
    assert host.round()
    assert host.durable() == {1}
    assert look(host.folder.root).troubles == ()


def test_old_notes_of_snapshots_that_are_gone_go_too(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer ones stay for a while, for trainers that look."""
    operation = host.keep(1)
    host.round()
    assert host.folder.ended() == {operation: "COMMITTED"}
    for mark in host.folder.marks():
        assert host.folder.take(mark)
    host.round()
    assert host.folder.ended() == {operation: "COMMITTED"}
    monkeypatch.setattr("bcp.tiers.folder.MOST_NOTES", 0)
    host.round()
    assert host.folder.ended() == {}


def test_files_that_were_deleted_behind_their_record_are_sent_again(host: Host) -> None:
    """Retention may take an interrupted upload for remains."""
    direct = saved(host.root / "direct-1", 1)
    for rank in (0, 1):
        kept(direct, host.folder.root, [rank], place="step-1", step=1)
        host.agent._next_try.clear()
        assert host.round() is (rank == 1)
        for path in (host.store.root / "step-1" / "model").glob("00000-*") if rank == 0 else ():
            path.unlink()
    assert bcp.Checkpoint(host.store.root / "step-1").verify()


@pytest.mark.parametrize(
    ("ledger", "is_left"),
    [
        (Ledger(run_id="r", owner="o", branch="b2").to_bytes(), True),
        (Ledger(run_id="r", owner="o").to_bytes(), True),
        (Ledger(run_id="s", owner="o", branch="b1").to_bytes(), True),
        (Ledger(run_id="r", owner="o", branch="b1").to_bytes(), False),
        (None, False),
        (b"{", False),
        (b"{}", False),
        (b"[]", False),
    ],
)
def test_a_run_that_has_gone_back_gets_no_step_of_the_branch_that_it_has_left(
    ledger: bytes | None, *, is_left: bool, host: Host
) -> None:
    """Nobody has told the agent of a host that was left out of the later life. A ledger that is none says nothing."""
    operation = host.keep(1, branch="r/b1")
    if ledger is not None:
        host.store.root.mkdir(exist_ok=True)
        (host.store.root / "run.json").write_bytes(ledger)
    assert host.round()
    assert host.durable() == (set() if is_left else {1})
    assert host.folder.ended()[operation] == (LEFT if is_left else Outcome.COMMITTED.name)
